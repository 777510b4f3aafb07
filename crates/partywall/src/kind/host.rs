//! Host memory: one sealed memfd for each chunk.
//!
//! The kernel seals a frozen version against writing, so that its readers get plain slices. A mutable version can never
//! be frozen, so it is accessed by volatile operations only.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, Weak},
};

use partywall_cuda::HostRegistration;
use partywall_os::{
    Errno,
    borrow::BlockBorrows,
    lock::IgnorePoison,
    map::{self, SealedMap, SharedMap},
    memfd, process,
};
use partywall_wire::Kind as WireKind;

use super::{Attach, Draft, Extension, HostUpload, Kind, Memory, Upload, Uploads, outside, wrong_kind};
use crate::{
    error::{Error, LimitReached, Result, Unreachable},
    gpu::{DeviceRange, Gpu, Gpus, cuda_error},
    place::Place,
};

/// The kind.
pub(super) struct HostKind;

impl Kind for HostKind {
    fn wire(&self) -> WireKind {
        WireKind::Host
    }

    fn lives_at(&self, place: Place) -> bool {
        place == Place::Host
    }

    fn allocate(
        &self,
        name: &str,
        _: Place,
        used: &[u64],
        reserve: Option<u64>,
        _: &Arc<Gpus>,
    ) -> Result<Box<dyn Draft>> {
        let chunk = |bytes: &u64| draft(name, if reserve.is_some() { whole_pages(*bytes) } else { *bytes });
        let chunks: Vec<_> = used.iter().map(chunk).collect::<Result<_>>()?;
        let bytes = chunks.iter().map(memfd::Draft::len).sum();
        let reserved = reserve.map_or(0, |reserve| whole_pages(reserve).max(bytes));
        Ok(Box::new(HostDraft { name: name.to_owned(), chunks, reserved, shared: None }))
    }

    fn chunk(&self, name: &str, _: Place, bytes: u64, _: &Arc<Gpus>) -> Result<(u64, OwnedFd)> {
        let draft = draft(name, whole_pages(bytes))?;
        let bytes = draft.len();
        Ok((
            bytes,
            draft.share().map_err(|e| Error::system(format!("growing {name:?} by {}", crate::bytes(bytes)), e))?,
        ))
    }

    fn attach(&self, version: Attach<'_>) -> Result<Box<dyn Memory>> {
        let name = version.name;
        let failed = |bytes| move |errno| Error::system(format!("mapping {bytes} bytes of {name:?}"), errno);
        if version.reserve > 0 {
            let bytes = version.chunks.iter().map(|(bytes, _)| bytes).sum::<u64>();
            let fds: Vec<_> = version.chunks.into_iter().map(|(_, fd)| fd).collect();
            let map = SharedMap::new(fds, version.reserve as usize, version.write).map_err(failed(bytes))?;
            if map.len() as u64 != bytes {
                return Err(wrong_length());
            }
            return Ok(Box::new(HostMemory::new(vec![HostChunk::Mutable(Arc::new(map))], true)));
        }
        let map = |(bytes, fd)| {
            let chunk = HostChunk::map(&fd, version.mutable, version.write).map_err(failed(bytes))?;
            if chunk.len() as u64 == bytes { Ok(chunk) } else { Err(wrong_length()) }
        };
        let chunks = version.chunks.into_iter().map(map).collect::<Result<_>>()?;
        Ok(Box::new(HostMemory::new(chunks, false)))
    }
}

fn draft(name: &str, bytes: u64) -> Result<memfd::Draft> {
    memfd::Draft::create(&format!("partywall:{name}"), bytes).map_err(|errno| match errno {
        Errno::FBIG if process::file_size_limit().is_some_and(|limit| bytes > limit) => {
            Error::system(format!("cannot allocate {} for {name:?} on host", crate::bytes(bytes)), errno)
        }
        Errno::NOMEM | Errno::INVAL | Errno::FBIG | Errno::OVERFLOW => out_of_memory(name, bytes),
        errno => Error::system(format!("making a memfd of {bytes} bytes for {name:?}"), errno),
    })
}

fn out_of_memory(name: &str, bytes: u64) -> Error {
    LimitReached::memory(name, Place::Host, bytes, None)
}

/// Rounds up to whole pages, so that the next chunk can be mapped without a gap.
fn whole_pages(bytes: u64) -> u64 {
    let page = rustix::param::page_size() as u64;
    bytes.max(1).checked_next_multiple_of(page).unwrap_or(u64::MAX)
}

