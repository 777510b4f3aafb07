//! The memory that another process or another mapping costs, compared with a private copy.

use partywall_measure::Unit;

use super::{Setting, cases, peer::Order};
use crate::prelude::*;

/// The number of processes that are counted for each size.
const PROCESSES: usize = 3;

/// Additional mappings of each process. Several are counted, because some share a page of host memory.
const MAPPINGS: u64 = 64;

/// The segment.
const COUNTED: &str = "counted";

pub(crate) fn run(setting: &Setting<'_>) -> Result<(), Failure> {
    let mut owner = setting.peer()?;
    // Every second size: the counts do not depend on the size, and a process takes long to start on a GPU.
    for size in setting.sizes("memory overhead", 1, 1).into_iter().step_by(2) {
        owner.ask::<()>(Order::Commit { name: COUNTED.into(), bytes: size, mutable: false })?;
        by_size(setting, size)?;
        owner.ask::<()>(Order::Free)?;
    }
    owner.end();
    Ok(())
}

fn by_size(setting: &Setting<'_>, size: u64) -> Result<(), Failure> {
    let free = || -> Result<u64, Failure> {
        let Some(gpu) = &setting.gpu else { return Ok(0) };
        Ok(gpu.context().memory_info().doing("asking for the free memory")?.free)
    };
    let [mut host_process, mut host_mapping, mut gpu_process, mut gpu_mapping] = [(); 4].map(|()| Vec::new());
    for _ in 0..PROCESSES {
        let before = free()?;
        let mut peer = setting.peer()?;
        let mut open = || peer.ask::<u64>(Order::Open { name: COUNTED.into(), bytes: size });
        // A process creates its context when it first maps memory.
        let with_one = open()?;
        let free_with_one = free()?;
        let with_more = (0..MAPPINGS).map(|_| open()).last().transpose()?.unwrap_or(with_one);
        let free_with_more = free()?;
        let each = |more: u64| more as f64 / MAPPINGS as f64;
        host_process.push(with_one as f64);
        host_mapping.push(each(with_more.saturating_sub(with_one)));
        gpu_process.push(before.saturating_sub(free_with_one) as f64);
        gpu_mapping.push(each(free_with_one.saturating_sub(free_with_more)));
        peer.end();
    }
    let case = cases(Unit::Bytes, size, "memory that a further process, and a further mapping, takes");
    setting.count(case("private host memory of a further process"), &host_process)?;
    setting.count(case("private host memory of a further mapping"), &host_mapping)?;
    if setting.gpu.is_some() {
        setting.count(case("GPU memory of a further process, with its context"), &gpu_process)?;
        setting.count(case("GPU memory of a further mapping"), &gpu_mapping)?;
    }
    setting.count(case("a copy of its own instead"), &[size as f64])
}
