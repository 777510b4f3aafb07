//! `partywall put`. With `--json`, once it is committed: `name`, `version`, `kind`, `place`, `bytes` (of the tensors),
//! `bytes_allocated`, `tensors` (a number), `lifetime`, `mutable`, `uid`, `shared`, `seconds`, `bytes_per_second`,
//! `pid`, `existed`. If `--if-absent` finds the name: only `name`, `version` and `existed`.

use std::{
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
    time::{Duration, Instant},
};

use clap::Args;
use partywall::{
    DeviceChoice, Domain, Error, ErrorKind, Limit, OpenOrBuild, Place, Put, Segment, Wait, WhenSome, bytes,
    error::Denied,
    files::{Plan, Storage, default_threads},
};
use serde_json::{Value, json};

use crate::{
    Context, describe, device,
    failure::Failure,
    fetch::{self, FETCH_PROGRAM, Request},
    progress, signals,
    text::{count, parse_seconds, parse_threads},
};

/// The arguments of the command.
#[derive(Debug, Args)]
#[allow(rustdoc::broken_intra_doc_links, reason = "brackets in `--help` are what may be left out")]
pub(crate) struct Arguments {
    /// A .safetensors or .npy file, a folder or *.safetensors.index.json of shards, any other file as raw bytes, or `-`
    /// for standard input. Or the URL of one of them: https://HOST/PATH, s3://BUCKET/KEY, gs://BUCKET/KEY,
    /// az://CONTAINER/KEY, or hf://ORG/MODEL[@REVISION][/FILE]. env://VARIABLE is the URL in a variable
    #[arg(value_name = "FILE|FOLDER|URL|-")]
    file: PathBuf,
    /// The name: letters, digits and `._-/`
    name: String,
    /// Where the memory is: auto (the first GPU, else host memory), host, pinned (host memory for
    /// GPUs) or pinned:N (on NUMA node N), cuda, cuda:N, or a GPU's UUID
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: DeviceChoice,
    /// Do nothing if the name already exists; this is not a failure. Of several that put a URL so under one name, one
    /// downloads it, and the others wait for its version
    #[arg(long)]
    if_absent: bool,
    /// Keep running and hold the name until Ctrl-C, SIGTERM or its removal; the name ends with this process. Without
    /// --hold and --owner the name stays until `partywall rm`
    #[arg(long)]
    hold: bool,
    /// Give the name to another process: it ends with the member of this token (`Domain.token` in Python, `member` in
    /// `partywall --json ps`)
    #[arg(long, value_name = "TOKEN", conflicts_with = "hold")]
    owner: Option<u64>,
    /// Allow processes to write the memory after the commit
    #[arg(long)]
    mutable: bool,
    /// Let processes of other users read it, where the broker admits them (`serve --allow-uid`)
    #[arg(long, conflicts_with = "mutable")]
    shared: bool,
    /// Threads that read and copy, each with a connection of its own for a URL [default: one per CPU, at most 8; for a
    /// URL 8]
    #[arg(long, value_name = "N", value_parser = parse_threads)]
    threads: Option<u16>,
    /// How often a request is made again without 16 KiB between; the waits between double from 0.5 s to 16 s
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u32).range(..=100), help_heading = FOR_URLS)]
    retries: u32,
    /// Give a connection up that has brought less than 16 KiB in so long
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = parse_seconds, help_heading = FOR_URLS)]
    timeout: Duration,
    /// Allow http://, which is not encrypted, to other machines than this one
    #[arg(long, help_heading = FOR_URLS)]
    allow_http: bool,
}

/// The heading of the options that concern URLs alone.
const FOR_URLS: &str = "For URLs";

/// Where the bytes are.
enum Origin {
    /// In files, whose headers are read.
    Files(Plan),
    /// On a server.
    Url(Box<dyn Storage>, PathBuf),
    /// In standard input.
    Stream,
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let output = context.output();
    // Checked first, so that an invalid name or an unusable file starts no broker.
    partywall::check_name(&arguments.name).map_err(|error| bad_name("put FILE", &arguments.name, error))?;
    let origin = origin(context, arguments)?;
    let domain = context.options().connect()?;
    let place = device::place(context.output(), arguments.device)?;
    // A connection waits for the network, not for a CPU.
    let default_threads = || if matches!(origin, Origin::Url(..)) { CONNECTIONS } else { default_threads() };
    let threads = arguments.threads.map_or_else(default_threads, usize::from);
    let kept = !arguments.hold && arguments.owner.is_none();
    let put = domain.put(&arguments.name, place).kept(kept).mutable(arguments.mutable).shared(arguments.shared);
    let put = put.if_absent(arguments.if_absent).threads(threads).when_some(arguments.owner, Put::owner);
    if let Some(error) = put.check().err() {
        return exists(context, arguments.if_absent, error);
    }
    // Nothing is shared yet, so until `cancel_flag` Ctrl-C ends the process, even inside a read that never returns.
    let mut claim = None;
    let plan = match origin {
        Origin::Files(plan) => plan,
        Origin::Stream => Plan::from_reader(std::io::stdin().lock(), limit(&domain, place)).map_err(Error::from)?,
        Origin::Url(storage, path) => {
            if arguments.if_absent {
                match domain.open_or_build(&arguments.name, Duration::MAX)? {
                    OpenOrBuild::Build(granted) => claim = Some(granted),
                    OpenOrBuild::Opened(segment) => {
                        return announce_existing(context, segment.name(), segment.version());
                    }
                }
            }
            Plan::from_storage(&*storage, &path).map_err(Error::from)?
        }
    };
    let cancel = signals::cancel_flag()?;
    let start = Instant::now();
    let put = {
        let progress = progress::of_bytes(output, &arguments.name, plan.total_bytes());
        let add = |bytes| progress.inc(bytes);
        let put = put.progress(&add).cancel(&cancel);
        match claim {
            Some(claim) => put.claimed(claim, &plan),
            None => put.plan(&plan),
        }
    };
    let segment = match put {
        Ok(segment) => segment,
        Err(error) => return exists(context, arguments.if_absent, error),
    };
    let (text, value) = committed(&segment, start.elapsed());
    let hold_text = if arguments.hold { "; holding it until Ctrl-C or its removal" } else { "" };
    output.announce(format!("{text}{hold_text}"), &value);
    drop(plan);
    if arguments.hold { hold(context, &segment, &cancel) } else { Ok(segment.release()?) }
}

