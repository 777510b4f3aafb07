//! Stream memory operations: a stream writes a word, or waits until a word has a value. Any stream, a plain store of a
//! CPU, and other processes may write the word, so a waiting stream polls it.
//!
//! The names without `_v2` are the older interface, which drivers refuse (vendor's documentation).

use std::sync::atomic::Ordering;

use crate::abi::{Code, DevicePtr, Handle};
use crate::context::Ctx;
use crate::entry::entry_points;
use crate::memory::{self, Want};
use crate::queue::Runner;
use crate::stream;

/// `CUstreamBatchMemOpParams`: a union of which each member begins with the operation.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BatchOperation {
    pub(crate) operation: u32,
    pub(crate) address: DevicePtr,
    /// 32-bit values are in the low half.
    pub(crate) value: u64,
    pub(crate) flags: u32,
    /// A field of the driver's, and padding for members that are longer.
    pub(crate) rest: [u64; 2],
}

#[derive(Clone, Copy)]
pub(crate) struct Word {
    address: DevicePtr,
    width: Width,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Width {
    W32 = 4,
    W64 = 8,
}

/// A memory operation whose parameters were checked.
#[derive(Clone, Copy)]
pub(crate) enum Operation {
    Wait {
        word: Word,
        value: u64,
        condition: u32,
    },
    Write {
        word: Word,
        value: u64,
    },
    /// All work of a stream is ordered, and visible when it is done, so a barrier does nothing.
    Barrier,
}

impl Word {
    fn new(address: DevicePtr, width: Width) -> Result<Self, Code> {
        if address.is_multiple_of(width as u64) { Ok(Self { address, width }) } else { Err(Code::INVALID_VALUE) }
    }

    fn load(self, context: &Ctx) -> Result<u64, Code> {
        let range = memory::access(context, self.address, self.width as usize, Want::Read)?;
        let value = match self.width {
            Width::W32 => range.words32().first().map(|word| word.load(Ordering::Acquire).into()),
            Width::W64 => range.words64().first().map(|word| word.load(Ordering::Acquire)),
        };
        value.ok_or(Code::ILLEGAL_ADDRESS)
    }

    fn store(self, context: &Ctx, value: u64) -> Result<(), Code> {
        let range = memory::access(context, self.address, self.width as usize, Want::Write)?;
        let stored = match self.width {
            Width::W32 => range.words32().first().map(|word| word.store(value as u32, Ordering::Release)),
            Width::W64 => range.words64().first().map(|word| word.store(value, Ordering::Release)),
        };
        stored.ok_or(Code::ILLEGAL_ADDRESS)
    }

    /// Returns whether a wait for `value` ends at `now`. The comparison "at least" is cyclic: it holds if the
    /// difference, wrapped to the width of the word, is not negative.
    fn meets(self, condition: u32, now: u64, value: u64) -> bool {
        let mask = if self.width == Width::W32 { u64::from(u32::MAX) } else { u64::MAX };
        let sign = mask ^ (mask >> 1);
        match condition {
            GEQ => now.wrapping_sub(value) & sign == 0,
            EQ => (now ^ value) & mask == 0,
            AND => now & value & mask != 0,
            _ => !(now | value) & mask != 0,
        }
    }
}

impl Operation {
    fn wait(address: DevicePtr, width: Width, value: u64, flags: u32) -> Result<Self, Code> {
        if flags & FLUSH != 0 {
            // Device attribute 98 is 0, as on the H200.
            return Err(Code::NOT_SUPPORTED);
        }
        if flags > NOR {
            return Err(Code::INVALID_VALUE);
        }
        Ok(Self::Wait { word: Word::new(address, width)?, value, condition: flags })
    }

