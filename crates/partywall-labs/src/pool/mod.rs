//! `partywall lab pool`: two processes take blocks of one pool, hand them over, and one of them is killed.
//!
//! | role | process | does |
//! |---|---|---|
//! | holder | child | takes blocks, writes, hands them over |
//! | taker | `partywall lab pool` | starts a broker, takes what is handed over, tries what must not work, kills another holder; concludes |

mod holder;
mod taker;

use std::{path::PathBuf, time::Duration};

use clap::{Args, Subcommand};
use partywall::{Block, Domain, Place, Pool};
use serde::{Deserialize, Serialize};

use super::{MemoryOptions, device, peer::Peer, step::Belief, teller::Teller};
use crate::{Context, failure::Failure};

pub(super) const TITLE: &str = "blocks that processes take, hand over, and lose by dying";

pub(super) const ROLES: [&str; 2] = ["holder", "taker"];

/// Its arguments.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    options: MemoryOptions,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Debug, Clone, Copy, Subcommand)]
enum Role {
    /// Take blocks, write into them, and hand them over
    Holder,
    /// Take over what is handed over, kill another holder, and say what came of it
    Taker,
}

/// Runs it.
pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let Arguments { options, role } = arguments;
    let output = context.console;
    match role {
        Some(Role::Holder) => holder::run(context, options, &mut Teller::new(output, LAB, "holder", false)),
        Some(Role::Taker) => {
            let mut teller = Teller::new(output, LAB, "taker", false);
            taker::run(context, Peer::find(context, LAB, "holder")?, &mut teller)
        }
        None => {
            let mut teller = Teller::new(output, LAB, "taker", true);
            let place = context.place(options.device)?;
            taker::run(context, Peer::spawn(LAB, "holder", &place.to_string())?, &mut teller)
        }
    }
}

/// What the holder says first.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    pid: u32,
    /// Where the blocks shall be.
    place: String,
}

/// Where the broker is. The pool is there.
#[derive(Debug, Serialize, Deserialize)]
struct Meet {
    socket: PathBuf,
}

/// What was wished for is done.
#[derive(Debug, Serialize, Deserialize)]
struct Ready;

/// What the taker wants next.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Wish {
    /// A block with this in each byte, handed over; answered by [`Offered`]. The first is told.
    Offer(u8),
    /// All blocks there are, with this in each byte; answered by [`Ready`]. They are kept.
    TakeAll(u8),
    /// One of those is given back, in a moment; answered by [`Ready`] before it is.
    GiveOneBack,
    /// All of those are given back; answered by [`Ready`].
    GiveAllBack,
    /// End.
    End,
}

/// A block was handed over: the reference is all that another process needs.
#[derive(Debug, Serialize, Deserialize)]
struct Offered {
    reference: String,
}

const LAB: &str = "pool";

/// The pool, and its blocks.
const POOL: &str = "blocks";
const BLOCKS: u32 = 8;
const BLOCK_BYTES: u64 = 1 << 20;

/// What is written into blocks: by the holder at first, and by whoever has one later.
const MARK: u8 = 0x5a;
const OTHER_MARK: u8 = 0xa5;

/// How often a block is taken and given back, to see how long that takes.
const PAIRS: u32 = 10_000;
/// How often the broker is asked something, beside it.
const QUESTIONS: u32 = 1_000;
/// How long nothing is waited for, to see that it does not come; and after which a block comes that is waited for.
const MOMENT: Duration = Duration::from_millis(100);
/// A wait that must end: far more than it takes, also on a slow day.
const TIMEOUT: Duration = Duration::from_secs(20);

const ASKS: Belief = belief("asks", "Who wants memory has to ask a driver or a server for it.");
const COPIED: Belief = belief("copied", "What is handed to another process is copied.");
const STALE: Belief = belief("stale", "An old reference leads to what somebody else has written since.");
const TWICE: Belief = belief("twice", "What is handed over once can be taken by two.");
const LOST: Belief = belief("lost", "The blocks of a killed process are lost.");

const BELIEFS: [Belief; 5] = [ASKS, COPIED, STALE, TWICE, LOST];

const fn belief(id: &'static str, text: &'static str) -> Belief {
    Belief { id, text }
}

fn open(domain: &Domain) -> Result<Pool, Failure> {
    Ok(domain.pool(POOL).timeout(TIMEOUT).open()?)
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
    device::first_byte(range.gpu(), range.as_slice()).map_err(device::copy_failed("reading a block"))
}
