//! Memory at addresses of this process: whole allocations, mapped one behind the other in a range of addresses.
#![allow(unsafe_code)] // driver calls

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use partywall_os::lock::IgnorePoison;
use partywall_os::map::SharedMap;

use crate::abi::{DevicePtr, MemAccessDesc};
use crate::allocation::Allocation;
use crate::context::CallContext;
use crate::{AccessError, CuResult, CudaError, ReplaceError};

/// The mapped allocations of a [`Mapping`](crate::Mapping) or a [`NodeMapping`](crate::NodeMapping).
pub(crate) struct Parts {
    calls: CallContext,
    // Dropped in this order: first what is mapped, then the addresses.
    /// Without gaps. A thread that maps more, or that changes who has access, holds the lock.
    mapped: Mutex<Vec<MappedPart>>,
    /// Bytes of all parts. It only grows, but is 0 from a replacement that has lost the memory to the next that has
    /// not. Stored (release) by [`Extension::publish`] when the parts are mapped, loaded (acquire) by [`Parts::len`]
    /// before they are used.
    len: AtomicU64,
    range: AddressRange,
}

impl Parts {
    /// Maps memory at the beginning of a range of `reserved` addresses, which is only as long as the memory if
    /// `reserved` is less or if the process has no free range of that length. Everybody in `rules` gets access.
    pub(crate) fn new(memory: Arc<Allocation>, reserved: u64, rules: &[MemAccessDesc]) -> Result<Self, CudaError> {
        let calls = memory.calls().clone();
        let bytes = memory.bytes();
        let guard = calls.guard()?;
        let range = match AddressRange::reserve(&calls, reserved.max(bytes)) {
            Err(error) if error.code == CuResult::OUT_OF_MEMORY && reserved > bytes => {
                AddressRange::reserve(&calls, bytes)
            }
            reserved => reserved,
        };
        let range = range.map_err(|error| describe(error, bytes, &calls))?;
        drop(guard);
        Self::at(range, [memory], rules).map_err(|(_, error)| error)
    }

    /// Maps allocations one behind the other at the beginning of a range in which nothing is mapped, and which holds
    /// them. Everybody in `rules` gets access. After an error nothing is mapped there.
    pub(crate) fn at(
        range: AddressRange,
        memories: impl IntoIterator<Item = Arc<Allocation>>,
        rules: &[MemAccessDesc],
    ) -> Result<Self, (AddressRange, CudaError)> {
        let parts = Self { calls: range.calls.clone(), mapped: Mutex::default(), len: AtomicU64::new(0), range };
        let mut extension = parts.extension(parts.lock(), None);
        let mapped = memories.into_iter().try_for_each(|memory| match extension.map(memory, rules) {
            Err(AccessError::Driver(error)) => Err(error),
            Err(error) => Err(CudaError::new("cuMemMap", CuResult::INVALID_VALUE).with_context(error.to_string())),
            Ok(()) => Ok(()),
        });
        match mapped {
            Ok(()) => extension.publish(),
            Err(error) => {
                drop(extension);
                return Err((parts.range, error));
            }
        }
        Ok(parts)
    }

    /// Unmaps everything, and returns the addresses, which stay reserved.
    pub(crate) fn vacate(&mut self) -> Result<AddressRange, CudaError> {
        self.unmap()?;
        *self.len.get_mut() = 0;
        Ok(self.range.take())
    }

