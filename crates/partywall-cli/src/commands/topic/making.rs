//! The options of a new topic. An existing topic must match them.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use partywall::{DType, DeviceChoice, Error, Topic, TopicOptions, WhenSome, error::NotFound};

use super::file::parse_shape;
use crate::{
    Context, device,
    failure::Failure,
    text::{count, parse_number, parse_seconds, parse_size},
};

/// The heading of options that only a new topic takes.
pub(super) const NEW: &str = "Options of a new topic";

/// The sizes and limits of a topic.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = NEW)]
pub(super) struct Numbers {
    /// Samples in the ring [default: 4]
    #[arg(long, value_name = "N", value_parser = parse_number::<u32>)]
    depth: Option<u32>,
    /// Samples that a subscriber gets when it joins late [default: 0]
    #[arg(long, value_name = "N", value_parser = parse_number::<u32>)]
    history: Option<u32>,
    /// Publishers at a time [default: 2]
    #[arg(long, value_name = "N", value_parser = parse_number::<u32>)]
    publishers: Option<u32>,
    /// Blocks that each publisher may hold before it publishes them [default: 2]
    #[arg(long, value_name = "N", value_parser = parse_number::<u32>)]
    loans: Option<u32>,
    /// Subscribers at a time [default: 4]
    #[arg(long, value_name = "N", value_parser = parse_number::<u32>)]
    subscribers: Option<u32>,
    /// Samples that each subscriber may hold [default: 2]
    #[arg(long, value_name = "N", value_parser = parse_number::<u32>)]
    held: Option<u32>,
    /// Blocks [default: depth + publishers × loans + subscribers × held]
    #[arg(long, value_name = "N", value_parser = parse_number::<u32>)]
    blocks: Option<u32>,
    /// Where its memory is: auto, host, pinned, pinned:N, cuda, cuda:N, or a GPU's UUID [default: auto, the first GPU,
    /// else host memory]
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceChoice>,
    /// Let processes of other users open it, where the broker admits them (`serve --allow-uid`)
    #[arg(long)]
    shared: bool,
}

/// The type of a topic's samples.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Samples")]
pub(super) struct Type {
    /// The type of the elements: uint8, float32, …
    #[arg(long, value_name = "DTYPE")]
    pub(super) dtype: Option<DType>,
    /// The shape: 480,640,3. A dimension `any` has any length and needs --max-bytes
    #[arg(long, value_name = "LENGTHS", value_parser = parse_lengths)]
    pub(super) shape: Option<Lengths>,
    /// Bytes of the largest sample, if the sizes of samples vary: 4096, 64KiB, 4MiB
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    pub(super) max_bytes: Option<u64>,
}

/// A shape; a dimension of `None` may have any length.
#[derive(Debug, Clone)]
pub(super) struct Lengths(pub(super) Vec<Option<u64>>);

/// How many subscribers to wait for.
#[derive(Debug, clap::Args)]
pub(super) struct Audience {
    /// Wait until the topic has this many subscribers
    #[arg(long, value_name = "N", value_parser = parse_number::<usize>)]
    wait_subscribers: Option<usize>,
    /// Wait at most this long for them, then fail with exit code 7 [default: until Ctrl-C]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds, requires = "wait_subscribers")]
    wait: Option<Duration>,
}

impl Type {
    /// Adds the type to the options of a topic.
    pub(super) fn of(&self, options: TopicOptions) -> TopicOptions {
        options
            .when_some(self.dtype, TopicOptions::dtype)
            .when_some(self.shape.as_ref(), |options, shape| options.varying_shape(&shape.0))
            .when_some(self.max_bytes, TopicOptions::max_bytes)
    }
}

impl Numbers {
    /// Opens the topic, or creates it with the options that `type_of_new` adds.
    pub(super) fn open_or_create(
        &self,
        context: &Context,
        options: TopicOptions,
        type_of_new: impl FnOnce(TopicOptions) -> TopicOptions,
    ) -> Result<Topic, Failure> {
        let mut options = self.of(options);
        if let Some(device) = self.device {
            options = options.place(device::place(context.output(), device)?);
        }
        // An existing topic may be in any place; only a new one needs a device.
        match options.open() {
            Err(Error::NotFound(NotFound::Name { .. })) => {}
            opened => return Ok(opened?),
        }
        if self.device.is_none() {
            options = options.place(device::place(context.output(), DeviceChoice::Auto)?);
        }
        Ok(type_of_new(options).open_or_create()?)
    }

    fn of(&self, options: TopicOptions) -> TopicOptions {
        options
            .when_some(self.depth, TopicOptions::depth)
            .when_some(self.history, TopicOptions::history)
            .when_some(self.publishers, TopicOptions::publishers)
            .when_some(self.loans, TopicOptions::loans)
            .when_some(self.subscribers, TopicOptions::subscribers)
            .when_some(self.held, TopicOptions::held)
            .when_some(self.blocks, TopicOptions::blocks)
            .shared(self.shared)
    }

    /// Returns whether the depth is given.
    pub(super) fn has_depth(&self) -> bool {
        self.depth.is_some()
    }
}

impl Audience {
    /// Waits for the requested subscribers. Returns false if Ctrl-C interrupted the wait.
    pub(super) fn wait_for(&self, context: &Context, topic: &Topic, stop: &AtomicBool) -> Result<bool, Failure> {
        let Some(wanted) = self.wait_subscribers else { return Ok(true) };
        let has = || topic.stats().subscribers.iter().filter(|subscriber| !subscriber.detached).count();
        let subscribers = count(wanted as u64, "subscriber");
        let start = Instant::now();
        if has() < wanted {
            context.output().note(format!("waiting for {subscribers} of topic {:?}; Ctrl-C ends it", topic.name()));
        }
        while has() < wanted {
            if stop.load(Ordering::Relaxed) {
                return Ok(false);
            }
            if let Some(limit) = self.wait.filter(|limit| start.elapsed() >= *limit) {
                let what = format!("cannot begin: topic {:?} did not have {subscribers}", topic.name());
                return Err(Error::Timeout { what, after: limit }.into());
            }
            std::thread::sleep(PAUSE);
        }
        Ok(true)
    }
}

fn parse_lengths(text: &str) -> Result<Lengths, String> {
    parse_shape(text).map(Lengths)
}

/// How often the subscribers are polled.
const PAUSE: Duration = Duration::from_millis(10);
