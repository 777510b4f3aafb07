//! Emulates, by their names, Partywall's kernels, that of one driver fact, and those that a program adds. Those of
//! `partywall-cuda/kernels/partywall.cu` are here, those of `lab.cu` in [`lab`], those of `images.cu` in [`images`], and
//! those of `partywall/kernels/pipeline.cu` in [`pipeline`].
//!
//! Their results do not depend on the shape of the grid: they stride over it, or take the amount of work as a
//! parameter.

mod images;
mod lab;
mod pipeline;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::abi::{Code, DevicePtr};
use crate::copy::in_pieces;
use crate::memory::{self, HostRange, Want};
use crate::queue::Runner;

/// The emulation of a kernel, which a launch runs once, on the thread of its stream, whatever the shape of its grid.
pub struct Kernel {
    /// Its name in the PTX.
    pub name: &'static str,
    /// The sizes of its parameters in bytes: 4 or 8 each.
    pub parameters: &'static [usize],
    /// Receives the parameters, each widened to 64 bits. An error is a fault of the context, as that of a kernel.
    pub run: fn(&mut Runner, &[u64]) -> Result<(), Code>,
}

static ADDED: OnceLock<&'static [Kernel]> = OnceLock::new();

/// Adds the kernels of the program that contains this driver. Only the first call counts; call it before any code loads
/// the driver. The driver of `libsimcuda.so`, which a program loads, does not have them.
pub fn add_kernels(kernels: &'static [Kernel]) {
    ADDED.get_or_init(|| kernels);
}

/// Returns the emulation of the kernel with this name, if there is one.
pub(crate) fn find(name: &str) -> Option<&'static Kernel> {
    let added = ADDED.get().copied().unwrap_or_default();
    let ours = KERNELS.iter().chain(&lab::KERNELS).chain(&images::KERNELS).chain(&pipeline::KERNELS);
    ours.chain(added).find(|kernel| kernel.name == name)
}

impl Runner {
    /// Returns the memory of `count` elements of `bytes` bytes, which lie in one allocation.
    ///
    /// # Errors
    /// [`Code::MISALIGNED_ADDRESS`] unless the address is a multiple of 8 for elements of 8 bytes, and of 4 for others;
    /// [`Code::ILLEGAL_ADDRESS`] for memory that the stream may not use so.
    pub fn memory(&self, address: u64, count: u64, bytes: u64, want: Want) -> Result<HostRange, Code> {
        aligned(address, if bytes == 8 { 8 } else { 4 })?;
        let bytes = count.checked_mul(bytes).and_then(|bytes| usize::try_from(bytes).ok());
        let bytes = bytes.ok_or(Code::ILLEGAL_ADDRESS)?;
        let range = memory::access(self.context(), address, bytes, want)?;
        if range.bytes() < bytes { Err(Code::ILLEGAL_ADDRESS) } else { Ok(range) }
    }

    /// Pauses between the pieces of a long kernel, if the environment asks for that (`SIMCUDA_DELAY`).
    ///
    /// # Errors
    /// That of the context, if it is lost.
    pub fn between(&mut self) -> Result<(), Code> {
        self.pause();
        self.context().check()
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    // Holds 330.
    #[test]
    fn kernel_of_the_program_is_found_and_hides_none_of_ours() {
        const fn own(name: &'static str) -> Kernel {
            Kernel { name, parameters: &[], run: |_, _| Ok(()) }
        }
        static OWN: [Kernel; 2] = [own("own"), own("pw_fill")];
        add_kernels(&OWN);
        assert!(find("own").is_some());
        assert_eq!(find("pw_fill").map(|kernel| kernel.parameters.len()), Some(2));
        assert!(find("other").is_none());
    }
}
