//! What exports and imports of topics share: the keys, the window, and which samples are the bridge's own.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex},
    time::Duration,
};

use partywall::{Domain, Place, Policy, Topic, error::NotFound, info::TopicShape};
use partywall_os::lock::IgnorePoison;
use zenoh::{Wait, bytes::ZBytes, qos::Priority};

use super::wire::{Instance, Message, RingId, StreamPolicy, ToOrigin, ToReceiver, Window};
use crate::link::{CONGESTION, Link, URGENT};

/// How topics cross.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TopicOptions {
    /// What happens at the origin to samples that this host does not take in time.
    pub(crate) policy: Policy,
    /// Samples from before an import; `None` for the topic's own number.
    pub(crate) history: Option<u32>,
    /// Where topics are created here.
    pub(crate) place: Place,
    /// How long an export waits for a host that it does not hear.
    pub(crate) timeout: Duration,
}

impl TopicOptions {
    /// Returns what a receiver asks for.
    pub(crate) fn window(&self) -> Window {
        // What is on its way is as old as the queue is long, so those that want what is new keep it short.
        let samples = match self.policy {
            Policy::Block => 256,
            Policy::DropOldest => 8,
            Policy::Latest => 2,
        };
        Window { samples, bytes: WINDOW_BYTES }
    }
}

/// The publishers of this bridge, in this life. What they publish is never exported, so rings of hosts have no loops.
#[derive(Debug, Clone)]
pub(crate) struct OwnPublishers {
    /// The broker, whose rings have nothing to do with those of another one.
    broker: u64,
    rings: Arc<Mutex<HashMap<RingId, OwnIds>>>,
}

/// The publishers of this bridge in one topic.
#[derive(Debug, Clone, Default)]
pub(crate) struct OwnIds(Arc<Mutex<VecDeque<u64>>>);

impl OwnPublishers {
    /// # Errors
    /// If the broker does not answer.
    pub(crate) fn new(domain: &Domain) -> partywall::Result<Self> {
        Ok(Self { broker: domain.watch("*")?.point().instance, rings: Arc::default() })
    }

    /// Returns the identity of a topic's ring, and its options. Name and version are none: once a topic is gone, another
    /// one of its name may have version 1 again. Nor is the time alone, at which many topics may be created.
    ///
    /// # Errors
    /// If the topic was removed, or the broker does not answer.
    pub(crate) fn ring(&self, topic: &Topic) -> partywall::Result<(RingId, TopicShape)> {
        let name = format!("{}@{}", topic.name(), topic.version());
        let version = topic.domain().inspect(&name)?.version;
        let is_none = || NotFound::Version { name: topic.name().to_owned(), version: topic.version(), latest: None };
        let shape = version.control.and_then(|control| control.topic).ok_or_else(is_none)?;
        Ok((ring_id(topic.name(), [self.broker, topic.version(), version.committed_at]), shape))
    }

    pub(crate) fn of(&self, ring: RingId) -> OwnIds {
        self.rings.lock().ignore_poison().entry(ring).or_default().clone()
    }
}

impl OwnIds {
    /// Adds a publisher, before it publishes.
    pub(crate) fn add(&self, publisher: u64) {
        let mut ids = self.0.lock().ignore_poison();
        ids.push_back(publisher);
        // The ring has left what the first ones have published.
        if ids.len() > MAX_OWN {
            ids.pop_front();
        }
    }

    /// Returns whether a publisher is the bridge's own.
    pub(crate) fn contains(&self, publisher: u64) -> bool {
        self.0.lock().ignore_poison().contains(&publisher)
    }

    /// Returns all of them.
    pub(crate) fn ids(&self) -> Vec<u64> {
        self.0.lock().ignore_poison().iter().copied().collect()
    }
}

/// Returns the identity of the ring of a topic of this broker, version and time.
fn ring_id(name: &str, numbers: [u64; 3]) -> RingId {
    let mut hasher = blake3::Hasher::new();
    hasher.update(numbers.map(u64::to_le_bytes).as_flattened()).update(name.as_bytes());
    let mut id = [0; 16];
    hasher.finalize_xof().fill(&mut id);
    RingId(u128::from_le_bytes(id))
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
pub(crate) fn key_to_origin(link: &Link, message: &ToOrigin, host: &str, name: &str) -> String {
    let (origin, receiver) = (message.stream.origin.0, message.stream.receiver.0);
    link.key(format_args!("credit/{host}/{origin:032x}/{receiver:032x}/{name}"))
}

/// Returns the key of messages to a receiver.
pub(crate) fn key_to_receiver(link: &Link, message: &ToReceiver, host: &str, name: &str) -> String {
    let (origin, receiver) = (message.stream.origin.0, message.stream.receiver.0);
    link.key(format_args!("data/{receiver:032x}/{host}/{origin:032x}/{name}"))
}

/// Sends a message of a stream. Waits for the link, and loses the message after a while, which streams expect.
pub(crate) fn put(link: &Link, key: &str, message: &impl Message, payload: impl Into<ZBytes>) {
    put_with(link, key, message, payload, Priority::DEFAULT);
}

/// Sends a message that does not wait for those of [`put`].
pub(crate) fn put_now(link: &Link, key: &str, message: &impl Message) {
    put_with(link, key, message, ZBytes::new(), URGENT);
}

fn put_with(link: &Link, key: &str, message: &impl Message, payload: impl Into<ZBytes>, priority: Priority) {
    let put = link.session().put(key, payload).attachment(message.encode());
    let _ = put.congestion_control(CONGESTION).priority(priority).wait();
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

/// The most publishers of a bridge in a topic that are remembered: the samples of more do not fit a ring.
const MAX_OWN: usize = 4096;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn rings_of_topics_of_one_moment_are_different() {
        let ids = [("a", [1, 1, 9]), ("b", [1, 1, 9]), ("a", [2, 1, 9]), ("a", [1, 2, 9]), ("a", [1, 1, 8])];
        let ids: HashSet<_> = ids.into_iter().map(|(name, numbers)| ring_id(name, numbers)).collect();
        assert_eq!(ids.len(), 5);
    }
}
