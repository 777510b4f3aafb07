//! The operations of the image kernels, computed by the CPU with the same results. A pixel has four bytes.

use std::ops::Range;

/// The size of an image, in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) width: u32,
    pub(super) height: u32,
}

impl Size {
    pub(super) fn bytes(self) -> u64 {
        u64::from(self.width) * u64::from(self.height) * 4
    }

    /// Returns the size of the image when it is shrunk to a maximum width, in the same proportions.
    pub(super) fn at_most(self, width: u32) -> Self {
        let width = self.width.min(width);
        let height = u64::from(self.height) * u64::from(width) / u64::from(self.width.max(1));
        Self { width, height: (height as u32).max(1) }
    }

    /// Returns the size as the shape of a tensor.
    pub(super) fn shape(self) -> [u64; 3] {
        [self.height.into(), self.width.into(), 4]
    }

    /// Converts the shape of a tensor, if it is that of an image.
    pub(super) fn of(shape: &[u64]) -> Option<Self> {
        match shape {
            [height, width, 4] => Some(Self { width: (*width).try_into().ok()?, height: (*height).try_into().ok()? }),
            _ => None,
        }
    }
}

/// Scales `from` to `to`. Each pixel is the mean of the pixels that it covers, of at least one.
pub(super) fn resize(from: &[u8], from_size: Size, to: &mut [u8], size: Size) {
    let covered = |i: u32, from: u32, to: u32| {
        let first = |i: u32| (u64::from(i) * u64::from(from) / u64::from(to)) as u32;
        first(i)..first(i + 1).max(first(i) + 1)
    };
    let columns = |x| covered(x, from_size.width, size.width);
    let rows = |y| covered(y, from_size.height, size.height);
    for_pixels(to, size, |x, y| mean(from, from_size, columns(x), rows(y)));
}

/// Blurs `from` into `to`, which has the same size. Each pixel is the mean of the square around it with this radius,
/// clipped to the image.
pub(super) fn blur(from: &[u8], to: &mut [u8], size: Size, radius: u32) {
    let around = |i: u32, end: u32| i.saturating_sub(radius)..(i + radius + 1).min(end);
    for_pixels(to, size, |x, y| mean(from, size, around(x, size.width), around(y, size.height)));
}

fn for_pixels(to: &mut [u8], size: Size, pixel: impl Fn(u32, u32) -> [u8; 4]) {
    for (y, row) in (0..size.height).zip(to.chunks_exact_mut(size.width.max(1) as usize * 4)) {
        for (x, bytes) in (0..size.width).zip(row.chunks_exact_mut(4)) {
            bytes.copy_from_slice(&pixel(x, y));
        }
    }
}

/// Returns the mean of some pixels, with each channel rounded to the nearest.
fn mean(image: &[u8], size: Size, columns: Range<u32>, rows: Range<u32>) -> [u8; 4] {
    let count = u64::from(columns.end - columns.start) * u64::from(rows.end - rows.start);
    let mut sums = [0_u64; 4];
    for y in rows {
        let row = y as usize * size.width as usize;
        for pixel in image[(row + columns.start as usize) * 4..(row + columns.end as usize) * 4].chunks_exact(4) {
            for (sum, channel) in sums.iter_mut().zip(pixel) {
                *sum += u64::from(*channel);
            }
        }
    }
    sums.map(|sum| ((sum + count / 2) / count) as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blur_averages_covered_pixels() {
        let gray = |values: &[u8]| values.iter().flat_map(|value| [*value, *value, *value, 255]).collect::<Vec<_>>();
        let from = gray(&[0, 10, 20, 30, 40, 50]);
        let size = Size { width: 3, height: 2 };
        let half = size.at_most(1);
        assert_eq!(half, Size { width: 1, height: 1 });
        let mut small = vec![0; 4];
        resize(&from, size, &mut small, half);
        assert_eq!(small, gray(&[25]));
        let mut large = vec![0; 6 * 2 * 4];
        resize(&from, size, &mut large, Size { width: 6, height: 2 });
        assert_eq!(large, gray(&[0, 0, 10, 10, 20, 20, 30, 30, 40, 40, 50, 50]));
        let mut blurred = vec![0; from.len()];
        blur(&from, &mut blurred, size, 1);
        // (0 + 10 + 30 + 40) / 4, the whole of it, (10 + 20 + 40 + 50) / 4.
        assert_eq!(blurred, gray(&[20, 25, 30, 20, 25, 30]));
        blur(&from, &mut blurred, size, 0);
        assert_eq!(blurred, from);
    }

    #[test]
    fn sizes_and_shapes() {
        let size = Size { width: 640, height: 480 };
        assert_eq!((size.at_most(320).height, size.at_most(1000)), (240, size));
        assert_eq!(Size::of(&size.shape()), Some(size));
        assert_eq!(Size::of(&[480, 640, 3]), None);
    }
}
