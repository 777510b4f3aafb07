//! What a domain holds and does at one moment, for `metrics` and `top`.
//!
//! The broker is asked as by `partywall status`, `ps`, `ls` and `show`. The number of calls is bounded, whatever the
//! number of names.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant, SystemTime},
};

use partywall::{
    Domain, Error, Result,
    info::{Control, ControlInfo, HolderInfo, MemberInfo, NameInfo, ObjectHolder, ObjectInfo, StatusInfo},
};

use crate::Context;

/// A domain at one moment. Its parts come from successive calls, so they may be some milliseconds apart.
#[derive(Debug)]
pub(crate) struct Snapshot {
    /// When it was complete, for rates.
    pub(crate) taken: Instant,
    /// The same moment since 1970, for ages.
    pub(crate) now: Duration,
    pub(crate) status: StatusInfo,
    pub(crate) members: Vec<MemberInfo>,
    pub(crate) names: Vec<NameInfo>,
    pub(crate) objects: Vec<ObjectInfo>,
    /// The members that have a semaphore open for which others wait, by its name: for at most as many as were asked
    /// for.
    pub(crate) contended: BTreeMap<String, Vec<ObjectHolder>>,
    /// How pools, topics and queues are used, by name: at most as many as were asked for.
    pub(crate) used: BTreeMap<String, Used>,
    /// Pools, topics and queues that are not in `used` because there are too many.
    pub(crate) left_out: usize,
}

/// How the latest version of a pool, topic or queue is used.
#[derive(Debug)]
pub(crate) struct Used {
    pub(crate) version: u64,
    pub(crate) control: Control,
    pub(crate) info: ControlInfo,
    pub(crate) holders: Vec<HolderInfo>,
}

impl Snapshot {
    /// Asks for everything, in detail for at most `most` pools, topics and queues.
    ///
    /// # Errors
    /// The errors of the calls. A name that ends meanwhile is no error.
    pub(crate) fn take(domain: &Domain, most: usize) -> Result<Self> {
        let status = domain.status()?;
        let members = domain.members()?;
        let names = domain.names()?;
        let objects = domain.objects()?;
        let mut used = BTreeMap::new();
        let left_out = controlled(&names).count().saturating_sub(most);
        for (name, version) in controlled(&names).take(most) {
            match domain.inspect(name) {
                // Another version than the listed one would not belong to the rest.
                Ok(info) if info.version.version == version => {
                    if let (Some(control), Some(about)) = (info.version.control, info.control) {
                        let used_now = Used { version, control, info: about, holders: info.holders };
                        used.insert(name.to_owned(), used_now);
                    }
                }
                Ok(_) | Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let mut contended = BTreeMap::new();
        for object in objects.iter().filter(|object| is_contended(object)).take(most) {
            match domain.inspect_object(object.kind(), object.name()) {
                Ok(detail) => _ = contended.insert(object.name().to_owned(), detail.holders),
                Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let taken = Instant::now();
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Ok(Self { taken, now, status, members, names, objects, contended, used, left_out })
    }
}

/// Returns whether members wait for a permit.
fn is_contended(object: &ObjectInfo) -> bool {
    matches!(object, ObjectInfo::Semaphore(semaphore) if semaphore.waiting > 0)
}

/// Returns the names and latest versions of pools, topics and queues.
fn controlled(names: &[NameInfo]) -> impl Iterator<Item = (&str, u64)> {
    names.iter().filter_map(|name| {
        let latest = name.latest.as_ref().filter(|latest| latest.control.is_some())?;
        Some((name.name.as_str(), latest.version))
    })
}

/// A connection that lasts longer than one broker.
#[derive(Debug)]
pub(crate) struct Observer {
    context: Context,
    domain: Option<Domain>,
}

impl Observer {
    /// Returns an observer that connects at its first use, and starts no broker.
    pub(crate) fn new(context: &Context) -> Self {
        Self { context: context.clone(), domain: None }
    }

    /// Returns the domain. Connects again if the broker has ended or another one has started since the last call.
    ///
    /// # Errors
    /// If no broker can be reached. The next call tries again.
    pub(crate) fn domain(&mut self) -> Result<&Domain> {
        let connected = self.domain.take().filter(|domain| domain.ping().is_ok());
        let domain = match connected {
            Some(domain) => domain,
            None => self.context.options().start(false).operator(true).connect()?,
        };
        Ok(self.domain.insert(domain))
    }
}
