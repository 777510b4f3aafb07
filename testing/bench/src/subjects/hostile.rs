//! What others notice of a client that misbehaves: their calls, beside each way of it in turn and beside none.
//!
//! The kernel does not apply its limits of descriptors to root. If this program runs as root, a broker of its own and
//! all clients run as another user, from copies of the programs that this user may read.

use std::{
    cell::RefCell,
    fs::{self, Permissions},
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::Path,
    process::Command,
};

use partywall::{DType, Domain, Place};
use partywall_harness::hostile::{BIG, Hostile};
use partywall_measure::{Case, Comparison, Failure, Sampler, Unit};
use tempfile::TempDir;

use crate::{
    bench::{Bench, clocked, microseconds},
    broker::{self, Broker, connect},
    process::{Line, Process},
    role,
};

/// A user without any files or privileges.
const NOBODY: u32 = 65_534;

/// The calls that are measured.
const CALLS: [&str; 3] = ["round trip", "open and release", "connect"];

/// The segment that others open.
const SMALL: &str = "small";

/// The descriptors of the segment that [`Hostile::OpensAndNeverReads`] opens.
const CHUNKS: usize = 100;

/// Samples that are asked for together.
const BLOCK: usize = 50;

pub(super) fn run(bench: &mut Bench, _: &Broker) -> Result<(), Failure> {
    let program = Program::of_an_unprivileged_user()?;
    for way in std::iter::once("nobody").chain(Hostile::ALL.map(Hostile::name)) {
        let others = RefCell::new(Process::start(program.command(role::BESIDE).arg(way))?);
        let said = others.borrow_mut().receive()?;
        if said != "begun" {
            return Err(format!("beside {way}: {said}").into());
        }
        for call in CALLS {
            let case = Case::new(call, Unit::Microseconds).parameter("beside", way);
            let comparison = Comparison::new(case, sampler(&others, call)).goal("<= 1 ms".parse()?);
            let plan = bench.plan(2_000).block(BLOCK);
            bench.run(comparison, plan)?;
        }
        others.into_inner().finish()?;
    }
    Ok(())
}

/// Asks for a block of samples at a time, so that the process does not sleep before each.
fn sampler<'a>(others: &'a RefCell<Process>, call: &'a str) -> Sampler<'a> {
    let mut taken = Vec::new();
    Box::new(move || {
        if taken.is_empty() {
            let mut others = others.borrow_mut();
            others.send(call)?;
            let answer = others.receive()?;
            taken = answer.split(' ').map(str::parse).collect::<Result<Vec<f64>, _>>()?;
        }
        taken.pop().ok_or_else(|| "no sample was taken".into())
    })
}

/// This program and the broker's, as a user to whom the kernel applies its limits.
struct Program {
    /// Copies for another user, if this one is root.
    copies: Option<TempDir>,
}

impl Program {
    fn of_an_unprivileged_user() -> Result<Self, Failure> {
        if !rustix::process::geteuid().is_root() {
            return Ok(Self { copies: None });
        }
        let readable = Permissions::from_mode(0o755);
        let copies = tempfile::Builder::new().prefix("partywall-bench").permissions(readable).tempdir_in("/tmp")?;
        fs::copy(std::env::current_exe()?, copies.path().join("partywall-bench"))?;
        fs::copy(broker::binary()?, copies.path().join("partywall"))?;
        Ok(Self { copies: Some(copies) })
    }

    fn command(&self, role: &str) -> Command {
        let Some(copies) = &self.copies else { return role::again(role) };
        let mut command = Command::new(copies.path().join("partywall-bench"));
        command.args([role::FLAG, role]).env("PARTYWALL_BIN", copies.path().join("partywall"));
        command.env("TMPDIR", "/tmp").current_dir("/tmp").uid(NOBODY).gid(NOBODY);
        command
    }
}

/// The role of the other clients: starts a broker and one client that misbehaves, and makes calls as the line asks for
/// them.
pub(crate) fn beside(way: &str) -> Result<(), Failure> {
    let mut line = Line::of_this_process()?;
    let broker = Broker::start()?;
    let domain = broker.connect()?;
    let builder = domain.create(BIG, Place::Host).chunk_bytes(256).kept(true);
    let builder = (0..CHUNKS).fold(builder, |builder, at| builder.tensor(&format!("{at}"), DType::U8, &[256]));
    builder.allocate()?.commit()?.release()?;
    let builder = domain.create(SMALL, Place::Host).tensor("x", DType::U8, &[4096]).kept(true);
    builder.allocate()?.commit()?.release()?;
    // Ends before the broker.
    let mut hostile = None;
    if way != "nobody" {
        let mut command = role::again(role::HOSTILE);
        let process = hostile.insert(Process::start(command.arg(way).arg(broker.socket()))?);
        process.receive()?;
    }
    line.send("begun")?;
    while let Some(call) = line.receive(None)? {
        let samples = (0..BLOCK).map(|_| sample(&broker, &domain, &call)).collect::<Result<Vec<_>, Failure>>()?;
        line.send(samples.iter().map(f64::to_string).collect::<Vec<_>>().join(" "))?;
    }
    if let Some(hostile) = hostile {
        hostile.kill()?;
    }
    broker.stop()
}

fn sample(broker: &Broker, domain: &Domain, call: &str) -> Result<f64, Failure> {
    let (elapsed, connected) = match call {
        "round trip" => clocked(|| domain.ping().map(|()| None))?,
        "connect" => clocked(|| connect(broker.socket()).map(Some))?,
        _ => clocked(|| domain.opener(SMALL).open()?.release().map(|()| None))?,
    };
    drop(connected);
    Ok(microseconds(elapsed))
}

/// The role of the client that misbehaves.
pub(crate) fn misbehave(way: &str, socket: &Path) -> Result<(), Failure> {
    let line = Line::of_this_process()?;
    let way = Hostile::named(way).ok_or("no such way to misbehave")?;
    let begun = || line.send("begun").unwrap_or_default();
    let again = || {
        let mut command = role::again(role::HOSTILE);
        command.arg(way.name()).arg(socket);
        command
    };
    way.play(socket, begun, again)
}
