//! The commands that ask one host: `pull`, `ls //HOST` and `show //HOST/NAME`.
//!
//! With `--json`, `pull` prints what `put` prints, with `origin` (`//HOST/NAME@V`) and `root`; with `--follow` one object
//! a line for each version. If the version is there already: only `name`, `version`, `existed`, `origin` and `root`.
//! `ls //HOST` prints `host` and `names`, a list of `name`, `kind`, `version`, `place`, `bytes`, `tensors`.
//! `show //HOST/NAME` prints `host`, `name`, `version`, `place`, `bytes` (of its content), `root`, `metadata` (an object)
//! and `tensors`, each with `name`, `dtype`, `shape`, `strides`, `bytes`.

use std::{
    sync::{Arc, atomic::AtomicBool, atomic::Ordering, mpsc},
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
    commands::{LocalBridge, Network, metadata, view},
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
    /// Give up once no byte has come for so long
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = parse_seconds)]
    timeout: Duration,
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
    cancel: Arc<AtomicBool>,
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
    let wanted: Vec<_> = [&from.host].into_iter().chain(&arguments.also).cloned().collect();
    let (link, hosts) = reach(context, &arguments.network, &wanted)?;
    let domain = context.options().connect()?;
    let place = device::place(context.output(), arguments.device)?;
    let cancel = cancel_flag()?;
    let puller = Puller { context, arguments, domain, place, name, link, hosts, cancel };
    if arguments.follow { puller.follow() } else { puller.once() }
}

