//! The commands `bridge`, `hosts` and `pull`.
//!
//! With `--json`, `bridge` prints one object once it runs: `host`, `instance`, `realm`, `pid`, `endpoints`, `connect`,
//! `exports`, `imports`. `hosts` prints `hosts`, a list of `host`, `instance`, `state` (`alive` or `unreachable`),
//! `unreachable_seconds`, `release`, `endpoints`, `protocol` (of a host that speaks another one, else null).

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use clap::{ArgMatches, Args, FromArgMatches};
use partywall::{
    DeviceChoice, Domain, Error, ErrorKind, OpenOrBuild, Pattern, Place, Policy, Segment, Wait,
    error::{NotFound, Unreachable},
    info::SegmentInfo,
};
use partywall_cli::{Context, Failure, Output, cancel_flag, device, lab::Extension, text::parse_seconds};
use partywall_os::thread::spawn;
use serde_json::json;

use crate::{
    BRIDGES, Bridge,
    attempts::{Attempts, Unreached},
    hosts::{ANSWER, HostEvent, Hosts, announce, host_taken, yields_to},
    identity::Identity,
    link::{Endpoints, Link, bare, is_loopback},
    message::{HostView, Refusal, Unanswered, decode},
    name::{RemotePattern, check_host},
    presence::Presence,
    record::BridgeRecord,
    remote::{PullArguments, pull},
    serve::Exports,
    topic::{self, TopicOptions, Topics},
};

/// The commands that this program adds.
pub(crate) const COMMANDS: [Extension; 3] = [
    Extension {
        name: "bridge",
        augment: BridgeArguments::augment_args,
        run: |context, matches| bridge(context, read(matches)?),
    },
    Extension {
        name: "hosts",
        augment: HostsArguments::augment_args,
        run: |context, matches| hosts(context, &read(matches)?),
    },
    Extension {
        name: "pull",
        augment: PullArguments::augment_args,
        run: |context, matches| pull(context, &read(matches)?),
    },
];

/// How a command reaches other hosts.
#[derive(Debug, Clone, Args)]
pub(crate) struct Network {
    /// The realm: bridges of different realms do not see each other
    #[arg(long, value_name = "REALM", default_value = DEFAULT_REALM, value_parser = check_host)]
    pub(crate) realm: String,
    /// Connect to the bridge at this address; may be repeated
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) connect: Vec<String>,
    /// Encrypt everything, with ca.pem, cert.pem and key.pem of this directory. The common name of a certificate is the
    /// name of its host
    #[arg(long, value_name = "DIR")]
    pub(crate) tls: Option<PathBuf>,
    /// Let a host take part that has such a certificate; may be repeated. Hosts of --import may in any case
    #[arg(long, value_name = "HOST", value_parser = check_host, requires = "tls")]
    pub(crate) allow: Vec<String>,
    /// Allow addresses of other machines. Nothing is encrypted: for private networks and WireGuard only
    #[arg(long, conflicts_with = "tls")]
    pub(crate) insecure_network: bool,
}

impl Network {
    /// Returns how `ls` and `show`, which have no options for it, reach other hosts: by the bridge of their domain.
    pub(crate) fn of_the_bridge() -> Self {
        let (realm, connect, allow) = (DEFAULT_REALM.to_owned(), Vec::new(), Vec::new());
        Self { realm, connect, tls: None, allow, insecure_network: false }
    }

    /// Returns where a session connects, without what it connects to and listens at.
    ///
    /// # Errors
    /// If the certificate cannot be used.
    pub(crate) fn endpoints(&self) -> Result<Endpoints, Failure> {
        let identity = self.tls.as_deref().map(Identity::read).transpose()?;
        let (insecure, allowed) = (self.insecure_network, self.allow.clone());
        Ok(Endpoints { insecure, identity, allowed, ..Endpoints::default() })
    }
}

