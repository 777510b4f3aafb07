//! References to blocks, which processes send to each other.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::error::{Error, InvalidArgument, Result};

/// Names a block that its holder has [offered](super::Block::offer), so that another process can
/// [accept](super::Pool::accept) it. Can be sent through any channel, as text or as bytes.
///
/// The reference is valid for one hold of the block only. Once the block was accepted, given back, or freed because its
/// holder died, the reference is stale for ever. It keeps neither the block nor the pool alive.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BlockRef {
    pub(super) pool: String,
    pub(super) version: u64,
    pub(super) index: u32,
    pub(super) generation: u64,
}

impl BlockRef {
    /// Returns the pool's name.
    pub fn pool(&self) -> &str {
        &self.pool
    }

    /// Returns the pool's version. A pool that is removed and created again has another version.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Returns the block's index in the pool, from 0.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Returns the block's generation, which changes each time that the block is taken or accepted.
    pub fn generation(&self) -> u64 {
        self.generation
    }
}

/// `NAME@VERSION#INDEX.GENERATION`
impl fmt::Display for BlockRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pool, version, index, generation } = self;
        write!(f, "{pool}@{version}#{index}.{generation}")
    }
}

impl FromStr for BlockRef {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parse = || {
            let (name, block) = text.rsplit_once('#')?;
            let (pool, version) = name.rsplit_once('@')?;
            let (index, generation) = block.split_once('.')?;
            let version = version.parse().ok()?;
            let index = index.parse().ok()?;
            Some(Self { pool: pool.to_owned(), version, index, generation: generation.parse().ok()? })
        };
        parse().ok_or_else(|| InvalidArgument::name(text, "a block of a pool is NAME@VERSION#INDEX.GENERATION"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_reference_round_trips_as_text() {
        let block = BlockRef { pool: "camera/left.0".into(), version: 3, index: 65_535, generation: 1 << 45 };
        assert_eq!(block.to_string(), "camera/left.0@3#65535.35184372088832");
        assert_eq!(block.to_string().parse::<BlockRef>().unwrap(), block);
        for text in ["", "frames", "frames@1", "frames#1.2", "frames@1#2", "frames@x#1.2", "f@1#-1.2", "f@1#65536.x"] {
            assert!(
                matches!(text.parse::<BlockRef>(), Err(Error::InvalidArgument(InvalidArgument::Name { .. }))),
                "{text}"
            );
        }
    }
}
