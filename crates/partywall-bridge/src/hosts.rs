//! Which hosts are there. Each has one token in the network, which ends with its bridge: at once if that is killed, and
//! within the lease if the host stops or its link is cut.
//!
//! A token that ends proves no death, so a host is never called dead, only unreachable: it may come back as the same
//! instance, or as another after its bridge was started anew.

use std::{
    collections::BTreeMap,
    sync::{Arc, Condvar, Mutex, mpsc},
    time::{Duration, Instant},
};

use partywall::ErrorKind;
use partywall_cli::Failure;
use partywall_os::{lock::IgnorePoison, thread::spawn};
use serde::{Deserialize, Serialize};
use zenoh::{Wait, liveliness::LivelinessToken, query::Query, sample::SampleKind};

use crate::{
    link::{Link, Unanswered, answer, decode},
    name::check_host,
};

/// What a host says about itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HostInfo {
    /// The release of its bridge.
    pub(crate) release: String,
    /// Where it listens.
    pub(crate) endpoints: Vec<String>,
    /// For how long its bridge has run, in milliseconds. No host relies on the clock of another.
    pub(crate) uptime_ms: u64,
}

/// A host, as another one knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HostView {
    pub(crate) host: String,
    pub(crate) instance: String,
    /// For how many milliseconds it has been unreachable; none if it is there.
    pub(crate) unreachable_ms: Option<u64>,
    /// None as long as it has not answered.
    pub(crate) info: Option<HostInfo>,
    /// Its protocol, if that is another one.
    pub(crate) foreign: Option<u32>,
}

/// A change of the hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum HostEvent {
    /// A host is there. `returned` says that it is the same instance as before.
    Found { host: String, instance: String, returned: bool },
    /// A host is unreachable, or its bridge has ended.
    Lost { host: String, instance: String },
    /// Another host has the name of this one.
    Twin { instance: String },
}

/// The hosts that a session knows. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Hosts(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    table: Mutex<HostTable>,
    changed: Condvar,
    listeners: Mutex<Vec<mpsc::Sender<HostEvent>>>,
}

/// The hosts without any network: tokens in, events out.
#[derive(Debug, Default)]
struct HostTable {
    /// Name and instance of this host, if it is one.
    own: Option<(String, String)>,
    known: BTreeMap<String, KnownHost>,
}

#[derive(Debug)]
struct KnownHost {
    instance: String,
    lost_at: Option<Instant>,
    info: Option<HostInfo>,
    foreign: Option<u32>,
}

impl HostTable {
    /// A token has appeared.
    fn found(&mut self, host: &str, instance: &str) -> Vec<HostEvent> {
        if self.own.as_ref().is_some_and(|(own, _)| own == host) {
            let is_twin = self.own.as_ref().is_some_and(|(_, own)| own != instance);
            return if is_twin { vec![HostEvent::Twin { instance: instance.into() }] } else { Vec::new() };
        }
        let found = |returned| HostEvent::Found { host: host.into(), instance: instance.into(), returned };
        let is_full = self.known.len() >= MAX_HOSTS;
        match self.known.get_mut(host) {
            Some(known) if known.instance == instance => match known.lost_at.take() {
                Some(_) => vec![found(true)],
                None => Vec::new(),
            },
            Some(known) => {
                let lost = HostEvent::Lost { host: host.into(), instance: known.instance.clone() };
                let was_there = known.lost_at.is_none();
                *known = KnownHost::new(instance);
                if was_there { vec![lost, found(false)] } else { vec![found(false)] }
            }
            // A peer that declares more only hides its own.
            None if is_full => Vec::new(),
            None => {
                self.known.insert(host.into(), KnownHost::new(instance));
                vec![found(false)]
            }
        }
    }

    /// A token has gone. That of an earlier instance changes nothing.
    fn lost(&mut self, host: &str, instance: &str, now: Instant) -> Vec<HostEvent> {
        match self.known.get_mut(host) {
            Some(known) if known.instance == instance && known.lost_at.is_none() => {
                known.lost_at = Some(now);
                vec![HostEvent::Lost { host: host.into(), instance: instance.into() }]
            }
            _ => Vec::new(),
        }
    }

