//! `partywall serve`: the broker, in the foreground or as a daemon.
//!
//! The command itself is the supervisor, which starts the broker's worker again if it dies.
//!
//! In the foreground it prints one line when it is ready, or with `--json` an object: `pid` (of the worker),
//! `supervisor` (its own pid), `socket`, `domain`, `version`, `log` (a path or null). `--background` prints the same
//! once the daemon is ready, and ends. `--check` prints `socket`, `domain`, `version`, `log`.
//!
//! In the foreground it is a service of systemd, if systemd has started it; see [`manager`].
//!
//! `--replace` has the running broker continue as this program; see [`replace`]. That broker then executes this program
//! with its own arguments, and [`Purpose`] says what for.

mod accounts;
pub(super) mod daemon;
mod manager;
mod replace;

use std::{
    os::fd::{AsFd, AsRawFd, OwnedFd, RawFd},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use clap::{Args, Command, Id};
use partywall::{ErrorKind, Gpu, Location, Place};
use partywall_broker::{
    Admission, Broker, Config, Exit, Limits, StartError, UserLimits,
    log::RotatingLog,
    memory_check::MemoryCheck,
    replacement::{Check, Purpose, execute},
    supervisor::{Supervisor, SupervisorError, Worker, exit_code},
};
use partywall_os::{
    dir::{DirAccess, Unsafe},
    supervision::LeftOpen,
};
use rustix::{
    fs::Mode,
    process::{Pid, Resource, Signal, getpid, getppid, getrlimit, kill_process, set_parent_process_death_signal},
};
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};
use tracing::Level;

use crate::{
    Context,
    failure::Failure,
    text::{parse_number, parse_seconds, parse_size},
};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Leave the terminal: return as soon as the broker is ready
    #[arg(long)]
    background: bool,
    /// Check the directory, the limits and whether another broker runs; start nothing
    #[arg(long, conflicts_with = "background")]
    check: bool,
    /// Have the running broker continue as this program, with everything open: members notice only that a call takes
    /// longer. It keeps its settings. This program first reads a copy of the broker's state, and nothing changes if it
    /// cannot continue with it
    #[arg(long, conflicts_with_all = settings())]
    replace: bool,
    /// The starter holds the lock on the socket's directory until the broker is ready. Used only with
    /// --background and by the library: the process itself becomes the daemon, and prints a failure on standard error
    #[arg(long, hide = true, requires = "background")]
    starter_holds_lock: bool,
    /// Become the daemon itself, as the command that --background starts
    #[arg(long, hide = true, requires = "background")]
    detach: bool,
    /// End when the process with this pid ends, or its thread that starts this broker; keep no log, and remove the
    /// socket's directory. Used only by `partywall lab`
    #[arg(long, value_name = "PID", hide = true, conflicts_with = "background")]
    of_a_lab: Option<i32>,
    #[command(flatten)]
    settings: Settings,
}