fn check_lengths(chunks: &[(u64, OwnedFd)]) -> Result<()> {
    for (bytes, fd) in chunks {
        if memfd::len(fd).map_err(|e| Error::system("asking for a chunk's length", e))? != *bytes {
            return Err(wrong_length());
        }
    }
    Ok(())
}

fn wrong_length() -> Error {
    Unreachable::protocol("the length of a chunk differs from the announced length")
}

struct HostDraft {
    name: String,
    chunks: Vec<memfd::Draft>,
    reserved: u64,
    /// The map of a mutable version, once it is frozen for the commit.
    shared: Option<SharedMap>,
}

impl Draft for HostDraft {
    fn chunk_bytes(&self) -> Vec<u64> {
        self.chunks.iter().map(memfd::Draft::len).collect()
    }

    fn push(&mut self, name: &str, _: Place, bytes: u64, _: &Arc<Gpus>) -> Result<()> {
        self.chunks.push(draft(name, bytes)?);
        Ok(())
    }

    fn reserved(&self) -> u64 {
        self.reserved
    }

    fn host_mut(&mut self, chunk: usize, offset: u64, bytes: u64) -> Result<&mut [u8]> {
        let all = self.chunks[chunk]
            .bytes_mut()
            .map_err(|e| Error::system(format!("mapping {:?} to write it", self.name), e))?;
        Ok(&mut all[offset as usize..(offset + bytes) as usize])
    }

    fn device(&self, _: usize, _: u64, _: u64) -> Result<DeviceRange<'_>> {
        Err(wrong_kind("host", "GPU", "a device pointer"))
    }

    fn uploads(&mut self) -> Box<dyn Uploads + '_> {
        Box::new(HostUploads { chunks: self.chunks.iter_mut().map(memfd::Draft::writer).collect() })
    }

    fn freeze(&mut self, mutable: bool) -> Result<()> {
        for draft in &mut self.chunks {
            let sealed = if mutable { draft.share_in_place() } else { draft.freeze_in_place() };
            sealed.map_err(|errno| match errno {
                Errno::BUSY => Error::Unreachable(Unreachable::Refused(
                    "the memory cannot be frozen while other code has it mapped for writing (through /proc?)".into(),
                )),
                Errno::NOENT => Error::system("opening the memory for reading through /proc", errno),
                errno => Error::system(format!("committing {:?}", self.name), errno),
            })?;
        }
        if mutable && self.shared.is_none() {
            let map = SharedMap::new(&self.chunks, self.reserved as usize, true);
            self.shared = Some(map.map_err(|errno| match errno {
                // Unwritten memory may be larger than the address space.
                Errno::NOMEM => out_of_memory(&self.name, self.chunk_bytes().iter().sum()),
                errno => Error::system("mapping the committed memory", errno),
            })?);
        }
        Ok(())
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.chunks.iter().map(AsFd::as_fd).collect()
    }

    fn into_memory(self: Box<Self>) -> Box<dyn Memory> {
        let Self { chunks, shared, .. } = *self;
        match shared {
            Some(map) => {
                let written = chunks.into_iter().map(memfd::Draft::into_written).collect();
                let chunks = vec![HostChunk::Mutable(Arc::new(map))];
                Box::new(HostMemory { _written: written, ..HostMemory::new(chunks, true) })
            }
            None => {
                let chunks = chunks.into_iter().filter_map(memfd::Draft::into_frozen);
                Box::new(HostMemory::new(chunks.map(Arc::new).map(HostChunk::Frozen).collect(), false))
            }
        }
    }
}

struct HostUploads<'a> {
    chunks: Vec<memfd::DraftWriter<'a>>,
}

impl Uploads for HostUploads<'_> {
    fn start(&self) -> Result<Box<dyn Upload + '_>> {
        // Writes with write calls instead of through a mapping: the kernel then does not zero a page that is
        // overwritten.
        Ok(Box::new(HostUpload::new(&self.chunks, |chunk, offset, bytes| {
            chunk.write_all_at(bytes, offset).map_err(|e| Error::system("writing into host memory", e))
        })))
    }
}

struct HostMemory {
    chunks: Vec<HostChunk>,
    /// The registration of each chunk while it is pinned.
    pins: Mutex<Vec<Weak<HostRegistration>>>,
    /// True if the only map may grow.
    grows: bool,
    /// The builder's mappings, whose addresses may still be in use.
    _written: Vec<memfd::Written>,
}

impl HostMemory {
    fn new(chunks: Vec<HostChunk>, grows: bool) -> Self {
        let pins = Mutex::new(chunks.iter().map(|_| Weak::new()).collect());
        Self { chunks, pins, grows, _written: Vec::new() }
    }

