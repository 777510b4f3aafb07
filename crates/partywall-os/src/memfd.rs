//! Anonymous files with seals.
//!
//! A memfd is created at its final length and sealed against shrinking and growing before any other process gets it. No
//! peer can therefore make a reader's mapping fault. Freezing adds `F_SEAL_WRITE`: from then on the kernel refuses
//! every write and every writable mapping by any process.
//!
//! The file has mode 0600. A process of another user that is handed a read-only descriptor therefore cannot open the
//! file again for writing through `/proc`. The kernel's default for memfds, 0777, lets any user do so.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::{
    fs::{self, MemfdFlags, Mode, OFlags, SealFlags},
    io,
};

use crate::{
    map::{PrivateMap, SealedMap},
    process,
};

/// Seals that every memfd of Partywall carries.
const FIXED_LENGTH: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// The longest name that `memfd_create` takes (memfd_create(2)).
const MAX_NAME: usize = 249;

/// A zeroed file that only this process can access until it is [frozen](Draft::freeze) or [shared](Draft::share).
///
/// It is written through a mapping ([`Draft::bytes_mut`]) or without one ([`Draft::writer`]). Without a mapping the
/// kernel need not zero each page before it is overwritten.
#[derive(Debug)]
pub struct Draft {
    map: Option<PrivateMap>,
    /// The mapping, once the file is frozen.
    frozen: Option<SealedMap>,
    fd: OwnedFd,
    bytes: u64,
}

impl Draft {
    /// Creates a file of `bytes` zero bytes, sealed against shrinking and growing. `name` is shown in `/proc`,
    /// shortened to the kernel's limit.
    ///
    /// # Errors
    /// `ENOMEM`, `EMFILE`; `EINVAL` or `EFBIG` if `bytes` exceeds the maximum length of a file; `EFBIG` beyond the
    /// process's [limit](process::file_size_limit), without the signal that the kernel would send.
    pub fn create(name: &str, bytes: u64) -> io::Result<Self> {
        let mut end = name.len().min(MAX_NAME);
        while !name.is_char_boundary(end) {
            end -= 1;
        }
        if process::file_size_limit().is_some_and(|limit| bytes > limit) {
            return Err(io::Errno::FBIG);
        }
        let fd = fs::memfd_create(&name[..end], MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        fs::fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
        io::retry_on_intr(|| fs::ftruncate(&fd, bytes))?;
        fs::fcntl_add_seals(&fd, FIXED_LENGTH)?;
        Ok(Self { map: None, frozen: None, fd, bytes })
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// Returns whether the file is empty.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Returns the bytes, mapped on first use.
    ///
    /// # Errors
    /// As mmap(2); `EFAULT` in a forked child of the process that mapped them; `EPERM` once the file is frozen.
    pub fn bytes_mut(&mut self) -> io::Result<&mut [u8]> {
        if self.frozen.is_some() {
            return Err(io::Errno::PERM);
        }
        let map = match self.map.take() {
            Some(map) => map,
            // SAFETY: `create` made the file, and `self` has not handed it to any other owner; `writer` needs `&mut
            // self`.
            None => unsafe { PrivateMap::new(&self.fd) }?,
        };
        self.map.insert(map).bytes_mut().ok_or(io::Errno::FAULT)
    }

    /// Returns the bytes as written so far, if [`Draft::bytes_mut`] has mapped them.
    pub fn bytes(&self) -> Option<&[u8]> {
        self.map.as_ref().and_then(PrivateMap::bytes)
    }

    /// Returns a writer that needs no mapping and can be used by several threads at once.
    pub fn writer(&mut self) -> DraftWriter<'_> {
        DraftWriter(self)
    }

    /// Forbids every further write by any process, and returns a read-only descriptor.
    ///
    /// # Errors
    /// `EBUSY` while any process has a writable mapping of the file or reads into it without a copy; `ENOENT` without
    /// /proc, through which the file is opened for reading.
    pub fn freeze(mut self) -> io::Result<OwnedFd> {
        // `freeze_in_place` would keep the mapping, which is not needed here.
        self.map = None;
        self.freeze_in_place()?;
        Ok(self.fd)
    }

    /// Freezes the file as [`Draft::freeze`] does, and keeps the mapping of [`Draft::bytes_mut`] at its address. Code
    /// that knows the address can still read the bytes there; a write faults. A second call changes nothing.
    ///
    /// # Errors
    /// As [`Draft::freeze`] and mmap(2); `EFAULT` in a forked child. The file then stays writable.
    pub fn freeze_in_place(&mut self) -> io::Result<()> {
        if self.frozen.is_some() {
            return Ok(());
        }
        let readable = open_for_reading(&self.fd)?;
        let seal = || fs::fcntl_add_seals(&self.fd, SealFlags::WRITE | SealFlags::SEAL);
        match self.map.take().map(|map| map.freeze(&self.fd, &readable, seal)) {
            None => {
                if !Seals::of(&self.fd)?.frozen() {
                    seal()?;
                }
                self.frozen = Some(SealedMap::new(&readable)?);
            }
            Some(Ok(map)) => self.frozen = Some(map),
            Some(Err((map, errno))) => {
                self.map = map;
                return Err(errno);
            }
        }
        self.fd = readable;
        Ok(())
    }

    /// Returns the mapping of a frozen file.
    pub fn into_frozen(self) -> Option<SealedMap> {
        self.frozen
    }

    /// Returns the mapping that [`Draft::bytes_mut`] made, for a shared file.
    pub fn into_written(self) -> Written {
        Written { _map: self.map }
    }

    /// Keeps the file writable for every process that receives it, and forbids freezing it.
    ///
    /// # Errors
    /// As fcntl(2).
    pub fn share(self) -> io::Result<OwnedFd> {
        self.share_in_place()?;
        Ok(self.fd)
    }

    /// Shares the file as [`Draft::share`] does, and keeps the mapping at its address.
    ///
    /// # Errors
    /// As fcntl(2).
    pub fn share_in_place(&self) -> io::Result<()> {
        if Seals::of(&self.fd)?.0.contains(SealFlags::SEAL) {
            Ok(())
        } else {
            fs::fcntl_add_seals(&self.fd, SealFlags::SEAL)
        }
    }
}

impl AsFd for Draft {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Opens a read-only descriptor of the same file.
///
/// Up to Linux 6.6 the kernel counts every shared mapping through a writable descriptor as a writer, even if the
/// mapping is read-only. Such a mapping keeps the file from being frozen, and is refused once the file is frozen
/// (`mapping_map_writable` in mmap).
fn open_for_reading(fd: &OwnedFd) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    io::retry_on_intr(|| fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()))
}

