//! The kernels of `partywall/kernels/pipeline.cu`.

use std::sync::atomic::{AtomicU32, Ordering};

use super::{Kernel, for_words};
use crate::abi::{Code, DevicePtr};
use crate::memory::Want;
use crate::queue::Runner;

pub(super) static KERNELS: [Kernel; 2] = [
    Kernel {
        name: "pw_draw",
        parameters: &[8, 4, 4],
        run: |runner, parameters| draw(runner, parameters[0], parameters[1], parameters[2]),
    },
    Kernel {
        name: "pw_detect",
        parameters: &[8, 4, 8],
        run: |runner, parameters| detect(runner, parameters[0], parameters[1], parameters[2]),
    },
];

/// A word of pixels whose bytes are all 10.
const DARK: u32 = u32::from_ne_bytes([10; 4]);

fn draw(runner: &mut Runner, pixels: DevicePtr, n: u64, spot: u64) -> Result<(), Code> {
    for_words(runner, pixels, whole(n)?, Want::Write, |first, words| {
        for (index, word) in (first..).zip(words) {
            let mut four = DARK.to_ne_bytes();
            if index == spot / 4 {
                four[(spot % 4) as usize] = 255;
            }
            word.store(u32::from_ne_bytes(four), Ordering::Relaxed);
        }
    })
}

fn detect(runner: &mut Runner, pixels: DevicePtr, n: u64, spot: DevicePtr) -> Result<(), Code> {
    let mut found = None;
    for_words(runner, pixels, whole(n)?, Want::Read, |first, words| {
        let bright = |word: &AtomicU32| word.load(Ordering::Relaxed).to_ne_bytes().iter().position(|byte| *byte == 255);
        for (index, word) in (first..).zip(words) {
            found = bright(word).map(|byte| index as u32 * 4 + byte as u32).or(found);
        }
    })?;
    let Some(found) = found else { return Ok(()) };
    for_words(runner, spot, 1, Want::Write, |_, words| words[0].store(found, Ordering::Relaxed))
}

/// Returns the words of so many pixels. The emulation has no part of a word.
fn whole(pixels: u64) -> Result<u64, Code> {
    if pixels.is_multiple_of(4) { Ok(pixels / 4) } else { Err(Code::INVALID_VALUE) }
}
