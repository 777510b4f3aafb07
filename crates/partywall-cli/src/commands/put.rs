//! `partywall put`. With `--json`, once it is committed: `name`, `version`, `kind`, `place`, `bytes` (of the tensors),
//! `bytes_allocated`, `tensors` (a number), `lifetime`, `mutable`, `uid`, `shared`, `seconds`, `bytes_per_second`, `pid`, `existed`. If
//! `--if-absent` finds the name: only `name`, `version` and `existed`.

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use clap::Args;
use partywall::{
    DeviceChoice, Domain, Error, ErrorKind, Segment, bytes,
    error::Denied,
    files::{Plan, default_threads},
};
use serde_json::json;

use crate::{Context, describe, device, failure::Failure, progress::Progress, signals, text::count};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// A .safetensors or .npy file, a folder or *.safetensors.index.json of shards, any other file as raw bytes, or `-`
    /// for standard input
    #[arg(value_name = "FILE|FOLDER|-")]
    file: PathBuf,
    /// The name: letters, digits and `._-/`
    name: String,
    /// Where the memory is: auto (the first GPU, else host memory), host, cuda, cuda:N, or a GPU's UUID
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: DeviceChoice,
    /// Do nothing if the name already exists; this is not a failure
    #[arg(long)]
    if_absent: bool,
    /// Keep running and hold the name until Ctrl-C, SIGTERM or its removal; the name ends with this process. Without
    /// --hold the name stays until `partywall rm`
    #[arg(long)]
    hold: bool,
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

fn parse_threads(argument: &str) -> Result<u16, String> {
    let threads = argument.parse().ok().filter(|threads| (1..=256).contains(threads));
    threads.ok_or_else(|| format!("{argument:?} is not a number of threads: use 1 to 256"))
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let output = context.output();
    let stream = arguments.file == Path::new("-");
    // Checked first, so that an invalid name or an unusable file starts no broker.
    partywall::check_name(&arguments.name).map_err(|error| bad_name(&arguments.name, error))?;
    let plan = if stream { None } else { Some(Plan::from_path(&arguments.file).map_err(Error::from)?) };
    let domain = context.options().connect()?;
    let place = device::place(context.output(), arguments.device)?;
    let threads = arguments.threads.map_or_else(default_threads, usize::from);
    let put =
        domain.put(&arguments.name, place).kept(!arguments.hold).mutable(arguments.mutable).shared(arguments.shared);
    let put = put.if_absent(arguments.if_absent).threads(threads);
    if let Some(error) = put.check().err() {
        return exists(context, arguments, error);
    }
    let plan = match plan {
        Some(plan) => plan,
        // Nothing is shared yet, so until here Ctrl-C ends the process, even inside a read that never returns.
        None => Plan::from_reader(std::io::stdin().lock(), limit(&domain)).map_err(Error::from)?,
    };
    let cancel = signals::cancel_flag()?;
    let start = Instant::now();
    let put = {
        let progress = Progress::new(output, &arguments.name, plan.total_bytes());
        let add = |bytes| progress.add(bytes);
        put.progress(&add).cancel(&cancel).plan(&plan)
    };
    let segment = match put {
        Ok(segment) => segment,
        Err(error) => return exists(context, arguments, error),
    };
    report(context, arguments, &plan, &segment, start.elapsed());
    drop(plan);
    if arguments.hold { hold(context, &segment, &cancel) } else { Ok(segment.release()?) }
}

/// Returns why a name is invalid; it may include a version, which cannot be chosen.
fn bad_name(name: &str, error: Error) -> Failure {
    let Some((name, version)) = name.split_once('@') else { return error.into() };
    let message = format!("version {version:?} of {name:?} cannot be chosen: versions are counted, from 1");
    Failure::new(ErrorKind::Usage, message, format!("`partywall put FILE {name}` commits the next version"))
}

/// Handles a name that already exists, for `--if-absent`. Returns every other error.
fn exists(context: &Context, arguments: &Arguments, error: Error) -> Result<(), Failure> {
    match error {
        Error::Denied(Denied::NameExists { name, version }) if arguments.if_absent => {
            let text = format!("{name}@{version} already exists; nothing was done");
            context.output().announce(text, &json!({ "name": name, "version": version, "existed": true }));
            Ok(())
        }
        error => Err(error.into()),
    }
}

fn report(context: &Context, arguments: &Arguments, plan: &Plan, segment: &Segment, took: Duration) {
    let total = plan.total_bytes();
    let tensors = segment.len() as u64;
    let rate = total as f64 / took.as_secs_f64().max(1e-9);
    let hold = if arguments.hold { "; holding it until Ctrl-C or its removal" } else { "" };
    let text = format!(
        "{}@{}: {} in {} on {} in {:.2} s ({:.2} GB/s){hold}",
        segment.name(),
        segment.version(),
        bytes(total),
        count(tensors, "tensor"),
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
        "tensors": tensors,
        "lifetime": if segment.is_kept() { "kept" } else { "owned" },
        "mutable": segment.is_mutable(),
        "uid": segment.owner(),
        "shared": segment.is_shared(),
        "seconds": took.as_secs_f64(),
        "bytes_per_second": rate,
        "pid": std::process::id(),
        "existed": false,
    });
    context.output().announce(text, &value);
}

/// Waits until a signal arrives or the name is removed.
fn hold(context: &Context, segment: &Segment, stop: &AtomicBool) -> Result<(), Failure> {
    while !stop.load(Ordering::Relaxed) {
        // The broker reports the removal. A signal does not end the wait, so its flag is polled.
        match segment.wait_withdrawn(Duration::from_millis(250)) {
            Err(Error::Timeout { .. }) => {}
            Ok(_) => {
                context.output().remark(format!("{} has been removed", segment.name()));
                break;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Returns how many bytes of a stream the broker's limit still allows.
fn limit(domain: &Domain) -> u64 {
    let Ok(status) = domain.status() else { return u64::MAX };
    let allowed = status.limits.iter().find(|(limit, _)| *limit == partywall::Limit::Bytes).map_or(u64::MAX, |l| l.1);
    allowed.saturating_sub(status.bytes.iter().map(|(_, bytes)| bytes).sum())
}