impl Puller<'_> {
    fn once(&self) -> Result<(), Failure> {
        let wanted = self.wanted(self.arguments.timeout)?;
        let segment = self.pull(&wanted)?;
        match segment {
            Some(segment) if self.arguments.hold => {
                match segment.wait_withdrawn(Wait::from(Duration::MAX).cancelled_by(&*self.cancel)) {
                    Ok(_) | Err(Error::Cancelled { .. }) => Ok(()),
                    Err(error) => Err(error.into()),
                }
            }
            Some(segment) => Ok(segment.release()?),
            None => Ok(()),
        }
    }

    /// Pulls each version that is the newest when the one before is there.
    fn follow(&self) -> Result<(), Failure> {
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
        let mut pulled = None;
        let mut is_first = true;
        let mut said = String::new();
        while !self.cancel.load(Ordering::Relaxed) {
            let wanted = self.wanted(if is_first { self.arguments.timeout } else { ANSWER });
            let done = wanted.and_then(|wanted| {
                let version = (wanted.manifest.version, wanted.manifest.root);
                if pulled.as_ref() != Some(&version) {
                    if let Some(segment) = self.pull(&wanted)? {
                        segment.release()?;
                    }
                    pulled = Some(version);
                }
                Ok(())
            });
            match done {
                Ok(()) => said.clear(),
                Err(failure) if is_first => return Err(failure),
                // The source may come back, and a newer version may be right.
                Err(failure) if failure.error.is_none() || is_of_source(&failure) => {
                    if said != failure.message && !self.cancel.load(Ordering::Relaxed) {
                        output.remark(&failure.message);
                        said = failure.message;
                    }
                }
                Err(failure) => return Err(failure),
            }
            is_first = false;
            let until = Instant::now() + LOOK;
            while !self.cancel.load(Ordering::Relaxed) && Instant::now() < until {
                if news.recv_timeout(Duration::from_millis(100)).is_ok() {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Asks the host for the manifest.
    fn wanted(&self, within: Duration) -> Result<Wanted, Failure> {
        let from = &self.arguments.from;
        let (manifest, table) = manifest(&self.link, &self.hosts, from, within, &self.cancel)?;
        let from = RemoteName { version: Some(manifest.version), ..from.clone() };
        Ok(Wanted { from, manifest, table })
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
        let PullArguments { also, timeout, hold, owner, .. } = self.arguments;
        let threads = default_threads();
        let sources = [&wanted.from.host].into_iter().chain(also).cloned().collect();
        let session = (self.link.clone(), self.hosts.clone());
        let from = wanted.from.clone();
        let content = RemoteContent::new(session, from, &wanted.manifest, sources, threads, *timeout);
        let origin = wanted.from.to_string();
        let own = [(ORIGIN, &*origin), (ROOT, root)];
        let kept = wanted.table.metadata().filter(|(key, _)| ![ORIGIN, ROOT].contains(key));
        let metadata = kept.chain(own).map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        let path = content.path();
        let plan = Plan::from_content(&path, content, &wanted.table, metadata).map_err(Error::from)?;
        let progress = progress::of_bytes(self.context.output(), &self.name, plan.total_bytes());
        let add = |bytes| progress.inc(bytes);
        let put = self.domain.put(&self.name, self.place).kept(!hold && owner.is_none()).threads(threads);
        let put = put.when_some(*owner, Put::owner).progress(&add).cancel(&self.cancel);
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
        Wait::from(Duration::MAX).cancelled_by(&*self.cancel)
    }
}

/// Returns whether a failure is one of the other host, so that a newer version of it may be pulled.
fn is_of_source(failure: &Failure) -> bool {
    matches!(failure.error.as_deref(), Some(Error::File(_)))
}

/// Opens a session with hosts.
fn reach(context: &Context, network: &Network, wanted: &[String]) -> Result<(Link, Hosts), Failure> {
    let mut endpoints = Endpoints { connect: network.connect.clone(), ..network.endpoints()? };
    endpoints.allowed.extend(wanted.iter().cloned());
    if network.connect.is_empty() {
        let deadline = Instant::now() + ANSWER;
        let (bridge, known) = loop {
            let (bridge, known) = view(context, &network.realm)?;
            // One that has just come has not said where it listens.
            let is_new = |view: &HostView| wanted.contains(&view.host) && view.unreachable_ms.is_none();
            let is_asked = known.iter().any(|view| is_new(view) && view.info.is_none() && view.foreign.is_none());
            if !is_asked || Instant::now() >= deadline {
                break (bridge, known);
            }
            std::thread::sleep(Duration::from_millis(100));
        };
        bridge.complete(&mut endpoints)?;
        for (number, host) in wanted.iter().enumerate() {
            match addresses(host, &bridge, &known) {
                Ok(found) => endpoints.connect.extend(found),
                // It is there for the case that one of them is not.
                Err(failure) if number > 0 => context.output().remark(failure.message),
                Err(failure) => return Err(failure),
            }
        }
    }
    let link = Link::open(&network.realm, &endpoints.check()?)?;
    let hosts = Hosts::watch(&link, None)?;
    Ok((link, hosts))
}

/// Returns where a host listens.
fn addresses(host: &str, bridge: &LocalBridge, known: &[HostView]) -> Result<Vec<String>, Failure> {
    if *host == bridge.record.host {
        let message = format!("//{host} is this host");
        let advice = "use its names without //HOST/, and `partywall cp`";
        return Err(Failure::new(ErrorKind::Usage, message, advice));
    }
    let found = known.iter().find(|view| view.host == *host).ok_or_else(|| no_host(host, known))?;
    refuse_foreign(found)?;
    let info = found.info.as_ref().ok_or_else(|| unreachable(host, found.unreachable_ms))?;
    if info.endpoints.is_empty() {
        let message = format!("//{host} listens at no address that other hosts reach");
        return Err(Failure::new(ErrorKind::Refused, message, "start its bridge with --listen and such an address"));
    }
    Ok(info.endpoints.iter().take(MAX_ENDPOINTS).map(|endpoint| bare(endpoint).to_owned()).collect())
}

/// Waits for a host, and returns its instance.
fn instance(hosts: &Hosts, host: &str, deadline: Instant, cancel: &AtomicBool) -> Result<String, Failure> {
    loop {
        let slice = deadline.min(Instant::now() + Duration::from_millis(200));
        let is_there = |view: &&HostView| view.host == host && view.unreachable_ms.is_none();
        let known = hosts.wait_until(slice, |known| known.iter().any(|view| is_there(&view)));
        if let Some(found) = known.iter().find(is_there) {
            return Ok(found.instance.clone());
        }
        if cancel.load(Ordering::Relaxed) {
            return Err(Error::Cancelled { what: format!("waiting for //{host}") }.into());
        }
        if Instant::now() >= deadline {
            let found = known.iter().find(|view| view.host == host);
            return Err(match found {
                None if !known.is_empty() => no_host(host, &known),
                found => unreachable(host, found.and_then(|found| found.unreachable_ms)),
            });
        }
    }
}

/// Asks a host for the manifest of a name, until it answers.
fn manifest(
    link: &Link,
    hosts: &Hosts,
    from: &RemoteName,
    within: Duration,
    cancel: &AtomicBool,
) -> Result<(Manifest, Table<Vec<u8>>), Failure> {
    let deadline = Instant::now() + within;
    loop {
        let instance = instance(hosts, &from.host, deadline, cancel)?;
        let left = deadline.saturating_duration_since(Instant::now());
        let is_cancelled = || cancel.load(Ordering::Relaxed);
        let asked = link.question(&manifest_key(link, &instance, from), left, MAX_MANIFEST).wait(&is_cancelled);
        if is_cancelled() {
            return Err(Error::Cancelled { what: format!("waiting for //{}", from.host) }.into());
        }
        match asked.and_then(|bytes| Manifest::read(&bytes)) {
            Ok((manifest, _))
                if manifest.name != from.name || from.version.is_some_and(|version| version != manifest.version) =>
            {
                return Err(unanswered(from, &Unanswered::Malformed("it is of another name or version")));
            }
            Ok(found) => return Ok(found),
            Err(Unanswered::Silent | Unanswered::Refused(Refusal::Busy)) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(50));
            }
            Err(error) => return Err(unanswered(from, &error)),
        }
    }
}

/// Lists the names that a host exports.
pub(crate) fn ls(context: &Context, text: &str) -> Result<(), Failure> {
    let rest = text.trim_start_matches('/');
    let (host, pattern) = rest.split_once('/').map_or((rest, None), |(host, pattern)| (host, Some(pattern)));
    let usage = |why: String| Failure::new(ErrorKind::Usage, why, "give //HOST, or //HOST/PATTERN");
    let host = check_host(host).map_err(usage)?;
    let pattern = pattern.filter(|pattern| !pattern.is_empty()).map(Pattern::new).transpose().map_err(usage)?;
    let (link, hosts) = reach(context, &Network::of_the_bridge(), std::slice::from_ref(&host))?;
    let instance = instance(&hosts, &host, Instant::now() + ANSWER, &NEVER)?;
    let asked = link.ask(&link.key(format_args!("names/{host}/{instance}")), ANSWER, MAX_MANIFEST);
    let names = asked.and_then(|bytes| decode::<Vec<ExportedName>>(&bytes));
    let mut names = names.map_err(|error| Failure::new(ErrorKind::Unreachable, format!("//{host} {error}"), ""))?;
    names.retain(|name| pattern.as_ref().is_none_or(|pattern| pattern.matches(&name.name)));
    let output = context.output();
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
    let (link, hosts) = reach(context, &Network::of_the_bridge(), std::slice::from_ref(&from.host))?;
    // The host may have to hash the version first.
    let (manifest, table) = manifest(&link, &hosts, &from, Duration::from_secs(60), &NEVER)?;
    let root = Hash::from_bytes(manifest.root).to_hex();
    let output = context.output();
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
fn unanswered(from: &RemoteName, error: &Unanswered) -> Failure {
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
    let failure = Failure::new(kind, format!("cannot pull {from}: //{host} {error}"), advice);
    failure.with_class(class).with_entry("cannot-pull")
}

/// The key of a replica's metadata that names its origin.
const ORIGIN: &str = "origin";

/// The names by which pullers take turns begin with this.
const TURNS: &str = ".pull/";

/// The addresses of a host that are tried.
const MAX_ENDPOINTS: usize = 16;

/// How often a follower looks at the origin without being told to.
const LOOK: Duration = Duration::from_secs(5);

static NEVER: AtomicBool = AtomicBool::new(false);
