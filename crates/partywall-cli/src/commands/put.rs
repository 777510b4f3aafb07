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
    DeviceChoice, Domain, Error, ErrorKind, Limit, Place, Put, Segment, Wait, WhenSome, bytes,
    error::Denied,
    files::{Plan, default_threads},
};
use serde_json::{Value, json};

use crate::{
    Context, describe, device,
    failure::Failure,
    progress, signals,
    text::{count, parse_threads},
};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// A .safetensors or .npy file, a folder or *.safetensors.index.json of shards, any other file as raw bytes, or `-`
    /// for standard input
    #[arg(value_name = "FILE|FOLDER|-")]
    file: PathBuf,
    /// The name: letters, digits and `._-/`
    name: String,
    /// Where the memory is: auto (the first GPU, else host memory), host, pinned (host memory for
    /// GPUs) or pinned:N (on NUMA node N), cuda, cuda:N, or a GPU's UUID
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: DeviceChoice,
    /// Do nothing if the name already exists; this is not a failure
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
    /// Threads that read and copy [default: one per CPU, at most 8]
    #[arg(long, value_name = "N", value_parser = parse_threads)]
    threads: Option<u16>,
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let output = context.output();
    let stream = arguments.file == Path::new("-");
    // Checked first, so that an invalid name or an unusable file starts no broker.
    partywall::check_name(&arguments.name).map_err(|error| bad_name("put FILE", &arguments.name, error))?;
    let plan = if stream { None } else { Some(Plan::from_path(&arguments.file).map_err(Error::from)?) };
    let domain = context.options().connect()?;
    let place = device::place(context.output(), arguments.device)?;
    let threads = arguments.threads.map_or_else(default_threads, usize::from);
    let kept = !arguments.hold && arguments.owner.is_none();
    let put = domain.put(&arguments.name, place).kept(kept).mutable(arguments.mutable).shared(arguments.shared);
    let put = put.if_absent(arguments.if_absent).threads(threads).when_some(arguments.owner, Put::owner);
    if let Some(error) = put.check().err() {
        return exists(context, arguments.if_absent, error);
    }
    let plan = match plan {
        Some(plan) => plan,
        // Nothing is shared yet, so until here Ctrl-C ends the process, even inside a read that never returns.
        None => Plan::from_reader(std::io::stdin().lock(), limit(&domain, place)).map_err(Error::from)?,
    };
    let cancel = signals::cancel_flag()?;
    let start = Instant::now();
    let put = {
        let progress = progress::of_bytes(output, &arguments.name, plan.total_bytes());
        let add = |bytes| progress.inc(bytes);
        put.progress(&add).cancel(&cancel).plan(&plan)
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
            let text = format!("{name}@{version} already exists; nothing was done");
            context.output().announce(text, &json!({ "name": name, "version": version, "existed": true }));
            Ok(())
        }
        error => Err(error.into()),
    }
}

/// Returns the text and the JSON for a version that this command has committed.
pub(super) fn committed(segment: &Segment, took: Duration) -> (String, Value) {
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
