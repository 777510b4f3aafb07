//! `partywall lab p2p`: a process uses the memory of another GPU, which it may not even see.
//!
//! | role | process | does |
//! |---|---|---|
//! | reader | child, two times | uses its own GPU; opens memory of the owner's GPU in each way; once that GPU is hidden |
//! | owner | `partywall lab p2p` | has memory on its GPU, sends it to the readers, checks what they wrote; concludes |

mod owner;
mod reader;

use crate::prelude::*;

pub(super) static LAB: Lab = Lab {
    name: "p2p",
    title: "a process uses the memory of another GPU, which may be hidden from it",
    broker: true,
    roles: &[Role::hidden("reader", reader::play)],
    observer: Role::hidden("owner", owner::play),
    beliefs: BELIEFS,
    ..Lab::DEFAULT
};

/// What the owner sends to a reader. The file descriptor of the other memory comes with it.
#[derive(Debug, Serialize, Deserialize)]
struct Offer {
    /// The owner's GPU.
    owner: String,
    /// The handle of memory of `cuMemAlloc`.
    handle: Vec<u8>,
    /// The owner's GPU is hidden from the reader.
    hidden: bool,
}

/// Bytes of each memory.
const BYTES: u64 = 64 << 20;

/// What the owner writes, and what a reader writes into the first byte of both.
const WRITTEN: u8 = 0xA1;
const WRITTEN_BACK: u8 = 0xB2;

/// The segment, and its tensor.
const SEGMENT: &str = "p2p/weights";
const TENSOR: &str = "data";

beliefs! {
    OWN_ONLY = "own-only": "A process can use only memory of its own GPU.",
    VISIBLE = "visible": "A process has to see a GPU to use memory on it.",
    ALIKE = "alike": "Memory of another GPU is as fast as that of one's own.",
    SILENT = "silent": "A program notices that a name is on another GPU only by its speed.",
}