/// Keeps the mapping of a [`Draft`] alive for code that still uses its addresses.
#[derive(Debug)]
pub struct Written {
    _map: Option<PrivateMap>,
}

/// Writes into a borrowed [`Draft`].
#[derive(Debug)]
pub struct DraftWriter<'a>(&'a mut Draft);

impl DraftWriter<'_> {
    /// Writes all of `bytes` at `offset`. If two threads write the same place, the bytes of either may remain.
    ///
    /// # Errors
    /// `EPERM` past the end, `ENOMEM`.
    pub fn write_all_at(&self, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
        while !bytes.is_empty() {
            let written = io::retry_on_intr(|| io::pwrite(&self.0.fd, bytes, offset))?;
            if written == 0 {
                return Err(io::Errno::IO);
            }
            bytes = &bytes[written..];
            offset += written as u64;
        }
        Ok(())
    }
}

/// Creates a frozen file with exactly these `contents`.
///
/// # Errors
/// As [`Draft::create`].
pub fn frozen(name: &str, contents: &[u8]) -> io::Result<OwnedFd> {
    let mut draft = Draft::create(name, contents.len() as u64)?;
    draft.writer().write_all_at(contents, 0)?;
    draft.freeze()
}

/// The seals of a memfd: operations that the kernel refuses on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seals(SealFlags);

impl Seals {
    /// Reads the seals of `fd`.
    ///
    /// # Errors
    /// `EINVAL` if the file is neither a memfd nor another file that can be sealed.
    pub fn of(fd: impl AsFd) -> io::Result<Self> {
        fs::fcntl_get_seals(fd).map(Self)
    }

    /// Returns whether the length can never change.
    pub fn fixed_length(self) -> bool {
        self.0.contains(FIXED_LENGTH)
    }

    /// Returns whether the bytes can never change.
    pub fn frozen(self) -> bool {
        self.0.contains(FIXED_LENGTH.union(SealFlags::WRITE))
    }
}

