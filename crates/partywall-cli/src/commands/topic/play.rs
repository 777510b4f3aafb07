//! `partywall topic play`. With `--json`, at the end: `name`, `file`, `channel`, `samples`, `bytes` (of the samples),
//! `seconds`, `cut_off` (whether the file is incomplete at its end).

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use partywall::{
    Domain, ErrorKind, Publisher, Topic, TopicOptions, bytes,
    files::{Message, TensorInfo},
};
use serde_json::json;

use super::{
    file::{Next, Playback, decode, parse_shape},
    making::{Audience, Lengths, Numbers, Type},
    parse_rate, sleep_until,
};
use crate::{Context, failure::Failure, signals, text::count};

/// The arguments of the command.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// The file
    file: PathBuf,
    /// The topic. If it does not exist, it is created like the recorded one
    name: String,
    /// The speed as a factor of the recorded one; less than 1 is slower
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = parse_rate)]
    rate: f64,
    /// Start again at the end of the file, until Ctrl-C
    #[arg(long = "loop")]
    again: bool,
    /// The recorded topic to play, if the file has several
    #[arg(long, value_name = "TOPIC")]
    channel: Option<String>,
    #[command(flatten)]
    audience: Audience,
    #[command(flatten)]
    numbers: Numbers,
}

/// Runs the command.
pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    partywall::check_name(&arguments.name)?;
    // Checked first, so that an unusable file starts no broker.
    let mut playback = Playback::open(&arguments.file)?;
    let mut next = playback.next()?;
    let stop = signals::cancel_flag()?;
    let domain = context.options().connect()?;
    let mut player = Player::new(context, arguments, &domain, &stop);
    let mut cut_off = false;
    loop {
        match next {
            Next::Sample { channel, log_time, message } => {
                if player.is_chosen(&playback, channel)? && !player.play(&playback, channel, log_time, &message)? {
                    break;
                }
                next = playback.next()?;
            }
            Next::End { cut_off: here } => {
                cut_off = here;
                if !arguments.again || player.samples == 0 {
                    break;
                }
                player.begun = None;
                playback = Playback::open(&arguments.file)?;
                next = playback.next()?;
            }
        }
    }
    player.report(&playback, cut_off)
}

struct Player<'a> {
    context: &'a Context,
    arguments: &'a Arguments,
    domain: &'a Domain,
    stop: &'a AtomicBool,
    /// The recorded topic that is played.
    channel: Option<String>,
    /// The topic to which it is published.
    topic: Option<(Topic, Publisher)>,
    /// The recorded time of the first sample of this pass through the file, and when it was published.
    begun: Option<(u64, Instant)>,
    start: Instant,
    samples: u64,
    bytes: u64,
}

impl<'a> Player<'a> {
    fn new(context: &'a Context, arguments: &'a Arguments, domain: &'a Domain, stop: &'a AtomicBool) -> Self {
        let channel = arguments.channel.clone();
        let start = Instant::now();
        Self { context, arguments, domain, stop, channel, topic: None, begun: None, start, samples: 0, bytes: 0 }
    }

    /// Returns whether the samples of a channel are played.
    fn is_chosen(&mut self, playback: &Playback, channel: u16) -> Result<bool, Failure> {
        let Some((topic, _)) = playback.channel(channel) else { return Ok(false) };
        let chosen = self.channel.get_or_insert_with(|| topic.clone());
        if chosen != topic && self.arguments.channel.is_none() {
            let what = format!("{} has samples of {chosen} and of {topic}", self.arguments.file.display());
            return Err(Failure::new(ErrorKind::Usage, what, "choose one with --channel TOPIC"));
        }
        Ok(chosen == topic)
    }

    /// Publishes a sample when it is due. Returns false if Ctrl-C interrupted it.
    fn play(&mut self, playback: &Playback, channel: u16, log_time: u64, message: &[u8]) -> Result<bool, Failure> {
        let name = format!("sample {} of {}", self.samples + 1, self.arguments.file.display());
        let (Message { tensor, bytes, .. }, header) = decode(Path::new(&name), message)?;
        if self.topic.is_none() {
            let topic = self.open(playback, channel, &tensor)?;
            let publisher = topic.publisher()?;
            if !self.arguments.audience.wait_for(self.context, &topic, self.stop)? {
                return Ok(false);
            }
            self.topic = Some((topic, publisher));
        }
        let Some((topic, publisher)) = &self.topic else { return Ok(false) };
        let (first, begun) = *self.begun.get_or_insert_with(|| (log_time, Instant::now()));
        let due = Duration::from_nanos(log_time.saturating_sub(first)).div_f64(self.arguments.rate);
        if !sleep_until(begun, due, self.stop)
            || !super::publish(topic, publisher, (tensor.dtype, &tensor.shape), bytes, &header, self.stop)?
        {
            return Ok(false);
        }
        self.samples += 1;
        self.bytes += bytes.len() as u64;
        Ok(true)
    }

    /// Opens the topic, or creates it like the recorded one.
    fn open(&self, playback: &Playback, channel: u16, first: &TensorInfo) -> Result<Topic, Failure> {
        let facts = playback.channel(channel).map(|(_, facts)| facts);
        let fact = |name: &str| facts.and_then(|facts| facts.get(name));
        let number = |name: &str| fact(name).and_then(|value| value.parse::<u64>().ok());
        let max_bytes = number("max_bytes").unwrap_or(0).max(first.bytes).max(1);
        let Arguments { name, numbers, .. } = self.arguments;
        let samples = Type {
            dtype: fact("dtype").and_then(|name| name.parse().ok()),
            shape: fact("shape").and_then(|shape| parse_shape(shape).ok()).map(Lengths),
            max_bytes: Some(max_bytes),
        };
        let depth = number("depth").and_then(|depth| u32::try_from(depth).ok()).filter(|_| !numbers.has_depth());
        let as_recorded = |options| samples.of(depth.into_iter().fold(options, TopicOptions::depth));
        numbers.open_or_create(self.context, self.domain.topic(name), as_recorded)
    }

    fn report(self, playback: &Playback, cut_off: bool) -> Result<(), Failure> {
        let Self { context, arguments, channel, start, samples, bytes: total, .. } = self;
        let output = context.output();
        let path = arguments.file.as_path();
        if cut_off {
            output.note(format!("{} is incomplete: its complete samples were played", path.display()));
        }
        if samples == 0 && !self.stop.load(Ordering::Relaxed) {
            return Err(nothing(path, arguments.channel.as_deref(), playback));
        }
        let took = start.elapsed().as_secs_f64();
        output.line(format!(
            "played {} of {} to {}: {} in {took:.1} s",
            count(samples, "sample"),
            path.display(),
            arguments.name,
            bytes(total),
        ));
        output.value(&json!({
            "name": arguments.name,
            "file": path,
            "channel": channel,
            "samples": samples,
            "bytes": total,
            "seconds": took,
            "cut_off": cut_off,
        }));
        Ok(())
    }
}

/// Returns the failure of a file without samples of `channel`, or without any.
fn nothing(path: &Path, channel: Option<&str>, playback: &Playback) -> Failure {
    let of = channel.map_or_else(String::new, |channel| format!(" of {channel}"));
    let recorded = playback.topics().into_iter().collect::<Vec<_>>().join(", ");
    let advice = if channel.is_some() && !recorded.is_empty() {
        format!("name one of its topics with --channel: {recorded}")
    } else {
        "list its contents: mcap info".to_owned()
    };
    Failure::new(ErrorKind::NotFound, format!("{} has no samples{of}", path.display()), advice)
}
