//! The kernels of `partywall-cuda/kernels/images.cu`.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use super::Kernel;
use crate::abi::{Code, DevicePtr};
use crate::memory::{HostRange, Want};
use crate::queue::Runner;

pub(super) static KERNELS: [Kernel; 2] = [
    Kernel {
        name: "pw_resize",
        parameters: &[8, 4, 4, 8, 4, 4],
        run: |runner, parameters| {
            let [from, from_width, from_height, to, width, height] = *parameters else {
                return Err(Code::INVALID_VALUE);
            };
            let from = Image::new(runner, from, from_width, from_height, Want::Read)?;
            let covered = |i: u64, from: u64, to: u64| i * from / to..((i + 1) * from / to).max(i * from / to + 1);
            Image::new(runner, to, width, height, Want::Write)?
                .fill(runner, |x, y| from.mean(covered(x, from_width, width), covered(y, from_height, height)))
        },
    },
    Kernel {
        name: "pw_blur",
        parameters: &[8, 8, 4, 4, 4],
        run: |runner, parameters| {
            let [from, to, width, height, radius] = *parameters else { return Err(Code::INVALID_VALUE) };
            let from = Image::new(runner, from, width, height, Want::Read)?;
            let around = |i: u64, end: u64| i.saturating_sub(radius)..(i + radius + 1).min(end);
            Image::new(runner, to, width, height, Want::Write)?
                .fill(runner, |x, y| from.mean(around(x, width), around(y, height)))
        },
    },
];

/// An image that a kernel reads or writes. It lies within one allocation.
struct Image {
    range: HostRange,
    width: u64,
    height: u64,
}

impl Image {
    fn new(runner: &Runner, address: DevicePtr, width: u64, height: u64, want: Want) -> Result<Self, Code> {
        let pixels = width.checked_mul(height).ok_or(Code::ILLEGAL_ADDRESS)?;
        Ok(Self { range: runner.memory(address, pixels, 4, want)?, width, height })
    }

    fn pixels(&self) -> &[AtomicU32] {
        self.range.words32()
    }

    /// Sets each pixel, a row at a time.
    fn fill(&self, runner: &mut Runner, pixel: impl Fn(u64, u64) -> u32) -> Result<(), Code> {
        let rows = self.pixels().chunks_exact(self.width.max(1) as usize);
        for (y, row) in (0..self.height).zip(rows) {
            runner.between()?;
            for (x, word) in (0..self.width).zip(row) {
                word.store(pixel(x, y), Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// Returns the mean of some pixels, each channel rounded to the nearest.
    fn mean(&self, columns: Range<u64>, rows: Range<u64>) -> u32 {
        let count = (columns.end - columns.start) * (rows.end - rows.start);
        let mut sums = [0; 4];
        for y in rows {
            for x in columns.clone() {
                let pixel = self.pixels()[(y * self.width + x) as usize].load(Ordering::Relaxed);
                for (sum, channel) in sums.iter_mut().zip(pixel.to_le_bytes()) {
                    *sum += u64::from(channel);
                }
            }
        }
        u32::from_le_bytes(sums.map(|sum| ((sum + count / 2) / count) as u8))
    }
}
