//! The commits of the raw clients of these tests.

use std::os::fd::OwnedFd;

use partywall_os::memfd;
use partywall_shm::{DType, Layout, TableBuilder};
use partywall_wire::{Commit, Lifetime, Table};

pub(crate) use partywall_harness::wire::{
    Client, Framed, called, encoded, greeted, hello, host_commit, open, shake_hands,
};

/// Returns a commit of one chunk of 4096 bytes with a table of one tensor `x`, in the message or in a memfd.
pub(crate) fn commit(name: &str, kept: bool, table_apart: bool) -> (Commit, Vec<OwnedFd>) {
    let mut builder = TableBuilder::new();
    builder.add("x", DType::U32, &[1024]).unwrap();
    let Layout { table, chunks } = builder.layout(1 << 20, 1).unwrap();
    let mut fds = vec![memfd::frozen("partywall:stress", &[1; 4096]).unwrap()];
    let table = if table_apart {
        fds.push(memfd::frozen("partywall-table:stress", &table).unwrap());
        Table::Fd { bytes: table.len() as u64 }
    } else {
        Table::Inline(table)
    };
    (host(name, kept, chunks, table), fds)
}

/// Returns a commit of host memory.
pub(crate) fn host(name: &str, kept: bool, chunks: Vec<u64>, table: Table) -> Commit {
    host_commit(name, if kept { Lifetime::Kept } else { Lifetime::Owned }, chunks, table)
}
