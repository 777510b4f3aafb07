//! Blocks of a pool beside allocations: what a process takes and gives back in its inner loop.

use partywall_measure::{Comparison, Unit};

use super::{
    Setting, cases,
    samplers::{allocation, allocation_in_order, block, pairs, touched},
};
use crate::prelude::*;

const UNIT: Unit = Unit::Microseconds;

/// Pairs of one sample.
const PAIRS: u32 = 100;

pub(crate) fn run(setting: &Setting<'_>) -> Result<(), Failure> {
    for size in setting.sizes("alloc", 9, 0) {
        let name = format!("blocks.{size}");
        let pool = setting.domain.pool(&name).blocks(4).block_bytes(size).place(setting.place).create()?;
        let case = cases(UNIT, size, "taking a block and giving it back");
        let comparison = Comparison::new(case("a block of a Partywall pool"), pairs(UNIT, PAIRS, || block(&pool)));
        let comparison = match &setting.gpu {
            None => comparison
                .rival(case("malloc and free, one byte of each page written"), pairs(UNIT, 1, move || touched(size))),
            Some(gpu) => {
                gpu.context().make_current().doing("making the context current")?;
                comparison
                    .rival(
                        case("cuMemAllocAsync and cuMemFreeAsync"),
                        pairs(UNIT, 10, move || allocation_in_order(gpu, size)),
                    )
                    .rival(case("cuMemAlloc and cuMemFree"), pairs(UNIT, 1, move || allocation(gpu, size)))
            }
        };
        setting.run(comparison)?;
        match pool.stats().free {
            4 => drop(pool),
            free => return Err(unexpected(format!("{free} of 4 blocks are free, and no block is in use"))),
        }
    }
    Ok(())
}