    fn views(&self, now: Instant) -> Vec<HostView> {
        let view = |(host, known): (&String, &KnownHost)| HostView {
            host: host.clone(),
            instance: known.instance.clone(),
            unreachable_ms: known.lost_at.map(|at| now.saturating_duration_since(at).as_millis() as u64),
            info: known.info.clone(),
            foreign: known.foreign,
        };
        self.known.iter().map(view).collect()
    }
}

impl KnownHost {
    fn new(instance: &str) -> Self {
        Self { instance: instance.into(), lost_at: None, info: None, foreign: None }
    }
}

impl Hosts {
    /// Begins to watch the tokens of a session's peers. `own` is the name of this host, if it is one.
    ///
    /// # Errors
    /// If the session has ended, or no thread can be started.
    pub(crate) fn watch(link: &Link, own: Option<&str>) -> Result<Self, Failure> {
        let own = own.map(|own| (own.to_owned(), link.instance()));
        let table = Mutex::new(HostTable { own, ..HostTable::default() });
        let shared = Arc::new(Shared { table, changed: Condvar::new(), listeners: Mutex::default() });
        let (send, changes) = mpsc::channel();
        let prefix = link.key("host/");
        let tokens = link.session().liveliness().declare_subscriber(link.key("host/*/*")).history(true);
        let tokens = tokens.callback(move |sample| {
            let token = sample.key_expr().as_str().strip_prefix(prefix.as_str()).and_then(|rest| rest.split_once('/'));
            if let Some((host, instance)) = token.filter(|(host, _)| check_host(host).is_ok()) {
                let _ = send.send((sample.kind() == SampleKind::Put, host.to_owned(), instance.to_owned()));
            }
        });
        tokens.background().wait().map_err(|error| Failure::system("watching for hosts", error))?;
        let hosts = Self(shared);
        // Ends with the session, which drops the callback.
        let (watched, link) = (hosts.clone(), link.clone());
        let started = spawn("partywall-hosts", move || {
            for (is_there, host, instance) in changes {
                watched.change(&link, is_there, &host, &instance);
            }
        });
        started.map_err(|error| Failure::system("starting a thread", error))?;
        Ok(hosts)
    }

    fn change(&self, link: &Link, is_there: bool, host: &str, instance: &str) {
        let events = {
            let mut table = self.0.table.lock().ignore_poison();
            if is_there { table.found(host, instance) } else { table.lost(host, instance, Instant::now()) }
        };
        for event in events {
            if let HostEvent::Found { host, instance, .. } = &event {
                let (hosts, link, host, instance) = (self.clone(), link.clone(), host.clone(), instance.clone());
                // Without the answer the host is known by its name alone.
                let _ = spawn("partywall-host", move || hosts.learn(&link, &host, &instance));
            }
            self.0.listeners.lock().ignore_poison().retain(|listener| listener.send(event.clone()).is_ok());
        }
        self.0.changed.notify_all();
    }

    /// Asks a host about itself.
    fn learn(&self, link: &Link, host: &str, instance: &str) {
        let asked = ask_info(link, host, instance);
        if let Some(known) = self.0.table.lock().ignore_poison().known.get_mut(host).filter(|k| k.instance == instance)
        {
            match asked {
                Ok(info) => known.info = Some(info),
                Err(Unanswered::Foreign(wire)) => known.foreign = Some(wire),
                Err(_) => {}
            }
        }
        self.0.changed.notify_all();
    }

    /// Returns all changes from now on. The hosts that are there now come first.
    pub(crate) fn events(&self) -> mpsc::Receiver<HostEvent> {
        let (send, events) = mpsc::channel();
        let table = self.0.table.lock().ignore_poison();
        for (host, known) in table.known.iter().filter(|(_, known)| known.lost_at.is_none()) {
            let (host, instance) = (host.clone(), known.instance.clone());
            let _ = send.send(HostEvent::Found { host, instance, returned: false });
        }
        // While the table is locked, so that no change falls between.
        self.0.listeners.lock().ignore_poison().push(send);
        events
    }

    /// Returns all hosts, by name.
    pub(crate) fn views(&self) -> Vec<HostView> {
        self.0.table.lock().ignore_poison().views(Instant::now())
    }

    /// Waits until the hosts are as wanted, at most until `deadline`. Returns them as they are then.
    pub(crate) fn wait_until(&self, deadline: Instant, is_met: impl Fn(&[HostView]) -> bool) -> Vec<HostView> {
        let mut table = self.0.table.lock().ignore_poison();
        loop {
            let views = table.views(Instant::now());
            let left = deadline.saturating_duration_since(Instant::now());
            if is_met(&views) || left.is_zero() {
                return views;
            }
            table = self.0.changed.wait_timeout(table, left).map_or_else(|e| e.into_inner().0, |(table, _)| table);
        }
    }
}

