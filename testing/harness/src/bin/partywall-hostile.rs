//! What others notice of a client that misbehaves: their calls, beside one way of it or beside `nobody`. The benchmark
//! `hostile` starts this program, which prints `ready`, reads requests such as `50 round trip`, and answers each with
//! that many lines of microseconds.
//!
//! The kernel does not apply its limits of descriptors to root. If this program runs as root, it starts itself again as
//! another user, from copies of the programs that this user may read.
#![forbid(unsafe_code)]

use std::{
    env,
    error::Error,
    fs::{self, Permissions},
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::Path,
    process::{Child, Command, Stdio},
    time::Instant,
};

use partywall::{DType, Domain, Place};
use partywall_harness::{
    Sandbox, binary, copy_program,
    hostile::{BIG, Hostile},
};
use rustix::process::{Signal, geteuid, set_parent_process_death_signal};

type Failure = Box<dyn Error>;

/// A user without any files or privileges.
const NOBODY: u32 = 65_534;

/// The way to misbehave of no client.
const NONE: &str = "nobody";

/// The argument of the process that misbehaves.
const PLAY: &str = "--play";

/// The segment that others open.
const SMALL: &str = "small";

/// The descriptors of the segment that [`Hostile::OpensAndNeverReads`] opens.
const CHUNKS: usize = 100;

fn main() -> Result<(), Failure> {
    let arguments: Vec<_> = env::args().skip(1).collect();
    // A process that misbehaves, or that another user runs, must not outlive the one that started it.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [PLAY, way, socket] => play(way, socket.as_ref()),
        [way] if geteuid().is_root() => again_as_nobody(way),
        [way] => measure(way),
        _ => Err(format!("usage: partywall-hostile {NONE}|WAY; ways: {:?}", Hostile::ALL.map(Hostile::name)).into()),
    }
}

fn again_as_nobody(way: &str) -> Result<(), Failure> {
    let readable = Permissions::from_mode(0o755);
    let copies = tempfile::Builder::new().prefix("pw-hostile").permissions(readable).tempdir_in("/tmp")?;
    let ours = copies.path().join("partywall-hostile");
    let theirs = copies.path().join("partywall");
    for (from, to) in [(env::current_exe()?, &ours), (fs::canonicalize(binary())?, &theirs)] {
        copy_program(&from, to);
    }
    let mut command = Command::new(ours);
    command.arg(way).env("PARTYWALL_BIN", theirs).env("TMPDIR", "/tmp").current_dir("/tmp");
    let status = command.uid(NOBODY).gid(NOBODY).status()?;
    if status.success() { Ok(()) } else { Err(format!("as another user: {status}").into()) }
}

/// Starts a broker and one client that misbehaves, and makes calls as standard input asks for them.
fn measure(way: &str) -> Result<(), Failure> {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let builder = domain.create(BIG, Place::Host).chunk_bytes(256).kept(true);
    let builder = (0..CHUNKS).fold(builder, |builder, at| builder.tensor(&format!("{at}"), DType::U8, &[256]));
    builder.allocate()?.commit()?.release()?;
    let builder = domain.create(SMALL, Place::Host).tensor("x", DType::U8, &[4096]).kept(true);
    builder.allocate()?.commit()?.release()?;
    let mut hostile = if way == NONE { None } else { Some(start(way, &sandbox.socket())?) };
    let mut out = io::stdout();
    writeln!(out, "ready")?;
    for request in io::stdin().lines() {
        let request = request?;
        let (count, call) = request.split_once(' ').ok_or("a request has a number and a call")?;
        for _ in 0..count.parse::<usize>()? {
            writeln!(out, "{}", sample(&sandbox, &domain, call)?)?;
        }
    }
    if let Some(hostile) = &mut hostile {
        hostile.kill()?;
        hostile.wait()?;
    }
    Ok(())
}

/// Starts a process that misbehaves, and waits until it has begun.
fn start(way: &str, socket: &Path) -> Result<Child, Failure> {
    let mut child = player(way, socket).stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let mut begun = String::new();
    BufReader::new(child.stdout.as_mut().ok_or("no output")?.take(64)).read_line(&mut begun)?;
    if begun.is_empty() { Err(format!("{way}: it has ended: {}", child.wait()?).into()) } else { Ok(child) }
}

fn player(way: &str, socket: &Path) -> Command {
    // The file may have been removed since.
    let mut command = Command::new("/proc/self/exe");
    command.args([PLAY, way]).arg(socket);
    command
}

/// Returns the microseconds of a call.
fn sample(sandbox: &Sandbox, domain: &Domain, call: &str) -> Result<f64, Failure> {
    let start = Instant::now();
    let connected = match call {
        "round trip" => domain.ping().map(|()| None)?,
        "connect" => Some(Domain::options().socket(sandbox.socket()).start(false).connect()?),
        "open and release" => domain.opener(SMALL).open()?.release().map(|()| None)?,
        other => return Err(format!("{other:?} is no call").into()),
    };
    let elapsed = start.elapsed();
    drop(connected);
    Ok(elapsed.as_secs_f64() * 1e6)
}

fn play(way: &str, socket: &Path) -> Result<(), Failure> {
    let found = Hostile::named(way).ok_or_else(|| format!("{way:?} is no way to misbehave"))?;
    let begun = || {
        let _ = writeln!(io::stdout(), "begun");
    };
    found.play(socket, begun, || player(way, socket))
}
