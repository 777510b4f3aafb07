//! `partywall lab vmm`: memory handed to another process by file descriptor, call by call.
//!
//! | role | process | does |
//! |---|---|---|
//! | export | child | makes memory, maps it twice, sends its file descriptor, ends |
//! | import | `partywall lab vmm` | receives it, maps it, reads, goes on after the maker's end; concludes |

mod export;
mod import;

use std::collections::BTreeMap;

use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};

use super::{Options, device, peer::Peer, step::Belief, teller::Teller};
use crate::{Context, failure::Failure};

pub(super) const TITLE: &str = "GPU memory handed to another process by file descriptor, call by call";

pub(super) const ROLES: [&str; 2] = ["export", "import"];

/// Its arguments.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Debug, Clone, Copy, Subcommand)]
enum Role {
    /// Make memory, map it twice, give its file descriptor away, and end
    Export,
    /// Receive the file descriptor, map the memory, and go on after its maker's end
    Import,
}

/// Runs it.
pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let Arguments { options, role } = arguments;
    let output = context.console;
    match role {
        Some(Role::Export) => export::run(context, options, &mut Teller::new(output, LAB, "export", false)),
        Some(Role::Import) => {
            let mut teller = Teller::new(output, LAB, "import", false);
            import::run(options, Peer::find(context, LAB, "export")?, &mut teller)
        }
        None => {
            let gpu = device::open(options.device())?;
            let mut teller = Teller::new(output, LAB, "import", true);
            let peer = Peer::spawn(LAB, "export", &gpu.uuid().to_string())?;
            import::run(options, peer, &mut teller)
        }
    }
}

/// What the exporter says first: who it is.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    pid: u32,
    uuid: String,
}

/// What goes along with the file descriptor, which says nothing of this itself.
#[derive(Debug, Serialize, Deserialize)]
struct Parcel {
    bytes: u64,
    /// Where the exporter has it mapped, and which descriptor it sent: of no use here, but to compare.
    address: u64,
    fd: i32,
}

/// What the importer wants next.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Wish {
    /// Look at what the importer has written.
    Look,
    /// End.
    End,
}

/// The exporter has looked.
#[derive(Debug, Serialize, Deserialize)]
struct Looked;

const LAB: &str = "vmm";

/// What the exporter writes, and then the importer.
const WRITTEN: u8 = 0xA1;
const WRITTEN_BACK: u8 = 0xB2;

const ONE_ADDRESS: Belief = belief("one-address", "An allocation has one address.");
const PARTS: Belief = belief("parts", "A part of an allocation can be mapped.");
const SAME_NUMBER: Belief = belief("same-number", "A file descriptor has the same number in both processes.");
const CONSUMED: Belief = belief("consumed", "Importing a file descriptor uses it up.");
const FD_HOLDS: Belief = belief("fd-holds", "Closing the file descriptor takes the memory away.");
const SAME_ADDRESS: Belief = belief("same-address", "The memory has the same address in both processes.");
const COPY: Belief = belief("copy", "What the other process maps is a copy.");
const PASSED_ON: Belief = belief("passed-on", "Whoever has imported memory can export it further.");
const MAKER: Belief = belief("maker", "The memory goes away with the process that made it.");

const BELIEFS: [Belief; 9] =
    [ONE_ADDRESS, PARTS, SAME_NUMBER, CONSUMED, FD_HOLDS, SAME_ADDRESS, COPY, PASSED_ON, MAKER];

const fn belief(id: &'static str, text: &'static str) -> Belief {
    Belief { id, text }
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