/// Makes this session a host of this name, which is refused to a second one.
///
/// # Errors
/// If another host that is connected has the name.
pub(crate) fn announce(
    link: &Link,
    host: &str,
    endpoints: &[String],
    start: Instant,
) -> Result<LivelinessToken, Failure> {
    let instance = link.instance();
    let (endpoints, release) = (endpoints.to_vec(), partywall::VERSION.to_owned());
    let info = move |query: Query| {
        let uptime_ms = start.elapsed().as_millis() as u64;
        let info = HostInfo { release: release.clone(), endpoints: endpoints.clone(), uptime_ms };
        let _ = answer(&query, &info);
    };
    let key = link.key(format_args!("host/{host}/{instance}"));
    let failed = |error| Failure::system("announcing this host", error);
    link.session().declare_queryable(&key).callback(info).background().wait().map_err(failed)?;
    let taken = link.key(format_args!("host/{host}/*"));
    let (send, tokens) = mpsc::channel();
    let asked = link.session().liveliness().get(taken).timeout(ANSWER);
    asked.callback(move |reply| _ = send.send(reply.result().is_ok())).wait().map_err(failed)?;
    if tokens.into_iter().any(|is_there| is_there) {
        return Err(host_taken(host));
    }
    link.session().liveliness().declare_token(key).wait().map_err(failed)
}

/// Returns whether this host gives its name up to another of the same name: the one that has run for longer keeps it.
pub(crate) fn yields_to(link: &Link, host: &str, instance: &str, start: Instant) -> bool {
    let Ok(info) = ask_info(link, host, instance) else { return false };
    let own = start.elapsed().as_millis() as u64;
    (own, link.instance().as_str()) < (info.uptime_ms, instance)
}

/// Returns the failure of a host whose name another one has.
pub(crate) fn host_taken(host: &str) -> Failure {
    let message = format!("another host is called //{host}");
    Failure::new(ErrorKind::Refused, message, "give this host another name with --host, or end the other bridge")
}

fn ask_info(link: &Link, host: &str, instance: &str) -> Result<HostInfo, Unanswered> {
    let bytes = link.ask(&link.key(format_args!("host/{host}/{instance}")), ANSWER, MAX_INFO)?;
    decode(&bytes)
}

/// How long a host may take to answer a question about itself.
pub(crate) const ANSWER: Duration = Duration::from_secs(5);

/// The most that a host may say about itself.
const MAX_INFO: usize = 1 << 16;

/// The hosts that are remembered.
const MAX_HOSTS: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn found(host: &str, instance: &str, returned: bool) -> HostEvent {
        HostEvent::Found { host: host.into(), instance: instance.into(), returned }
    }

    fn lost(host: &str, instance: &str) -> HostEvent {
        HostEvent::Lost { host: host.into(), instance: instance.into() }
    }

    #[test]
    fn host_comes_back_as_the_same_instance_or_as_another() {
        let mut table = HostTable { own: Some(("a".into(), "1".into())), ..HostTable::default() };
        let now = Instant::now();
        assert_eq!(table.found("b", "2"), [found("b", "2", false)]);
        assert_eq!(table.found("b", "2"), []);
        assert_eq!(table.lost("b", "2", now), [lost("b", "2")]);
        assert_eq!(table.lost("b", "2", now), []);
        assert_eq!(table.views(now + Duration::from_secs(3))[0].unreachable_ms, Some(3000));
        assert_eq!(table.found("b", "2"), [found("b", "2", true)]);
        // Started anew before the end of the first was noticed.
        assert_eq!(table.found("b", "3"), [lost("b", "2"), found("b", "3", false)]);
        assert_eq!(table.lost("b", "2", now), []);
        assert_eq!(table.views(now)[0].unreachable_ms, None);
        assert_eq!(table.lost("b", "3", now), [lost("b", "3")]);
        assert_eq!(table.found("b", "4"), [found("b", "4", false)]);
        assert_eq!(table.found("a", "1"), []);
        assert_eq!(table.found("a", "5"), [HostEvent::Twin { instance: "5".into() }]);
        assert_eq!(table.views(now).len(), 1);
    }
}