    fn write(address: DevicePtr, width: Width, value: u64, flags: u32) -> Result<Self, Code> {
        match flags {
            0 => Ok(Self::Write { word: Word::new(address, width)?, value }),
            // "Not supported in the v2 API", says the vendor's header.
            NO_MEMORY_BARRIER => Err(Code::NOT_SUPPORTED),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    fn decode(batch: &BatchOperation) -> Result<Self, Code> {
        let BatchOperation { operation, address, value, flags, .. } = *batch;
        match operation {
            WAIT_32 => Self::wait(address, Width::W32, value, flags),
            WRITE_32 => Self::write(address, Width::W32, value, flags),
            FLUSH_REMOTE_WRITES => Err(Code::NOT_SUPPORTED),
            WAIT_64 => Self::wait(address, Width::W64, value, flags),
            WRITE_64 => Self::write(address, Width::W64, value, flags),
            BARRIER => Ok(Self::Barrier),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    /// Returns whether `new` differs in nothing but address, value and comparison.
    pub(crate) fn is_like(self, new: Self) -> bool {
        match (self, new) {
            (Self::Wait { word: old, .. }, Self::Wait { word: new, .. })
            | (Self::Write { word: old, .. }, Self::Write { word: new, .. }) => old.width == new.width,
            (Self::Barrier, Self::Barrier) => true,
            _ => false,
        }
    }

    /// An address without memory is refused when the operation is enqueued.
    pub(crate) fn check(self, context: &Ctx) -> Result<(), Code> {
        match self {
            Self::Wait { word, .. } | Self::Write { word, .. } => {
                word.load(context).map(drop).map_err(|_| Code::INVALID_VALUE)
            }
            Self::Barrier => Ok(()),
        }
    }

    pub(crate) fn run(self, runner: &Runner) -> Result<(), Code> {
        let context = runner.context();
        match self {
            Self::Wait { word, value, condition } => {
                runner.poll(|| Ok(word.meets(condition, word.load(context)?, value)))
            }
            Self::Write { word, value } => word.store(context, value),
            Self::Barrier => Ok(()),
        }
    }
}

/// Reads a batch of operations.
///
/// # Safety
/// `operations` points to `count` operations, or is null.
pub(crate) unsafe fn decode(count: u32, operations: *const BatchOperation, flags: u32) -> Result<Vec<Operation>, Code> {
    if flags != 0 || count > LARGEST_BATCH || count > 0 && operations.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: an array of this length, by the caller's promise; only the beginning of each union is read, where each
    // member of the union has whole, initialised words.
    let read = |index| unsafe { operations.add(index as usize).read() };
    (0..count).map(|index| Operation::decode(&read(index))).collect()
}

fn enqueue(stream: Handle, operations: Vec<Operation>) -> Result<(), Code> {
    let stream = stream::find(stream)?;
    operations.iter().try_for_each(|operation| operation.check(stream.context()))?;
    stream.submit(move |runner| operations.iter().try_for_each(|operation| operation.run(runner)))?;
    Ok(())
}

entry_points! {
    fn cuStreamWaitValue32_v2(stream: Handle, address: DevicePtr, value: u32, flags: u32) {
        enqueue(stream, vec![Operation::wait(address, Width::W32, value.into(), flags)?])
    }
    fn cuStreamWaitValue64_v2(stream: Handle, address: DevicePtr, value: u64, flags: u32) {
        enqueue(stream, vec![Operation::wait(address, Width::W64, value, flags)?])
    }
    fn cuStreamWriteValue32_v2(stream: Handle, address: DevicePtr, value: u32, flags: u32) {
        enqueue(stream, vec![Operation::write(address, Width::W32, value.into(), flags)?])
    }
    fn cuStreamWriteValue64_v2(stream: Handle, address: DevicePtr, value: u64, flags: u32) {
        enqueue(stream, vec![Operation::write(address, Width::W64, value, flags)?])
    }
    fn cuStreamBatchMemOp_v2(stream: Handle, count: u32, operations: *const BatchOperation, flags: u32) {
        // SAFETY: the caller passes an array of this length.
        enqueue(stream, unsafe { decode(count, operations, flags) }?)
    }
    fn cuStreamWaitValue32(_stream: Handle, _address: DevicePtr, _value: u32, _flags: u32) {
        Err(Code::NOT_SUPPORTED)
    }
    fn cuStreamWaitValue64(_stream: Handle, _address: DevicePtr, _value: u64, _flags: u32) {
        Err(Code::NOT_SUPPORTED)
    }
    fn cuStreamWriteValue32(_stream: Handle, _address: DevicePtr, _value: u32, _flags: u32) {
        Err(Code::NOT_SUPPORTED)
    }
    fn cuStreamWriteValue64(_stream: Handle, _address: DevicePtr, _value: u64, _flags: u32) {
        Err(Code::NOT_SUPPORTED)
    }
    fn cuStreamBatchMemOp(_stream: Handle, _count: u32, _operations: *const BatchOperation, _flags: u32) {
        Err(Code::NOT_SUPPORTED)
    }
}

// `CUstreamWaitValue_flags`
const GEQ: u32 = 0;
const EQ: u32 = 1;
const AND: u32 = 2;
const NOR: u32 = 3;
const FLUSH: u32 = 1 << 30;

/// `CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER`.
const NO_MEMORY_BARRIER: u32 = 1;

// `CUstreamBatchMemOpType`
const WAIT_32: u32 = 1;
const WRITE_32: u32 = 2;
const FLUSH_REMOTE_WRITES: u32 = 3;
const WAIT_64: u32 = 4;
const WRITE_64: u32 = 5;
const BARRIER: u32 = 6;

/// Fewer than 256 (vendor's documentation).
const LARGEST_BATCH: u32 = 255;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_least_is_cyclic_and_signed_in_the_width_of_the_word() {
        let word = |width| Word { address: 0, width };
        let geq = |width, now, value| word(width).meets(GEQ, now, value);
        for (now, value, ends) in [(5, 5, true), (6, 5, true), (4, 5, false), (u64::MAX, 1, false), (1, u64::MAX, true)]
        {
            assert_eq!(geq(Width::W64, now, value), ends, "{now} {value}");
        }
        assert!(geq(Width::W64, 5 + (1 << 62) + 1, 7), "a poisoned word ends every wait");
        assert!(!geq(Width::W64, 1 << 63, 0) && geq(Width::W32, 1 << 63, 0));
        assert!(!geq(Width::W32, u64::from(u32::MAX), 1) && geq(Width::W32, 0, u64::from(u32::MAX)));
    }

    #[test]
    fn other_comparisons_use_the_word_alone() {
        let meets = |width, condition, now, value| Word { address: 0, width }.meets(condition, now, value);
        assert!(meets(Width::W32, EQ, 7, 7) && !meets(Width::W32, EQ, 8, 7));
        assert!(meets(Width::W64, AND, 6, 2) && !meets(Width::W64, AND, 5, 2));
        assert!(meets(Width::W32, NOR, 0, 0) && !meets(Width::W32, NOR, 0xFFFF_0000, 0xFFFF));
        assert!(meets(Width::W64, NOR, 0xFFFF_0000, 0xFFFF));
    }
}