/// The settings of a broker, which it keeps when another program continues for it.
#[derive(Debug, Args)]
struct Settings {
    /// Admit these users as well, by number or name; may be repeated. They get only what others create as shared. The
    /// socket's directory then needs mode 0711, and clients have to name the socket
    #[arg(long, value_name = "UID", num_args = 1.., value_parser = accounts::user)]
    allow_uid: Vec<u32>,
    /// Admit the members of this group as well, by number or name, as --allow-uid does
    #[arg(long, value_name = "GID", value_parser = accounts::group)]
    group: Option<u32>,
    /// Exit after this many seconds without members and names, or never [default: 60 in the background, else never]
    #[arg(long, value_name = "SECONDS|never", value_parser = parse_idle)]
    idle_exit: Option<IdleExit>,
    /// Milliseconds after a process's exit and hang-up until it counts as dead
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = parse_number::<u64>)]
    settle_ms: u64,
    /// Seconds until the memory of a dead process is freed although its GPU work may still run, as
    /// under MPS [default: never, only by `partywall rm --unproven`]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    unproven_after: Option<Duration>,
    /// Milliseconds that a new connection has to introduce itself
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = parse_number::<u64>)]
    handshake_timeout_ms: u64,
    /// Most bytes of all versions and semaphores together: 4096, 64KiB, 512MiB, 1.5GiB, 2TiB [default: 16TiB]
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    max_bytes: Option<u64>,
    /// Most bytes of pinned memory on each NUMA node [default: --max-bytes]
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    max_pinned_bytes: Option<u64>,
    /// Most names [default: 65536]
    #[arg(long, value_name = "N", value_parser = parse_number::<u64>)]
    max_names: Option<u64>,
    /// Most file descriptors held for versions, timelines and semaphores [default: what `ulimit -Hn` leaves]
    #[arg(long, value_name = "N", value_parser = parse_number::<u64>)]
    max_fds: Option<u64>,
    /// Most members, not counting unproven ones [default: 4096, or a sixteenth of `ulimit -Hn`]
    #[arg(long, value_name = "N", value_parser = parse_members)]
    max_clients: Option<u64>,
    /// Most leases of all members on versions, timelines and semaphores [default: 262144]
    #[arg(long, value_name = "N", value_parser = parse_number::<u64>)]
    max_leases: Option<u64>,
    /// Most timelines [default: 65536]
    #[arg(long, value_name = "N", value_parser = parse_number::<u64>)]
    max_timelines: Option<u64>,
    /// Most semaphores [default: 4096]
    #[arg(long, value_name = "N", value_parser = parse_number::<u64>)]
    max_semaphores: Option<u64>,
    /// Most requests of all members that wait for names [default: 65536]
    #[arg(long, value_name = "N", value_parser = parse_number::<u64>)]
    max_waits: Option<u64>,
    /// Most bytes of each user's versions, timelines and semaphores [default: a quarter of --max-bytes for each user
    /// but the broker's]
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    max_bytes_per_uid: Option<u64>,
    /// Most bytes of each user's pinned memory on each NUMA node [default: likewise, of --max-pinned-bytes]
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    max_pinned_bytes_per_uid: Option<u64>,
    /// Most names, timelines and semaphores of each user [default: likewise, of --max-names]
    #[arg(long, value_name = "N", value_parser = parse_number::<u64>)]
    max_names_per_uid: Option<u64>,
    /// Most file descriptors for each user's versions, timelines and semaphores [default: likewise, of --max-fds]
    #[arg(long, value_name = "N", value_parser = parse_number::<u64>)]
    max_fds_per_uid: Option<u64>,
    /// Most members of each user, unproven ones among them [default: likewise, of --max-clients]
    #[arg(long, value_name = "N", value_parser = parse_members)]
    max_clients_per_uid: Option<u64>,
    /// Most leases of each user's members [default: likewise, of --max-leases]
    #[arg(long, value_name = "N", value_parser = parse_number::<u64>)]
    max_leases_per_uid: Option<u64>,
    /// Most timelines of each user [default: likewise, of --max-timelines]
    #[arg(long, value_name = "N", value_parser = parse_number::<u64>)]
    max_timelines_per_uid: Option<u64>,
    /// Most semaphores of each user [default: likewise, of --max-semaphores]
    #[arg(long, value_name = "N", value_parser = parse_number::<u64>)]
    max_semaphores_per_uid: Option<u64>,
    /// Most requests of each user's members that wait for names [default: likewise, of --max-waits]
    #[arg(long, value_name = "N", value_parser = parse_number::<u64>)]
    max_waits_per_uid: Option<u64>,
    /// Most connections at a time of each user but the broker's that are no members, for `ps`, `ls` and the like
    /// [default: 4 of 16]
    #[arg(long, value_name = "N", value_parser = parse_number::<u64>)]
    max_seats_per_uid: Option<u64>,
    /// Most bytes of one message [default: 256KiB; at least 64KiB]
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    max_message: Option<u64>,
}

/// Returns the arguments that mean nothing where another program continues for a broker.
fn settings() -> Vec<Id> {
    let settings = Settings::augment_args(Command::new("serve"));
    let settings = settings.get_arguments().map(|argument| argument.get_id().clone());
    ["background", "check"].map(Id::from).into_iter().chain(settings).collect()
}

/// How long an idle broker waits until it exits; for ever if `None`.
#[derive(Debug, Clone, Copy)]
pub(super) struct IdleExit(pub(super) Option<Duration>);

