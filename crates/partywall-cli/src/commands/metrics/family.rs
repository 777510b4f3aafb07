//! Metrics of one moment, and their text.

use std::fmt;

use partywall::info::Ages;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text},
    metrics::MetricType,
    registry::Registry,
};

/// The format of [`to_text`], as HTTP names it.
pub(super) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A metric with its series.
#[derive(Debug)]
pub(super) struct Family {
    /// Its name, without `partywall_` in front. A counter's ends with `_total`.
    name: &'static str,
    /// What it means, without a full stop at the end.
    help: &'static str,
    of_type: MetricType,
    series: Vec<(Vec<Label>, Value)>,
}

/// The name and value of a label.
pub(super) type Label = (&'static str, String);

#[derive(Debug, Clone, Copy)]
enum Value {
    Whole(u64),
    Seconds(f64),
    Ages(Ages),
}

impl Family {
    /// A value that may rise and fall.
    pub(super) fn gauge(name: &'static str, help: &'static str) -> Self {
        Self { name, help, of_type: MetricType::Gauge, series: Vec::new() }
    }

    /// A number that never falls while its series exists.
    pub(super) fn counter(name: &'static str, help: &'static str) -> Self {
        Self { of_type: MetricType::Counter, ..Self::gauge(name, help) }
    }

    /// A histogram, whose counts never fall while its series exists.
    pub(super) fn histogram(name: &'static str, help: &'static str) -> Self {
        Self { of_type: MetricType::Histogram, ..Self::gauge(name, help) }
    }

    /// Adds a series.
    pub(super) fn push(&mut self, labels: impl IntoIterator<Item = Label>, value: u64) {
        self.series.push((labels.into_iter().collect(), Value::Whole(value)));
    }

    /// Adds a series of seconds.
    pub(super) fn push_seconds(&mut self, labels: impl IntoIterator<Item = Label>, milliseconds: u64) {
        self.series.push((labels.into_iter().collect(), Value::Seconds(milliseconds as f64 / 1e3)));
    }

    /// Adds a series of a histogram.
    pub(super) fn push_ages(&mut self, labels: impl IntoIterator<Item = Label>, ages: Ages) {
        self.series.push((labels.into_iter().collect(), Value::Ages(ages)));
    }

    /// Returns it with one series that has no labels.
    pub(super) fn of(mut self, value: u64) -> Self {
        self.push([], value);
        self
    }

    fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mut metric = encoder.encode_descriptor(self.name, &format!("{}.", self.help), None, self.of_type)?;
        for (labels, value) in &self.series {
            if labels.is_empty() {
                self.encode_value(&mut metric, *value)?;
            } else {
                self.encode_value(&mut metric.encode_family(labels)?, *value)?;
            }
        }
        Ok(())
    }

    fn encode_value(&self, series: &mut MetricEncoder<'_>, value: Value) -> fmt::Result {
        match value {
            // As a counter it would get a second `_total`: the crate writes OpenMetrics, where a counter's help has a
            // name without. To Prometheus and its tools that name is of another metric, so the counter has no help.
            Value::Whole(value) => series.encode_gauge(&value),
            Value::Seconds(value) => series.encode_gauge(&value),
            Value::Ages(ages) => encode_ages(series, &ages),
        }
    }
}

fn encode_ages(series: &mut MetricEncoder<'_>, ages: &Ages) -> fmt::Result {
    let mut buckets = Vec::with_capacity(Ages::BOUNDS + 1);
    let mut below = 0;
    for (bound, younger) in ages.younger.iter().enumerate() {
        buckets.push((Ages::bound(bound) as f64 / 1e9, younger.saturating_sub(below)));
        below = *younger;
    }
    // An age may be counted in a bucket and not yet, or never, in the sum.
    let count = ages.count.max(below);
    buckets.push((f64::INFINITY, count - below));
    series.encode_histogram::<NoLabelSet>(ages.sum as f64 / 1e9, count, &buckets, None)
}

/// Returns the families in the text format of Prometheus, which its server, its node exporter and its tools read.
pub(super) fn to_text(families: Vec<Family>) -> String {
    #[derive(Debug)]
    struct Families(Vec<Family>);

    impl Collector for Families {
        fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
            self.0.iter().filter(|family| !family.series.is_empty()).try_for_each(|family| family.encode(&mut encoder))
        }
    }

    let mut registry = Registry::with_prefix("partywall");
    registry.register_collector(Box::new(Families(families)));
    let mut text = String::new();
    text::encode_registry(&mut text, &registry).expect("a string takes everything that is written to it");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_has_types_and_labels() {
        let mut bytes = Family::gauge("bytes", "Bytes of all names");
        bytes.push([("place", "host".to_owned()), ("kind", "memfd".to_owned())], 1 << 60);
        bytes.push([("place", "a \"quoted\"\n\\ place".to_owned())], 0);
        let mut age = Family::gauge("heartbeat_age_seconds", "Time since the last heartbeat");
        age.push_seconds([("pid", "7".to_owned())], 1_500);
        let deaths = Family::counter("deaths_total", "Members that died").of(3);
        let mut ages = Family::histogram("topic_latency_seconds", "Ages of samples");
        let mut younger = [3; Ages::BOUNDS];
        younger[0] = 1;
        ages.push_ages([("pid", "7".to_owned())], Ages { count: 4, sum: 2_500_000_000, younger, ..Ages::default() });
        let text = to_text(vec![bytes, age, deaths, Family::gauge("nothing", "It has no series"), ages]);
        let buckets = Vec::from_iter(text.lines().filter(|line| line.contains("_bucket")));
        assert_eq!(buckets.len(), Ages::BOUNDS + 1);
        assert_eq!(buckets[0], r#"partywall_topic_latency_seconds_bucket{le="0.000001024",pid="7"} 1"#);
        assert_eq!(buckets[20], r#"partywall_topic_latency_seconds_bucket{le="1.073741824",pid="7"} 3"#);
        let text: String = text
            .lines()
            .filter(|line| !line.contains("_bucket") || line.contains("Inf"))
            .map(|line| format!("{line}\n"))
            .collect();
        let expected = r##"# HELP partywall_bytes Bytes of all names.
# TYPE partywall_bytes gauge
partywall_bytes{place="host",kind="memfd"} 1152921504606846976
partywall_bytes{place="a \"quoted\"\n\\ place"} 0
# HELP partywall_heartbeat_age_seconds Time since the last heartbeat.
# TYPE partywall_heartbeat_age_seconds gauge
partywall_heartbeat_age_seconds{pid="7"} 1.5
# HELP partywall_deaths_total Members that died.
# TYPE partywall_deaths_total counter
partywall_deaths_total 3
# HELP partywall_topic_latency_seconds Ages of samples.
# TYPE partywall_topic_latency_seconds histogram
partywall_topic_latency_seconds_sum{pid="7"} 2.5
partywall_topic_latency_seconds_count{pid="7"} 4
partywall_topic_latency_seconds_bucket{le="+Inf",pid="7"} 4
"##;
        assert_eq!(text, expected);
    }
}
