//! `partywall lab pool`: two processes take blocks of one pool, hand them over, and one of them is killed.
//!
//! | role | process | does |
//! |---|---|---|
//! | holder | child | takes blocks, writes, hands them over |
//! | taker | `partywall lab pool` | starts a broker, takes what is handed over, tries what must not work, kills another holder; concludes |

mod holder;
mod taker;

use std::mem;

use partywall::{Block, BlockRef, Pool, error::Gone};

use crate::prelude::*;

pub(super) static LAB: Lab = Lab {
    name: "pool",
    about: "Blocks that processes take, hand over, and lose by dying",
    title: "blocks that processes take, hand over, and lose by dying",
    on_host: true,
    broker: true,
    options: |command| command,
    roles: &[Role::new(
        "holder",
        "Take blocks, write into them, and hand them over",
        "The taker has seen enough, and says which beliefs held.",
        holder::play,
    )],
    observer: Role::new(
        "taker",
        "Take over what is handed over, kill another holder, and say what came of it",
        "",
        taker::play,
    ),
    claims: CLAIMS,
};

/// A command of the taker. A command without an answer of its own is answered with `()` when it is done.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Command {
    /// A block with this in each byte, handed over; answered by its reference, which is all that another process
    /// needs. The first is told.
    Offer(u8),
    /// All blocks there are, with this in each byte. They are kept.
    TakeAll(u8),
    /// One of those is given back, in a moment; answered before it is.
    GiveOneBack,
    /// All of those are given back.
    GiveAllBack,
}

/// The pool, and its blocks.
const POOL: &str = "blocks";
const BLOCKS: u32 = 8;
const BLOCK_BYTES: u64 = 1 << 20;

/// What is written into blocks: by the holder at first, and by its later owner.
const MARK: u8 = 0x5a;
const OTHER_MARK: u8 = 0xa5;

/// How often a block is taken and given back, to see how long that takes.
const PAIRS: u32 = 10_000;
/// How often the broker is asked something, beside it.
const QUESTIONS: u32 = 1_000;

claims! {
    ASKS = "asks": "A process that wants memory has to ask a driver or a server for it.",
    COPIED = "copied": "What is handed to another process is copied.",
    STALE = "stale": "An old reference leads to what somebody else has written since.",
    TWICE = "twice": "What is handed over once can be taken by two.",
    LOST = "lost": "The blocks of a killed process are lost.",
}

/// Writes every byte of a block, and returns when it is done.
fn fill(block: &mut Block, place: Place, mark: u8) -> Result<(), Failure> {
    if place == Place::Host {
        block.bytes_mut()?.fill(mark);
        return Ok(());
    }
    let range = block.device()?;
    device::set(range.gpu(), range.as_slice(), mark)
}

/// The first byte of a block.
fn first_byte(block: &Block, place: Place) -> Result<u8, Failure> {
    if place == Place::Host {
        return Ok(block.bytes()?[0]);
    }
    let range = block.device()?;
    device::first_byte(range.gpu(), range.as_slice()).doing("reading a block")
}
