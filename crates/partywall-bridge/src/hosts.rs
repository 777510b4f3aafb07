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
use zenoh::{Wait, liveliness::LivelinessToken, sample::SampleKind};

use crate::{
    link::Link,
    message::{HostInfo, HostView, Unanswered, decode},
    name::{check_host, is_instance},
};

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
    /// A thread asks it about itself.
    is_asked: bool,
}

impl HostTable {
    /// A token has appeared.
    fn found(&mut self, host: &str, instance: &str) -> Vec<HostEvent> {
        if self.own.as_ref().is_some_and(|(own, _)| own == host) {
            let is_twin = self.own.as_ref().is_some_and(|(_, own)| own != instance);
            return if is_twin { vec![HostEvent::Twin { instance: instance.into() }] } else { Vec::new() };
        }
        let found = |returned| HostEvent::Found { host: host.into(), instance: instance.into(), returned };
        if self.known.len() >= MAX_HOSTS && !self.known.contains_key(host) {
            self.forget_one();
        }
        let is_full = self.known.len() >= MAX_HOSTS;
        match self.known.get_mut(host) {
            Some(known) if known.instance == instance => match known.lost_at.take() {
                Some(_) => vec![found(true)],
                None => Vec::new(),
            },
            Some(known) => {
                let lost = HostEvent::Lost { host: host.into(), instance: known.instance.clone() };
                let was_there = known.lost_at.is_none();
                *known = KnownHost { is_asked: known.is_asked, ..KnownHost::new(instance) };
                if was_there { vec![lost, found(false)] } else { vec![found(false)] }
            }
            None if is_full => Vec::new(),
            None => {
                self.known.insert(host.into(), KnownHost::new(instance));
                vec![found(false)]
            }
        }
    }

    /// Forgets the host that has been unreachable for the longest time, if one is.
    fn forget_one(&mut self) {
        let lost = self.known.iter().filter_map(|(host, known)| Some((known.lost_at?, host)));
        if let Some((_, host)) = lost.min().map(|(at, host)| (at, host.clone())) {
            self.known.remove(&host);
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
        Self { instance: instance.into(), lost_at: None, info: None, foreign: None, is_asked: false }
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
            let is_one = |(host, instance): &(&str, &str)| check_host(host).is_ok() && is_instance(instance);
            if let Some((host, instance)) = token.filter(is_one) {
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
            if let HostEvent::Found { host, .. } = &event {
                self.ask(link, host);
            }
            self.0.listeners.lock().ignore_poison().retain(|listener| listener.send(event.clone()).is_ok());
        }
        self.0.changed.notify_all();
    }

    /// Lets a thread ask a host about itself, unless one does so already: no host has two, however often it comes and
    /// goes. Without an answer it is known by its name alone.
    fn ask(&self, link: &Link, host: &str) {
        let is_asked = |is_asked| {
            let mut table = self.0.table.lock().ignore_poison();
            let known = table.known.get_mut(host)?;
            Some(std::mem::replace(&mut known.is_asked, is_asked))
        };
        if is_asked(true) == Some(false) {
            let (hosts, link, of) = (self.clone(), link.clone(), host.to_owned());
            if spawn("partywall-host", move || hosts.learn(&link, &of)).is_err() {
                is_asked(false);
            }
        }
    }

    /// Asks a host about itself until it answers or is lost, and again if its bridge was started anew meanwhile.
    fn learn(&self, link: &Link, host: &str) {
        loop {
            let instance = {
                let mut table = self.0.table.lock().ignore_poison();
                let Some(known) = table.known.get_mut(host) else { return };
                if known.lost_at.is_some() || known.info.is_some() || known.foreign.is_some() {
                    known.is_asked = false;
                    return;
                }
                known.instance.clone()
            };
            let answer = ask_info(link, host, &instance);
            let is_unanswered = !matches!(answer, Ok(_) | Err(Unanswered::Foreign(_)));
            if let Some(known) = self.0.table.lock().ignore_poison().known.get_mut(host)
                && known.instance == instance
            {
                match answer {
                    Ok(info) => known.info = Some(info),
                    Err(Unanswered::Foreign(wire)) => known.foreign = Some(wire),
                    Err(_) => {}
                }
            }
            self.0.changed.notify_all();
            if is_unanswered {
                std::thread::sleep(PAUSE);
            }
        }
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
pub(crate) fn announce(link: &Link, host: &str) -> Result<LivelinessToken, Failure> {
    let failed = |error| Failure::system("announcing this host", error);
    let taken = link.key(format_args!("host/{host}/*"));
    let (send, tokens) = mpsc::channel();
    let asked = link.session().liveliness().get(taken).timeout(ANSWER);
    asked.callback(move |reply| _ = send.send(reply.result().is_ok())).wait().map_err(failed)?;
    if tokens.into_iter().any(|is_there| is_there) {
        return Err(host_taken(host));
    }
    let key = link.key(format_args!("host/{host}/{}", link.instance()));
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
    let advice = "give this host another name with --host, or end the other bridge";
    Failure::new(ErrorKind::Refused, message, advice).with_entry("host-taken")
}

fn ask_info(link: &Link, host: &str, instance: &str) -> Result<HostInfo, Unanswered> {
    let bytes = link.ask(&link.key(format_args!("host/{host}/{instance}")), ANSWER, MAX_INFO)?;
    decode(&bytes)
}

/// The pause before a host that has not answered is asked again.
const PAUSE: Duration = Duration::from_secs(1);

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

    #[test]
    fn of_too_many_hosts_those_that_are_lost_are_forgotten() {
        let mut table = HostTable::default();
        let now = Instant::now();
        for number in 0..MAX_HOSTS {
            assert_eq!(table.found(&format!("h{number}"), "1").len(), 1);
        }
        assert_eq!(table.found("late", "1"), []);
        table.lost("h7", "1", now + Duration::from_secs(2));
        table.lost("h5", "1", now + Duration::from_secs(1));
        assert_eq!(table.found("late", "1"), [found("late", "1", false)]);
        let hosts: Vec<_> = table.views(now).into_iter().map(|view| view.host).collect();
        assert!(hosts.len() == MAX_HOSTS && !hosts.contains(&"h5".into()) && hosts.contains(&"h7".into()));
    }
}
