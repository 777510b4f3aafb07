//! `partywall lab vmm`: hands GPU memory to another process by file descriptor, call by call.
//!
//! | role | process | does |
//! |---|---|---|
//! | export | child | creates memory, maps it twice, sends its file descriptor, ends |
//! | import | `partywall lab vmm` | receives it, maps it, reads, continues after the exporter's end; concludes |

mod export;
mod import;

use std::collections::BTreeMap;

use crate::prelude::*;

pub(super) static LAB: Lab = Lab {
    name: "vmm",
    title: "GPU memory handed to another process by file descriptor, call by call",
    about: Some("A hand-over of memory by file descriptor, call by call"),
    roles: &[Role::new("export", "Create memory, map it twice, send its file descriptor, and end", export::play)],
    observer: Role::new(
        "import",
        "Receive the file descriptor, map the memory, and continue after the exporter's end",
        import::play,
    ),
    farewell: Some("This process ends now. The importer continues, and reports which beliefs are refuted."),
    beliefs: BELIEFS,
    ..Lab::DEFAULT
};

/// The values that travel with the file descriptor, which does not contain them.
#[derive(Debug, Serialize, Deserialize)]
struct Parcel {
    bytes: u64,
    /// The exporter's address of the memory and the number of its descriptor, only for comparison.
    address: u64,
    fd: i32,
}

/// The byte that the exporter writes, and the byte that the importer writes later.
const WRITTEN: u8 = 0xA1;
const WRITTEN_BACK: u8 = 0xB2;

beliefs! {
    ONE_ADDRESS = "one-address": "An allocation has one address.",
    PARTS = "parts": "A part of an allocation can be mapped.",
    SAME_NUMBER = "same-number": "A file descriptor has the same number in both processes.",
    CONSUMED = "consumed": "Importing a file descriptor uses it up.",
    FD_HOLDS = "fd-holds": "Closing the file descriptor takes the memory away.",
    SAME_ADDRESS = "same-address": "The memory has the same address in both processes.",
    COPY = "copy": "The other process maps a copy.",
    PASSED_ON = "passed-on": "A process that has imported memory can export it.",
    MAKER = "maker": "The memory goes away with the process that made it.",
}

/// Open files: the targets of the links in `/proc/self/fd`.
type Files = BTreeMap<i32, String>;

/// Returns the open files of this process.
fn open_files() -> Files {
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let links = entries.filter_map(|entry| {
        let number = entry.file_name().to_str()?.parse().ok()?;
        Some((number, std::fs::read_link(entry.path()).ok()?.display().to_string()))
    });
    // The directory itself was open while it was read.
    links.filter(|(_, link)| !link.starts_with("/proc/")).collect()
}

/// Formats the descriptors that only the first list has, each as `31 → /dev/nvidiactl`.
fn beyond(more: &Files, less: &Files) -> String {
    let new: Vec<_> =
        more.iter().filter(|(fd, _)| !less.contains_key(fd)).map(|(fd, link)| format!("{fd} → {link}")).collect();
    if new.is_empty() { "none".into() } else { new.join(", ") }
}

/// Formats the number of open files, and of those of the GPU's driver.
fn count(files: &Files) -> String {
    let driver = files.values().filter(|link| link.starts_with("/dev/nvidia")).count();
    format!("{} open files, {driver} of them of the GPU's driver", files.len())
}
