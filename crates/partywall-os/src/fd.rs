//! Classifies received file descriptors by what the kernel reports, which the sender cannot forge.

use std::os::fd::{AsFd, AsRawFd};

use rustix::{
    fs::{self, FileType},
    io,
};

use crate::memfd::Seals;

/// Character devices of the NVIDIA driver (Linux' list of allocated devices; `/dev/nvidiactl` is minor 255).
const NVIDIA_MAJOR: u32 = 195;
const NVIDIA_CTL_MINOR: u32 = 255;

/// The type of the file system of large pages (statfs(2)).
const HUGETLBFS_MAGIC: fs::FsWord = 0x9584_58f6;

/// The kind of file behind a file descriptor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FdKind {
    /// A memfd, with its seals and length.
    Memfd {
        /// Its seals.
        seals: Seals,
        /// Its length in bytes.
        bytes: u64,
    },
    /// A file of `/dev/nvidiactl`: the driver exports GPU memory as such files.
    NvidiaControl,
    /// Something else, described for an error message.
    Other(String),
}

/// Returns the kind of file behind `fd`.
///
/// # Errors
/// As fstat(2).
pub fn classify(fd: impl AsFd) -> io::Result<FdKind> {
    let stat = fs::fstat(&fd)?;
    let major = fs::major(stat.st_rdev);
    let minor = fs::minor(stat.st_rdev);
    Ok(match FileType::from_raw_mode(stat.st_mode) {
        FileType::CharacterDevice if (major, minor) == (NVIDIA_MAJOR, NVIDIA_CTL_MINOR) => FdKind::NvidiaControl,
        FileType::CharacterDevice => FdKind::Other(format!("a character device {major}:{minor}")),
        // Files of tmpfs can carry seals too, and count as memfds here: only the promise of the seals matters. No seal
        // keeps large pages there: a hole in them, and no free page left, kills the process that reads it.
        FileType::RegularFile => match Seals::of(&fd) {
            Ok(_) if fs::fstatfs(&fd)?.f_type == HUGETLBFS_MAGIC => FdKind::Other("memory in large pages".into()),
            Ok(seals) => FdKind::Memfd { seals, bytes: stat.st_size as u64 },
            Err(_) => FdKind::Other("an ordinary file".into()),
        },
        FileType::Directory => FdKind::Other("a directory".into()),
        FileType::Socket => FdKind::Other("a socket".into()),
        FileType::Fifo => FdKind::Other("a pipe".into()),
        _ => FdKind::Other(link(&fd)),
    })
}

/// Returns the kernel's name for the file, such as `anon_inode:[pidfd]`.
fn link(fd: impl AsFd) -> String {
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    fs::readlink(path, Vec::new()).map_or_else(|_| "an unknown file".into(), |link| link.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memfd;

    #[test]
    fn file_kinds_are_distinguished() {
        let memfd = memfd::frozen("partywall:test", &[0; 10]).unwrap();
        assert!(matches!(classify(&memfd), Ok(FdKind::Memfd { bytes: 10, seals }) if seals.fixed_length()));
        let describe = |fd: &dyn Fn() -> std::fs::File| match classify(fd()).unwrap() {
            FdKind::Other(what) => what,
            kind => panic!("{kind:?}"),
        };
        assert_eq!(describe(&|| std::fs::File::open("/dev/null").unwrap()), "a character device 1:3");
        assert_eq!(describe(&|| std::fs::File::open("/").unwrap()), "a directory");
        let (a, _b) = crate::socket::pair().unwrap();
        assert_eq!(classify(&a), Ok(FdKind::Other("a socket".into())));
    }

    // Holds 160.
    #[test]
    fn memory_that_no_seal_keeps_is_no_memfd() {
        use rustix::fs::{MemfdFlags, SealFlags};
        let sealable = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        match fs::memfd_create("partywall:test", sealable | MemfdFlags::HUGETLB) {
            Ok(large) => {
                fs::ftruncate(&large, 2 << 20).unwrap();
                fs::fcntl_add_seals(&large, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE).unwrap();
                assert_eq!(classify(&large), Ok(FdKind::Other("memory in large pages".into())));
            }
            Err(errno) => eprintln!("not tested: large pages ({errno})"),
        }
        match secret() {
            Some(secret) => assert_eq!(classify(&secret), Ok(FdKind::Other("an ordinary file".into()))),
            None => eprintln!("not tested: secret memory"),
        }
    }

    /// Memory that the kernel cannot read either (memfd_secret(2)).
    #[allow(unsafe_code)]
    fn secret() -> Option<std::os::fd::OwnedFd> {
        use std::os::fd::{FromRawFd, OwnedFd};
        // SAFETY: the call takes flags alone and touches no memory of ours.
        let fd = unsafe { libc::syscall(libc::SYS_memfd_secret, libc::O_CLOEXEC) };
        // SAFETY: the kernel has just created the descriptor for us, and nothing else owns it.
        (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd as i32) })
    }
}
