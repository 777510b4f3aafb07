//! The commands that ask one host: `pull`, `ls //HOST` and `show //HOST/NAME`.
//!
//! With `--json`, `pull` prints what `put` prints, with `origin` (`//HOST/NAME@V`) and `root`; with `--follow` one object
//! a line for each version. If the version is there already: only `name`, `version`, `existed`, `origin` and `root`.
//! `ls //HOST` prints `host` and `names`, a list of `name`, `kind`, `version`, `place`, `bytes`, `tensors`.
//! `show //HOST/NAME` prints `host`, `name`, `version`, `place`, `bytes` (of its content), `root`, `metadata` (an object)
//! and `tensors`, each with `name`, `dtype`, `shape`, `strides`, `bytes`.

use std::{
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use blake3::Hash;
use clap::Args;
use partywall::{
    Claim, DeviceChoice, Domain, Error, ErrorKind, OpenOrBuild, Pattern, Place, Put, Segment, Wait, WhenSome, bytes,
    check_name,
    error::NotFound,
    files::{Plan, default_threads},
    info::Table,
};
use partywall_cli::{Context, Failure, cancel_flag, committed, device, progress, text::parse_seconds};
use serde_json::{Value, json};
use zenoh::Wait as _;

use crate::{
    attempts::{Attempts, Unreached},
    commands::{INTERACTIVE, LocalBridge, NEVER, Network, metadata, view},
    hosts::{ANSWER, Hosts},
    link::{Endpoints, Link, bare},
    manifest::{MAX_MANIFEST, Manifest},
    message::{ExportedName, HostView, Refusal, Unanswered, decode},
    name::{RemoteName, check_host},
    pull::{RemoteContent, manifest_key},
    serve::ROOT,
};

/// The arguments of `pull`.
#[derive(Debug, Args)]
pub(crate) struct PullArguments {
    /// The segment: //HOST/NAME is the latest version, //HOST/NAME@V is version V
    #[arg(value_name = "//HOST/NAME[@V]")]
    from: RemoteName,
    /// The name here [default: the same]
    name: Option<String>,
    /// Where the memory is: auto (the first GPU, else host memory), host, pinned (host memory for
    /// GPUs) or pinned:N (on NUMA node N), cuda, cuda:N, or a GPU's UUID
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: DeviceChoice,
    /// Go on, and pull each newer version once it is there; versions between are left out. Until Ctrl-C or SIGTERM
    #[arg(long)]
    follow: bool,
    /// Ask these hosts, too, for the same content; each one that has pulled it has it. Their names, separated by commas
    #[arg(long, value_name = "HOST,…", value_delimiter = ',', value_parser = check_host)]
    also: Vec<String>,
    /// Keep running and hold the name until Ctrl-C, SIGTERM or its removal; the name ends with this process. Without
    /// --hold and --owner the name stays until `partywall rm`
    #[arg(long, conflicts_with = "follow")]
    hold: bool,
    /// Give the name to another process: it ends with the member of this token
    #[arg(long, value_name = "TOKEN", conflicts_with = "hold")]
    owner: Option<u64>,
    /// Give up once no byte has come for so long [default: 60, or 10 for a bridge or a host that nobody
    /// knows]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    timeout: Option<Duration>,
    #[command(flatten)]
    network: Network,
}

/// What a puller uses.
struct Puller<'a> {
    context: &'a Context,
    arguments: &'a PullArguments,
    domain: Domain,
    place: Place,
    name: String,
    link: Link,
    hosts: Hosts,
    cancel: &'a AtomicBool,
}

/// What a version is pulled with.
struct Wanted {
    /// With its version.
    from: RemoteName,
    manifest: Manifest,
    table: Table<Vec<u8>>,
}

