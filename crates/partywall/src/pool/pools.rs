//! The pools and topics that a connection has mapped. Each is mapped once, however many handles it has.

use std::sync::{Arc, Mutex, MutexGuard, Weak};

use partywall_cuda::DeviceUuid;
use partywall_os::lock::IgnorePoison;

use super::blocks::{Blocks, MapObject};
use crate::{error::Result, gpu::Gpu, place::Place, segment::Segment};

/// The pools and topics of a connection.
#[derive(Debug, Default)]
pub(crate) struct OpenPools(Mutex<Vec<Weak<Blocks>>>);

/// Exclusive access to [`OpenPools`].
pub(crate) struct Locked<'a>(MutexGuard<'a, Vec<Weak<Blocks>>>);

impl OpenPools {
    pub(crate) fn lock(&self) -> Locked<'_> {
        Locked(self.0.lock().ignore_poison())
    }
}

impl Locked<'_> {
    /// Returns a version that is mapped; if `device` is given, mapped for that GPU, or in host memory that no GPU maps.
    pub(crate) fn find(&self, name: &str, version: u64, device: Option<DeviceUuid>) -> Option<Arc<Blocks>> {
        let fits = |blocks: &Arc<Blocks>| {
            let there = blocks.gpu().map(Gpu::uuid);
            (blocks.name(), blocks.version()) == (name, version)
                && (device.is_none() || blocks.segment().place() == Place::Host || device == there)
        };
        self.0.iter().filter_map(Weak::upgrade).find(fits)
    }

    /// Adds the blocks of a newly mapped segment.
    pub(crate) fn add(&mut self, segment: Segment, map: MapObject) -> Result<Arc<Blocks>> {
        let blocks = Blocks::new(segment, map)?;
        self.0.retain(|known| known.strong_count() > 0);
        self.0.push(Arc::downgrade(&blocks));
        Ok(blocks)
    }
}