#[derive(Debug, Args)]
struct BridgeArguments {
    /// The name of this host: letters, digits, `-` and `.` [default: the machine's]
    #[arg(long, value_name = "NAME", value_parser = check_host)]
    host: Option<String>,
    /// Listen at this address; may be repeated
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:7447")]
    listen: Vec<String>,
    /// Let other hosts read names that match: segments by `pull`, topics by --import; may be repeated
    #[arg(long, value_name = "PATTERN", value_parser = Pattern::new)]
    export: Vec<Pattern>,
    /// Publish here what these topics of another host publish; may be repeated
    #[arg(long, value_name = "//HOST/PATTERN")]
    import: Vec<RemotePattern>,
    /// What happens at their host to samples of imported topics that this host does not take in time: `block`,
    /// `drop-oldest` or `latest`. Only with `block` do publishers there wait for this host
    #[arg(long, value_name = "POLICY", default_value = "drop-oldest", value_parser = topic::policy)]
    policy: Policy,
    /// Import this many samples from before, instead of the topic's own number
    #[arg(long, value_name = "SAMPLES")]
    history: Option<u32>,
    /// Where imported topics are created that are not there yet: host, auto (the first GPU, else host memory), pinned
    /// (host memory for GPUs) or pinned:N (on NUMA node N), cuda, cuda:N, or a GPU's UUID
    #[arg(long, value_name = "DEVICE", default_value = "host")]
    device: DeviceChoice,
    /// For this long, in seconds, publishers here wait for a host that blocks and is unreachable
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = clap::value_parser!(u32))]
    timeout: u32,
    #[command(flatten)]
    network: Network,
}

#[derive(Debug, Args)]
struct HostsArguments {
    /// Give up once the bridge has not answered for so long [default: 20, or 10 if there is no bridge]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    timeout: Option<Duration>,
    #[command(flatten)]
    network: Network,
}

/// The bridge of this domain.
#[derive(Debug)]
pub(crate) struct LocalBridge {
    pub(crate) pid: u32,
    pub(crate) record: BridgeRecord,
}

impl LocalBridge {
    /// Adds to endpoints what this bridge uses itself.
    pub(crate) fn complete(&self, endpoints: &mut Endpoints) -> Result<(), Failure> {
        endpoints.insecure |= self.record.insecure;
        if endpoints.identity.is_none() {
            endpoints.identity = self.record.tls.as_deref().map(Identity::read).transpose()?;
        }
        Ok(())
    }
}

/// Reads the arguments of a command.
fn read<T: FromArgMatches>(matches: &ArgMatches) -> Result<T, Failure> {
    T::from_arg_matches(matches).map_err(|error| Failure::new(ErrorKind::Usage, error.to_string(), ""))
}