/// Runs `partywall pull`.
pub(crate) fn pull(context: &Context, arguments: &PullArguments) -> Result<(), Failure> {
    let from = &arguments.from;
    let name = arguments.name.clone().unwrap_or_else(|| from.name.clone());
    check_name(&name)?;
    if arguments.follow && from.version.is_some() {
        let message = format!("cannot follow {from}: a version does not change");
        return Err(Failure::new(ErrorKind::Usage, message, "leave out the version, or --follow"));
    }
    let output = context.output();
    let place = device::place(output, arguments.device)?;
    let cancel = cancel_flag()?;
    let note = |text| output.note(text);
    let attempts = Attempts::new(arguments.timeout, SILENCE, &cancel).with_note(&note);
    let wanted: Vec<_> = [&from.host].into_iter().chain(&arguments.also).cloned().collect();
    let (link, hosts) = reach(context, &arguments.network, &wanted, &attempts)?;
    let domain = context.options().connect()?;
    let puller = Puller { context, arguments, domain, place, name, link, hosts, cancel: &cancel };
    if arguments.follow { puller.follow(&attempts) } else { puller.once(&attempts) }
}

impl Puller<'_> {
    fn once(&self, attempts: &Attempts<'_>) -> Result<(), Failure> {
        let wanted = self.wanted(attempts, attempts.left())?;
        let segment = self.pull(&wanted)?;
        match segment {
            Some(segment) if self.arguments.hold => {
                match segment.wait_withdrawn(Wait::from(Duration::MAX).cancelled_by(self.cancel)) {
                    Ok(_) | Err(Error::Cancelled { .. }) => Ok(()),
                    Err(error) => Err(error.into()),
                }
            }
            Some(segment) => Ok(segment.release()?),
            None => Ok(()),
        }
    }

    /// Pulls each version that is the newest when the one before is there.
    fn follow(&self, attempts: &Attempts<'_>) -> Result<(), Failure> {
        let output = self.context.output();
        let from = &self.arguments.from;
        let (send, news) = mpsc::sync_channel(1);
        let key = self.link.key(format_args!("names/{}/*", from.host));
        let name = from.name.clone();
        let subscriber = self.link.session().declare_subscriber(key).callback(move |sample| {
            let changed = decode::<String>(&sample.payload().to_bytes());
            if changed.is_ok_and(|changed| changed.is_empty() || changed == name) {
                // If one is waiting already, everything is looked at again in any case.
                let _ = send.try_send(());
            }
        });
        subscriber.background().wait().map_err(|error| Failure::system("following the names of a host", error))?;
        let release = |segment: Option<Segment>| segment.map_or(Ok(()), Segment::release);
        let first = self.wanted(attempts, attempts.left())?;
        release(self.pull(&first)?)?;
        let mut pulled = (first.manifest.version, first.manifest.root);
        let mut said = None;
        while !self.cancel.load(Ordering::Relaxed) {
            let until = Instant::now() + POLL;
            while !self.cancel.load(Ordering::Relaxed) && Instant::now() < until {
                if news.recv_timeout(Duration::from_millis(100)).is_ok() {
                    break;
                }
            }
            // That the host is lost is said soon. A host that is there may have a large version to hash.
            let attempts = Attempts::new(Some(ANSWER), ANSWER, self.cancel);
            let done = self.wanted(&attempts, self.timeout()).and_then(|wanted| {
                let version = (wanted.manifest.version, wanted.manifest.root);
                if pulled != version {
                    release(self.pull(&wanted)?)?;
                    pulled = version;
                }
                Ok(())
            });
            match done {
                Ok(()) => said = None,
                Err(failure) if may_pass(&failure) => {
                    if said != Some(failure.kind) && !self.cancel.load(Ordering::Relaxed) {
                        output.remark(format!("{}; trying again", failure.message));
                        said = Some(failure.kind);
                    }
                }
                Err(failure) => return Err(failure),
            }
        }
        Ok(())
    }

    /// Asks the host for the manifest. `within` is how long one that is there may take to answer: it may have to hash the
    /// version.
    fn wanted(&self, attempts: &Attempts<'_>, within: Duration) -> Result<Wanted, Failure> {
        let from = &self.arguments.from;
        let (manifest, table) = manifest(&self.link, &self.hosts, from, "pull", attempts, within)?;
        let from = RemoteName { version: Some(manifest.version), ..from.clone() };
        Ok(Wanted { from, manifest, table })
    }

    fn timeout(&self) -> Duration {
        self.arguments.timeout.unwrap_or(SILENCE)
    }

    /// Pulls a version, unless it is there. Of several processes that want it, one pulls it.
    fn pull(&self, wanted: &Wanted) -> Result<Option<Segment>, Failure> {
        let root = Hash::from_bytes(wanted.manifest.root).to_hex();
        let mut claim = None;
        // Held until the version is committed, by those that replace an existing version.
        let mut _turn = None;
        match self.existing()? {
            None => match self.domain.open_or_build(&self.name, self.waiting())? {
                OpenOrBuild::Build(granted) => claim = Some(granted),
                OpenOrBuild::Opened(_) => _turn = Some(self.turn()?),
            },
            Some(_) => _turn = Some(self.turn()?),
        }
        let PullArguments { hold, owner, .. } = self.arguments;
        if let Some((version, found, place)) = self.existing()?
            && found.as_deref() == Some(root.as_str())
            && (place == self.place && !hold && owner.is_none())
        {
            let text = format!("{}@{version} is {} already; nothing was done", self.name, wanted.from);
            let value = json!({
                "name": self.name, "version": version, "existed": true, "origin": wanted.from.to_string(),
                "root": root.as_str(),
            });
            self.context.output().announce(text, &value);
            return Ok(None);
        }
        let start = Instant::now();
        let segment = self.put(wanted, claim, root.as_str())?;
        let (text, mut value) = committed(&segment, start.elapsed());
        if let Some(value) = value.as_object_mut() {
            value.insert("origin".into(), wanted.from.to_string().into());
            value.insert("root".into(), root.as_str().into());
        }
        let hold_text = if self.arguments.hold { "; holding it until Ctrl-C or its removal" } else { "" };
        self.context.output().announce(format!("{text}, copied from {}{hold_text}", wanted.from), &value);
        Ok(Some(segment))
    }

    fn put(&self, wanted: &Wanted, claim: Option<Claim>, root: &str) -> Result<Segment, Failure> {
        let PullArguments { also, hold, owner, .. } = self.arguments;
        let threads = default_threads();
        let sources = [&wanted.from.host].into_iter().chain(also).cloned().collect();
        let session = (self.link.clone(), self.hosts.clone());
        let from = wanted.from.clone();
        let content = RemoteContent::new(session, from, &wanted.manifest, sources, threads, self.timeout());
        let origin = wanted.from.to_string();
        let own = [(ORIGIN, &*origin), (ROOT, root)];
        let kept = wanted.table.metadata().filter(|(key, _)| ![ORIGIN, ROOT].contains(key));
        let metadata = kept.chain(own).map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        let path = content.path();
        let plan = Plan::from_content(&path, content, &wanted.table, metadata).map_err(Error::from)?;
        let progress = progress::of_bytes(self.context.output(), &self.name, plan.total_bytes());
        let add = |bytes| progress.inc(bytes);
        let put = self.domain.put(&self.name, self.place).kept(!hold && owner.is_none()).threads(threads);
        let put = put.when_some(*owner, Put::owner).progress(&add).cancel(self.cancel);
        let put = match claim {
            Some(claim) => put.claimed(claim, &plan),
            None => put.plan(&plan),
        };
        Ok(put?)
    }

    /// Returns the latest version of the name here, the root that its metadata names, and its place.
    fn existing(&self) -> Result<Option<(u64, Option<String>, Place)>, Failure> {
        match self.domain.inspect(&self.name) {
            Ok(info) if info.is_latest => {
                Ok(Some((info.version.version, metadata(&info, ROOT), info.version.place.into())))
            }
            Ok(_) | Err(Error::NotFound(NotFound::Name { .. })) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until this process is the one that replaces the name's version by another host's. A claim that is never
    /// fulfilled is a turn: when its process drops it or dies, it passes on.
    fn turn(&self) -> Result<Claim, Failure> {
        let turn = format!("{TURNS}{}", blake3::hash(self.name.as_bytes()).to_hex());
        match self.domain.open_or_build(&turn, self.waiting())? {
            OpenOrBuild::Build(claim) => Ok(claim),
            OpenOrBuild::Opened(_) => {
                let message = format!("the name {turn} exists, and pullers of {} take turns by it", self.name);
                Err(Failure::new(ErrorKind::Refused, message, format!("`partywall rm {turn}`")))
            }
        }
    }

    /// Another process pulls for as long as it makes progress, which this one does not see.
    fn waiting(&self) -> Wait<'_> {
        Wait::from(Duration::MAX).cancelled_by(self.cancel)
    }
}

