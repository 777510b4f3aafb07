//! `partywall topic cat`: the bytes of samples on standard output, for programs in any language. `docs/topics.md`
//! describes the lines of `--header`.

use std::io::Write;

use partywall::{Sample, Subscriber};
use serde_json::{Value, json};

use super::{
    Receiver, Receiving, bytes_of, file, is_lost,
    stdout::{Stdout, check_terminal, not_written},
};
use crate::{Context, failure::Failure, text::count};

/// The arguments of the command.
#[derive(Debug, clap::Args)]
// This command always ends with an idle topic, so that the program behind the pipe ends as well.
#[command(mut_arg("until_idle", |argument| argument.hide(true)))]
pub(super) struct Arguments {
    #[command(flatten)]
    receiving: Receiving,
    /// Write a line of JSON before each sample: its size in bytes, type, shape, numbers and header
    #[arg(long)]
    header: bool,
}

/// Runs the command.
pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let Arguments { receiving, header } = arguments;
    if context.output().is_json() {
        let advice = "describe the samples with --header, or print them as JSON with `partywall topic echo`";
        let what = "--json cannot be used: standard output carries the samples";
        return Err(Failure::new(partywall::ErrorKind::Usage, what, advice));
    }
    let name = &receiving.name;
    check_terminal(format!("use a pipe: partywall topic cat {name} | xxd | head; or partywall topic echo {name}"))?;
    let topic = receiving.open(context)?;
    let subscribed = receiving.subscribe_until(&topic, true)?;
    let stdout = Stdout::new(&subscribed.1);
    let mut cat = Cat { stdout, with_header: *header, bytes: Vec::new(), samples: 0, missed: 0, failed: 0 };
    receiving.receive(context, &topic, &subscribed, &mut cat)?;
    let Cat { samples, missed, failed, .. } = cat;
    context.output().note(format!("{}; {missed} missed, {failed} failed", count(samples, "sample")));
    Ok(())
}

struct Cat {
    stdout: Stdout,
    with_header: bool,
    /// The next sample: written only once it is known to be complete.
    bytes: Vec<u8>,
    samples: u64,
    missed: u64,
    failed: u64,
}

impl Receiver for Cat {
    fn sample(&mut self, sample: Sample, _: &Subscriber) -> Result<(), Failure> {
        self.missed += sample.missed();
        self.bytes.clear();
        if self.with_header {
            // Writing to a vector cannot fail.
            let _ = writeln!(self.bytes, "{}", head(&sample));
        }
        match bytes_of(&sample, u64::MAX, &mut self.bytes) {
            Ok(()) => self.samples += 1,
            Err(error) if is_lost(&error) => {
                self.failed += 1;
                self.bytes.clear();
            }
            Err(error) => return Err(error.into()),
        }
        // A slow reader keeps no block from the publishers.
        sample.release()?;
        self.stdout.write_all(&self.bytes).map_err(|error| not_written(&error))
    }

    fn idle(&mut self) -> Result<(), Failure> {
        self.stdout.check();
        Ok(())
    }
}

/// Returns the line before a sample. `bytes` is its first member, for readers that have no parser for JSON.
fn head(sample: &Sample) -> Value {
    json!({
        "bytes": sample.len(),
        "dtype": sample.dtype().name(),
        "shape": sample.shape(),
        "position": sample.position(),
        "publisher": sample.publisher(),
        "sequence": sample.sequence(),
        "missed": sample.missed(),
        "header": file::hex(&sample.header()),
    })
}
