//! `partywall topic …`: lists topics; publishes, prints, passes on and measures samples; records them in files and
//! plays them.

mod cat;
mod echo;
mod file;
mod info;
mod list;
mod making;
mod mcap;
mod play;
mod playback;
mod publish;
mod rates;
mod record;
mod stdout;
mod values;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use clap::{Args, Subcommand};
use partywall::{
    DType, Error, Publisher, Sample, Subscriber, Topic, Wait,
    error::{Gone, InvalidData},
};

use crate::{
    Context,
    failure::Failure,
    output::Output,
    signals,
    text::{count, parse_count, parse_seconds},
};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: TopicCommand,
}

#[derive(Debug, Subcommand)]
enum TopicCommand {
    /// List topics with their samples, publishers, subscribers and rates
    Ls(list::Arguments),
    /// Show the samples, memory, publishers and subscribers of a topic
    Info(info::Arguments),
    /// Publish samples from a file, standard input, or generated numbers
    Pub(publish::Arguments),
    /// Print samples as they arrive: rate, lag, headers and first values
    Echo(Receiving),
    /// Write the bytes of samples to standard output, for a program behind a pipe
    Cat(cat::Arguments),
    /// Measure the samples per second and the gaps between them
    Hz(rates::Arguments),
    /// Measure the bytes per second and the sizes of samples
    Bw(rates::Arguments),
    /// Write samples to an MCAP file
    Record(record::Arguments),
    /// Publish the samples of an MCAP file at their recorded pace
    Play(play::Arguments),
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    match &arguments.command {
        TopicCommand::Ls(arguments) => list::run(context, arguments),
        TopicCommand::Info(arguments) => info::run(context, arguments),
        TopicCommand::Pub(arguments) => publish::run(context, arguments),
        TopicCommand::Echo(receiving) => echo::run(context, receiving),
        TopicCommand::Cat(arguments) => cat::run(context, arguments),
        TopicCommand::Hz(arguments) => rates::run(context, arguments, rates::Quantity::Gaps),
        TopicCommand::Bw(arguments) => rates::run(context, arguments, rates::Quantity::Sizes),
        TopicCommand::Record(arguments) => record::run(context, arguments),
        TopicCommand::Play(arguments) => play::run(context, arguments),
    }
}

/// Which samples are received.
#[derive(Debug, Args)]
struct Receiving {
    /// The topic
    name: String,
    /// End after this many samples
    #[arg(long, value_name = "N", value_parser = parse_count)]
    count: Option<u64>,
    /// End after this many seconds
    #[arg(long = "for", value_name = "SECONDS", value_parser = parse_seconds)]
    limit: Option<Duration>,
    /// End when the last publisher has left and all samples are received
    #[arg(long)]
    until_idle: bool,
    /// Wait this long for a topic that does not exist yet
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    wait: Option<Duration>,
    /// Make publishers wait for this process, instead of missing samples if it is too slow
    #[arg(long)]
    block: bool,
}

/// The callbacks of a receiver.
trait Receiver {
    /// Handles a sample.
    fn sample(&mut self, sample: Sample, subscriber: &Subscriber) -> Result<(), Failure>;

    /// Called after each sample, and regularly while none arrives.
    fn idle(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    /// Returns how soon the next regular call is due.
    fn moment(&self) -> Duration {
        MOMENT
    }
}

impl Receiving {
    /// Opens the topic.
    fn open(&self, context: &Context) -> Result<Topic, Failure> {
        partywall::check_name(&self.name)?;
        let wait = self.wait.unwrap_or_default();
        // A process that waits for a topic may be the first one in the domain, so it starts a broker.
        let domain = context.options().start(!wait.is_zero()).connect()?;
        Ok(domain.topic(&self.name).timeout(wait).open()?)
    }

    /// Subscribes to the topic. Returns the subscriber and a flag that Ctrl-C sets. The flag is installed before other
    /// processes can see the subscriber.
    fn subscribe(&self, topic: &Topic) -> Result<(Subscriber, Arc<AtomicBool>), Failure> {
        self.subscribe_until(topic, self.until_idle)
    }

    /// Subscribes to the topic; only `until_idle` ends the subscriber when the last publisher has left.
    fn subscribe_until(&self, topic: &Topic, until_idle: bool) -> Result<(Subscriber, Arc<AtomicBool>), Failure> {
        let stop = signals::cancel_flag()?;
        let policy = if self.block { partywall::Policy::Block } else { partywall::Policy::DropOldest };
        // The clock costs less than anything else that these commands do with a sample.
        let options = topic.subscribe(policy).until_idle(until_idle).measure_ages(true);
        Ok((options.join()?, stop))
    }