pub(super) fn parse_idle(text: &str) -> Result<IdleExit, String> {
    if text == "never" { Ok(IdleExit(None)) } else { parse_seconds(text).map(|after| IdleExit(Some(after))) }
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    // What the broker creates has the mode that it asks for, also if the umask of its starter would take away more.
    rustix::process::umask(Mode::RWXG | Mode::RWXO);
    let location = context.options().location()?;
    if arguments.replace {
        return replace::run(context, &location);
    }
    let purpose = Purpose::of_this_process();
    if let Some(Purpose::Check(check)) = purpose {
        return answer(arguments, &location, check);
    }
    if arguments.check {
        return check(context, arguments, &location);
    }
    if let Some(Purpose::CheckMemory(check)) = purpose {
        return check_memory(check);
    }
    let continues = purpose.is_some();
    if arguments.background && !continues && !arguments.detach && !arguments.starter_holds_lock {
        return daemon::start();
    }
    if !arguments.background {
        let listener = if continues { None } else { manager::listener(context.output())? };
        let served = serve(context, arguments, &location, listener, None, |ready| {
            context.output().announce(ready.text(), &ready.json());
            manager::notify(context.output(), &format!("READY=1\nSTATUS={}", ready.status()));
        });
        manager::notify(context.output(), "STOPPING=1");
        return served;
    }
    let mut starter = if continues { None } else { Some(daemon::daemonize()?) };
    let pipe = starter.as_ref().map(|starter| starter.as_fd().as_raw_fd());
    let served = serve(context, arguments, &location, None, pipe, |ready| {
        if let Some(starter) = starter.take() {
            starter.ready(&context.output().announcement(ready.text(), &ready.json()));
        }
    });
    if let Err(failure) = &served {
        match starter.take() {
            Some(starter) => daemon::report(starter, failure),
            None => tracing::error!(why = failure.message, "the broker ended"),
        }
    }
    // A daemon's standard streams have no reader.
    served.map_err(|failure| Failure::silent(failure.kind))
}

