//! Comparisons of a measured case with its floor and its rivals, in the same run.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::{Case, Error, Goal, Percentiles, Plan, Sampler, Verdict, figure};

/// One measured case, its floor, and its rivals.
///
/// The *floor* is the least work that achieves the same: the raw system or driver calls without
/// Partywall. A *rival* is another way to the same result. All cases run in turns, a block of
/// samples each (A B C A B C …). A machine that gets slower or warmer during the run therefore
/// changes all medians alike and leaves the ratio unchanged.
pub struct Comparison<'a> {
    measured: Participant<'a>,
    floor: Option<Participant<'a>>,
    rivals: Vec<Participant<'a>>,
    goal: Option<Goal>,
}

/// The result of a comparison.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ComparisonResult {
    /// How often each case was called, and in which turns.
    pub plan: Plan,
    /// The measured case.
    pub measured: Measurement,
    /// The floor, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub floor: Option<Measurement>,
    /// The rivals.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rivals: Vec<Measurement>,
    /// The median of the measured case divided by that of the floor, in the same unit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    /// Whether the goal was met, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
}

/// A case and its samples, summarised.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// What was measured.
    #[serde(flatten)]
    pub case: Case,
    /// The distribution of its samples, in the unit of the case.
    pub percentiles: Percentiles,
}

impl<'a> Comparison<'a> {
    /// Returns a comparison of `case` without floor, rivals and goal.
    pub fn new(case: Case, sampler: Sampler<'a>) -> Self {
        Self { measured: Participant::new(case, sampler), floor: None, rivals: Vec::new(), goal: None }
    }

    /// Sets the floor, to which the ratio and goals with `floor` refer.
    #[must_use]
    pub fn floor(mut self, case: Case, sampler: Sampler<'a>) -> Self {
        self.floor = Some(Participant::new(case, sampler));
        self
    }

    /// Adds a rival, to which a goal may refer by the name of its case.
    #[must_use]
    pub fn rival(mut self, case: Case, sampler: Sampler<'a>) -> Self {
        self.rivals.push(Participant::new(case, sampler));
        self
    }

    /// Returns the measured case.
    pub fn case(&self) -> &Case {
        &self.measured.case
    }

    /// Returns whether a goal may refer to this name: `floor`, if there is one, or the name of a rival.
    pub fn has(&self, name: &str) -> bool {
        name == "floor" && self.floor.is_some() || self.rivals.iter().any(|rival| rival.case.name == name)
    }

    /// Sets the goal for the median of the measured case.
    #[must_use]
    pub fn goal(mut self, goal: Goal) -> Self {
        self.goal = Some(goal);
        self
    }

    /// Warms all cases up, takes their samples in turns and summarises them.
    ///
    /// The first sampler that fails ends the comparison, because medians of only the successful
    /// calls would not be comparable. A missed goal is a result, not an error.
    pub fn run(mut self, plan: Plan) -> Result<ComparisonResult, Error> {
        if plan.samples == 0 {
            return Err(Error::NoSamples);
        }
        self.in_turns(plan.warm_up, plan.block, false)?;
        self.in_turns(plan.samples, plan.block, true)?;

        let measured = self.measured.summarise()?;
        let floor = self.floor.map(Participant::summarise).transpose()?;
        let rivals = self.rivals.into_iter().map(Participant::summarise).collect::<Result<Vec<_>, _>>()?;
        let ratio = floor.as_ref().map(|floor| ratio(&measured, floor)).transpose()?;
        let judge = |goal: &Goal| judge(goal, &measured, floor.as_ref(), &rivals);
        let verdict = self.goal.as_ref().map(judge).transpose()?;
        Ok(ComparisonResult { plan, measured, floor, rivals, ratio, verdict })
    }

