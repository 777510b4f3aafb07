//! `partywall lab errors`: each way in which sharing fails, and what the driver answers.
//!
//! | role | process | does |
//! |---|---|---|
//! | exporter | child | has memory of every kind, asks for handles, gives good ones away, ends |
//! | opener | `partywall lab errors` | opens handles, early, late and after their maker's end; concludes |
//! | intruder | child of the opener | what may end CUDA in a process: damaged handles, reads past the end, wrong frees |

mod exporter;
mod intruder;
mod opener;

use clap::{Args, Subcommand};
use partywall::cuda::IpcMemoryHandle;
use serde::{Deserialize, Serialize};

use super::{Options, device, peer::Peer, step::Belief, teller::Teller};
use crate::{Context, failure::Failure};

pub(super) const TITLE: &str = "each way in which sharing GPU memory fails, and what the driver answers";

pub(super) const ROLES: [&str; 2] = ["exporter", "opener"];

/// Its arguments.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    options: Options,
    /// A handle that `exporter` printed before this machine was restarted: try to open it
    #[arg(long, global = true, value_name = "HEX", value_parser = parse_handle)]
    handle: Option<IpcMemoryHandle>,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Debug, Clone, Copy, Subcommand)]
enum Role {
    /// Have memory of every kind, ask for handles, give them to the opener, and end
    Exporter,
    /// Open handles, also too early, damaged, and after their maker's end
    Opener,
    #[command(hide = true)]
    Intruder,
}

/// Runs it.
pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let Arguments { options, handle, role } = arguments;
    let output = context.console;
    match role {
        Some(Role::Exporter) => {
            let mut teller = Teller::new(output, LAB, "exporter", false);
            exporter::run(context, options, &mut teller)
        }
        Some(Role::Intruder) => intruder::run(options, &mut Teller::new(output, LAB, "intruder", false)),
        Some(Role::Opener) => {
            let mut teller = Teller::new(output, LAB, "opener", false);
            let peer = Peer::find(context, LAB, "exporter")?;
            opener::run(options, peer, &mut teller, *handle)
        }
        None => {
            // Here, so that a machine without a GPU is told so once, and by this process.
            let gpu = device::open(options.device())?;
            let mut teller = Teller::new(output, LAB, "opener", true);
            let peer = Peer::spawn(LAB, "exporter", &gpu.uuid().to_string())?;
            opener::run(options, peer, &mut teller, *handle)
        }
    }
}

/// What the exporter says first: who it is.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    pid: u32,
    uuid: String,
}

/// What the exporter gives away. Handles are hexadecimal.
#[derive(Debug, Serialize, Deserialize)]
struct Offer {
    /// An allocation of [`BYTES`], marked at its beginning and at [`INSIDE`], and its handle.
    base: String,
    /// The handle of the address at [`INSIDE`] in it, if the driver makes one.
    inside: Option<String>,
    /// An allocation of [`ODD_BYTES`], and how far behind it another one begins in the same 2 MiB.
    odd: String,
    neighbour: Option<u64>,
    /// An allocation of [`BYTES`] that holds old bytes until the exporter is told to write it.
    late: String,
    /// An allocation of [`BYTES`] that nobody opens before the exporter has ended.
    last: String,
}

/// What the opener wants next.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Wish {
    /// Enqueue the work that fills `late`, behind a wait.
    Enqueue,
    /// Let the wait end, and say when the work is done.
    Finish,
    /// End.
    End,
}

/// How the exporter answers a wish: why it could not be done.
type Done = Result<(), String>;

const LAB: &str = "errors";

/// Bytes of an allocation. More than a block of 2 MiB, so that it has its blocks for itself.
const BYTES: u64 = 4 << 20;
/// Where the second mark is.
const INSIDE: u64 = 1 << 20;
const ODD_BYTES: u64 = 1000;

/// What the first byte of an allocation is, and the byte at [`INSIDE`].
const MARK: u8 = 0x11;
const MARK_INSIDE: u8 = 0x22;
const MARK_ODD: u8 = 0x33;
const OLD: u8 = 0x44;
const NEW: u8 = 0x55;

const ANY_POINTER: Belief = belief("any-pointer", "Whatever a kernel can use can be shared by handle.");
const INTERIOR: Belief = belief("interior", "The handle of a pointer into an allocation leads to that pointer.");
const ONLY_SHARED: Belief = belief("only-shared", "Who opens a handle sees that allocation and nothing else.");
const EVERYWHERE: Belief = belief("everywhere", "A handle opens in any process, the one that made it included.");
const CHECKED: Belief = belief("checked", "A handle with a wrong bit is refused.");
const KEEPS: Belief = belief("keeps", "A handle is good for as long as somebody has it.");
const DIES: Belief = belief("dies", "What is open goes away with the process that made it.");
const WAITS: Belief = belief("waits", "Opening a handle waits for the work that fills the memory.");
const READER_FREES: Belief = belief("reader-frees", "cuMemFree gives back what was opened by handle.");
const CLOSED_ONCE: Belief = belief("closed-once", "Closing a mapping twice is reported.");
const ANY_SIZE: Belief = belief("any-size", "Memory of any size can be made to be shared by file descriptor.");
const ANY_EVENT: Belief = belief("any-event", "Any event can be shared between processes.");
const EVENT_HERE: Belief = belief("event-here", "The handle of an event opens in the process that made it.");
const CODES: Belief = belief("codes", "The error code says what was wrong.");

const BELIEFS: [Belief; 14] = [
    ANY_POINTER,
    INTERIOR,
    ONLY_SHARED,
    EVERYWHERE,
    CHECKED,
    KEEPS,
    DIES,
    WAITS,
    READER_FREES,
    CLOSED_ONCE,
    ANY_SIZE,
    ANY_EVENT,
    EVENT_HERE,
    CODES,
];

const fn belief(id: &'static str, text: &'static str) -> Belief {
    Belief { id, text }
}

fn handle_text(handle: IpcMemoryHandle) -> String {
    handle.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn parse_handle(text: &str) -> Result<IpcMemoryHandle, String> {
    let bad = || "a handle is 128 hexadecimal digits".to_owned();
    // As it is copied from two lines of a terminal.
    let text: String = text.split_whitespace().collect();
    if text.len() != 128 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(bad());
    }
    let mut bytes = [0; 64];
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * index..2 * index + 2], 16).map_err(|_| bad())?;
    }
    Ok(IpcMemoryHandle(bytes))
}

/// The handle that another role sent.
fn received(text: &str) -> Result<IpcMemoryHandle, Failure> {
    parse_handle(text).map_err(|why| {
        Failure::new(partywall::ErrorKind::CheckFailed, format!("the other role sent no handle: {why}"), "start again")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_goes_round_as_text() {
        let handle = IpcMemoryHandle(std::array::from_fn(|index| index as u8 * 3));
        assert_eq!(parse_handle(&handle_text(handle)), Ok(handle));
        for text in ["", "00", &"g".repeat(128), &"é".repeat(64), &"+1".repeat(64)] {
            assert!(parse_handle(text).is_err(), "{text}");
        }
    }
}