/// Returns whether a follower goes on after a failure: if it is one of the other host, which may come back or commit a
/// version that is right, or a lack of memory here.
fn may_pass(failure: &Failure) -> bool {
    match failure.error.as_deref() {
        None | Some(Error::File(_)) => true,
        Some(error) => matches!(error.kind(), ErrorKind::Refused | ErrorKind::Device),
    }
}

/// Opens a session with hosts. The first of them has to be known.
fn reach(
    context: &Context,
    network: &Network,
    wanted: &[String],
    attempts: &Attempts<'_>,
) -> Result<(Link, Hosts), Failure> {
    let mut endpoints = Endpoints { connect: network.connect.clone(), ..network.endpoints()? };
    endpoints.allowed.extend(wanted.iter().cloned());
    if network.connect.is_empty() {
        let start = Instant::now();
        let (bridge, connect, missing) = attempts.until(|| {
            let (bridge, known) = view(context, &network.realm, attempts)?;
            let mut connect = addresses(&wanted[0], &bridge, &known)?;
            let mut missing = Vec::new();
            // The others are there for the case that the first one is not.
            for host in &wanted[1..] {
                match addresses(host, &bridge, &known) {
                    Ok(found) => connect.extend(found),
                    // It has just come, and has not said where it listens.
                    Err(Unreached::Silent(failure)) if is_there(host, &known) && start.elapsed() < ANSWER => {
                        return Err(Unreached::Silent(failure));
                    }
                    Err(Unreached::Final(failure) | Unreached::Unknown(failure) | Unreached::Silent(failure)) => {
                        missing.push(failure.message);
                    }
                }
            }
            Ok((bridge, connect, missing))
        })?;
        bridge.complete(&mut endpoints)?;
        endpoints.connect.extend(connect);
        missing.iter().for_each(|message| context.output().remark(message));
    }
    let link = Link::open(&network.realm, &endpoints.check()?)?;
    let hosts = Hosts::watch(&link, None)?;
    Ok((link, hosts))
}