    /// Runs the comparison as [`run`](Self::run) does, with as many samples as fit into `limit`, at least 5 and at most
    /// `most`. A first call of each case determines how many fit.
    pub fn run_within(mut self, limit: Duration, most: usize) -> Result<ComparisonResult, Error> {
        let start = Instant::now();
        self.in_turns(1, 1, false)?;
        let fit = limit.as_secs_f64() / start.elapsed().as_secs_f64().max(1e-9);
        let samples = (fit as usize).clamp(5, most.max(5));
        self.run(Plan::new(samples))
    }

    /// Calls each case `calls` times, at most `block` times in each turn.
    fn in_turns(&mut self, calls: usize, block: usize, keep: bool) -> Result<(), Error> {
        let mut left = calls;
        while left > 0 {
            let now = left.min(block.max(1));
            for participant in std::iter::once(&mut self.measured).chain(&mut self.floor).chain(&mut self.rivals) {
                for _ in 0..now {
                    participant.call(keep)?;
                }
            }
            left -= now;
        }
        Ok(())
    }
}

impl ComparisonResult {
    /// Returns the median of the floor or of a rival over that of the measured case, or `None` if their units differ in
    /// kind.
    pub fn of_case(&self, other: &Measurement) -> Option<f64> {
        ratio(other, &self.measured).ok()
    }

    /// Returns the goal, the limit that it was here, and whether it was met, if there is a goal.
    pub fn judgement(&self) -> Option<String> {
        let Verdict { goal, limit, met, .. } = self.verdict.as_ref()?;
        let outcome = if *met { "met" } else { "MISSED" };
        Some(format!("{goal} (here {} {}): {outcome}", figure(*limit), self.measured.case.unit))
    }

    /// Returns whether the goal was met, or true if there is no goal.
    pub fn met(&self) -> bool {
        self.verdict.as_ref().is_none_or(|verdict| verdict.met)
    }
}

struct Participant<'a> {
    case: Case,
    sampler: Sampler<'a>,
    calls: usize,
    samples: Vec<f64>,
}

impl<'a> Participant<'a> {
    fn new(case: Case, sampler: Sampler<'a>) -> Self {
        Self { case, sampler, calls: 0, samples: Vec::new() }
    }

    fn call(&mut self, keep: bool) -> Result<(), Error> {
        self.calls += 1;
        let value = (self.sampler)().map_err(|source| Error::Sample {
            case: self.case.name.clone(),
            call: self.calls,
            source,
        })?;
        if !value.is_finite() {
            return Err(Error::NotFinite { case: self.case.name.clone(), value });
        }
        if keep {
            self.samples.push(value);
        }
        Ok(())
    }

    fn summarise(self) -> Result<Measurement, Error> {
        Ok(Measurement { percentiles: Percentiles::of(&self.samples)?, case: self.case })
    }
}

/// Returns one median over another.
fn ratio(one: &Measurement, other: &Measurement) -> Result<f64, Error> {
    let unit = one.case.unit;
    let other_p50 = other.case.unit.convert(other.percentiles.p50, unit)?;
    Ok(one.percentiles.p50 / other_p50)
}

