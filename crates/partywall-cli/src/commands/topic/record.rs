//! `partywall topic record`. With `--json`, at the end: `name`, `file`, `samples`, `missed`, `failed` (incomplete samples,
//! which are not in the file), `bytes` (of the samples), `seconds`. `docs/topic-files.md` describes the file.

use std::path::PathBuf;

use partywall::{Sample, Subscriber, bytes};
use serde_json::json;

use super::{Receiver, Receiving, file::Recording, is_lost};
use crate::{Context, failure::Failure, text::count};

/// The arguments of the command.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    receiving: Receiving,
    /// The file
    file: PathBuf,
    /// Replace the file if it exists
    #[arg(long)]
    force: bool,
}

/// Runs the command.
pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let topic = arguments.receiving.open(context)?;
    // Opened before the file, so that a failure leaves an existing file unchanged.
    let receiving = arguments.receiving.subscribe(&topic)?;
    let output = context.output();
    let shown = arguments.file.display();
    let recording = Recording::create(&arguments.file, &topic, arguments.force)?;
    output.note(format!("recording {} in {shown}", topic.name()));
    let mut recorder = Recorder { recording, samples: 0, missed: 0, failed: 0, bytes: 0 };
    let received = arguments.receiving.receive(context, &topic, &receiving, &mut recorder);
    let Recorder { recording, samples, missed, failed, bytes: total } = recorder;
    // The file holds all received samples, however the command ended.
    let finished = recording.finish();
    let took = received?.as_secs_f64();
    finished?;
    output.line(format!(
        "{} of {} in {shown}: {} in {took:.1} s; {missed} missed, {failed} failed",
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
