//! `partywall lab errors`: the ways in which sharing fails, and the driver's answers.
//!
//! | role | process | does |
//! |---|---|---|
//! | exporter | child | allocates memory of every kind, asks for handles, sends the good ones, ends |
//! | opener | `partywall lab errors` | opens handles: too early, and after the end of the exporter; concludes |
//! | intruder | child of the opener | tries what may break CUDA in a process: damaged handles, reads past the end, wrong frees |

mod exporter;
mod intruder;
mod opener;

use partywall::cuda::{IpcEvent, PinnedBuffer, PointerInfo};

use crate::prelude::*;

pub(super) static LAB: Lab = Lab {
    name: "errors",
    title: "each way in which sharing GPU memory fails, and what the driver answers",
    about: Some("Each way in which sharing fails, and what the driver answers"),
    options: Kept::augment_args,
    roles: &[
        Role::new(
            "exporter",
            "Allocate memory of every kind, ask for handles, send them to the opener, and end",
            exporter::play,
        ),
        Role::hidden("intruder", intruder::play),
    ],
    observer: Role::new(
        "opener",
        "Open handles: valid, too early, damaged, and after the end of the exporter",
        opener::play,
    ),
    farewell: Some(
        "This process ends now, with all its memory. The opener continues, and reports which beliefs are refuted.",
    ),
    beliefs: BELIEFS,
    ..Lab::DEFAULT
};

#[derive(Debug, Args)]
struct Kept {
    /// A handle that `exporter` printed before this machine was restarted: try to open it
    #[arg(long, global = true, value_name = "HEX", value_parser = parse_handle)]
    handle: Option<IpcMemoryHandle>,
}

/// The handles that the exporter sends, in hexadecimal.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Offer {
    /// An allocation of [`BYTES`], marked at its beginning and at [`INSIDE`], and its handle.
    base: String,
    /// The handle of the address at [`INSIDE`] in it, if the driver returns one.
    inside: Option<String>,
    /// An allocation of [`ODD_BYTES`], and the offset of a neighbour in the same 2 MiB.
    odd: String,
    neighbour: Option<u64>,
    /// An allocation of [`BYTES`] with old contents, until the exporter gets the command to fill it.
    late: String,
    /// An allocation of [`BYTES`] that no process opens before the exporter has ended.
    last: String,
}

/// A command of the opener.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Command {
    /// Enqueue the work that fills `late`, behind a wait.
    Enqueue,
    /// End the wait, and report when the work is done.
    Finish,
}

/// The exporter's answer to a command: the reason if it failed.
type Done = Result<(), String>;

/// Bytes of an allocation. More than 2 MiB, so that it shares no block of the driver with another allocation.
const BYTES: u64 = 4 << 20;
/// Where the second mark is.
const INSIDE: u64 = 1 << 20;
const ODD_BYTES: u64 = 1000;

/// The first byte of an allocation, and the byte at [`INSIDE`].
const MARK: u8 = 0x11;
const MARK_INSIDE: u8 = 0x22;
const MARK_ODD: u8 = 0x33;
const OLD: u8 = 0x44;
const NEW: u8 = 0x55;

beliefs! {
    ANY_POINTER = "any-pointer": "All memory that a kernel can use can be shared by handle.",
    INTERIOR = "interior": "The handle of a pointer into an allocation opens at that pointer.",
    ONLY_SHARED = "only-shared": "A process that opens a handle sees that allocation and nothing else.",
    EVERYWHERE = "everywhere": "A handle opens in any process, including the one that made it.",
    CHECKED = "checked": "A handle with a wrong bit is refused.",
    KEEPS = "keeps": "A handle is valid for as long as a process has it.",
    DIES = "dies": "Open memory goes away with the process that allocated it.",
    WAITS = "waits": "Opening a handle waits for the work that fills the memory.",
    READER_FREES = "reader-frees": "cuMemFree frees memory that was opened by handle.",
    CLOSED_ONCE = "closed-once": "Closing a mapping twice is reported.",
    ANY_SIZE = "any-size": "Memory of any size can be shared by file descriptor.",
    ANY_EVENT = "any-event": "Any event can be shared between processes.",
    EVENT_HERE = "event-here": "The handle of an event opens in the process that made it.",
    CODES = "codes": "The error code says what was wrong.",
}

fn handle_text(handle: IpcMemoryHandle) -> String {
    handle.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn parse_handle(text: &str) -> Result<IpcMemoryHandle, String> {
    let bad = || "a handle is 128 hexadecimal digits".to_owned();
    // A handle copied from a terminal may contain line breaks.
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

/// Parses the handle that another role sent.
fn received(text: &str) -> Result<IpcMemoryHandle, Failure> {
    parse_handle(text).map_err(|why| unexpected(format!("the other role sent an invalid handle: {why}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handle_survives_its_text_form() {
        let handle = IpcMemoryHandle(std::array::from_fn(|index| index as u8 * 3));
        assert_eq!(parse_handle(&handle_text(handle)), Ok(handle));
        for text in ["", "00", &"g".repeat(128), &"é".repeat(64), &"+1".repeat(64)] {
            assert!(parse_handle(text).is_err(), "{text}");
        }
    }
}