    /// Begins to map more behind the current end. `mapped` is the result of [`lock`](Self::lock). Publication also
    /// makes it visible in `view`, which shows the same addresses.
    pub(crate) fn extension<'a>(
        &'a self,
        mapped: MutexGuard<'a, Vec<MappedPart>>,
        view: Option<&'a SharedMap>,
    ) -> Extension<'a> {
        Extension { parts: self, new: Vec::new(), mapped, len: self.len(), view }
    }

    /// Keeps other threads from mapping more.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Vec<MappedPart>> {
        // A panic under this lock drops, and so unmaps, what was not published.
        self.mapped.lock().ignore_poison()
    }

    /// Gives access to all of the memory, or changes it, for everybody in `rules`. The caller holds the lock, or has
    /// the only reference.
    pub(crate) fn set_access(&self, rules: &[MemAccessDesc]) -> Result<(), CudaError> {
        set_access(&self.calls, self.range.pointer, self.len(), rules)
    }

    /// Maps other memory of the same length in the place of the only part, with access for everybody in `rules`. If
    /// that fails, the former memory is mapped again; if that fails too, the length is 0 until a later call succeeds.
    pub(crate) fn replace(&mut self, memory: Arc<Allocation>, rules: &[MemAccessDesc]) -> Result<(), ReplaceError> {
        let bytes = memory.bytes();
        let refused = |error| ReplaceError { source: describe(error, bytes, &self.calls), lost: None };
        let [part] = self.mapped.get_mut().ignore_poison().as_mut_slice() else {
            let error = CudaError::new("cuMemMap", CuResult::NOT_SUPPORTED);
            return Err(refused(error.with_context("memory that has grown cannot be replaced")));
        };
        if part.memory.bytes() != bytes {
            let error = CudaError::new("cuMemMap", CuResult::INVALID_VALUE);
            return Err(refused(error.with_context(format!("it replaces {} bytes", part.memory.bytes()))));
        }
        let _guard = self.calls.guard().map_err(refused)?;
        let replaced = part.replace(memory, rules);
        let is_lost = replaced.as_ref().is_err_and(|error| error.lost.is_some());
        *self.len.get_mut() = if is_lost { 0 } else { bytes };
        replaced.map_err(|error| ReplaceError { source: describe(error.source, bytes, &self.calls), ..error })
    }

    /// Unmaps everything. Returns the first failure, and the memory is as free as it can get. Nothing to do the second
    /// time.
    pub(crate) fn unmap(&mut self) -> Result<(), CudaError> {
        let mapped = std::mem::take(self.mapped.get_mut().ignore_poison());
        mapped.into_iter().rev().map(|mut part| part.unmap()).fold(Ok(()), Result::and)
    }

    pub(crate) fn is_mapped(&mut self) -> bool {
        !self.mapped.get_mut().ignore_poison().is_empty()
    }

    pub(crate) fn calls(&self) -> &CallContext {
        &self.calls
    }

    pub(crate) fn pointer(&self) -> DevicePtr {
        self.range.pointer
    }

    pub(crate) fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    pub(crate) fn reserved(&self) -> u64 {
        self.range.bytes as u64
    }
}

/// Memory that is mapped behind a mapping and not yet visible in it. Dropping it unmaps it again.
///
/// It keeps other threads from extending the mapping. A thread that has one must not change who has access to the
/// mapping, nor extend it again, before it is published or dropped.
pub struct Extension<'a> {
    parts: &'a Parts,
    // Unmapped before the lock is released: the next extension takes the same addresses.
    new: Vec<MappedPart>,
    mapped: MutexGuard<'a, Vec<MappedPart>>,
    /// The length of the mapping including it.
    len: u64,
    view: Option<&'a SharedMap>,
}

impl Extension<'_> {
    /// Maps one more allocation.
    pub(crate) fn map(&mut self, memory: Arc<Allocation>, rules: &[MemAccessDesc]) -> Result<(), AccessError> {
        let parts = self.parts;
        let offset = self.len;
        let len = memory.bytes();
        let available = parts.reserved();
        if available - offset < len {
            return Err(AccessError::OutOfRange { offset, len, available });
        }
        let _guard = parts.calls.guard()?;
        let part = MappedPart::map(memory, parts.range.pointer + offset, rules);
        self.new.push(part.map_err(|error| describe(error, len, &parts.calls))?);
        self.len += len;
        Ok(())
    }

    /// Makes the memory part of the mapping.
    pub fn publish(mut self) {
        self.mapped.append(&mut self.new);
        self.parts.len.store(self.len, Ordering::Release);
        if let Some(view) = self.view {
            // SAFETY: the view shows these addresses, which are mapped up to the new length and stay so, because only
            // the owner of the parts, which the view keeps, unmaps them; the lock keeps other extensions away.
            unsafe { view.grow_to(self.len as usize) };
        }
    }
}

impl fmt::Debug for Extension<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Extension({} bytes)", self.len - self.parts.len())
    }
}

/// One allocation, mapped whole.
#[derive(Debug)]
pub(crate) struct MappedPart {
    pointer: DevicePtr,
    memory: Arc<Allocation>,
    /// True if it is still mapped; false between [`MappedPart::unmap`] and the drop of the fields, and once
    /// [`MappedPart::replace`] has lost the memory.
    mapped: bool,
}

impl MappedPart {
    /// Maps memory at addresses that are reserved and unused, and gives access.
    fn map(memory: Arc<Allocation>, pointer: DevicePtr, rules: &[MemAccessDesc]) -> Result<Self, CudaError> {
        let driver = memory.calls().driver();
        // SAFETY: the callers have reserved the addresses for as many bytes, and nothing is mapped there; the handle
        // is live while `memory` is; offset and flags must be 0.
        unsafe { driver.mem_map(pointer, memory.bytes() as usize, 0, memory.as_raw(), 0) }?;
        // From here on dropping it unmaps.
        let part = Self { pointer, memory, mapped: true };
        if !rules.is_empty() {
            set_access(part.memory.calls(), pointer, part.memory.bytes(), rules)?;
        }
        Ok(part)
    }

