//! A file with the weights, for comparison.

use std::{
    fs::{self, File},
    os::fd::AsRawFd,
    sync::atomic::AtomicBool,
};

use partywall::files::Format;

use super::*;

/// A file in the page cache. It has no name, so that it disappears if this process is killed.
pub(super) struct Cached(File);

impl Cached {
    /// Writes the weights to a file beside other temporary files.
    pub(super) fn write(session: &Session) -> Result<Self, Failure> {
        let segment = session.domain().open(NAME, TIMEOUT)?;
        let path = partywall_os::environment::temporary_directory()
            .join(format!("partywall-lab-weights-{}", std::process::id()));
        let writing = format!("writing {}", path.display());
        let mut file = File::options().read(true).write(true).create_new(true).open(&path).doing(&writing)?;
        fs::remove_file(&path).doing(&writing)?;
        segment.write_to(None, Format::SafeTensors, &mut file, &|_| (), &AtomicBool::new(false))?;
        Ok(Self(file))
    }

    /// Returns a path by which processes of this machine open the file.
    pub(super) fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd()).into()
    }
}