fn judge(
    goal: &Goal,
    measured: &Measurement,
    floor: Option<&Measurement>,
    rivals: &[Measurement],
) -> Result<Verdict, Error> {
    goal.judge(measured.percentiles.p50, measured.case.unit, |name| {
        let found = match name {
            "floor" => floor,
            name => rivals.iter().find(|rival| rival.case.name == name),
        };
        let found = found.ok_or_else(|| {
            let known: Vec<_> =
                floor.map(|_| "floor").into_iter().chain(rivals.iter().map(|rival| rival.case.name.as_str())).collect();
            Error::UnknownReference {
                reference: name.to_owned(),
                known: if known.is_empty() { "nothing to refer to".to_owned() } else { known.join(", ") },
            }
        })?;
        Ok((found.percentiles.p50, found.case.unit))
    })
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::Unit;

    fn constant(value: f64) -> Sampler<'static> {
        Box::new(move || Ok(value))
    }

    fn case(name: &str) -> Case {
        Case::new(name, Unit::Microseconds)
    }

    #[test]
    fn cases_run_in_turns_of_one_block() {
        let order = RefCell::new(String::new());
        let note = |letter: char| -> Sampler<'_> {
            let order = &order;
            Box::new(move || {
                order.borrow_mut().push(letter);
                Ok(1.0)
            })
        };
        let result = Comparison::new(case("a"), note('a'))
            .floor(case("b"), note('b'))
            .rival(case("c"), note('c'))
            .run(Plan::new(5).warm_up(1).block(2))
            .unwrap();
        assert_eq!(*order.borrow(), "abc".to_owned() + "aabbcc" + "aabbcc" + "abc");
        assert_eq!(result.measured.percentiles.n, 5);
        assert_eq!(result.rivals[0].percentiles.n, 5);
    }

    #[test]
    fn drifting_machine_does_not_change_the_ratio() {
        // A machine that gets ten times slower from the first sample to the last.
        let clock = RefCell::new(0.0);
        let costing = |cost: f64| -> Sampler<'_> {
            let clock = &clock;
            Box::new(move || {
                let mut now = clock.borrow_mut();
                *now += 1.0;
                Ok(cost * (1.0 + *now * 9.0 / 2000.0))
            })
        };
        let result = Comparison::new(case("ours"), costing(20.0))
            .floor(case("raw"), costing(10.0))
            .run(Plan::new(1000).warm_up(0).block(10))
            .unwrap();
        let ratio = result.ratio.unwrap();
        assert!((ratio - 2.0).abs() < 0.03, "ratio {ratio}");
    }

    #[test]
    fn warm_up_is_not_counted() {
        let mut calls = 0;
        let result = Comparison::new(
            case("cold start"),
            Box::new(move || {
                calls += 1;
                Ok(if calls <= 3 { 1000.0 } else { 1.0 })
            }),
        )
        .run(Plan::new(10).warm_up(3))
        .unwrap();
        assert_eq!(result.measured.percentiles.max, 1.0);
    }

    #[test]
    fn ratio_and_goal_convert_units() {
        let result = Comparison::new(case("ours"), constant(1200.0))
            .floor(Case::new("raw", Unit::Milliseconds), constant(1.0))
            .goal("<= 1.3x floor".parse().unwrap())
            .run(Plan::new(3))
            .unwrap();
        assert!((result.ratio.unwrap() - 1.2).abs() < 1e-9);
        let verdict = result.verdict.clone().unwrap();
        assert!(verdict.met && result.met());
        assert!((verdict.limit - 1300.0).abs() < 1e-9);
    }

    #[test]
    fn a_missed_goal_is_a_result() {
        let result = Comparison::new(case("ours"), constant(3.0))
            .rival(case("theirs"), constant(2.0))
            .goal("<= theirs".parse().unwrap())
            .run(Plan::new(3))
            .unwrap();
        assert!(!result.met());
    }

    #[test]
    fn goal_without_its_floor_lists_the_cases() {
        let error = Comparison::new(case("ours"), constant(3.0))
            .rival(case("theirs"), constant(2.0))
            .goal("<= 2x floor".parse().unwrap())
            .run(Plan::new(3))
            .unwrap_err();
        assert!(error.to_string().contains("theirs"), "{error}");
    }

    #[test]
    fn a_failing_sampler_ends_the_comparison_with_its_name() {
        let mut calls = 0;
        let error = Comparison::new(
            case("flaky"),
            Box::new(move || {
                calls += 1;
                if calls == 4 { Err("connection reset".into()) } else { Ok(1.0) }
            }),
        )
        .run(Plan::new(10).warm_up(1))
        .unwrap_err();
        let text = error.to_string();
        assert!(text.contains("flaky") && text.contains("call 4"), "{text}");
    }

    #[test]
    fn non_finite_sample_is_refused() {
        let error = Comparison::new(case("ours"), constant(f64::NAN)).run(Plan::new(1)).unwrap_err();
        assert!(matches!(error, Error::NotFinite { .. }));
        let error = Comparison::new(case("ours"), constant(1.0)).run(Plan::new(0));
        assert!(matches!(error, Err(Error::NoSamples)));
    }
}
