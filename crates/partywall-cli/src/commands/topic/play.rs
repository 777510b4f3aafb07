//! `partywall topic play`. With `--json`, at the end: `name`, `file`, `channel`, `samples`, `bytes` (of the samples),
//! `seconds`, `cut_off` (whether the file is incomplete at its end).

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use partywall::{
    Domain, ErrorKind, MAX_DEPTH, Publisher, Topic, TopicOptions, WhenSome, bytes,
    files::{Message, TensorInfo},
};
use serde_json::json;

use super::{
    NameCheck,
    file::parse_shape,
    making::{Audience, Lengths, NEW, Numbers, Type},
    parse_rate,
    playback::{Channel, Next, Playback, decode, largest},
    sleep_until,
};
use crate::{
    Context,
    failure::Failure,
    signals,
    text::{count, parse_size},
};

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
    /// Bytes of the largest sample: 4096, 64KiB, 4MiB [default: of the largest one in the file]
    #[arg(long, value_name = "BYTES", value_parser = parse_size, help_heading = NEW)]
    max_bytes: Option<u64>,
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
            Next::Sample { channel, log_time } => {
                if player.is_chosen(&playback, channel)? && !player.play(&playback, channel, log_time)? {
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
    name_check: NameCheck,
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
        let name_check = NameCheck::new();
        let topic = None;
        Self { context, arguments, domain, stop, channel, topic, name_check, begun: None, start, samples: 0, bytes: 0 }
    }

    /// Returns whether the samples of a channel are played.
    fn is_chosen(&mut self, playback: &Playback, channel: u16) -> Result<bool, Failure> {
        let Some(Channel { topic, .. }) = playback.channel(channel) else { return Ok(false) };
        let chosen = self.channel.get_or_insert_with(|| topic.clone());
        if chosen != topic && self.arguments.channel.is_none() {
            let what = format!("{} has samples of {chosen} and of {topic}", self.arguments.file.display());
            return Err(Failure::new(ErrorKind::Usage, what, "choose one with --channel TOPIC"));
        }
        Ok(chosen == topic)
    }

    /// Publishes a sample when it is due. Returns false if Ctrl-C interrupted it.
    fn play(&mut self, playback: &Playback, channel: u16, log_time: u64) -> Result<bool, Failure> {
        let name = format!("sample {} of {}", self.samples + 1, self.arguments.file.display());
        let (Message { tensor, bytes, .. }, header) = decode(Path::new(&name), playback.message())?;
        if self.topic.is_none() {
            let topic = self.open(playback, channel, &tensor)?;
            let publisher = topic.publisher()?;
            if !self.arguments.audience.wait_for(self.context, &topic, self.stop)? {
                return Ok(false);
            }
            self.topic = Some((topic, publisher));
        }
        let Some((_, publisher)) = &self.topic else { return Ok(false) };
        let (first, begun) = *self.begun.get_or_insert_with(|| (log_time, Instant::now()));
        let due = Duration::from_nanos(log_time.saturating_sub(first)).div_f64(self.arguments.rate);
        if !sleep_until(begun, due, self.stop) {
            return Ok(false);
        }
        self.name_check.update(self.context.output(), publisher);
        if !super::publish(publisher, (tensor.dtype, &tensor.shape), bytes, &header, self.stop)? {
            return Ok(false);
        }
        self.samples += 1;
        self.bytes += bytes.len() as u64;
        Ok(true)
    }

    /// Opens the topic, or creates it like the recorded one.
    fn open(&self, playback: &Playback, channel: u16, first: &TensorInfo) -> Result<Topic, Failure> {
        let Arguments { file, name, numbers, max_bytes, .. } = self.arguments;
        let options = self.domain.topic(name).when_some(*max_bytes, TopicOptions::max_bytes);
        numbers.open_or_create(self.context, options, |options| {
            let Some(Channel { topic, metadata }) = playback.channel(channel) else { return options };
            let fact = |name: &str| metadata.get(name).map(String::as_str);
            let number = |name: &str| fact(name).and_then(|value| value.parse::<u64>().ok());
            // What the file says about its samples may be wrong, and decides how much memory the topic takes. It is
            // believed as far as the samples agree, as far as it asks for no more bytes than the file has, and as far
            // as a topic can have it.
            let dtype = fact("dtype").and_then(|name| name.parse().ok()).filter(|dtype| *dtype == first.dtype);
            let shape = fact("shape").and_then(|shape| parse_shape(shape).ok());
            let shape = shape.filter(|shape| matches(shape, &first.shape)).map(Lengths);
            let is_fixed = dtype.is_some() && shape.as_ref().is_some_and(|shape| !shape.0.contains(&None));
            let most = playback.length().max(SMALL);
            let is_given = max_bytes.is_some();
            let recorded = number("max_bytes").filter(|bytes| *bytes <= most);
            let max_bytes = max_bytes.unwrap_or_else(|| match recorded {
                _ if is_fixed => first.bytes.max(1),
                recorded => {
                    let found = largest(file, topic, self.stop).unwrap_or(0);
                    found.max(first.bytes).max(recorded.unwrap_or(1)).max(1)
                }
            });
            let fits = |depth: &u64| {
                (1..=MAX_DEPTH.into()).contains(depth)
                    && depth.checked_mul(max_bytes).is_some_and(|bytes| bytes <= most)
            };
            let depth = number("depth").filter(fits).map(|depth| depth as u32);
            let used = [
                ("dtype", dtype.is_some()),
                ("shape", shape.is_some()),
                ("max_bytes", recorded.is_some() || is_fixed || is_given),
                ("depth", depth.is_some() || numbers.has_depth()),
            ];
            let ignored = used.iter().filter(|(name, is_used)| fact(name).is_some() && !is_used);
            let ignored: Vec<_> = ignored.map(|(name, _)| *name).collect();
            if !ignored.is_empty() {
                let what = format!("the metadata {} of {}", ignored.join(", "), file.display());
                let why = "its samples, its size or the limits of topics contradict it";
                self.context.output().note(format!("ignored {what}: {why}"));
            }
            let options = options.when_some(depth.filter(|_| !numbers.has_depth()), TopicOptions::depth);
            Type { dtype, shape, max_bytes: Some(max_bytes) }.of(options)
        })
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

/// Returns whether a sample has such a shape.
fn matches(shape: &[Option<u64>], of_sample: &[u64]) -> bool {
    let mut both = shape.iter().zip(of_sample);
    shape.len() == of_sample.len() && both.all(|(wanted, has)| wanted.is_none_or(|wanted| wanted == *has))
}

/// So many bytes a file may ask for even if it is smaller.
const SMALL: u64 = 1 << 20;