/// Returns where a host listens.
fn addresses(host: &str, bridge: &LocalBridge, known: &[HostView]) -> Result<Vec<String>, Unreached> {
    if *host == bridge.record.host {
        let message = format!("//{host} is this host");
        let advice = "use its names without //HOST/, and `partywall cp`";
        return Err(Failure::new(ErrorKind::Usage, message, advice).into());
    }
    let found = known.iter().find(|view| view.host == *host);
    let found = found.ok_or_else(|| Unreached::Unknown(no_host(host, known)))?;
    refuse_foreign(found)?;
    let info = found.info.as_ref().ok_or_else(|| Unreached::Silent(unreachable(host, found.unreachable_ms)))?;
    if info.endpoints.is_empty() {
        let message = format!("//{host} listens at no address that other hosts reach");
        let advice = "start its bridge with --listen and such an address";
        return Err(Failure::new(ErrorKind::Refused, message, advice).into());
    }
    Ok(info.endpoints.iter().take(MAX_ENDPOINTS).map(|endpoint| bare(endpoint).to_owned()).collect())
}

fn is_there(host: &str, known: &[HostView]) -> bool {
    known.iter().any(|view| view.host == host && view.unreachable_ms.is_none())
}

/// Waits a moment for a host, and returns its instance.
fn instance(hosts: &Hosts, host: &str, attempts: &Attempts<'_>) -> Result<String, Unreached> {
    let moment = Instant::now() + attempts.left().min(Duration::from_millis(200));
    let known = hosts.wait_until(moment, |known| is_there(host, known));
    let found = known.iter().find(|view| view.host == host);
    match found {
        Some(found) if found.unreachable_ms.is_none() => Ok(found.instance.clone()),
        None if !known.is_empty() => Err(Unreached::Unknown(no_host(host, &known))),
        found => Err(Unreached::Silent(unreachable(host, found.and_then(|found| found.unreachable_ms)))),
    }
}

