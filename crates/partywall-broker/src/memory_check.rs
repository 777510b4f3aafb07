//! A child process of the broker finds out whether the memory at a place is lost: of a GPU, or of a NUMA node where the
//! driver has pinned it.
//!
//! The broker contains no CUDA, and the word of a member that cannot import memory ends no other member's names. So the
//! broker executes its program once more, with copies of the descriptors that it holds for the place. The child tries
//! to import each of them, and a fresh allocation besides: only if that works are the others lost. The fresh allocation
//! is at the same place, so the loss of a GPU says nothing about pinned memory.
//!
//! A chunk is lost only if the fresh allocation works and the driver refuses the chunk as invalid. A hidden GPU, a
//! missing driver or a full GPU proves nothing; the place is then checked again a few times, because a GPU that is just
//! being reset cannot be used.
//!
//! The child is killed with the broker's worker, and changes nothing. What it has found is one event of the registry,
//! which the journal contains or does not contain.

use std::os::fd::{OwnedFd, RawFd};

use partywall_os::{Errno, process::inherited};
use partywall_wire::Place;
use rustix::io::{retry_on_intr, write};
use serde::{Deserialize, Serialize};

/// A check of a place, in the child.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryCheck {
    place: Place,
    answer: RawFd,
    chunks: Vec<RawFd>,
}

impl MemoryCheck {
    /// Describes a check for the child, in which the pipe for the answer and then the chunks have these numbers.
    pub(crate) fn describe(place: Place, numbers: &[RawFd]) -> String {
        let numbers: Vec<_> = numbers.iter().map(RawFd::to_string).collect();
        let place = match place {
            Place::Gpu(gpu) => format!("{:032x}", u128::from_be_bytes(gpu)),
            Place::Pinned(node) => format!("{NODE}{node}"),
            Place::Host => "host".into(),
        };
        format!("{place} {}", numbers.join(" "))
    }

    pub(crate) fn parse(description: &str) -> Option<Self> {
        let (place, numbers) = description.split_once(' ')?;
        let place = match place.strip_prefix(NODE) {
            Some(node) => Place::Pinned(node.parse().ok()?),
            None => Place::Gpu(u128::from_str_radix(place, 16).ok()?.to_be_bytes()),
        };
        let mut numbers = numbers.split(' ').map(|number| number.parse().ok());
        Some(Self { place, answer: numbers.next()??, chunks: numbers.collect::<Option<_>>()? })
    }

    /// Returns the place.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Answers the broker. `find` gets a descriptor for each chunk of memory, and returns for each whether it is lost,
    /// or why that cannot be found out.
    ///
    /// # Errors
    /// If the descriptors were not inherited, or the broker is gone.
    pub fn answer(self, find: impl FnOnce(Vec<OwnedFd>) -> Result<Vec<bool>, String>) -> Result<(), Errno> {
        let answer = inherited(self.answer)?;
        let chunks = self.chunks.into_iter().map(inherited).collect::<Result<_, _>>()?;
        // Short enough for a pipe.
        let found = postcard::to_extend(&Found(find(chunks)), MAGIC.to_vec()).map_err(|_| Errno::INVAL)?;
        retry_on_intr(|| write(&answer, &found)).map(drop)
    }
}

/// What a child has found.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Found(pub(crate) Result<Vec<bool>, String>);

impl Found {
    /// Decodes what a child has written, which may have died or be another program.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        bytes.strip_prefix(&MAGIC).and_then(|bytes| postcard::from_bytes(bytes).ok())
    }
}

/// Precedes the number of a NUMA node.
const NODE: &str = "node:";

/// Precedes an answer, because the program may be one of another release.
const MAGIC: [u8; 8] = *b"PWMEM\0\0\0";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn description_is_parsed() {
        for place in [Place::Gpu([7; 16]), Place::Pinned(1)] {
            let check = MemoryCheck { place, answer: 3, chunks: vec![4, 5] };
            assert_eq!(MemoryCheck::parse(&MemoryCheck::describe(place, &[3, 4, 5])), Some(check));
        }
        for wrong in ["", "07", "07 ", "x 3", "07 3 x", "07 3  4", "node: 3", "node:x 3", "host 3"] {
            assert_eq!(MemoryCheck::parse(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn partial_answer_is_none() {
        let found = Found(Ok(vec![true, false]));
        let bytes = postcard::to_extend(&found, MAGIC.to_vec()).unwrap();
        assert_eq!(Found::decode(&bytes), Some(found));
        for end in 0..bytes.len() {
            assert_eq!(Found::decode(&bytes[..end]), None, "{end}");
        }
    }
}
