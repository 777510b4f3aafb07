//! What exports and imports of topics share: the keys, the window, and which samples are the bridge's own.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex},
    time::Duration,
};

use partywall::{Policy, Topic};
use partywall_os::lock::IgnorePoison;
use zenoh::{Wait, bytes::ZBytes, qos::CongestionControl};

use super::wire::{Instance, Message, StreamPolicy, ToOrigin, ToReceiver, Window};
use crate::link::Link;

/// How topics cross.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TopicOptions {
    /// What happens at the origin to samples that this host does not take in time.
    pub(crate) policy: Policy,
    /// Samples from before an import; `None` for the topic's own number.
    pub(crate) history: Option<u32>,
    /// How long an export waits for a host that it does not hear.
    pub(crate) timeout: Duration,
}

impl TopicOptions {
    /// Returns what a receiver asks for.
    pub(crate) fn window(&self) -> Window {
        // What is on its way is as old as the queue is long, so those that want what is new keep it short.
        let samples = match self.policy {
            Policy::Block => 64,
            Policy::DropOldest => 8,
            Policy::Latest => 2,
        };
        Window { samples, bytes: WINDOW_BYTES }
    }
}

/// The publishers of this bridge, in this life. What they publish is never exported, so rings of hosts have no loops.
#[derive(Debug, Clone, Default)]
pub(crate) struct OwnPublishers(Arc<Mutex<HashSet<(String, u64, u64)>>>);

impl OwnPublishers {
    /// Adds a publisher, before it publishes.
    pub(crate) fn add(&self, topic: &Topic, publisher: u64) {
        self.0.lock().ignore_poison().insert((topic.name().to_owned(), topic.version(), publisher));
    }

    /// Returns whether a publisher is the bridge's own.
    pub(crate) fn contains(&self, topic: &Topic, publisher: u64) -> bool {
        self.0.lock().ignore_poison().contains(&(topic.name().to_owned(), topic.version(), publisher))
    }
}

/// Returns the number of an instance, which sessions write in hexadecimal.
pub(crate) fn instance_of(text: &str) -> Option<Instance> {
    u128::from_str_radix(text, 16).ok().map(Instance)
}

/// Returns the number of this life of the bridge.
pub(crate) fn own_instance(link: &Link) -> Instance {
    // Sessions have 128 bits in hexadecimal; were that to change, the bridge would not be found, and harm nobody.
    instance_of(&link.instance()).unwrap_or(Instance(0))
}

/// Returns the key of messages to an origin.
pub(crate) fn key_to_origin(link: &Link, message: &ToOrigin, name: &str) -> String {
    let (origin, receiver) = (message.stream.origin.0, message.stream.receiver.0);
    link.key(format_args!("credit/{origin:032x}/{receiver:032x}/{name}"))
}

/// Returns the key of messages to a receiver.
pub(crate) fn key_to_receiver(link: &Link, message: &ToReceiver, host: &str, name: &str) -> String {
    let (origin, receiver) = (message.stream.origin.0, message.stream.receiver.0);
    link.key(format_args!("data/{receiver:032x}/{host}/{origin:032x}/{name}"))
}

/// Sends a message, and waits for the link as long as that has a lease. If the host is gone the message is lost, which
/// streams expect.
pub(crate) fn put(link: &Link, key: &str, message: &impl Message, payload: impl Into<ZBytes>) {
    let put = link.session().put(key, payload).attachment(message.encode());
    let _ = put.congestion_control(CongestionControl::Block).wait();
}

/// Reads the name of a policy.
///
/// # Errors
/// Returns a sentence that lists the names.
pub(crate) fn policy(text: &str) -> Result<Policy, String> {
    match text {
        "block" => Ok(Policy::Block),
        "drop-oldest" => Ok(Policy::DropOldest),
        "latest" => Ok(Policy::Latest),
        _ => Err(format!("{text:?} is no policy: choose block, drop-oldest or latest")),
    }
}

pub(crate) fn to_wire(policy: Policy) -> StreamPolicy {
    match policy {
        Policy::Block => StreamPolicy::Block,
        Policy::DropOldest => StreamPolicy::DropOldest,
        Policy::Latest => StreamPolicy::Latest,
    }
}

pub(crate) fn from_wire(policy: StreamPolicy) -> Policy {
    match policy {
        StreamPolicy::Block => Policy::Block,
        StreamPolicy::DropOldest => Policy::DropOldest,
        StreamPolicy::Latest => Policy::Latest,
    }
}

/// The bytes of a stream that may be on their way: 10 Gbit/s for 25 ms.
pub(crate) const WINDOW_BYTES: u64 = 32 << 20;