/// Runs the bridge until a signal, the end of its name or that of the broker.
fn bridge(context: &Context, arguments: BridgeArguments) -> Result<(), Failure> {
    let BridgeArguments { host, listen, export, import, policy, history, device, timeout, network } = arguments;
    let output = context.output();
    let place = device::place(output, device)?;
    let topics = TopicOptions { policy, history, place, timeout: Duration::from_secs(timeout.into()) };
    let start = Instant::now();
    let mut endpoints = Endpoints { listen, connect: network.connect.clone(), ..network.endpoints()? };
    endpoints.allowed.extend(import.iter().map(|import| import.host.clone()));
    let endpoints = endpoints.check()?;
    let host = match (host, &endpoints.identity) {
        (Some(host), Some(identity)) if identity.host != host => {
            let message = format!("the certificate of --tls is of host {}, not of {host}", identity.host);
            return Err(Failure::new(
                ErrorKind::Usage,
                message,
                "leave out --host, or give the directory of this host",
            ));
        }
        (Some(host), _) => host,
        (None, Some(identity)) => identity.host.clone(),
        (None, None) => machine_name()?,
    };
    let domain = context.options().connect()?;
    let name = format!("{BRIDGES}{}", network.realm);
    // Claimed before anything listens, so that a second bridge is refused by the name and not by its port.
    let claim = loop {
        match domain.open_or_build(&name, CLAIM)? {
            OpenOrBuild::Build(claim) => break claim,
            // A bridge that was just killed has the name until its death is proved.
            OpenOrBuild::Opened(former) => match former.wait_withdrawn(PROOF) {
                Ok(_) => {}
                Err(Error::Timeout { .. }) => return Err(second_bridge(&domain, &network.realm)),
                Err(error) => return Err(error.into()),
            },
        }
    };
    let stop = cancel_flag()?;
    let link = Link::open(&network.realm, &endpoints)?;
    let hosts = Hosts::watch(&link, Some(&host))?;
    // The peers' tokens are there once they are connected, or never.
    let expected = endpoints.connect.len();
    hosts.wait_until(Instant::now() + CONNECT, |hosts| hosts.len() >= expected);
    let events = hosts.events();
    let listen: Vec<_> = endpoints.listen.iter().map(|endpoint| bare(endpoint).to_owned()).collect();
    // Among hosts of several machines an address of the loopback leads each one to itself.
    let is_alone = listen.iter().chain(&endpoints.connect).all(|endpoint| is_loopback(endpoint));
    let reachable = listen.iter().filter(|endpoint| is_alone || !is_loopback(endpoint)).cloned().collect();
    let bridge = Arc::new(Bridge {
        domain,
        link: link.clone(),
        hosts: hosts.clone(),
        host: host.clone(),
        endpoints: reachable,
        start,
        exports: export,
        imports: import,
    });
    let _exports = Exports::start(&bridge)?;
    let topics = Topics::start(&bridge, topics, output)?;
    let token = announce(&link, &host)?;
    let instance = link.instance();
    let build = claim.create(Place::Host).tensor("bridge", partywall::DType::U8, &[1]);
    let record = BridgeRecord {
        host: host.clone(),
        instance: instance.clone(),
        endpoints: listen.clone(),
        insecure: endpoints.insecure,
        tls: endpoints.identity.as_ref().map(|identity| identity.directory().to_owned()),
    };
    let build = record.to_metadata().iter().fold(build, |build, (key, value)| build.metadata(key, value));
    let named = build.allocate()?.commit()?;
    let has_twin = Arc::new(AtomicBool::new(false));
    let twin = has_twin.clone();
    let is_certified = endpoints.identity.is_some();
    let (watched, stopped, own) = (link.clone(), stop.clone(), host.clone());
    let mut presence = Presence::new(&bridge.domain, &network.realm);
    let watching = spawn("partywall-twin", move || {
        for event in events {
            report(output, &event, &own);
            if let Err(error) = presence.follow(&hosts.views()) {
                output.note(format!("cannot say in this domain which hosts are there: {error}"));
            }
            // Without certificates any process can say that it is this host.
            if let HostEvent::Twin { instance } = event
                && is_certified
                && yields_to(&watched, &own, &instance, start)
            {
                twin.store(true, Ordering::Relaxed);
                stopped.store(true, Ordering::Relaxed);
            }
        }
    });
    watching.map_err(|error| Failure::system("starting a thread", error))?;
    let patterns = |patterns: &[Pattern]| patterns.iter().map(|p| p.as_str().to_owned()).collect::<Vec<_>>();
    let exports = patterns(&bridge.exports);
    let imports: Vec<_> = bridge.imports.iter().map(ToString::to_string).collect();
    let readable = may_read(&bridge, &endpoints, &exports.join(", "));
    let text = format!("//{host} at {}; {readable}", listen.join(", "));
    let value = json!({
        "host": host, "instance": instance, "realm": network.realm, "pid": std::process::id(), "endpoints": listen,
        "connect": endpoints.connect, "exports": exports, "imports": imports,
    });
    output.announce(text, &value);
    let ended = hold(&named, &stop);
    topics.stop();
    // The others learn of the end now, not after the lease.
    drop(token);
    let _ = zenoh::Wait::wait(link.session().close());
    if has_twin.load(Ordering::Relaxed) { Err(host_taken(&host)) } else { ended }
}

/// Returns the sentence about what other hosts can do here.
fn may_read(bridge: &Bridge, endpoints: &Endpoints, exports: &str) -> String {
    let who = match &endpoints.identity {
        Some(_) if endpoints.allowed.is_empty() => return "no other host may connect: no --allow".to_owned(),
        Some(_) => format!("//{}", endpoints.allowed.join(", //")),
        None if endpoints.insecure => "every machine that reaches it".to_owned(),
        None => "every process of this machine".to_owned(),
    };
    let mut text = match exports {
        "" => "other hosts can read nothing here: no --export".to_owned(),
        _ => format!("{who} can read {exports}"),
    };
    if endpoints.identity.is_none() {
        let topics: Vec<_> = bridge.imports.iter().map(|import| import.pattern.as_str()).collect();
        if !topics.is_empty() {
            text += &format!("; {who} can publish in {}", topics.join(", "));
        }
        text += if endpoints.insecure { "; nothing is encrypted" } else { "" };
    }
    text
}

