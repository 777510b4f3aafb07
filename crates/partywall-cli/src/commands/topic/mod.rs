//! `partywall topic …`: looks at the samples of a topic, and carries them to files and back.

mod echo;
mod file;
mod play;
mod record;
mod values;

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use clap::{Args, Subcommand};
use partywall::{Error, ErrorKind, Sample, Subscriber, Topic};

use crate::{Context, failure::Failure, signals, text::parse_seconds};

/// Its arguments.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Tell of samples as they come: how many a second, how far behind, their headers and first values
    Echo(echo::Arguments),
    /// Write samples to an MCAP file
    Record(record::Arguments),
    /// Publish the samples of an MCAP file at the pace at which they were recorded
    Play(play::Arguments),
}

/// Runs it.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    match &arguments.what {
        What::Echo(arguments) => echo::run(context, arguments),
        What::Record(arguments) => record::run(context, arguments),
        What::Play(arguments) => play::run(context, arguments),
    }
}

/// Which samples are received.
#[derive(Debug, Args)]
struct Receiving {
    /// The topic
    name: String,
    /// End after so many samples
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// End after so long
    #[arg(long = "for", value_name = "SECONDS", value_parser = parse_seconds)]
    limit: Option<Duration>,
    /// Wait so long for a topic that is not there yet
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    wait: Option<Duration>,
    /// Have publishers wait for this process instead of missing samples when it is too slow
    #[arg(long)]
    block: bool,
}

/// What a receiver has to do.
trait Receiver {
    /// A sample has come.
    fn sample(&mut self, sample: Sample, subscriber: &Subscriber) -> Result<(), Failure>;

    /// None has come for a moment.
    fn idle(&mut self) -> Result<(), Failure> {
        Ok(())
    }
}

impl Receiving {
    /// Opens the topic.
    fn open(&self, context: &Context) -> Result<Topic, Failure> {
        partywall::check_name(&self.name)?;
        let wait = self.wait.unwrap_or_default();
        // Who waits for a topic may be the first to come.
        let domain = context.options().start(!wait.is_zero()).connect()?;
        Ok(domain.topic(&self.name).timeout(wait).open()?)
    }

    /// Subscribes to it.
    fn subscribe(&self, topic: &Topic) -> Result<Subscriber, Failure> {
        let policy = if self.block { partywall::Policy::Block } else { partywall::Policy::DropOldest };
        Ok(topic.subscriber(policy)?)
    }

    /// Gives samples to `receiver` as they come, until there have been enough, the time is over, or Ctrl-C. Returns for how
    /// long that was.
    fn receive(&self, subscriber: &Subscriber, receiver: &mut impl Receiver) -> Result<Duration, Failure> {
        let stop = cancel_flag()?;
        let (start, mut left) = (Instant::now(), self.count.unwrap_or(u64::MAX));
        while left > 0 && !stop.load(Ordering::Relaxed) {
            let time = self.limit.map_or(MOMENT, |limit| limit.saturating_sub(start.elapsed()).min(MOMENT));
            if time.is_zero() {
                break;
            }
            match subscriber.recv_unless(time, || stop.load(Ordering::Relaxed)) {
                Ok(Some(sample)) => {
                    receiver.sample(sample, subscriber)?;
                    left -= 1;
                }
                Ok(None) => break,
                Err(Error::Timeout { .. }) => {}
                Err(error) => return Err(error.into()),
            }
            receiver.idle()?;
        }
        Ok(start.elapsed())
    }
}

/// The first `most` bytes of a sample, wherever it is, once it is complete.
///
/// # Errors
/// [`Error::SampleFailed`] and [`Error::SampleTainted`] for one that never will be.
fn bytes_of(sample: &Sample, most: u64, out: &mut Vec<u8>) -> Result<(), Error> {
    sample.wait(PATIENCE)?;
    let (start, bytes) = (out.len(), sample.len().min(most));
    match sample.gpu() {
        None => out.extend_from_slice(&sample.bytes()?[..bytes as usize]),
        Some(_) if bytes == 0 => {}
        Some(gpu) => {
            out.resize(start + bytes as usize, 0);
            sample.device_on(gpu.stream())?.slice(0, bytes)?.copy_to_host(gpu.stream(), &mut out[start..])?;
        }
    }
    sample.check()
}

/// Whether an error says that a sample will never be complete.
fn is_lost(error: &Error) -> bool {
    matches!(error, Error::SampleFailed { .. } | Error::SampleTainted { .. })
}

fn cancel_flag() -> Result<std::sync::Arc<AtomicBool>, Failure> {
    signals::cancel_flag().map_err(|error| {
        Failure::new(ErrorKind::Refused, format!("handling signals: {error}"), "see what the kernel says")
    })
}

/// How long to wait for a sample before looking at the clock.
const MOMENT: Duration = Duration::from_millis(250);

/// How long a stream of a publisher may take to complete a sample, and a subscriber to make room for one.
const PATIENCE: Duration = Duration::from_secs(10);