    /// Maps other memory of the same length at the same addresses. If that fails, maps the former memory there again.
    fn replace(&mut self, memory: Arc<Allocation>, rules: &[MemAccessDesc]) -> Result<(), ReplaceError> {
        let pointer = self.pointer;
        let unmapped = self.unmap();
        let was_unmapped = unmapped.is_ok();
        let source = match unmapped.and_then(|()| Self::map(memory, pointer, rules)) {
            Ok(new) => {
                *self = new;
                return Ok(());
            }
            Err(error) => error,
        };
        if !was_unmapped {
            // After a failure the memory may still be mapped. Unmapping nothing is no error (measured).
            self.mapped = true;
            let again = self.unmap();
            self.memory.calls().record_drop(again);
        }
        match Self::map(self.memory.clone(), pointer, rules) {
            Ok(former) => {
                *self = former;
                Err(ReplaceError { source, lost: None })
            }
            // It was never unmapped: nothing else was mapped here, and the driver still gives access.
            Err(_) if !was_unmapped && set_access(self.memory.calls(), pointer, self.memory.bytes(), rules).is_ok() => {
                self.mapped = true;
                Err(ReplaceError { source, lost: None })
            }
            Err(lost) => Err(ReplaceError { source, lost: Some(Box::new(lost)) }),
        }
    }

    fn unmap(&mut self) -> Result<(), CudaError> {
        if !std::mem::replace(&mut self.mapped, false) {
            return Ok(());
        }
        self.memory.calls().give_back(|driver| {
            // SAFETY: exactly the range that was mapped, unmapped once. Nothing gives it out any more, because the
            // callers have the only reference to it: they end the part, or map other memory there, or give up its
            // length.
            unsafe { driver.mem_unmap(self.pointer, self.memory.bytes() as usize) }
        })
    }
}

impl Drop for MappedPart {
    fn drop(&mut self) {
        let unmapped = self.unmap();
        self.memory.calls().record_drop(unmapped);
    }
}

/// Gives access to `bytes` from `pointer` on, all of which are mapped.
fn set_access(calls: &CallContext, pointer: DevicePtr, bytes: u64, rules: &[MemAccessDesc]) -> Result<(), CudaError> {
    let _guard = calls.guard()?;
    // SAFETY: the range is mapped as a whole, by the callers; the rules are live and counted.
    unsafe { calls.driver().mem_set_access(pointer, bytes as usize, rules.as_ptr(), rules.len()) }
}

fn describe(error: CudaError, bytes: u64, calls: &CallContext) -> CudaError {
    error.with_context(match calls {
        CallContext::Of(context) => format!("mapping {bytes} bytes for device {}", context.device().ordinal()),
        CallContext::Any(_) => format!("mapping {bytes} bytes of a NUMA node"),
    })
}

/// A reserved range of addresses.
#[derive(Debug)]
pub(crate) struct AddressRange {
    calls: CallContext,
    pub(crate) pointer: DevicePtr,
    pub(crate) bytes: usize,
}

impl AddressRange {
    /// Reserves exactly this many bytes of addresses, in one range.
    pub(crate) fn reserve(calls: &CallContext, bytes: u64) -> Result<Self, CudaError> {
        let size =
            usize::try_from(bytes).map_err(|_| CudaError::new("cuMemAddressReserve", CuResult::INVALID_VALUE))?;
        let mut pointer = 0;
        // SAFETY: the pointer is to a live address; no alignment, hint or flags are asked for.
        unsafe { calls.driver().mem_address_reserve(&mut pointer, size, 0, 0, 0) }?;
        Ok(Self { calls: calls.clone(), pointer, bytes: size })
    }

    /// Returns the range, and leaves one without addresses.
    fn take(&mut self) -> Self {
        let none = Self { calls: self.calls.clone(), pointer: 0, bytes: 0 };
        std::mem::replace(self, none)
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let freed = self.calls.give_back(|driver| {
            // SAFETY: reserved once, freed once. If unmapping failed before, the driver refuses and the addresses
            // stay reserved, which is safe.
            unsafe { driver.mem_address_free(self.pointer, self.bytes) }
        });
        self.calls.record_drop(freed);
    }
}
