//! Emulates, by their names, Partywall's kernels and that of one driver fact. Those of
//! `partywall-cuda/kernels/partywall.cu` are here, those of `lab.cu` in [`lab`], those of `images.cu` in [`images`],
//! and those of `render.cu` in [`render`].
//!
//! Their results do not depend on the shape of the grid: they stride over it, or take the amount of work as a
//! parameter.

mod images;
mod lab;
mod render;

use std::sync::atomic::{AtomicU32, Ordering};

use crate::abi::{Code, DevicePtr};
use crate::copy::in_pieces;
use crate::memory::{self, Want};
use crate::queue::Runner;

/// A kernel, as a launch needs it.
pub(crate) struct Kernel {
    name: &'static str,
    /// The sizes of its parameters in bytes.
    pub(crate) parameters: &'static [usize],
    /// Receives the parameters, each widened to 64 bits.
    pub(crate) run: fn(&mut Runner, &[u64]) -> Result<(), Code>,
}

/// Returns the emulation of the kernel with this name, if there is one.
pub(crate) fn find(name: &str) -> Option<&'static Kernel> {
    KERNELS
        .iter()
        .chain(&lab::KERNELS)
        .chain(&images::KERNELS)
        .chain(&render::KERNELS)
        .find(|kernel| kernel.name == name)
}

static KERNELS: [Kernel; 5] = [
    Kernel {
        name: "pw_fill",
        parameters: &[8, 8],
        run: |runner, parameters| fill(runner, parameters[0], parameters[1]),
    },
    Kernel {
        name: "pw_verify",
        parameters: &[8, 8, 4, 8],
        run: |runner, parameters| verify(runner, parameters[0], parameters[1], parameters[2] as u32, parameters[3]),
    },
    Kernel {
        name: "pw_double",
        parameters: &[8, 8],
        run: |runner, parameters| double(runner, parameters[0], parameters[1]),
    },
    Kernel {
        name: "pw_read",
        parameters: &[8, 8, 8],
        run: |runner, parameters| read(runner, parameters[0], parameters[1]),
    },
    Kernel {
        name: "through_local_memory",
        parameters: &[8, 8],
        run: |runner, parameters| through_local_memory(runner, parameters[0]),
    },
];

fn expected(index: u64) -> u32 {
    (index as u32).wrapping_mul(2).wrapping_add(1337) ^ 0xDEAD_BEEF
}

fn fill(runner: &mut Runner, p: DevicePtr, n: u64) -> Result<(), Code> {
    for_words(runner, p, n, Want::Write, |first, words| {
        for (index, word) in (first..).zip(words) {
            word.store(expected(index), Ordering::Relaxed);
        }
    })
}

fn double(runner: &mut Runner, p: DevicePtr, n: u64) -> Result<(), Code> {
    for_words(runner, p, n, Want::Write, |_, words| {
        for word in words {
            word.store(word.load(Ordering::Relaxed).wrapping_mul(2), Ordering::Relaxed);
        }
    })
}

fn verify(runner: &mut Runner, p: DevicePtr, n: u64, factor: u32, first_bad: DevicePtr) -> Result<(), Code> {
    let mut lowest = None;
    for_words(runner, p, n, Want::Read, |first, words| {
        if lowest.is_none() {
            let bad = |(index, word): &(u64, &AtomicU32)| {
                word.load(Ordering::Relaxed) != factor.wrapping_mul(expected(*index))
            };
            lowest = (first..).zip(words).find(bad).map(|(index, _)| index);
        }
    })?;
    let Some(lowest) = lowest else { return Ok(()) };
    aligned(first_bad, 8)?;
    let range = memory::access(runner.context(), first_bad, 8, Want::Write)?;
    range.words64().first().ok_or(Code::ILLEGAL_ADDRESS)?.fetch_min(lowest, Ordering::Relaxed);
    Ok(())
}

/// Reads all bytes. The sum would go to a word that nothing reads.
fn read(runner: &mut Runner, p: DevicePtr, n: u64) -> Result<(), Code> {
    aligned(p, 16)?;
    let words = n.checked_mul(4).ok_or(Code::ILLEGAL_ADDRESS)?;
    for_words(runner, p, words, Want::Read, |_, words| {
        std::hint::black_box(words.iter().fold(0, |sum: u32, word| sum.wrapping_add(word.load(Ordering::Relaxed))));
    })
}

/// The kernel of the driver facts, with 0 as its second parameter. With another value the word is undefined.
fn through_local_memory(runner: &mut Runner, p: DevicePtr) -> Result<(), Code> {
    for_words(runner, p, 1, Want::Write, |_, words| words[0].store(7, Ordering::Relaxed))
}

/// Calls `each` for each piece, with the index of its first word and its words.
fn for_words(
    runner: &mut Runner,
    p: DevicePtr,
    n: u64,
    want: Want,
    mut each: impl FnMut(u64, &[AtomicU32]),
) -> Result<(), Code> {
    aligned(p, 4)?;
    let bytes = n.checked_mul(4).filter(|bytes| p.checked_add(*bytes).is_some()).ok_or(Code::ILLEGAL_ADDRESS)?;
    let context = runner.context().clone();
    in_pieces(runner, bytes as usize, |offset, most| {
        let range = memory::access(&context, p + offset as u64, most, want)?;
        let words = range.words32();
        if words.is_empty() {
            return Err(Code::ILLEGAL_ADDRESS);
        }
        each(offset as u64 / 4, words);
        Ok(words.len() * 4)
    })
}

fn aligned(address: DevicePtr, bytes: u64) -> Result<(), Code> {
    if address.is_multiple_of(bytes) { Ok(()) } else { Err(Code::MISALIGNED_ADDRESS) }
}