    fn mutable(&self, chunk: usize) -> Result<&Arc<SharedMap>> {
        match &self.chunks[chunk] {
            HostChunk::Mutable(map) => Ok(map),
            HostChunk::Frozen(_) => Err(wrong_kind("frozen host", "mutable host", "a shared slice")),
        }
    }
}

enum HostChunk {
    Frozen(Arc<SealedMap>),
    Mutable(Arc<SharedMap>),
}

impl HostChunk {
    fn map(fd: &OwnedFd, mutable: bool, write: bool) -> Result<Self, Errno> {
        match (mutable, write) {
            (false, _) => SealedMap::new(fd).map(Arc::new).map(Self::Frozen),
            (true, false) => SharedMap::readable(fd).map(Arc::new).map(Self::Mutable),
            (true, true) => SharedMap::writable(fd).map(Arc::new).map(Self::Mutable),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Frozen(map) => map.bytes().len(),
            Self::Mutable(map) => map.len(),
        }
    }
}

impl Memory for HostMemory {
    fn has_cpu(&self) -> bool {
        true
    }

    fn allow_cpu(&self) -> Result<()> {
        Ok(())
    }

    fn bytes(&self, chunk: usize, offset: u64, bytes: u64) -> Result<&[u8]> {
        match &self.chunks[chunk] {
            HostChunk::Frozen(map) => Ok(&map.bytes()[offset as usize..(offset + bytes) as usize]),
            HostChunk::Mutable(_) => Err(wrong_kind("mutable host", "frozen host", "a plain slice")),
        }
    }

    fn shared(&self, chunk: usize) -> Result<&SharedMap> {
        self.mutable(chunk).map(|map| &**map)
    }

    fn block_borrows(&self, offset: u64, stride: u64, bytes: u64, count: u32) -> Option<BlockBorrows> {
        let map = self.mutable(0).ok()?.clone();
        BlockBorrows::new(map, offset as usize, stride as usize, bytes as usize, count as usize)
    }

    fn device(&self, _: usize, _: u64, _: u64) -> Result<DeviceRange<'_>> {
        Err(wrong_kind("host", "GPU", "a device pointer"))
    }

    fn read(&self, chunk: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        match &self.chunks[chunk] {
            HostChunk::Frozen(map) => out.copy_from_slice(&map.bytes()[offset as usize..][..out.len()]),
            HostChunk::Mutable(map) => map.read_bytes(offset as usize, out).ok_or_else(outside)?,
        }
        Ok(())
    }

    fn write(&self, chunk: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        self.shared(chunk)?.write_bytes(offset as usize, bytes).ok_or_else(outside)
    }

    fn pin(&self, gpu: &Gpu) -> Result<Vec<Arc<HostRegistration>>> {
        // A panic under this lock loses no registration.
        let mut pins = self.pins.lock().ignore_poison();
        let pin = |(chunk, pin): (&HostChunk, &mut Weak<HostRegistration>)| {
            if let Some(registration) = pin.upgrade() {
                return Ok(registration);
            }
            let registered = match chunk {
                HostChunk::Frozen(map) => HostRegistration::frozen(gpu.context(), map.clone()),
                HostChunk::Mutable(map) => HostRegistration::shared(gpu.context(), map.clone()),
            };
            let registration = Arc::new(registered.map_err(cuda_error("pinning a segment"))?);
            *pin = Arc::downgrade(&registration);
            Ok(registration)
        };
        self.chunks.iter().zip(pins.iter_mut()).map(pin).collect()
    }

    fn registration(&self, chunk: usize) -> Option<Arc<HostRegistration>> {
        self.pins.lock().ignore_poison()[chunk].upgrade()
    }

    fn unpin(&self, registrations: Vec<Arc<HostRegistration>>) {
        // Under the lock: otherwise another thread could find a chunk whose pin is gone but that is still registered.
        let _pins = self.pins.lock().ignore_poison();
        drop(registrations);
    }

    fn reserved(&self) -> u64 {
        match self.chunks.first() {
            Some(HostChunk::Mutable(map)) if self.grows => map.reserved() as u64,
            _ => 0,
        }
    }

    fn extend(&self, chunks: &[(u64, OwnedFd)]) -> Result<Box<dyn Extension + '_>> {
        check_lengths(chunks)?;
        let fds: Vec<_> = chunks.iter().map(|(_, fd)| fd).collect();
        let extension = self.shared(0)?.extend(fds);
        Ok(Box::new(extension.map_err(|e| Error::system("mapping the memory that a segment has grown by", e))?))
    }
}

impl Extension for map::Extension<'_> {
    fn publish(self: Box<Self>) {
        map::Extension::publish(*self);
    }
}
