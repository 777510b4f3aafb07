//! A child process of the broker finds out whether a GPU has lost its memory.
//!
//! The broker contains no CUDA, and the word of a member that cannot import memory ends no other member's names. So the
//! broker executes its program once more, with copies of the descriptors that it holds for the GPU. The child tries to
//! import each of them, and a fresh allocation besides: only if the GPU and its driver work are the others lost.
//!
//! The child is killed with the broker's worker, and changes nothing. What it has found is one event of the registry, which
//! the journal contains or does not contain.

use std::os::fd::{OwnedFd, RawFd};

use partywall_os::{Errno, process::inherited};
use rustix::io::{retry_on_intr, write};
use serde::{Deserialize, Serialize};

/// A check of a GPU, in the child.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuCheck {
    gpu: [u8; 16],
    answer: RawFd,
    chunks: Vec<RawFd>,
}

impl GpuCheck {
    /// Describes a check for the child, in which the pipe for the answer and then the chunks have these numbers.
    pub(crate) fn describe(gpu: [u8; 16], numbers: &[RawFd]) -> String {
        let numbers: Vec<_> = numbers.iter().map(RawFd::to_string).collect();
        format!("{:032x} {}", u128::from_be_bytes(gpu), numbers.join(" "))
    }

    pub(crate) fn parse(description: &str) -> Option<Self> {
        let (gpu, numbers) = description.split_once(' ')?;
        let gpu = u128::from_str_radix(gpu, 16).ok()?.to_be_bytes();
        let mut numbers = numbers.split(' ').map(|number| number.parse().ok());
        Some(Self { gpu, answer: numbers.next()??, chunks: numbers.collect::<Option<_>>()? })
    }

    /// Returns the UUID of the GPU.
    pub fn gpu(&self) -> [u8; 16] {
        self.gpu
    }

    /// Answers the broker. `find` gets a descriptor for each chunk of memory, and returns for each whether it is lost, or
    /// why that cannot be found out.
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

/// Precedes an answer, because the program may be one of another release.
const MAGIC: [u8; 8] = *b"PWGPU\0\0\0";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn description_is_parsed() {
        let check = GpuCheck { gpu: [7; 16], answer: 3, chunks: vec![4, 5] };
        assert_eq!(GpuCheck::parse(&GpuCheck::describe([7; 16], &[3, 4, 5])), Some(check));
        for wrong in ["", "07", "07 ", "x 3", "07 3 x", "07 3  4"] {
            assert_eq!(GpuCheck::parse(wrong), None, "{wrong:?}");
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
