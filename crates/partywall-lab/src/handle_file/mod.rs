//! `partywall lab handle-file`: a handle that travels in a file, as in many tutorials, and a name instead.
//!
//! | role | process | does |
//! |---|---|---|
//! | producer | child | writes the handle of its memory to a file: in two parts, too early, and properly |
//! | consumer | `partywall lab handle-file` | opens what it finds in the file, kills another producer; concludes |

mod consumer;
mod producer;

use crate::prelude::*;

pub(super) static LAB: Lab = Lab {
    name: "handle-file",
    title: "a handle passed through a file: too early, stale, and properly",
    broker: true,
    roles: &[Role::new("producer", "Allocate memory, and write its handle to a file", producer::play)],
    observer: Role::new("consumer", "Open the handle from the file, and kill another producer", consumer::play),
    beliefs: BELIEFS,
    ..Lab::DEFAULT
};

/// A command of the consumer. It is answered with `()` when it is done.
#[derive(Debug, Serialize, Deserialize)]
enum Command {
    /// Allocate memory, and write the first half of its handle to this file.
    Half(PathBuf),
    /// Write the rest. The memory is not filled yet.
    Rest(PathBuf),
    /// Fill the memory, wait for the GPU, and replace the file in one step. Report it if the flag is set.
    Publish(PathBuf, bool),
    /// Free the memory, and allocate as much again. The file stays.
    Replace,
    /// Build a segment of this name; answered before that.
    Build(String),
}

/// Bytes of the memory. More than 2 MiB, so that it shares no block of the driver with another allocation.
const BYTES: u64 = 4 << 20;
const HANDLE_BYTES: usize = 64;

/// The byte in the memory before the producer has filled it, and after.
const OLD: u8 = 0x0D;
const NEW: u8 = 0x5A;

/// The tensor of each segment.
const TENSOR: &str = "data";

beliefs! {
    WHOLE = "whole": "A consumer that finds the file finds a whole handle.",
    READY = "ready": "When the file is there, the memory is ready.",
    NOTICED = "noticed": "The file goes away with the memory.",
    STALE = "stale": "A handle in a file names the memory that it was made for.",
    NAME_EARLY = "name-early": "A consumer that asks for a name too early has to try again.",
    NAME_STALE = "name-stale": "After its process has died, a name looks as if it had never existed.",
}

/// Formats the number of bytes that have a value.
fn count(bytes: &[u8], value: u8) -> String {
    let right = bytes.iter().filter(|byte| **byte == value).count();
    format!("{value:#04x} in {right} of {} bytes", bytes.len())
}