/// Finds the bytes. Becomes the program that puts URLs, if this one does not.
fn origin(context: &Context, arguments: &Arguments) -> Result<Origin, Failure> {
    if arguments.file == Path::new("-") {
        return Ok(Origin::Stream);
    }
    let Some(url) = fetch::url(&arguments.file) else {
        return Ok(Origin::Files(Plan::from_path(&arguments.file).map_err(Error::from)?));
    };
    let Some(contained) = fetch::contained() else { return Err(FETCH_PROGRAM.enter("partywall put URL")) };
    let Arguments { retries, timeout, allow_http, .. } = *arguments;
    let request = Request { url: url.to_owned(), retries, timeout, allow_http, output: context.output() };
    let (storage, path) = (contained.open)(&request)?;
    Ok(Origin::Url(storage, path))
}

/// Returns why a name is invalid; it may include a version, which cannot be chosen. `command` is the command without
/// the name.
pub(super) fn bad_name(command: &str, name: &str, error: Error) -> Failure {
    let Some((name, version)) = name.split_once('@') else { return error.into() };
    let message = format!("version {version:?} of {name:?} cannot be chosen: versions are counted, from 1");
    Failure::new(ErrorKind::Usage, message, format!("`partywall {command} {name}` commits the next version"))
}

/// Handles a name that already exists, for `--if-absent`. Returns every other error.
pub(super) fn exists(context: &Context, if_absent: bool, error: Error) -> Result<(), Failure> {
    match error {
        Error::Denied(Denied::NameExists { name, version, .. }) if if_absent => {
            announce_existing(context, &name, version)
        }
        error => Err(error.into()),
    }
}

fn announce_existing(context: &Context, name: &str, version: u64) -> Result<(), Failure> {
    let text = format!("{name}@{version} already exists; nothing was done");
    context.output().announce(text, &json!({ "name": name, "version": version, "existed": true }));
    Ok(())
}

/// Returns the text and the JSON for a version that this command has committed.
pub fn committed(segment: &Segment, took: Duration) -> (String, Value) {
    let total = segment.tensor_bytes();
    let rate = total as f64 / took.as_secs_f64().max(1e-9);
    let text = format!(
        "{}@{}: {} in {} on {} in {:.2} s ({:.2} GB/s)",
        segment.name(),
        segment.version(),
        bytes(total),
        count(segment.len() as u64, "tensor"),
        describe::place(segment.place()),
        took.as_secs_f64(),
        rate / 1e9,
    );
    let value = json!({
        "name": segment.name(),
        "version": segment.version(),
        "kind": segment.kind(),
        "place": describe::place(segment.place()),
        "bytes": total,
        "bytes_allocated": segment.bytes(),
        "tensors": segment.len(),
        "lifetime": if segment.is_kept() { "kept" } else { "owned" },
        "mutable": segment.is_mutable(),
        "uid": segment.owner(),
        "shared": segment.is_shared(),
        "seconds": took.as_secs_f64(),
        "bytes_per_second": rate,
        "pid": std::process::id(),
        "existed": false,
    });
    (text, value)
}

/// Waits until a signal arrives or the name is removed.
fn hold(context: &Context, segment: &Segment, stop: &AtomicBool) -> Result<(), Failure> {
    match segment.wait_withdrawn(Wait::from(Duration::MAX).cancelled_by(stop)) {
        Err(Error::Cancelled { .. }) => Ok(()),
        Ok(_) => {
            context.output().remark(format!("{} has been removed", segment.name()));
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

/// Returns how many bytes of a stream the broker's limits still allow at a place.
fn limit(domain: &Domain, place: Place) -> u64 {
    let Ok(status) = domain.status() else { return u64::MAX };
    let rest = |limit, is_meant: &dyn Fn(Place) -> bool| {
        let allowed = status.limits.iter().find(|(of, _)| *of == limit).map_or(u64::MAX, |(_, allowed)| *allowed);
        let held: u64 = status.bytes.iter().filter(|(at, _)| is_meant((*at).into())).map(|(_, bytes)| bytes).sum();
        allowed.saturating_sub(held)
    };
    let on_node = match place {
        Place::Pinned(_) => rest(Limit::Pinned(None), &|at| at == place),
        Place::Host | Place::Gpu(_) => u64::MAX,
    };
    rest(Limit::Bytes, &|_| true).min(on_node)
}

/// How many connections download a URL by default.
const CONNECTIONS: usize = 8;