/// Returns the length of a file in bytes.
///
/// # Errors
/// As fstat(2).
pub fn len(fd: impl AsFd) -> io::Result<u64> {
    Ok(fs::fstat(fd)?.st_size as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::{SealedMap, SharedMap};
    use std::{
        os::unix::process::CommandExt,
        process::{Command, Stdio},
    };

    #[test]
    fn memfd_can_neither_shrink_nor_grow() {
        let mut draft = Draft::create("partywall:test", 4096).unwrap();
        assert!(Seals::of(&draft.fd).unwrap().fixed_length());
        assert_eq!(fs::ftruncate(&draft.fd, 0), Err(io::Errno::PERM));
        assert_eq!(fs::ftruncate(&draft.fd, 8192), Err(io::Errno::PERM));
        assert_eq!(draft.writer().write_all_at(&[1; 10], 4090), Err(io::Errno::PERM));
    }

    // Holds 3.
    #[test]
    fn frozen_memfd_refuses_writers() {
        let mut draft = Draft::create("partywall:test", 4096).unwrap();
        draft.bytes_mut().unwrap()[7] = 42;
        draft.writer().write_all_at(&[43], 8).unwrap();
        assert_eq!(&draft.bytes().unwrap()[7..9], [42, 43]);
        let fd = draft.freeze().unwrap();
        assert_eq!(fs::fcntl_getfl(&fd).unwrap() & OFlags::ACCMODE, OFlags::RDONLY);
        // Opening the file again for writing does not help.
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let writable = fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap();
        assert_eq!(io::pwrite(&writable, b"x", 0), Err(io::Errno::PERM));
        assert_eq!(SharedMap::writable(&writable).err(), Some(io::Errno::PERM));
        assert_eq!(&SealedMap::new(&fd).unwrap().bytes()[7..9], [42, 43]);
    }

    #[test]
    fn memory_frozen_in_place_keeps_its_address() {
        let mut draft = Draft::create("partywall:test", 5000).unwrap();
        let bytes = draft.bytes_mut().unwrap();
        bytes[4999] = 42;
        let address = bytes.as_ptr();
        draft.freeze_in_place().unwrap();
        draft.freeze_in_place().unwrap();
        assert_eq!(draft.bytes_mut().err(), Some(io::Errno::PERM));
        assert_eq!(io::pwrite(&draft, b"x", 0), Err(io::Errno::BADF));
        let map = draft.into_frozen().unwrap();
        assert_eq!((map.bytes().as_ptr(), map.bytes()[4999]), (address, 42));
    }

    #[test]
    fn memory_that_cannot_be_frozen_in_place_stays_writable() {
        let mut draft = Draft::create("partywall:test", 5000).unwrap();
        draft.bytes_mut().unwrap()[0] = 1;
        let other = SharedMap::writable(&draft).unwrap();
        assert_eq!(draft.freeze_in_place().err(), Some(io::Errno::BUSY));
        draft.bytes_mut().unwrap()[1] = 2;
        drop(other);
        draft.freeze_in_place().unwrap();
        assert_eq!(draft.into_frozen().unwrap().bytes()[..2], [1, 2]);
    }

    #[test]
    fn file_with_a_writable_map_is_not_frozen() {
        let draft = Draft::create("partywall:test", 4096).unwrap();
        let _other = SharedMap::writable(&draft.fd).unwrap();
        assert_eq!(draft.freeze().err(), Some(io::Errno::BUSY));
    }

    #[test]
    fn shared_memory_is_never_frozen_and_never_a_slice() {
        let fd = Draft::create("partywall:test", 4096).unwrap().share().unwrap();
        assert_eq!(fs::fcntl_add_seals(&fd, SealFlags::WRITE), Err(io::Errno::PERM));
        assert!(SealedMap::new(&fd).is_err());
    }

    /// Runs a shell as another user, whose standard input is `fd`, opened for reading alone. Returns whether it could
    /// open the file again in the given way.
    fn other_user_reopens(fd: &OwnedFd, how: &str) -> bool {
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let reading = fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", &format!("exec 3{how}/proc/self/fd/0")]).stdin(reading).stderr(Stdio::null());
        shell.uid(65534).gid(65534).current_dir("/").status().unwrap().success()
    }

    // Holds 146.
    #[test]
    fn needs_root_other_user_cannot_reopen_memory_for_writing() {
        let draft = Draft::create("partywall:test", 4096).unwrap();
        let shared = Draft::create("partywall:test", 4096).unwrap().share().unwrap();
        for fd in [&draft.fd, &shared] {
            assert!(!other_user_reopens(fd, "<>"), "for writing");
            assert!(!other_user_reopens(fd, "<"), "nor for reading: it has the descriptor");
        }
        let unprotected = fs::memfd_create("partywall:test", MemfdFlags::CLOEXEC).unwrap();
        assert!(other_user_reopens(&unprotected, "<>"), "with the kernel's own mode it can");
    }

    #[test]
    fn long_names_and_empty_files_are_legal() {
        let fd = Draft::create(&"ä".repeat(300), 0).unwrap().freeze().unwrap();
        assert_eq!(SealedMap::new(&fd).unwrap().bytes(), b"");
    }
}
