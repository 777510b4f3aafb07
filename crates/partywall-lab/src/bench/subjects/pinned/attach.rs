//! Attaching pinned memory that another process has committed, against the driver's own calls on the same file
//! descriptors (import, reserve, map, set access), and against a memfd that the process maps and registers
//! (`cuMemHostRegister`).

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    thread,
};

use partywall::{
    Access, Segment,
    cuda::{HostRegistration, experiment::NodeAttachment, kernels::expected},
};
use partywall_measure::{Case, Comparison, Failure, Plan, Sampler, Unit};
use partywall_os::{map::SharedMap, memfd::Draft};

use super::Setting;
use crate::{
    bench::{Bench, handout, samplers::Half, size, subjects::gpu_open},
    broker::Broker,
};

/// The name of the rival, to which goals refer.
const REGISTERED: &str = "map a memfd and register it";

/// Sizes in units of the setting, and how many samples are taken of each: the largest takes seconds a sample.
const SIZES: [(u64, usize); 3] = [(1, 20), (8, 5), (32, 3)];

/// The users of the memory. The rival always serves both.
const USERS: [(&str, Access); 3] =
    [("the GPU", Access::Gpu), ("the CPU", Access::Cpu), ("the GPU and the CPU", Access::Both)];

pub(crate) fn run(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let setting = Setting::new(bench, broker)?;
    for (units, samples) in SIZES {
        let bytes = units * setting.unit;
        // Both memories at once, so that the two take turns.
        if setting.fits(bench, &format!("attaching {}", size(bytes)), 2 * bytes) {
            let plan = Plan::new(bench.fewer(samples).max(3)).warm_up(1).block(1);
            of_size(bench, broker, &setting, bytes, plan)?;
        }
    }
    Ok(())
}

fn of_size(bench: &Bench<'_>, broker: &Broker, setting: &Setting, bytes: u64, plan: Plan) -> Result<(), Failure> {
    let Setting { domain, gpu, node, .. } = setting;
    let name = format!("pinned.{bytes}");
    gpu_open::commit(bench, broker, &name, setting.place(), TENSORS, bytes / TENSORS)?;
    let driver = gpu.context().driver();
    let chunks = handout::chunks(broker.socket(), &name, driver.is_simulated())?;
    let memfd = touched(bytes)?;
    for (users, access) in USERS {
        let case =
            |what: &str| Case::new(what, Unit::Microseconds).parameter("size", size(bytes)).parameter("for", users);
        let ours = || -> Sampler<'_> {
            Half::Opening.sampler(
                || Ok(domain.opener(&name).device(gpu.uuid()).access(access).open()?),
                |segment| check(segment, access),
                |segment| Ok(segment.release()?),
            )
        };
        let cpu = access != Access::Gpu;
        let device = (access != Access::Cpu).then(|| gpu.context());
        let attach = move |(bytes, file): &(u64, OwnedFd)| {
            NodeAttachment::new(driver, *node, (*bytes, file.as_fd()), cpu, device)
        };
        let plain = Half::Opening.sampler(
            || Ok(chunks.iter().map(attach).collect::<Result<Vec<_>, _>>()?),
            |_| Ok(()),
            |attached| {
                drop(attached);
                Ok(())
            },
        );
        let comparison = Comparison::new(case("open"), ours()).floor(case("import, reserve, map, set access"), plain);
        bench.run(comparison, plan)?;
        if access == Access::Cpu {
            continue;
        }
        let register = || {
            let map = Arc::new(SharedMap::writable(&memfd)?);
            Ok(HostRegistration::shared(gpu.context(), map)?)
        };
        let rival = Half::Opening.sampler(
            register,
            |_| Ok(()),
            |registration| {
                drop(registration);
                Ok(())
            },
        );
        let comparison = Comparison::new(case("open, against a memfd"), ours()).rival(case(REGISTERED), rival);
        // All pages of the memfd are there, so the first sample is like the others.
        bench.run(comparison, plan.warm_up(0))?;
    }
    domain.remove(&name)?;
    Ok(())
}

/// Fails if the attached memory is not the one that was committed. Reads it by the access that it was opened with.
fn check(segment: &Segment, access: Access) -> Result<(), Failure> {
    let tensor = segment.tensor(LAST)?;
    let mut word = [0; 4];
    if access == Access::Gpu {
        let range = tensor.device()?;
        range.gpu().stream().copy_to_host(&mut word, range.as_slice().slice(0, 4)?)?;
    } else {
        word.copy_from_slice(&tensor.as_bytes()?[..4]);
    }
    if u32::from_ne_bytes(word) != expected(0) {
        return Err("the attached memory has other contents than were committed".into());
    }
    Ok(())
}

/// Returns a memfd whose pages exist.
fn touched(bytes: u64) -> Result<Draft, Failure> {
    let mut memfd = Draft::create("partywall-bench", bytes)?;
    let writer = &memfd.writer();
    let threads = partywall::files::default_threads() as u64;
    let write = |thread: u64| {
        let block = vec![1; BLOCK as usize];
        (thread * BLOCK..bytes).step_by((threads * BLOCK) as usize).try_for_each(|at| writer.write_all_at(&block, at))
    };
    thread::scope(|scope| -> Result<(), Failure> {
        let threads: Vec<_> = (0..threads).map(|thread| scope.spawn(move || write(thread))).collect();
        for thread in threads {
            thread.join().map_err(|_| "a thread that writes a memfd has panicked")??;
        }
        Ok(())
    })?;
    Ok(memfd)
}

/// The tensors of a segment, and the name of the last.
const TENSORS: u64 = 16;
const LAST: &str = "tensor.15";

/// Bytes that are written at once; all sizes are multiples.
const BLOCK: u64 = 1 << 20;
