//! iceoryx2, a rival of topics: a separate program (`peers/iceoryx2`), which cargo builds when a subject needs
//! it. `PARTYWALL_ICEORYX2` names a built program, for machines without cargo.

use std::{
    cell::RefCell,
    collections::VecDeque,
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use partywall_measure::{Failure, Sampler, Unit};
use tempfile::TempDir;

use crate::bench::{placement::Placement, program::Program};

const MANIFEST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/peers/iceoryx2/Cargo.toml");
const TARGET: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/iceoryx2");
const BINARY: &str = "release/partywall-peer-iceoryx2";

/// The program.
#[derive(Debug)]
pub(crate) struct Iceoryx2 {
    binary: PathBuf,
}

/// How its two processes exchange messages.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Mode {
    /// Both sides poll for messages.
    Look,
    /// Both sides wait for messages, in turn.
    Exchange,
    /// One of them sleeps.
    Wake,
}

/// Two of its processes that hand over to each other. Dropping this ends them.
#[derive(Debug)]
pub(crate) struct Twins {
    programs: RefCell<[Program; 2]>,
    _folder: TempDir,
}

impl Iceoryx2 {
    /// Returns the built program, or builds it with cargo, which takes minutes the first time.
    pub(crate) fn build() -> Result<Self, Failure> {
        if let Some(binary) = env::var_os("PARTYWALL_ICEORYX2") {
            return Ok(Self { binary: binary.into() });
        }
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["build", "--release", "--locked", "--quiet", "--manifest-path", MANIFEST, "--target-dir", TARGET]);
        let output =
            cargo.stdin(Stdio::null()).output().map_err(|error| format!("iceoryx2: no cargo here: {error}"))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            let why = said.lines().find(|line| line.starts_with("error")).unwrap_or_default();
            return Err(format!("iceoryx2 cannot be built ({}): {why}", output.status).into());
        }
        Ok(Self { binary: Path::new(TARGET).join(BINARY) })
    }

    /// Starts two processes, each with the given number of subscribers of the other, and waits until they have found
    /// each other.
    pub(crate) fn start(&self, mode: Mode, subscribers: usize) -> Result<Twins, Failure> {
        let folder = tempfile::Builder::new().prefix("partywall-bench").tempdir()?;
        let mode = match mode {
            Mode::Look => "look",
            Mode::Exchange => "exchange",
            Mode::Wake => "wake",
        };
        let start = |side| {
            let mut command = Command::new(&self.binary);
            command.arg(folder.path()).args([mode, &subscribers.to_string(), side]);
            Program::spawn(format!("iceoryx2 {mode} {subscribers} {side}"), &mut command)
        };
        let mut programs = [start("first")?, start("second")?];
        for program in &mut programs {
            program.await_ready()?;
        }
        Ok(Twins { programs: RefCell::new(programs), _folder: folder })
    }
}

impl Twins {
    /// Places the processes; returns `false` if there are not enough processors.
    pub(crate) fn place(&self, placement: Placement) -> Result<bool, Failure> {
        let [first, second] = &*self.programs.borrow();
        placement.apply_to(first.pid(), second.pid())
    }

    /// Returns a sampler of the processes, which takes `batch` samples at a time.
    pub(crate) fn sampler(&self, unit: Unit, batch: usize) -> Sampler<'_> {
        let mut taken = VecDeque::new();
        Box::new(move || {
            if taken.is_empty() {
                let mut programs = self.programs.borrow_mut();
                for program in &mut *programs {
                    program.ask(batch)?;
                }
                taken = programs[0].answers(batch)?;
                programs[1].answers(batch)?;
            }
            let nanoseconds: f64 = taken.pop_front().ok_or("no samples were asked for")?;
            Ok(Unit::Nanoseconds.convert(nanoseconds, unit)?)
        })
    }
}
