//! The clients of one MPS server, which share its context on the GPU and fail together.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use partywall::cuda::CuResult;
use partywall_harness::mps;

use super::legacy::{Legacy, open};
use super::memory::read;
use super::neighbours::{self, At, Victim, ourselves};
use super::{BYTES, LIMIT, OK};
use crate::tests::stage::{Check, Line, Peer};
use crate::tests::world::say;

/// An MPS control daemon for one test. Dropping it ends the daemon and its servers; their clients must have ended.
pub(crate) struct Mps {
    /// Taken when it is dropped.
    keeper: Option<Peer>,
    directory: PathBuf,
}

impl Mps {
    pub(crate) fn start() -> Result<Self, String> {
        let directory = std::env::temp_dir().join(format!("partywall-mps-{}", std::process::id()));
        let mut mps = Self { keeper: None, directory };
        let mut command = mps.client();
        // In its own group, so that it outlives a killed fact and can then end the daemon. Clients count the GPUs that
        // the daemon sees.
        command.env(mps::LOGS, mps.directory.join("log")).env_remove("CUDA_VISIBLE_DEVICES").process_group(0);
        mps.keeper.insert(Peer::start_with("keeper", command)?).expect("started")?;
        // The first client starts a server, and confirms that it is a client.
        let mut first = neighbours::start(mps.client())?;
        neighbours::enough(&mut first)?;
        first.finish()?;
        Ok(mps)
    }

    /// Returns the variable that makes a process a client, and its value.
    pub(crate) fn environment(&self) -> (&'static str, &Path) {
        (mps::PIPES, &self.directory)
    }

    /// Starts this program as a client.
    pub(super) fn client(&self) -> Command {
        let mut command = ourselves();
        let (variable, directory) = self.environment();
        command.env(variable, directory);
        command
    }
}

impl Drop for Mps {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.keeper.take().map(Peer::finish) {
            say(&error);
        }
    }
}

/// Runs the daemon until the other end of the line is closed, waits until it and its servers are gone, and sends their
/// logs.
pub(super) fn keeper(_: &Check, line: &Line) -> Result<(), String> {
    let directory = |variable| std::env::var_os(variable).map(PathBuf::from).ok_or(format!("there is no {variable}"));
    let until = || line.send("started").and_then(|()| line.speaks_within(LIMIT)).map(drop);
    say(&mps::keep(&directory(mps::PIPES)?, &directory(mps::LOGS)?, until)?);
    Ok(())
}

/// Kills a client in an endless kernel. Returns the results of two other clients.
fn death_in_an_endless_kernel(mps: &Mps) -> Result<[CuResult; 2], String> {
    let mut neighbours = [neighbours::start(mps.client())?, neighbours::start(mps.client())?];
    Victim::start(At::AnEndlessKernel, mps.client())?.peer.kill()?;
    let [first, second] = &mut neighbours;
    Ok([neighbours::last_answer(first)?, neighbours::last_answer(second)?])
}

pub(super) fn under_mps_a_death_in_an_endless_kernel_faults_the_other_clients(check: &Check) -> Result<(), String> {
    for code in death_in_an_endless_kernel(&Mps::start()?)? {
        check.same(&format!("{code} is the end of a neighbour's context"), code.is_sticky(), true);
    }
    Ok(())
}

pub(super) fn under_mps_a_fault_stays_among_the_clients(check: &Check) -> Result<(), String> {
    let mps = Mps::start()?;
    check.start()?;
    let address = check.alloc(BYTES)?;
    check.fill(address, BYTES)?;
    death_in_an_endless_kernel(&mps)?;
    check.answers("work of a process that is no client", check.double(address, BYTES)?, OK);
    check.same("and its bytes", check.holds_pattern(address, BYTES, 2)?, true);
    Ok(())
}

pub(super) fn under_mps_a_death_outside_of_kernels_harms_no_other_process(check: &Check) -> Result<(), String> {
    let mps = Mps::start()?;
    neighbours::harms_nobody(check, At::Nothing, || mps.client())?;
    neighbours::harms_nobody(check, At::AWait, || mps.client())
}

pub(super) fn under_mps_polling_kernels_take_turns(_: &Check) -> Result<(), String> {
    let mps = Mps::start()?;
    neighbours::take_turns(|| mps.client())
}

pub(super) fn under_mps_memory_is_shared_between_clients(check: &Check) -> Result<(), String> {
    let mps = Mps::start()?;
    let mut owner = Peer::start_with("owner_of_exported_memory", mps.client())?;
    read(mps.client(), "0", owner.hear()?.descriptor()?)?;
    owner.finish()?;
    let Legacy { owner, whole, .. } = Legacy::start_with(mps.client())?;
    check.same("a legacy handle", open(mps.client(), whole)?, OK.to_string());
    owner.finish()
}

pub(super) fn under_mps_memory_is_shared_with_other_processes(_: &Check) -> Result<(), String> {
    let mps = Mps::start()?;
    let mut client = Peer::start_with("owner_of_exported_memory", mps.client())?;
    read(ourselves(), "0", client.hear()?.descriptor()?)?;
    client.finish()?;
    let mut other = Peer::start("owner_of_exported_memory")?;
    read(mps.client(), "0", other.hear()?.descriptor()?)?;
    other.finish()
}
