//! Reports what the processes of a test left behind in the simulated driver.
//!
//! Each process that ends by itself writes a list of what it created and did not release. A killed process writes no
//! list, because its resources end with it.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use serde::Deserialize;

/// The directory that the processes of one test write to. Dropping it removes it.
pub(crate) struct Ledger {
    directory: PathBuf,
}

/// The environment variable that names the directory.
pub(crate) const VARIABLE: &str = "SIMCUDA_LEDGER";

/// A resource that was left behind.
#[derive(Deserialize)]
struct Left {
    kind: String,
    bytes: u64,
    /// The function that created it, and the number of that call in the process.
    call: String,
    index: u64,
}

impl Ledger {
    pub(crate) fn new() -> io::Result<Self> {
        let directory = std::env::temp_dir().join(format!("partywall-ledger-{}", std::process::id()));
        std::fs::create_dir(&directory)?;
        // Processes of other users write their lists here, too.
        std::fs::set_permissions(&directory, Permissions::from_mode(0o777))?;
        Ok(Self { directory })
    }

    pub(crate) fn directory(&self) -> &PathBuf {
        &self.directory
    }

    /// Returns a line for each resource left behind, with the call that created it.
    pub(crate) fn left(&self) -> Result<Vec<String>, String> {
        let mut lines = Vec::new();
        for entry in std::fs::read_dir(&self.directory).map_err(|error| error.to_string())? {
            let path = entry.map_err(|error| error.to_string())?.path();
            // Another one is the beginning of a list of a process that was killed.
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
            let list: Vec<Left> =
                serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?;
            let process = path.file_stem().unwrap_or_default().display();
            lines.extend(list.iter().map(|Left { kind, bytes, call, index }| {
                format!("process {process} left: {kind} of {bytes} bytes, created by {call}, its call {index}")
            }));
        }
        Ok(lines)
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}
