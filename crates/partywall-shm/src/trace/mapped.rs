//! Traces in memory that the broker creates and members map.
#![allow(unsafe_code)]

use std::sync::Arc;

use partywall_os::map::SharedMap;

use super::{EVENTS, Header, RINGS, Ring, Slot, Traces};

/// Bytes of the traces. Only pages that are used take memory.
pub(crate) const BYTES: usize = size_of::<Header>() + RINGS * size_of::<Ring>();

/// Change the text whenever the bytes or the codes of actions change, and never for a name alone.
pub(crate) const LAYOUT_HASH: u64 = crate::layout_hash(
    b"header64: until8 0:56; rings64: next8 0:56 slots4096: state8 at8 since8 who8 (tid32 pid32) what8 (action1 attempt1 0:6) object8 \
    value8 0:8; 13 actions from publish to take",
);

impl Traces {
    /// Returns the traces that begin at `offset`; `None` if the memory ends before they do.
    pub(crate) fn at(memory: &Arc<SharedMap>, offset: usize) -> Option<Self> {
        let header = memory.part(offset, 1)?;
        Some(Self { header, rings: memory.part(offset + size_of::<Header>(), RINGS)? })
    }
}

const _: () = assert!(size_of::<Header>() == 64 && size_of::<Slot>() == 64 && size_of::<Ring>() == 64 * (EVENTS + 1));

// SAFETY: `repr(C)`, atomics and an array of them, which fill it.
unsafe impl partywall_os::map::Atomics for Header {}
// SAFETY: `repr(C)`, atomics and arrays of atomics and of structs of atomics, which lie without gaps, as the sizes
// show.
unsafe impl partywall_os::map::Atomics for Ring {}