/// Asks a host at the key of its instance until it answers, each time for at most `within`. `failed` describes what it
/// answers instead.
fn ask<T>(
    (link, hosts): (&Link, &Hosts),
    host: &str,
    key: impl Fn(&str) -> String,
    (attempts, within): (&Attempts<'_>, Duration),
    read: impl Fn(&[u8]) -> Result<T, Unanswered>,
    failed: impl Fn(&Unanswered) -> Failure,
) -> Result<T, Failure> {
    attempts.until(|| {
        let instance = instance(hosts, host, attempts)?;
        let is_cancelled = || attempts.is_cancelled();
        let asked = link.question(&key(&instance), within, MAX_MANIFEST).wait(&is_cancelled);
        asked.and_then(|bytes| read(&bytes)).map_err(|error| match &error {
            Unanswered::Silent | Unanswered::Refused(Refusal::Busy) => Unreached::Silent(failed(&error)),
            _ => failed(&error).into(),
        })
    })
}

/// Asks a host for the manifest of a name.
fn manifest(
    link: &Link,
    hosts: &Hosts,
    from: &RemoteName,
    verb: &str,
    attempts: &Attempts<'_>,
    within: Duration,
) -> Result<(Manifest, Table<Vec<u8>>), Failure> {
    let read = |bytes: &[u8]| {
        let (manifest, table) = Manifest::read(bytes)?;
        if manifest.name != from.name || from.version.is_some_and(|version| version != manifest.version) {
            return Err(Unanswered::Malformed("it is of another name or version"));
        }
        Ok((manifest, table))
    };
    let key = |instance: &str| manifest_key(link, instance, from);
    ask((link, hosts), &from.host, key, (attempts, within), read, |error| unanswered(from, verb, error))
}

/// Lists the names that a host exports.
pub(crate) fn ls(context: &Context, text: &str) -> Result<(), Failure> {
    let rest = text.trim_start_matches('/');
    let (host, pattern) = rest.split_once('/').map_or((rest, None), |(host, pattern)| (host, Some(pattern)));
    let usage = |why: String| Failure::new(ErrorKind::Usage, why, "give //HOST, or //HOST/PATTERN");
    let host = check_host(host).map_err(usage)?;
    let pattern = pattern.filter(|pattern| !pattern.is_empty()).map(Pattern::new).transpose().map_err(usage)?;
    let output = context.output();
    let note = |text| output.note(text);
    let attempts = Attempts::new(None, INTERACTIVE, &NEVER).with_note(&note);
    let (link, hosts) = reach(context, &Network::of_the_bridge(), std::slice::from_ref(&host), &attempts)?;
    let key = |instance: &str| link.key(format_args!("names/{host}/{instance}"));
    let failed = |error: &Unanswered| {
        let kind = if *error == Unanswered::Silent { ErrorKind::TimedOut } else { ErrorKind::Refused };
        let message = format!("cannot list //{host}: it {error}");
        let advice = "see whether that host runs (`partywall hosts`) and has the same release of Partywall";
        let class = if *error == Unanswered::Silent { "HostUnreachable" } else { "Error" };
        Failure::new(kind, message, advice).with_class(class)
    };
    let within = (&attempts, ANSWER);
    let mut names = ask((&link, &hosts), &host, key, within, decode::<Vec<ExportedName>>, failed)?;
    // What is no name cannot be pulled, and might be something to a shell that completes names.
    names.retain(|ExportedName { name, .. }| {
        check_name(name).is_ok() && pattern.as_ref().is_none_or(|pattern| pattern.matches(name))
    });
    let value = |name: &ExportedName| {
        let ExportedName { name, kind, version, place, bytes, tensors } = name;
        json!({ "name": name, "kind": kind, "version": version, "place": place, "bytes": bytes, "tensors": tensors })
    };
    output.value(&json!({ "host": host, "names": names.iter().map(value).collect::<Vec<_>>() }));
    if names.is_empty() {
        output.note(format!("//{host} exports no name that exists"));
        return Ok(());
    }
    let row = |name: &ExportedName| {
        let of = format!("//{host}/{}@{}", name.name, name.version);
        vec![of, name.kind.clone(), name.place.clone(), bytes(name.bytes), name.tensors.to_string()]
    };
    let rows: Vec<_> = names.iter().map(row).collect();
    output.table(&["NAME", "KIND", "PLACE", ">SIZE", ">TENSORS"], &rows, &["PLACE", "TENSORS"]);
    Ok(())
}

/// Shows a segment of a host.
pub(crate) fn show(context: &Context, text: &str) -> Result<(), Failure> {
    let from: RemoteName =
        text.parse().map_err(|why: String| Failure::new(ErrorKind::Usage, why, "give //HOST/NAME[@V]"))?;
    let output = context.output();
    let note = |text| output.note(text);
    // The host may have to hash the version first.
    let attempts = Attempts::new(None, SILENCE, &NEVER).with_note(&note);
    let (link, hosts) = reach(context, &Network::of_the_bridge(), std::slice::from_ref(&from.host), &attempts)?;
    let (manifest, table) = manifest(&link, &hosts, &from, "show", &attempts, attempts.left())?;
    let root = Hash::from_bytes(manifest.root).to_hex();
    let tensors = table.in_given_order();
    let values = tensors.iter().map(|tensor| {
        json!({
            "name": tensor.name(), "dtype": tensor.dtype().to_string(), "shape": tensor.shape().collect::<Vec<_>>(),
            "strides": tensor.strides().collect::<Vec<_>>(), "bytes": tensor.bytes(),
        })
    });
    let metadata: serde_json::Map<String, Value> =
        table.metadata().map(|(key, value)| (key.to_owned(), value.into())).collect();
    output.value(&json!({
        "host": from.host, "name": manifest.name, "version": manifest.version, "place": manifest.place,
        "bytes": manifest.length, "root": root.as_str(), "metadata": metadata,
        "tensors": values.collect::<Vec<_>>(),
    }));
    output.line(format!("//{}/{}@{}", from.host, manifest.name, manifest.version));
    output.line(format!("  place    {}", manifest.place));
    output.line(format!("  size     {} in {} tensors", bytes(manifest.length), tensors.len()));
    output.line(format!("  root     {root}"));
    for (key, value) in table.metadata() {
        output.line(format!("  {key} = {value}"));
    }
    let rows = tensors.iter().map(|tensor| {
        let shape: Vec<_> = tensor.shape().collect();
        vec![tensor.name().to_owned(), tensor.dtype().to_string(), format!("{shape:?}"), bytes(tensor.bytes())]
    });
    let rows: Vec<_> = rows.collect();
    output.line("");
    output.table(&["TENSOR", "DTYPE", "SHAPE", ">SIZE"], &rows, &[]);
    Ok(())
}

fn no_host(host: &str, known: &[HostView]) -> Failure {
    let names: Vec<_> = known.iter().map(|view| format!("//{}", view.host)).collect();
    let there =
        if names.is_empty() { "there is no other host".to_owned() } else { format!("there are {}", names.join(", ")) };
    let advice = "start its bridge with --host, and let one of the two bridges --connect to the other";
    let failure = Failure::new(ErrorKind::NotFound, format!("no host is called //{host}: {there}"), advice);
    failure.with_class("HostNotFound").with_entry("no-host")
}

fn unreachable(host: &str, for_ms: Option<u64>) -> Failure {
    let since = for_ms.map(|ms| format!(" for {:.1} s", ms as f64 / 1e3)).unwrap_or_default();
    let advice = "see whether its bridge runs and listens at an address that this host reaches";
    let failure = Failure::new(ErrorKind::TimedOut, format!("//{host} is unreachable{since}"), advice);
    failure.with_class("HostUnreachable").with_entry("host-unreachable")
}

fn refuse_foreign(view: &HostView) -> Result<(), Failure> {
    let Some(wire) = view.foreign else { return Ok(()) };
    let message = format!("//{} {}", view.host, Unanswered::Foreign(wire));
    let failure = Failure::new(ErrorKind::Refused, message, "run the same release of Partywall on both hosts");
    Err(failure.with_class("VersionMismatch").with_entry("other-protocol"))
}

/// Returns the failure of a question about a name.
fn unanswered(from: &RemoteName, verb: &str, error: &Unanswered) -> Failure {
    let host = &from.host;
    let (kind, class, advice) = match error {
        Unanswered::Refused(Refusal::NoName) => (
            ErrorKind::NotFound,
            "NameNotFound",
            format!("`partywall ls //{host}` lists what it exports (`partywall bridge --export`)"),
        ),
        Unanswered::Refused(Refusal::NoVersion(_)) => {
            (ErrorKind::NotFound, "VersionNotFound", "leave out the version".into())
        }
        Unanswered::Refused(Refusal::Kind(kind)) => (
            ErrorKind::Refused,
            "WrongKind",
            match &kind[..] {
                "topic" => format!("import it: `partywall bridge --import '{from}'`"),
                "timeline" => {
                    "send its value with the data: in the header of a sample, or in the metadata of a version".into()
                }
                "queue" => "run its workers on that host, or use a message broker between hosts".into(),
                "semaphore" => "it counts processes of that host only: use one on each host".into(),
                _ => "copy what is in it to a segment there, and pull that".into(),
            },
        ),
        Unanswered::Refused(Refusal::NotFrozen(_)) => (
            ErrorKind::Refused,
            "WrongKind",
            "copy it to a frozen segment there (`partywall cp`), and pull that".into(),
        ),
        Unanswered::Silent => {
            let advice = "see whether the host is stopped, or give a longer --timeout";
            (ErrorKind::TimedOut, "HostUnreachable", advice.into())
        }
        Unanswered::Foreign(_) => {
            (ErrorKind::Refused, "VersionMismatch", "run the same release of Partywall on both hosts".into())
        }
        _ => (ErrorKind::Refused, "Error", "try again, or pull from another host".into()),
    };
    let failure = Failure::new(kind, format!("cannot {verb} {from}: //{host} {error}"), advice);
    failure.with_class(class).with_entry("cannot-pull")
}

/// The key of a replica's metadata that names its origin.
const ORIGIN: &str = "origin";

/// The names by which pullers take turns begin with this.
const TURNS: &str = ".pull/";

/// The addresses of a host that are tried.
const MAX_ENDPOINTS: usize = 16;

/// How often a follower asks the origin without being notified.
const POLL: Duration = Duration::from_secs(5);

/// How long a pull goes on by default while no byte comes.
const SILENCE: Duration = Duration::from_secs(60);
