//! Blocks of a pool beside allocations: what a process takes and gives back in its inner loop.

use partywall::{
    Pool,
    cuda::{DeviceBuffer, experiment},
};
use partywall_measure::{Comparison, Failure as Sampled, Sampler, Unit};

use super::Bench;
use crate::prelude::*;

/// Pairs of one sample.
const PAIRS: u32 = 100;

pub(super) fn run(bench: &Bench<'_>) -> Result<(), Failure> {
    for size in bench.sizes("alloc", 9, 0) {
        let name = format!("blocks.{size}");
        let pool = bench.domain.pool(&name).blocks(4).block_bytes(size).place(bench.place).create()?;
        let case = |name: &str| bench.case(name, Unit::Microseconds, size).parameter("of", "taking and giving back");
        let comparison = Comparison::new(case("a block of a Partywall pool"), ours(&pool));
        let comparison = match &bench.gpu {
            None => comparison
                .rival(case("malloc and free, one byte of each page written"), pairs(1, move || touched(size))),
            Some(gpu) => {
                gpu.context().make_current().doing("making the context current")?;
                let ordered = move || Ok(experiment::allocate_and_free_on(gpu.stream(), size as usize)?);
                let driver = move || DeviceBuffer::new(gpu.context(), size).map(drop).map_err(Sampled::from);
                comparison
                    .rival(case("cuMemAllocAsync and cuMemFreeAsync"), pairs(10, ordered))
                    .rival(case("cuMemAlloc and cuMemFree"), pairs(1, driver))
            }
        };
        bench.run("blocks", comparison)?;
        match pool.stats().free {
            4 => drop(pool),
            free => return Err(unexpected(&format!("{free} of 4 blocks are free, and nobody has one"))),
        }
    }
    Ok(())
}

fn ours(pool: &Pool) -> Sampler<'_> {
    pairs(PAIRS, || Ok(pool.alloc(TIMEOUT)?.release()?))
}

/// Memory of this process alone. Without a byte written there would be none.
fn touched(bytes: u64) -> Result<(), Sampled> {
    let mut memory = Vec::<u8>::with_capacity(bytes as usize);
    let pages = memory.spare_capacity_mut().iter_mut().step_by(4096);
    pages.for_each(|byte| {
        byte.write(1);
    });
    std::hint::black_box(&memory);
    Ok(())
}

/// Returns microseconds of a pair, in the mean of some.
fn pairs<'a>(count: u32, pair: impl Fn() -> Result<(), Sampled> + 'a) -> Sampler<'a> {
    Box::new(move || {
        let start = Instant::now();
        for _ in 0..count {
            pair()?;
        }
        Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(count))
    })
}