fn serve(
    context: &Context,
    arguments: &Arguments,
    location: &Location,
    listener: Option<OwnedFd>,
    starter: Option<RawFd>,
    when_ready: impl FnOnce(&ReadyMessage<'_>),
) -> Result<(), Failure> {
    let left = match Purpose::of_this_process() {
        // Before anything is opened.
        Some(Purpose::Continue(continuation)) => Some((continuation, daemon::left_open()?)),
        _ => None,
    };
    let config = config(arguments, location);
    let supervisor = match left {
        Some((continuation, left)) => Supervisor::resume(config, continuation, left, execute),
        None => Supervisor::bind(config, listener),
    };
    let mut supervisor = supervisor.map_err(failure)?;
    // Not before it is certain that no broker listens there, which would have another log then.
    let opened = if arguments.of_a_lab.is_some() { None } else { try_log(context, location) };
    let log = opened.as_ref().map(|log| log.path().to_owned());
    if let Some(opened) = opened {
        supervisor.keep_log(opened);
    }
    if let Some(lab) = arguments.of_a_lab {
        let refused = |errno| Failure::system("asking for a signal", errno);
        set_parent_process_death_signal(Some(Signal::TERM)).map_err(refused)?;
        // The lab may have been killed before the request; then no signal arrives. This one waits until the worker
        // runs.
        if Pid::as_raw(getppid()) != lab {
            kill_process(getpid(), Signal::TERM).map_err(refused)?;
        }
    }
    let worker_log = log.clone();
    let served = daemon::supervise(
        supervisor,
        |worker, left| work(worker, left, worker_log.as_deref()),
        |pid| when_ready(&ReadyMessage { pid, supervisor: std::process::id(), location, log: log.as_deref() }),
        starter,
    );
    if let Err(error) = served {
        if let Some(log) = &log {
            let _ = start_log(log);
        }
        if matches!(error, SupervisorError::CannotStart { .. } | SupervisorError::NotStarted(_)) {
            tracing::error!(%error, "the broker has not started");
            return Err(Failure::new(ErrorKind::Refused, error.to_string(), not_started()));
        }
        tracing::error!(%error, "the domain has ended");
        let advice =
            "start it again: names are lost, and mapped memory stays mapped; `partywall logs` may show the reason";
        return Err(Failure::new(ErrorKind::Refused, error.to_string(), advice));
    }
    if let (Some(lab), Some(directory)) = (arguments.of_a_lab, location.socket.parent()) {
        // Fails if the lab has removed it already, and any directory but its own if that is not empty.
        let _ =
            if is_of_lab(directory, lab) { std::fs::remove_dir_all(directory) } else { std::fs::remove_dir(directory) };
    }
    Ok(())
}

/// Returns whether a lab has made a directory for its broker and files: its name ends with the pid of the lab.
fn is_of_lab(directory: &Path, lab: i32) -> bool {
    let name = directory.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.contains(".lab-") && name.ends_with(&format!("-{lab}"))
}

/// Serves, in a process of its own, until the domain ends. Returns the exit code.
fn work(worker: Worker, left: LeftOpen, log: Option<&Path>) -> u8 {
    // The supervisor has checked that it can be written, but no file descriptor may be free.
    let logs = log.is_some_and(|log| start_log(log).is_ok());
    // A panic must not unwind: dropping the broker would close the memory that the next worker continues with.
    std::panic::set_hook(Box::new(|panic| {
        tracing::error!(%panic, "a bug: please report it");
        std::process::abort();
    }));
    let run = || -> Result<Exit, String> {
        let broker = worker.start(left).map_err(|error| error.to_string())?;
        if let Some(log) = log.filter(|_| !logs) {
            // Descriptors of the former worker are closed now.
            let _ = start_log(log);
        }
        for signal in [SIGINT, SIGTERM] {
            let stop = broker.stop_handle();
            if let Err(error) = stop.and_then(|stop| signal_hook::low_level::pipe::register(signal, stop)) {
                // The signal then kills the worker, and its supervisor ends the domain.
                tracing::warn!(signal, %error, "the broker cannot end by a signal in an orderly way");
            }
        }
        broker.run().map_err(|error| error.to_string())
    };
    let exit = run();
    match &exit {
        Ok(exit) => tracing::info!(?exit, "the broker has ended"),
        Err(error) => tracing::error!(error, "the broker cannot continue"),
    }
    exit_code(exit.ok())
}

/// Says to the broker that has executed this program whether this program can continue for it.
fn answer(arguments: &Arguments, location: &Location, check: Check) -> Result<(), Failure> {
    let answered = check.answer(&config(arguments, location), |_| ());
    answered.map(drop).map_err(|errno| Failure::system("answering the broker", errno))
}

/// Says to the broker that has executed this program whether the memory behind descriptors is lost.
fn check_memory(check: MemoryCheck) -> Result<(), Failure> {
    let place = Place::from(check.place());
    let find = |chunks: Vec<OwnedFd>| {
        let found = match place {
            Place::Gpu(gpu) => Gpu::open(gpu).and_then(|gpu| gpu.find_lost(&chunks)),
            Place::Pinned(node) => partywall::gpu::find_lost_on_node(node, &chunks),
            Place::Host => return Err("the kernel loses no memory".into()),
        };
        found.map(|lost| lost.iter().map(Option::is_some).collect()).map_err(|error| error.to_string())
    };
    let answered = check.answer(find);
    answered.map_err(|errno| Failure::system("answering the broker", errno))
}

/// Says whether a broker can start.
fn check(context: &Context, arguments: &Arguments, location: &Location) -> Result<(), Failure> {
    Broker::check(&config(arguments, location)).map_err(failure)?;
    let Location { domain, socket, .. } = location;
    let log = absolute_logs(location).into_iter().next().unwrap_or_default();
    let text = format!("a broker of domain {domain:?} can listen at {}; log in {}", socket.display(), log.display());
    let value = json!({ "socket": socket, "domain": domain, "version": partywall::VERSION, "log": log });
    context.output().announce(text, &value);
    Ok(())
}

/// Returns where the log may be. Absolute, because a daemon leaves its working directory.
fn absolute_logs(location: &Location) -> Vec<PathBuf> {
    location.logs().into_iter().map(|log| std::path::absolute(&log).unwrap_or(log)).collect()
}

/// Returns the first log that can be written, with a remark if it is not in the usual place; `None` with a remark if
/// there is none. A log that another broker writes cannot: that broker sees another directory at the path of its socket
/// (containers, `PrivateTmp=`), so the logs beside the sockets are different ones.
fn try_log(context: &Context, location: &Location) -> Option<RotatingLog> {
    let mut failed: Vec<String> = Vec::new();
    let found = absolute_logs(location).into_iter().find_map(|log| match RotatingLog::open(&log) {
        Ok(log) => Some(log),
        Err(error) => {
            failed.push(format!("{}: {error}", log.display()));
            None
        }
    });
    // The broker starts without a log too.
    if !failed.is_empty() {
        let failed = failed.join("; ");
        context.output().remark(match &found {
            Some(log) => {
                format!("the log is in {}, because another place cannot be used: {failed}", log.path().display())
            }
            None => format!("no log is written: {failed}"),
        });
    }
    found
}

/// The message of a broker that is ready.
struct ReadyMessage<'a> {
    pid: u32,
    supervisor: u32,
    location: &'a Location,
    log: Option<&'a Path>,
}

