//! Hand-offs by blocks of a pool: one side offers a block, and the other side accepts it. The reference of the block
//! goes through a Unix socket, because a pool carries no messages.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
};

use partywall::{BlockRef, Pool};
use partywall_measure::Failure as Sampled;

use super::{
    group::TURNS,
    relay::{SLOT, byte, came_back, slot, stream},
};
use crate::prelude::*;

/// A pool that both sides have open, and their socket.
pub(crate) struct Blocks {
    pool: Pool,
    socket: UnixStream,
}

impl Blocks {
    pub(crate) fn new(domain: &Domain, place: Place, name: &str, socket: UnixStream) -> Result<Self, Failure> {
        // Streams give blocks back later: an exchange must not wait for blocks of the previous one.
        let pool = domain.pool(&format!("{name}/blocks")).blocks(4 * TURNS as u32).block_bytes(SLOT).place(place);
        Ok(Self { pool: pool.open_or_create()?, socket })
    }

    /// Writes a number into a block, and offers it.
    pub(crate) fn send(&mut self, value: u64) -> Result<(), Sampled> {
        let mut block = self.pool.alloc(TIMEOUT)?;
        block.as_mut_slice::<u64>()?[0] = value;
        self.offer(block)
    }

    /// Accepts a block, returns the number in it, and gives the block back.
    pub(crate) fn receive(&mut self) -> Result<u64, Sampled> {
        let block = self.accept()?;
        let found = block.as_slice::<u64>()?[0];
        block.release()?;
        Ok(found)
    }

    fn offer(&mut self, block: Block) -> Result<(), Sampled> {
        let text = block.offer()?.to_string();
        // All messages have one length, so that one call reads one of them.
        let mut message = [0; MESSAGE];
        let room = message.get_mut(..text.len()).ok_or("the reference of a block is too long")?;
        room.copy_from_slice(text.as_bytes());
        Ok(self.socket.write_all(&message)?)
    }

    fn accept(&mut self) -> Result<Block, Sampled> {
        let mut message = [0; MESSAGE];
        self.socket.read_exact(&mut message)?;
        let text = message.split(|byte| *byte == 0).next().unwrap_or_default();
        let reference: BlockRef = std::str::from_utf8(text)?.parse()?;
        Ok(self.pool.accept(&reference)?)
    }
}

/// A relay by blocks in GPU memory: each stream copies the byte of the accepted block into the next one. A timeline of
/// the sender orders the receiver's stream behind the copy.
pub(crate) struct BlockRelay {
    stream: Stream,
    blocks: Blocks,
    ours: TimelineWriter,
    theirs: Timeline,
    received: Option<Block>,
}

impl BlockRelay {
    pub(crate) fn new(
        domain: &Domain,
        place: Place,
        name: &str,
        [ours, theirs]: [&str; 2],
        socket: UnixStream,
    ) -> Result<Self, Failure> {
        let stream = stream(domain, place)?;
        let blocks = Blocks::new(domain, place, name, socket)?;
        let ours = domain.timeline_writer(ours)?;
        Ok(Self { stream, blocks, ours, theirs: domain.timeline(theirs)?, received: None })
    }

    /// Offers a block with the byte that was received last, or with the byte of a new exchange.
    pub(crate) fn send(&mut self, value: u64) -> Result<(), Sampled> {
        let stream = self.stream.as_ref();
        let block = self.blocks.pool.alloc(TIMEOUT)?;
        let to = slot(block.device()?.as_slice())?;
        match self.received.take() {
            None => stream.enqueue_set(to, byte(value))?,
            Some(before) => {
                stream.enqueue_copy(to, slot(before.device()?.as_slice())?)?;
                before.release_on(stream).map_err(|refused| refused.error)?;
            }
        }
        self.ours.signal_on(stream, value)?;
        self.blocks.offer(block)
    }

    pub(crate) fn receive(&mut self, value: u64) -> Result<(), Sampled> {
        let block = self.blocks.accept()?;
        self.theirs.wait_on(self.stream.as_ref(), value)?;
        self.received = Some(block);
        Ok(())
    }

    /// Waits for the stream.
    pub(crate) fn finish(&self) -> Result<(), Sampled> {
        self.stream.synchronize()?;
        Ok(self.theirs.check()?)
    }

    /// Fails if the byte is not the one that this side, the first one, has sent.
    pub(crate) fn check(&mut self, last: u64) -> Result<(), Sampled> {
        let block = self.received.take().ok_or("no block came back")?;
        let checked = came_back(&self.stream, block.device()?.as_slice(), last);
        block.release_on(self.stream.as_ref()).map_err(|refused| refused.error)?;
        checked
    }
}

/// Bytes of a message with the reference of a block, as text.
const MESSAGE: usize = 128;
