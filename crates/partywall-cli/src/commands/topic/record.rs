//! `partywall topic record`. With `--json`, at the end: `name`, `file`, `samples`, `missed`, `failed` (incomplete
//! samples, which are not in the file), `bytes` (of the samples), `seconds`; on standard error if the file is standard
//! output. `docs/topic-files.md` describes the file.

use std::path::{Path, PathBuf};

use partywall::{Sample, Subscriber, bytes};
use serde_json::json;

use super::{Receiver, Receiving, file::Recording, is_lost, stdout::check_terminal};
use crate::{Context, failure::Failure, output::is_standard_output, text::count};

/// The arguments of the command.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    receiving: Receiving,
    /// The file; or `-` for standard output
    #[arg(value_name = "FILE|-")]
    file: PathBuf,
    /// Replace the file if it exists
    #[arg(long)]
    force: bool,
}

/// Runs the command.
pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let is_stream = arguments.file == Path::new("-") || is_standard_output(&arguments.file);
    if is_stream {
        let name = &arguments.receiving.name;
        check_terminal(format!("name a file, or use a pipe: partywall topic record {name} - | gzip > {name}.mcap.gz"))?;
    }
    let topic = arguments.receiving.open(context)?;
    // Opened before the file, so that a failure leaves an existing file unchanged.
    let receiving = arguments.receiving.subscribe(&topic)?;
    let recording = Recording::create(
        if is_stream { Path::new("-") } else { &arguments.file },
        &topic,
        arguments.force,
        &receiving.1,
    )?;
    let output = if is_stream { context.output().on_standard_error() } else { context.output() };
    let to = if is_stream { "on standard output".to_owned() } else { format!("in {}", arguments.file.display()) };
    output.note(format!("recording {} {to}", topic.name()));
    let mut recorder = Recorder { recording, samples: 0, missed: 0, failed: 0, bytes: 0 };
    let received = arguments.receiving.receive(context, &topic, &receiving, &mut recorder);
    let Recorder { recording, samples, missed, failed, bytes: total } = recorder;
    // The file holds all received samples, however the command ended.
    let finished = recording.finish();
    let took = received?.as_secs_f64();
    finished?;
    output.line(format!(
        "{} of {} {to}: {} in {took:.1} s; {missed} missed, {failed} failed",
        count(samples, "sample"),
        topic.name(),
        bytes(total),
    ));
    output.value(&json!({
        "name": topic.name(),
        "file": arguments.file,
        "samples": samples,
        "missed": missed,
        "failed": failed,
        "bytes": total,
        "seconds": took,
    }));
    Ok(())
}

struct Recorder {
    recording: Recording,
    samples: u64,
    missed: u64,
    failed: u64,
    bytes: u64,
}

impl Receiver for Recorder {
    fn sample(&mut self, sample: Sample, _: &Subscriber) -> Result<(), Failure> {
        self.missed += sample.missed();
        match self.recording.add(&sample)? {
            Ok(()) => {
                self.samples += 1;
                self.bytes += sample.len();
            }
            Err(error) if is_lost(&error) => self.failed += 1,
            Err(error) => return Err(error.into()),
        }
        Ok(sample.release()?)
    }

    fn idle(&mut self) -> Result<(), Failure> {
        self.recording.flush_if_due()
    }
}