impl ReadyMessage<'_> {
    fn text(&self) -> String {
        self.about(&format!("with pid {}, supervised by pid {}, ", self.pid, self.supervisor))
    }

    /// Returns what a service manager shows for as long as the domain lives. The worker's pid would be wrong after its
    /// death, and the supervisor opens no socket to correct it while a worker shares its table of files.
    fn status(&self) -> String {
        self.about(&format!("supervised by pid {} ", self.supervisor))
    }

    fn about(&self, processes: &str) -> String {
        let log = self.log.map_or_else(|| "no log".into(), |log| format!("log in {}", log.display()));
        let Location { domain, socket, .. } = self.location;
        format!("broker of domain {domain:?} {processes}listens at {}; {log}", socket.display())
    }

    fn json(&self) -> serde_json::Value {
        json!({
            "pid": self.pid,
            "supervisor": self.supervisor,
            "socket": self.location.socket,
            "domain": self.location.domain,
            "version": partywall::VERSION,
            "log": self.log,
        })
    }
}

fn parse_members(text: &str) -> Result<u64, String> {
    match parse_number(text)? {
        members if members < 1 << 16 => Ok(members),
        members => Err(format!("a broker has at most 65535 members, not {members}")),
    }
}

fn config(arguments: &Arguments, location: &Location) -> Config {
    let settings = &arguments.settings;
    let defaults = Limits::default();
    let config = Config::new(&location.socket, &location.domain, partywall::VERSION);
    Config {
        limits: Limits {
            bytes: settings.max_bytes.unwrap_or(defaults.bytes),
            pinned: settings.max_pinned_bytes,
            names: settings.max_names.unwrap_or(defaults.names),
            fds: settings.max_fds,
            clients: settings.max_clients,
            leases: settings.max_leases.unwrap_or(defaults.leases),
            timelines: settings.max_timelines.unwrap_or(defaults.timelines),
            semaphores: settings.max_semaphores.unwrap_or(defaults.semaphores),
            waits: settings.max_waits.unwrap_or(defaults.waits),
            message: settings.max_message.map_or(defaults.message, |n| usize::try_from(n).unwrap_or(usize::MAX)),
            per_uid: UserLimits {
                bytes: settings.max_bytes_per_uid,
                pinned: settings.max_pinned_bytes_per_uid,
                names: settings.max_names_per_uid,
                fds: settings.max_fds_per_uid,
                clients: settings.max_clients_per_uid,
                leases: settings.max_leases_per_uid,
                timelines: settings.max_timelines_per_uid,
                semaphores: settings.max_semaphores_per_uid,
                waits: settings.max_waits_per_uid,
                operators: settings.max_seats_per_uid,
            },
            ..defaults
        },
        admission: Admission { uids: settings.allow_uid.iter().copied().collect(), group: settings.group },
        idle_exit: match settings.idle_exit {
            Some(IdleExit(after)) => after,
            None if arguments.background => config.idle_exit,
            None => None,
        },
        settle: Duration::from_millis(settings.settle_ms),
        unproven_after: settings.unproven_after,
        handshake_timeout: Duration::from_millis(settings.handshake_timeout_ms),
        checks_memory: true,
        starter_holds_lock: arguments.starter_holds_lock,
        ..config
    }
}

