//! `partywall trace`: writes what the processes of a domain publish, receive, submit, claim, signal and wait for, as a
//! file for <https://ui.perfetto.dev>.
//!
//! With `--json` it prints an object with `out` (the file), `events`, `arrows` (between events), `processes`, `lost`
//! (events that were not read in time) and `seconds`; on standard error if the file is standard output.

use std::{
    io::{self, BufWriter, ErrorKind as IoErrorKind},
    path::{Path, PathBuf},
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use clap::Args;
use partywall::{
    Domain, ErrorKind, Pattern,
    files::Draft,
    info::{NameInfo, Named, ObjectInfo, ObjectKind},
};
use serde_json::json;

use crate::{Context, failure::Failure, output::is_standard_output, signals, text};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Trace only topics, queues and timelines whose names match; `*` stands for any characters, also `/`, and `?` for
    /// one
    #[arg(value_name = "NAME", value_parser = Pattern::new)]
    names: Vec<Pattern>,
    /// How long to trace; Ctrl-C ends it earlier
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = parse_time)]
    seconds: Duration,
    /// The file, in Chrome's format for traces; or `-` for standard output
    #[arg(long, value_name = "FILE|-", default_value = "trace.json")]
    out: PathBuf,
    /// Replace the file if it exists
    #[arg(long)]
    force: bool,
    /// How many events to keep; later ones count as lost
    #[arg(long, value_name = "NUMBER", default_value_t = 1_000_000, value_parser = text::parse_count)]
    max_events: u64,
}

fn parse_time(argument: &str) -> Result<Duration, String> {
    match text::parse_seconds(argument)? {
        Duration::ZERO => Err(format!("{argument} is too short: use more than 0 seconds, as in 0.5")),
        time => Ok(time),
    }
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let stop = signals::cancel_flag()?;
    let domain = context.options().start(false).operator(true).connect()?;
    check_names(&domain, &arguments.names)?;
    let Arguments { names, out, force, .. } = arguments;
    let is_stream = out == Path::new("-") || is_standard_output(out);
    // Begun before anything is traced, so that a wrong name costs no time.
    let mut file =
        if is_stream { None } else { Some(Draft::create(out, *force).map_err(|error| refused(out, error))?) };
    let mut recording = domain.record_trace(usize::try_from(arguments.max_events).unwrap_or(usize::MAX));
    let start = Instant::now();
    let output = context.output();
    let output = if is_stream { output.on_standard_error() } else { output };
    output.note(format!("tracing the domain at {}; Ctrl-C ends it", domain.socket().display()));
    while start.elapsed() < arguments.seconds && !stop.load(Ordering::Relaxed) {
        recording.poll();
    }
    let took = start.elapsed().as_secs_f64();
    let trace = recording.finish(|name| names.is_empty() || names.iter().any(|pattern| pattern.matches(name)));
    let to = if is_stream { "standard output".to_owned() } else { out.display().to_string() };
    let written = match &mut file {
        Some(file) => trace.write(&mut BufWriter::new(file)),
        None => trace.write(&mut BufWriter::new(io::stdout().lock())),
    };
    match written {
        // A reader that has closed the pipe (`| head`) is not a failure.
        Err(error) if is_stream && error.kind() == IoErrorKind::BrokenPipe => {}
        written => written.map_err(|error| Failure::system(&format!("cannot write {to}"), error))?,
    }
    if let Some(file) = file {
        file.publish().map_err(|error| refused(out, error))?;
    }
    let processes = trace.processes();
    let lost = trace.lost();
    output.value(&json!({
        "out": out,
        "events": trace.events(),
        "arrows": trace.arrows(),
        "processes": processes,
        "lost": lost,
        "seconds": took,
    }));
    let what = text::count(trace.events() as u64, "event");
    let of = if processes == 1 { "1 process".to_owned() } else { format!("{processes} processes") };
    let to = if is_stream { format!("on {to}") } else { format!("in {to}") };
    output.line(format!("{what} of {of} in {took:.1} s are {to}, {lost} lost; open it at https://ui.perfetto.dev"));
    Ok(())
}

/// Refuses a name that nothing has: it is more likely to be misspelt than to appear within seconds.
fn check_names(domain: &Domain, wanted: &[Pattern]) -> Result<(), Failure> {
    if wanted.is_empty() {
        return Ok(());
    }
    let names = domain.names()?;
    let objects = domain.objects()?;
    // Older versions of a name that was removed may be in use.
    let is_traced = |name: &&NameInfo| {
        let named = name.latest.as_ref().map(|latest| Named::of(latest.control.as_ref()));
        named.is_none_or(|named| matches!(named, Named::Topic | Named::Queue))
    };
    let timelines = objects.iter().filter(|object| object.kind() == ObjectKind::Timeline).map(ObjectInfo::name);
    let there: Vec<_> = names.iter().filter(is_traced).map(|name| name.name.as_str()).chain(timelines).collect();
    match wanted.iter().find(|wanted| !there.iter().any(|name| wanted.matches(name))) {
        None => Ok(()),
        Some(unknown) => {
            let what = format!("no topic, queue or timeline matches {:?}", unknown.as_str());
            let advice = "partywall ls lists what is there; leave the names out to trace also what is created later";
            Err(Failure::new(ErrorKind::NotFound, what, advice))
        }
    }
}

fn refused(path: &Path, error: io::Error) -> Failure {
    let kind = match error.kind() {
        IoErrorKind::AlreadyExists => {
            let message = format!("{} already exists", path.display());
            let advice = "name another file with --out, or add --force to replace this one";
            return Failure::new(ErrorKind::Refused, message, advice);
        }
        IoErrorKind::NotFound => ErrorKind::NotFound,
        _ => ErrorKind::Refused,
    };
    let message = format!("cannot create {}: {error}", path.display());
    Failure::new(kind, message, "name a file in a folder that you may write to with --out")
}
