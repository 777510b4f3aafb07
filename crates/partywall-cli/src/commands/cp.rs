//! `partywall cp`. With `--json` the members of `put`, and `source` and `source_version`.

use std::time::{Duration, Instant};

use clap::Args;
use partywall::{Address, DeviceChoice, ErrorKind, files::default_threads};
use serde_json::json;

use super::put::{bad_name, committed, exists};
use crate::{
    Context, device,
    failure::Failure,
    progress, signals,
    text::{parse_seconds, parse_threads},
};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The segment to copy, and its version (the latest by default)
    #[arg(value_name = "NAME[@V]")]
    source: String,
    /// The name of the copy: letters, digits and `._-/`
    name: String,
    /// Where the memory is: auto (the first GPU, else host memory), host, pinned, pinned:N, cuda, cuda:N, or a GPU's
    /// UUID
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: DeviceChoice,
    /// Do nothing if the name already exists; this is not a failure
    #[arg(long)]
    if_absent: bool,
    /// Allow processes to write the copy after the commit
    #[arg(long)]
    mutable: bool,
    /// Let processes of other users read it, where the broker admits them (`serve --allow-uid`)
    #[arg(long, conflicts_with = "mutable")]
    shared: bool,
    /// Threads that copy where no GPU does [default: one per CPU, at most 8]
    #[arg(long, value_name = "N", value_parser = parse_threads)]
    threads: Option<u16>,
    /// Wait this long for a source that does not exist yet
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    wait: Option<Duration>,
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let source: Address = arguments.source.parse()?;
    if source.tensor().is_some() {
        let message = format!("{} names one tensor, and a copy has all tensors of a segment", arguments.source);
        let advice = format!("partywall cp {} {}", source.name(), arguments.name);
        return Err(Failure::new(ErrorKind::Usage, message, advice));
    }
    let command = format!("cp {}", arguments.source);
    partywall::check_name(&arguments.name).map_err(|error| bad_name(&command, &arguments.name, error))?;
    let wait = arguments.wait.unwrap_or_default();
    // A process that waits for a name may be the first one in the domain, so it starts a broker.
    let domain = context.options().start(!wait.is_zero()).connect()?;
    let place = device::place(context.output(), arguments.device)?;
    let threads = arguments.threads.map_or_else(default_threads, usize::from);
    let put = domain.put(&arguments.name, place).kept(true).mutable(arguments.mutable).shared(arguments.shared);
    let put = put.if_absent(arguments.if_absent).threads(threads);
    if let Some(error) = put.check().err() {
        return exists(context, arguments.if_absent, error);
    }
    let (source, _) = domain.open_address(&source, wait)?;
    let cancel = signals::cancel_flag()?;
    let start = Instant::now();
    let copied = {
        let progress = progress::of_bytes(context.output(), &arguments.name, source.tensor_bytes());
        let add = |bytes| progress.inc(bytes);
        put.progress(&add).cancel(&cancel).segment(&source)
    };
    let segment = match copied {
        Ok(segment) => segment,
        Err(error) => return exists(context, arguments.if_absent, error),
    };
    let (text, mut value) = committed(&segment, start.elapsed());
    value["source"] = json!(source.name());
    value["source_version"] = json!(source.version());
    context.output().announce(format!("{}@{} → {text}", source.name(), source.version()), &value);
    segment.release()?;
    Ok(source.release()?)
}
