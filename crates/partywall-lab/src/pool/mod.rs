//! `partywall lab pool`: two processes take blocks of one pool, hand them over, and one of them is killed.
//!
//! | role | process | does |
//! |---|---|---|
//! | holder | child | takes blocks, writes, hands them over |
//! | taker | `partywall lab pool` | starts a broker, accepts blocks, tries what must fail, kills another holder; concludes |

mod holder;
mod taker;

use std::mem;

use partywall::{BlockRef, Pool, error::Gone};

use crate::prelude::*;

pub(super) static LAB: Lab = Lab {
    name: "pool",
    title: "blocks that processes take, hand over, and lose when they die",
    on_host: true,
    broker: true,
    roles: &[Role::new("holder", "Take blocks, write into them, and hand them over", holder::play)],
    observer: Role::new("taker", "Accept blocks, kill another holder, and report the results", taker::play),
    beliefs: BELIEFS,
    ..Lab::DEFAULT
};

/// A command of the taker. It is answered with `()` when it is done, unless stated otherwise.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Command {
    /// Offer a block with this in each byte; answered by its reference, which is all that another process needs. The
    /// first offer is reported.
    Offer(u8),
    /// Take all free blocks, fill them with this byte, and keep them.
    TakeAll(u8),
    /// Release one of these blocks after a moment; answered before that.
    GiveOneBack,
    /// Release all of these blocks.
    GiveAllBack,
}

/// The pool, and its blocks.
const POOL: &str = "blocks";
const BLOCKS: u32 = 8;
const BLOCK_BYTES: u64 = 1 << 20;

/// The bytes that the holder, and the later owner, write into blocks.
const MARK: u8 = 0x5a;
const OTHER_MARK: u8 = 0xa5;

/// How often a block is taken and released, to measure the time.
const PAIRS: u32 = 10_000;
/// How often the broker is pinged, for comparison.
const QUESTIONS: u32 = 1_000;

beliefs! {
    ASKS = "asks": "A process that wants memory has to ask a driver or a server for it.",
    COPIED = "copied": "A block that is handed to another process is copied.",
    STALE = "stale": "An old reference gives access to what another process has written since.",
    TWICE = "twice": "A block that is offered once can be accepted by two processes.",
    LOST = "lost": "The blocks of a killed process are lost.",
}

/// Writes every byte of a block, and waits until that is done.
fn fill(block: &mut Block, place: Place, mark: u8) -> Result<(), Failure> {
    if place == Place::Host {
        block.bytes_mut()?.fill(mark);
        return Ok(());
    }
    let range = block.device()?;
    device::set(range.gpu(), range.as_slice(), mark)
}

/// Returns the first byte of a block.
fn first_byte(block: &Block, place: Place) -> Result<u8, Failure> {
    if place == Place::Host {
        return Ok(block.bytes()?[0]);
    }
    let range = block.device()?;
    device::first_byte(range.gpu(), range.as_slice()).doing("reading a block")
}