/// Waits until a signal arrives, the name is removed or the broker ends.
fn hold(named: &Segment, stop: &AtomicBool) -> Result<(), Failure> {
    match named.wait_withdrawn(Wait::from(Duration::MAX).cancelled_by(stop)) {
        Ok(_) | Err(Error::Cancelled { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Prints changes of the hosts for people.
fn report(output: Output, event: &HostEvent, own: &str) {
    match event {
        HostEvent::Found { host, returned: true, .. } => output.note(format!("//{host} is reachable again")),
        HostEvent::Found { host, .. } => output.note(format!("//{host} is there")),
        HostEvent::Lost { host, .. } => output.note(format!("//{host} is unreachable")),
        HostEvent::Twin { .. } => {
            output.note(format!("another host is called //{own}, too: give one of the two another name with --host"));
        }
    }
}

fn second_bridge(domain: &Domain, realm: &str) -> Failure {
    let of = if realm == "default" { String::new() } else { format!(" in realm {realm}") };
    let who = match local_bridge(domain, realm) {
        Ok(Some(bridge)) => format!("process {}, as //{}", bridge.pid, bridge.record.host),
        _ => "another process".to_owned(),
    };
    let message = format!("this domain has a bridge{of}: {who}");
    let advice = "end that process first, or choose another --realm or --domain";
    Failure::new(ErrorKind::Refused, message, advice).with_entry("bridge-exists")
}

/// Finds the bridge of a domain.
pub(crate) fn local_bridge(domain: &Domain, realm: &str) -> Result<Option<LocalBridge>, Failure> {
    let info = match domain.inspect(&format!("{BRIDGES}{realm}")) {
        Ok(info) if info.is_latest => info,
        Ok(_) | Err(Error::NotFound(NotFound::Name { .. })) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let read = |key: &str| info.table.metadata().find(|(found, _)| *found == key).map(|(_, value)| value);
    let record = BridgeRecord::read(read).ok_or_else(|| {
        let message =
            format!("the name {BRIDGES}{realm} was not made by a bridge, but by process {}", info.version.committer);
        Failure::new(ErrorKind::Refused, message, format!("`partywall rm {BRIDGES}{realm}`"))
    })?;
    Ok(Some(LocalBridge { pid: info.version.committer, record }))
}

/// Returns a value of a version's metadata.
pub(crate) fn metadata(info: &SegmentInfo, key: &str) -> Option<String> {
    info.table.metadata().find(|(found, _)| *found == key).map(|(_, value)| value.to_owned())
}

/// Returns the hosts: those that this domain's bridge knows, or with `--connect` those at these addresses.
fn known_hosts(context: &Context, network: &Network, attempts: &Attempts<'_>) -> Result<Vec<HostView>, Failure> {
    let Network { realm, connect, .. } = network;
    if connect.is_empty() {
        return Ok(attempts.until(|| view(context, realm, attempts))?.1);
    }
    let endpoints = Endpoints { connect: connect.clone(), ..network.endpoints()? }.check()?;
    if endpoints.identity.is_some() && endpoints.allowed.is_empty() {
        let message = "no host may answer: with --tls each needs --allow HOST";
        return Err(Failure::new(ErrorKind::Usage, message, "add --allow with the names of the hosts to list"));
    }
    let link = Link::open(realm, &endpoints)?;
    let hosts = Hosts::watch(&link, None)?;
    let is_met = |hosts: &[HostView]| hosts.len() >= connect.len() && hosts.iter().all(|host| host.info.is_some());
    Ok(hosts.wait_until(Instant::now() + attempts.unknown(), is_met))
}

/// Asks the bridge of the domain which hosts it knows, once.
///
/// # Errors
/// [`Unreached`].
pub(crate) fn view(
    context: &Context,
    realm: &str,
    attempts: &Attempts<'_>,
) -> Result<(LocalBridge, Vec<HostView>), Unreached> {
    let domain = match context.options().start(false).connect() {
        Ok(domain) => Some(domain),
        Err(Error::Unreachable(Unreachable::NoAnswer { .. })) => None,
        Err(error) => return Err(Failure::from(error).into()),
    };
    let find = || domain.as_ref().map_or(Ok(None), |domain| local_bridge(domain, realm));
    let Some(bridge) = find()? else {
        let message = "this domain has no bridge that would know other hosts";
        let advice = "start one with `partywall bridge`, or name a bridge of another host with --connect HOST:PORT";
        let failure = Failure::new(ErrorKind::NotFound, message, advice);
        return Err(Unreached::Unknown(failure.with_class("HostNotFound").with_entry("no-bridge")));
    };
    let mut endpoints = Endpoints { connect: bridge.record.endpoints.clone(), ..Endpoints::default() };
    bridge.complete(&mut endpoints)?;
    let link = Link::open(realm, &endpoints.check()?)?;
    let there = Hosts::watch(&link, None)?;
    let BridgeRecord { host, instance, .. } = &bridge.record;
    let has_it = |known: &[HostView]| known.iter().any(|view| view.host == *host && view.instance == *instance);
    let deadline = Instant::now() + ANSWER.min(attempts.left());
    // It is over, too, once the bridge has ended: the next one is asked then.
    let is_over = || attempts.is_cancelled() || !matches!(find(), Ok(Some(found)) if found.record == bridge.record);
    while !has_it(&there.wait_until(deadline.min(Instant::now() + CHECK), has_it)) {
        if Instant::now() >= deadline || is_over() {
            return Err(Unreached::Silent(silent_bridge(&bridge, &Unanswered::Silent)));
        }
    }
    let key = link.key(format_args!("view/{host}/{instance}"));
    let asked = link.question(&key, ANSWER.min(attempts.left()), MAX_VIEW).wait(&is_over);
    match asked.and_then(|bytes| decode(&bytes)) {
        Ok(views) => Ok((bridge, views)),
        Err(error @ (Unanswered::Silent | Unanswered::Refused(Refusal::Busy))) => {
            Err(Unreached::Silent(silent_bridge(&bridge, &error)))
        }
        Err(error) => Err(silent_bridge(&bridge, &error).into()),
    }
}

fn silent_bridge(bridge: &LocalBridge, error: &Unanswered) -> Failure {
    let message = format!("the bridge of this domain, process {}, {error}", bridge.pid);
    let advice = "see whether it is stopped, give a longer --timeout, or end it and start it again";
    let failure = Failure::new(ErrorKind::TimedOut, message, advice);
    failure.with_class("HostUnreachable").with_entry("bridge-silent")
}

fn hosts(context: &Context, arguments: &HostsArguments) -> Result<(), Failure> {
    let output = context.output();
    let note = |text| output.note(text);
    let attempts = Attempts::new(arguments.timeout, INTERACTIVE, &NEVER).with_note(&note);
    let hosts = known_hosts(context, &arguments.network, &attempts)?;
    let value = |host: &HostView| {
        json!({
            "host": host.host,
            "instance": host.instance,
            "state": if host.unreachable_ms.is_some() { "unreachable" } else { "alive" },
            "unreachable_seconds": host.unreachable_ms.map(|ms| ms as f64 / 1e3),
            "release": host.info.as_ref().map(|info| &info.release),
            "endpoints": host.info.as_ref().map(|info| &info.endpoints),
            "protocol": host.foreign,
        })
    };
    output.value(&json!({ "hosts": hosts.iter().map(value).collect::<Vec<_>>() }));
    if hosts.is_empty() {
        output.note("no other host is there");
        return Ok(());
    }
    let rows: Vec<_> = hosts.iter().map(row).collect();
    output.table(&["HOST", "STATE", "RELEASE", "ENDPOINTS"], &rows, &["RELEASE"]);
    Ok(())
}

fn row(host: &HostView) -> Vec<String> {
    let state = match (host.foreign, host.unreachable_ms) {
        (_, Some(ms)) => format!("unreachable for {:.1} s", ms as f64 / 1e3),
        (Some(wire), None) => format!("speaks protocol {wire}"),
        (None, None) => "alive".to_owned(),
    };
    let info = host.info.as_ref();
    let endpoints = info.map(|info| info.endpoints.join(" ")).unwrap_or_default();
    vec![format!("//{}", host.host), state, info.map(|info| info.release.clone()).unwrap_or_default(), endpoints]
}

/// Returns the name of this machine.
fn machine_name() -> Result<String, Failure> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname");
    let name = name.map_err(|error| Failure::system("reading the name of this machine", error))?;
    check_host(name.trim()).map_err(|why| {
        let message = format!("the machine's name cannot be that of a host: {why}");
        Failure::new(ErrorKind::Usage, message, "choose one with --host")
    })
}

/// The realm of those that choose none.
const DEFAULT_REALM: &str = "default";

/// How long a bridge waits for another one that is just starting.
const CLAIM: Duration = Duration::from_secs(10);

/// How long a bridge waits for the proof that the one before it is dead, which takes a settle time of 100 ms.
const PROOF: Duration = Duration::from_secs(1);

/// How long a starting bridge waits for the hosts that it connects to. Afterwards it goes on trying.
const CONNECT: Duration = Duration::from_secs(2);

/// How long commands wait by default that only ask.
pub(crate) const INTERACTIVE: Duration = Duration::from_secs(20);

/// How often a command that waits for its bridge checks whether that has ended.
const CHECK: Duration = Duration::from_millis(200);

/// The flag of commands that any signal ends.
pub(crate) static NEVER: AtomicBool = AtomicBool::new(false);

/// The most that a bridge may say about its hosts.
const MAX_VIEW: usize = 1 << 22;
