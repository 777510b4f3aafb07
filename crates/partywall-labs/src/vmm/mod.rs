//! `partywall lab vmm`: memory handed to another process by file descriptor, call by call.
//!
//! | role | process | does |
//! |---|---|---|
//! | export | child | makes memory, maps it twice, sends its file descriptor, ends |
//! | import | `partywall lab vmm` | receives it, maps it, reads, goes on after the maker's end; concludes |

mod export;
mod import;

use std::collections::BTreeMap;

use crate::prelude::*;

pub(super) static LAB: Lab = Lab {
    name: "vmm",
    about: "A hand-over of memory by file descriptor, call by call",
    title: "GPU memory handed to another process by file descriptor, call by call",
    on_host: false,
    broker: false,
    options: |command| command,
    roles: &[Role::new(
        "export",
        "Make memory, map it twice, give its file descriptor away, and end",
        "This process ends now. The importer goes on, and says which beliefs held.",
        export::play,
    )],
    observer: Role::new(
        "import",
        "Receive the file descriptor, map the memory, and go on after its maker's end",
        "",
        import::play,
    ),
    claims: CLAIMS,
};

/// What goes along with the file descriptor, which says nothing of this itself.
#[derive(Debug, Serialize, Deserialize)]
struct Parcel {
    bytes: u64,
    /// Where the exporter has it mapped, and which descriptor it sent: of no use here, but to compare.
    address: u64,
    fd: i32,
}

/// What the exporter writes, and then the importer.
const WRITTEN: u8 = 0xA1;
const WRITTEN_BACK: u8 = 0xB2;

claims! {
    ONE_ADDRESS = "one-address": "An allocation has one address.",
    PARTS = "parts": "A part of an allocation can be mapped.",
    SAME_NUMBER = "same-number": "A file descriptor has the same number in both processes.",
    CONSUMED = "consumed": "Importing a file descriptor uses it up.",
    FD_HOLDS = "fd-holds": "Closing the file descriptor takes the memory away.",
    SAME_ADDRESS = "same-address": "The memory has the same address in both processes.",
    COPY = "copy": "What the other process maps is a copy.",
    PASSED_ON = "passed-on": "A process that has imported memory can export it further.",
    MAKER = "maker": "The memory goes away with the process that made it.",
}

/// The open files of this process: what each descriptor leads to, as `/proc/self/fd` says.
fn open_files() -> BTreeMap<i32, String> {
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let links = entries.filter_map(|entry| {
        let number = entry.file_name().to_str()?.parse().ok()?;
        Some((number, std::fs::read_link(entry.path()).ok()?.display().to_string()))
    });
    // The directory itself was open while it was read.
    links.filter(|(_, link)| !link.starts_with("/proc/")).collect()
}

/// `31 → /dev/nvidiactl`, for each descriptor that one list has and the other one has not.
fn beyond(more: &BTreeMap<i32, String>, less: &BTreeMap<i32, String>) -> String {
    let new: Vec<_> =
        more.iter().filter(|(fd, _)| !less.contains_key(fd)).map(|(fd, link)| format!("{fd} → {link}")).collect();
    if new.is_empty() { "none".into() } else { new.join(", ") }
}

/// How many of the open files lead to the GPU's driver, and how many there are.
fn counted(files: &BTreeMap<i32, String>) -> String {
    let driver = files.values().filter(|link| link.starts_with("/dev/nvidia")).count();
    format!("{} open files, {driver} of them of the GPU's driver", files.len())
}
