//! Parts of a segment, in bytes from the beginning of its memory. Tasks of a queue name them as inputs.

use partywall_wire::LeaseId;

use super::Segment;
use crate::{
    error::{Error, InvalidArgument, Result},
    gpu::DeviceRange,
    info,
};

/// The range of a part in a segment's memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PartRange {
    chunk: usize,
    offset: u64,
    bytes: u64,
}

impl PartRange {
    /// Finds a part in consecutive ranges of these lengths. Returns `None` if the part is empty or not within one
    /// range.
    pub(crate) fn find(ranges: &[u64], offset: u64, bytes: u64) -> Option<Self> {
        let mut start = 0_u64;
        for (chunk, range) in ranges.iter().enumerate() {
            let end = start.checked_add(*range)?;
            if offset < end {
                let fits = bytes > 0 && bytes <= end - offset;
                return fits.then_some(Self { chunk, offset: offset - start, bytes });
            }
            start = end;
        }
        None
    }
}

impl Segment {
    /// Returns the number of the lease; `None` once it is taken.
    pub(crate) fn lease(&self) -> Option<LeaseId> {
        self.lease
    }

    /// Returns the lengths of the consecutive ranges of memory. A part must lie within one of them.
    pub(crate) fn ranges(&self) -> Result<Vec<u64>> {
        info::ranges(self.facts.chosen.reserved, &self.stage().chunks)
    }

    /// Finds a part. Refreshes the segment if the part is beyond the length that this process knows.
    pub(crate) fn part(&self, offset: u64, bytes: u64) -> Result<PartRange> {
        if let Some(range) = PartRange::find(&self.ranges()?, offset, bytes) {
            return Ok(range);
        }
        let _ = self.refresh()?;
        PartRange::find(&self.ranges()?, offset, bytes).ok_or_else(|| no_part(self.name(), offset, bytes, self.bytes()))
    }

    /// Returns the bytes of a part of frozen host memory.
    pub(crate) fn part_bytes(&self, range: PartRange) -> Result<&[u8]> {
        self.view()?.bytes(range.chunk, range.offset, range.bytes).map_err(|e| self.named(e))
    }

    /// Returns the first address of a part of host memory.
    pub(crate) fn part_address(&self, range: PartRange) -> Result<*const u8> {
        if !self.facts.chosen.mutable {
            return self.part_bytes(range).map(<[u8]>::as_ptr);
        }
        let map = self.view()?.shared(range.chunk).map_err(|e| self.named(e))?;
        // In bounds: the range was found within the present length.
        Ok(map.as_ptr().wrapping_add(range.offset as usize))
    }

    /// Copies bytes of a part, from `offset` on, to `out`. The caller has checked the range. Host-synchronous.
    pub(crate) fn read_part(&self, range: PartRange, offset: u64, out: &mut [u8]) -> Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        self.view()?.read(range.chunk, range.offset + offset, out).map_err(|e| self.named(e))
    }

    /// Returns a part on its GPU.
    pub(crate) fn part_device(&self, range: PartRange) -> Result<DeviceRange<'_>> {
        self.view()?.device(range.chunk, range.offset, range.bytes).map_err(|e| self.named(e))
    }
}

/// Returns the error that a segment has no such part.
pub(crate) fn no_part(segment: &str, offset: u64, bytes: u64, has: u64) -> Error {
    InvalidArgument::range(segment, format!("bytes {offset} + {bytes} are not within one chunk of its {has} bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_lies_within_one_piece_of_memory() {
        let find = |offset, bytes| {
            PartRange::find(&[10, 0, 20], offset, bytes).map(|range| (range.chunk, range.offset, range.bytes))
        };
        assert_eq!(
            (find(0, 10), find(9, 1), find(10, 20), find(29, 1)),
            (Some((0, 0, 10)), Some((0, 9, 1)), Some((2, 0, 20)), Some((2, 19, 1)))
        );
        for (offset, bytes) in [(0, 0), (0, 11), (9, 2), (10, 21), (30, 1), (u64::MAX, 1), (1, u64::MAX)] {
            assert_eq!(find(offset, bytes), None, "{offset} + {bytes}");
        }
    }
}
