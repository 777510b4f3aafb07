//! One time line of two processes: `cargo run -p partywall --example spans` has a producer and a consumer write their
//! spans to `spans.json`, or to the file that is named. Open it in <https://ui.perfetto.dev> or in `chrome://tracing`.
#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

use std::{
    env,
    error::Error,
    fmt,
    fs::{File, OpenOptions},
    io::Write,
    process::{self, Command},
    time::Duration,
};

use partywall::{DType, Domain, Place, Policy, Result, Topic};
use rustix::{thread::gettid, time::ClockId};
use serde_json::{Map, Value, json};
use tracing::{
    Level, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id},
};
use tracing_subscriber::{Layer, filter::Targets, layer::Context, prelude::*, registry::LookupSpan};

const SAMPLES: u64 = 10;
const TIMEOUT: Duration = Duration::from_secs(60);

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let path = arguments.next().unwrap_or("spans.json".to_owned());
    let is_producer = arguments.next().as_deref() == Some("produce");
    if !is_producer {
        File::create(&path)?.write_all(b"[\n")?;
    }
    // Both processes append whole lines.
    let mut file = OpenOptions::new().append(true).open(&path)?;
    // A program that is profiled needs these two statements and the layer below.
    let of_partywall = Targets::new().with_target("partywall", Level::TRACE);
    tracing_subscriber::registry().with(TimeLine(file.try_clone()?).with_filter(of_partywall)).init();

    let topic = Domain::connect()?.topic("example/spans").dtype(DType::U8).shape(&[1 << 20]).place(Place::Host);
    let topic = topic.open_or_create()?;
    if is_producer {
        return Ok(produce(&topic)?);
    }
    let consumer = topic.subscribe(Policy::Block).until_idle(true).join()?;
    let mut producer = Command::new(env::current_exe()?).args([&path, "produce"]).spawn()?;
    let received = consumer.iter().try_fold(0, |count, sample| sample.map(|_| count + 1))?;
    println!("{received} samples received; the producer: {}", producer.wait()?);
    let name = |pid: u32, name: &str| json!({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}});
    writeln!(file, "{},\n{}\n]", name(process::id(), "consumer"), name(producer.id(), "producer"))?;
    Ok(())
}

fn produce(topic: &Topic) -> Result<()> {
    let publisher = topic.publisher()?;
    for number in 0..SAMPLES {
        let mut sample = publisher.loan(DType::U8, &[1 << 20], TIMEOUT)?;
        sample.as_mut_slice::<u8>()?.fill(number as u8);
        sample.filled().publish(TIMEOUT)?;
    }
    Ok(())
}

/// Writes each span as a *complete event* of the Chrome trace format. All processes have the same clock.
struct TimeLine(File);

/// Microseconds.
struct Entered(f64);

#[derive(Default)]
struct Fields(Map<String, Value>);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for TimeLine {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        context.span(id).expect("it is new").extensions_mut().insert(fields);
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        context.span(id).expect("it is open").extensions_mut().replace(Entered(now()));
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        let span = context.span(id).expect("it is open");
        let extensions = span.extensions();
        let (Some(Entered(start)), Some(Fields(fields))) = (extensions.get(), extensions.get()) else { return };
        let event = json!({
            "ph": "X", "name": span.name(), "cat": span.metadata().target(), "args": fields,
            "ts": start, "dur": now() - start, "pid": process::id(), "tid": gettid().as_raw_nonzero().get(),
        });
        // One call for the whole line. A profile that cannot be written is no reason to fail.
        _ = (&self.0).write_all(format!("{event},\n").as_bytes());
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}").into());
    }
}

fn now() -> f64 {
    let time = rustix::time::clock_gettime(ClockId::Monotonic);
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
}