/// Writes the events of `tracing` to the log.
fn start_log(path: &Path) -> std::io::Result<()> {
    let log = RotatingLog::open(path)?;
    let level = std::env::var("PARTYWALL_LOG").ok().filter(|level| !level.is_empty());
    let chosen = level.as_deref().map(str::parse);
    let refused = matches!(chosen, Some(Err(_)));
    let most = chosen.and_then(Result::ok).unwrap_or(Level::INFO);
    let subscriber = tracing_subscriber::fmt().with_max_level(most).with_ansi(false).with_writer(Arc::new(log));
    let _ = subscriber.try_init();
    if refused {
        tracing::warn!(level, "PARTYWALL_LOG is not a level (error, warn, info, debug, trace): using info");
    }
    Ok(())
}

/// Returns the advice for a broker that has not begun to serve.
fn not_started() -> String {
    // A limit of the shell or the unit is a frequent reason, and an unusual setting.
    let limits = [(Resource::As, "ulimit -v"), (Resource::Fsize, "ulimit -f"), (Resource::Data, "ulimit -d")];
    let in_force = limits.iter().filter_map(|(resource, name)| {
        let limit = getrlimit(*resource).current?;
        Some(format!("`{name}` ({} KiB)", limit / 1024))
    });
    let in_force: Vec<_> = in_force.collect();
    let limits = match &in_force[..] {
        [] => "`partywall doctor` checks the limits of this machine".to_owned(),
        in_force => format!("raise what limits this process: {}", in_force.join(", ")),
    };
    format!("{limits}; then start the broker again: it had not begun to serve, so nothing is lost")
}

/// Returns the failure of a broker that cannot start. Each error has its class, entry and advice in one row.
fn failure(error: StartError) -> Failure {
    let (kind, entry, advice) = match &error {
        StartError::Directory { path, why } => (ErrorKind::Unreachable, None, directory_advice(path, why)),
        StartError::Locked { .. } => (ErrorKind::Refused, None, "end the process that starts or ends a broker at that path, then try again".into()),
        StartError::AlreadyRunning { .. } => (ErrorKind::Refused, Some("socket-exists"), "use it, end it with `partywall stop`, or name another --domain".into()),
        StartError::NotASocket { path, .. } => (ErrorKind::Refused, None, format!("remove {}, or name another --socket", path.display())),
        StartError::Inherited { .. } => (ErrorKind::Refused, Some("socket-not-taken"), "set ListenStream= of the socket unit to the socket that `partywall status` prints, or --socket to the path of ListenStream=".into()),
        StartError::TooFewFiles { needed, room, .. } => {
            let fewer = if *room > 0 { format!(", or serve with --max-clients {room}") } else { String::new() };
            let limit = "the hard limit of open files (`ulimit -Hn`, LimitNOFILE=, --ulimit nofile=)";
            (ErrorKind::Refused, Some("too-few-files"), format!("raise {limit} to {needed}{fewer}"))
        }
        StartError::Limit { option, .. } => (ErrorKind::Usage, Some("bad-limit"), format!("give {option} another number, or leave it out")),
        StartError::PathTooLong { .. } => (ErrorKind::Usage, Some("path-too-long"), "name a shorter --socket, or shorten $XDG_RUNTIME_DIR (else $TMPDIR), where the default socket is".into()),
        _ => (ErrorKind::Refused, None, not_started()),
    };
    Failure::new(kind, error.to_string(), advice).with_entry(entry)
}

fn directory_advice(path: &Path, why: &Unsafe) -> String {
    match why {
        Unsafe::NoParent(parent) => {
            let make = format!("create it with `mkdir -p {}`", parent.display());
            format!("{make}, or check --socket, PARTYWALL_SOCKET and XDG_RUNTIME_DIR")
        }
        Unsafe::Mode { wanted: DirAccess::Passable, .. } => {
            format!("let others pass through it (chmod 711 {}), or name another --socket", path.display())
        }
        Unsafe::Mode { .. } => {
            format!("give only your user access (chmod 700 {}), or name another --socket", path.display())
        }
        _ => "name a --socket in a directory that belongs to this user; it is made if its parent exists".into(),
    }
}
