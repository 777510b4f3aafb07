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
        // Files of hugetlbfs and tmpfs can carry seals too, and count as memfds here: only the promise of the seals
        // matters.
        FileType::RegularFile => match Seals::of(&fd) {
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
}
