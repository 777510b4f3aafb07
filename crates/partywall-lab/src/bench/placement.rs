//! The processors on which the two sides of a round trip run.
//!
//! Without a placement the scheduler puts them on one processor or on two by chance, and keeps them there for a while.
//! A round trip between two of them wakes an idle processor twice, which takes ten times as long as all the rest in a
//! virtual machine: a case and its floor compare only if both have the same placement.

use std::fs;

use partywall_measure::{Case, Failure};
use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

/// A placement of this thread and its peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Placement {
    /// All on one processor, which shows the cost of the calls themselves.
    OneProcessor,
    /// This thread on one processor, its peers on another, which includes the cost of waking a processor.
    TwoProcessors,
    /// Any processors, as the scheduler decides.
    Free,
}

/// A placement of this thread. Dropping it ends the placement; its peers keep theirs.
#[derive(Debug)]
pub(crate) struct Placed(CpuSet);

impl Placement {
    /// Places this thread, and all threads of the processes `peers`. `None` if there is only one processor for two.
    pub(crate) fn apply(self, peers: &[u32]) -> Result<Option<Placed>, Failure> {
        let allowed = sched_getaffinity(None)?;
        let Some((ours, theirs)) = self.sides(allowed) else { return Ok(None) };
        for peer in peers {
            place(*peer, &theirs)?;
        }
        sched_setaffinity(None, &ours)?;
        Ok(Some(Placed(allowed)))
    }

    /// Places all threads of two processes, as if `first` were this thread. `false` if there is only one processor for
    /// two.
    pub(crate) fn apply_to(self, first: u32, second: u32) -> Result<bool, Failure> {
        let Some((one, other)) = self.sides(sched_getaffinity(None)?) else { return Ok(false) };
        place(first, &one)?;
        place(second, &other)?;
        Ok(true)
    }

    /// Returns the processors of each side, from the allowed ones.
    fn sides(self, allowed: CpuSet) -> Option<(CpuSet, CpuSet)> {
        let mut processors = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).map(|cpu| {
            let mut only = CpuSet::new();
            only.set(cpu);
            only
        });
        match (self, processors.next(), processors.next()) {
            (Self::Free, ..) => Some((allowed, allowed)),
            (Self::OneProcessor, Some(one), _) => Some((one, one)),
            (Self::TwoProcessors, Some(one), Some(other)) => Some((one, other)),
            _ => None,
        }
    }

    /// Returns `case` with the placement among its parameters.
    pub(crate) fn of(self, case: Case) -> Case {
        case.parameter(
            "on",
            match self {
                Self::OneProcessor => "one processor",
                Self::TwoProcessors => "two processors",
                Self::Free => "any processor",
            },
        )
    }
}

/// Places all threads that a process has now.
fn place(process: u32, on: &CpuSet) -> Result<(), Failure> {
    for task in fs::read_dir(format!("/proc/{process}/task"))? {
        let thread: i32 = task?.file_name().to_string_lossy().parse()?;
        sched_setaffinity(Pid::from_raw(thread), on)?;
    }
    Ok(())
}

impl Drop for Placed {
    fn drop(&mut self) {
        // These processors were allowed before. If this fails, later cases are measured with the wrong placement.
        let _ = sched_setaffinity(None, &self.0);
    }
}
