//! Memory that the broker shares with all members, and what it does there.

use std::sync::Arc;

use partywall_os::Errno;
use partywall_shm::members::{self, Members};

use crate::rim::reclaimer::{Donated, Reclaimer};

/// Everything that is mapped.
#[derive(Debug)]
pub(super) struct Control {
    rows: Members,
    rows_fd: Arc<Donated>,
}

impl Control {
    pub(super) fn create(clients: u64, reclaimer: &Reclaimer) -> Result<Self, Errno> {
        let fd = Members::create(usize::try_from(clients).map_err(|_| Errno::OVERFLOW)?)?;
        Ok(Self { rows: Members::map(&fd)?, rows_fd: Arc::new(reclaimer.keep(fd)) })
    }

    /// Gives a row out. Its new member is well until it has had time to say so itself.
    pub(super) fn begin_row(&self, row: u16) {
        self.rows.beat(row, members::now());
    }

    /// The memory of the members' rows.
    pub(super) fn rows_fd(&self) -> Arc<Donated> {
        Arc::clone(&self.rows_fd)
    }
}