    /// Passes samples to `receiver` as they arrive, until the count is reached, the time is over, the topic is idle, or
    /// Ctrl-C. Prints on standard error what it waits for. Returns how long it received.
    fn receive(
        &self,
        context: &Context,
        topic: &Topic,
        (subscriber, stop): &(Subscriber, Arc<AtomicBool>),
        receiver: &mut impl Receiver,
    ) -> Result<Duration, Failure> {
        let mut presence = Presence { output: context.output(), topic, publishers: None };
        presence.update();
        let start = Instant::now();
        let mut left = self.count.unwrap_or(u64::MAX);
        while left > 0 && !stop.load(Ordering::Relaxed) {
            let left_of_limit = self.limit.map_or(MOMENT, |limit| limit.saturating_sub(start.elapsed()));
            if left_of_limit.is_zero() {
                break;
            }
            let time = left_of_limit.min(MOMENT).min(receiver.moment());
            match subscriber.recv(Wait::from(time).cancelled_by(&**stop)) {
                Ok(sample) => {
                    receiver.sample(sample, subscriber)?;
                    left -= 1;
                }
                Err(Error::Cancelled { .. }) => break,
                Err(Error::Timeout { .. }) => presence.update(),
                Err(Error::Gone(Gone::TopicIdle { .. })) => {
                    presence.output.note(format!("the last publisher of {} has left", topic.name()));
                    break;
                }
                Err(error) => return Err(error.into()),
            }
            receiver.idle()?;
        }
        Ok(start.elapsed())
    }
}

/// Reports the publishers that the command waits for; keeps the number that was printed last.
struct Presence<'a> {
    output: Output,
    topic: &'a Topic,
    publishers: Option<usize>,
}

impl Presence<'_> {
    /// Prints what the command waits for, if that has changed.
    fn update(&mut self) {
        let now = self.topic.stats().publishers.iter().filter(|publisher| !publisher.detached).count();
        let name = self.topic.name();
        let some = count(now as u64, "publisher");
        match (self.publishers.replace(now), now) {
            (None, 0) => self.output.note(format!("waiting for a publisher of {name}; Ctrl-C ends it")),
            (None, _) => self.output.note(format!("waiting for samples of {name}, which has {some}; Ctrl-C ends it")),
            (Some(before), 0) if before > 0 => {
                self.output.note(format!("the last publisher of {name} has left; waiting for another"));
            }
            (Some(0), now) if now > 0 => self.output.note(format!("{name} has {some} now")),
            _ => {}
        }
    }
}

/// Reports once that the topic of a publisher was removed. Its subscribers go on receiving, so the command goes on,
/// too.
struct NameCheck {
    /// When to check again; `None` once it was reported.
    due: Option<Instant>,
}

impl NameCheck {
    fn new() -> Self {
        Self { due: Some(Instant::now() + NAME_CHECK) }
    }

    /// Checks now and then. An error of the publisher itself is left for its next publication to report.
    fn update(&mut self, output: Output, publisher: &Publisher) {
        let now = Instant::now();
        if self.due.is_none_or(|due| now < due) {
            return;
        }
        self.due = Some(now + NAME_CHECK);
        if let Err(error @ Error::NotFound(_)) = publisher.check() {
            let who = "only subscribers that have the topic open receive what follows; Ctrl-C ends this";
            output.note(format!("{error}; {who}"));
            self.due = None;
        }
    }
}

/// Publishes a sample. Returns false if Ctrl-C interrupted the wait for a block or for subscribers.
fn publish(
    publisher: &Publisher,
    (dtype, shape): (DType, &[u64]),
    bytes: &[u8],
    header: &[u8],
    stop: &AtomicBool,
) -> Result<bool, Failure> {
    let wait = Wait::from(TIMEOUT).cancelled_by(stop);
    let sent = publisher.send_with(dtype, shape, wait, |loan| {
        loan.header(header)?;
        loan.write(bytes).map(|()| None)
    });
    match sent {
        Ok(_) => Ok(true),
        Err(Error::Cancelled { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Sleeps until `due` after `begun`. Returns false if Ctrl-C interrupted the sleep.
fn sleep_until(begun: Instant, due: Duration, stop: &AtomicBool) -> bool {
    loop {
        let left = due.saturating_sub(begun.elapsed());
        if stop.load(Ordering::Relaxed) {
            return false;
        }
        if left.is_zero() {
            return true;
        }
        std::thread::sleep(left.min(NAP));
    }
}

/// Returns the first `most` bytes of a sample in any place, once the sample is complete.
///
/// # Errors
/// [`InvalidData::SampleFailed`] and [`InvalidData::SampleTainted`] for a sample that will never be complete.
fn bytes_of(sample: &Sample, most: u64, out: &mut Vec<u8>) -> Result<(), Error> {
    sample.wait(TIMEOUT)?;
    let start = out.len();
    out.resize(start + sample.len().min(most) as usize, 0);
    sample.read_at(0, &mut out[start..])?;
    sample.check()
}

/// Returns whether an error means that a sample will never be complete.
fn is_lost(error: &Error) -> bool {
    matches!(error, Error::InvalidData(InvalidData::SampleFailed { .. } | InvalidData::SampleTainted { .. }))
}

/// Parses a number of samples per second, or a factor of the recorded speed.
fn parse_rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if (1e-3..=1e6).contains(&rate) => Ok(rate),
        _ => Err("use a number from 0.001 to 1000000".into()),
    }
}

/// How long to sleep between two polls of the stop flag.
const NAP: Duration = Duration::from_millis(100);

/// How long to wait for a sample before the next regular call.
const MOMENT: Duration = Duration::from_millis(250);

/// The time between two checks of whether a topic still has its name.
const NAME_CHECK: Duration = Duration::from_secs(1);

/// The timeout for a publisher's stream to complete a sample, and for subscribers to make room for one.
const TIMEOUT: Duration = Duration::from_secs(10);
