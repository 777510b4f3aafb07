//! The ledger: all existing objects, with the calls that created them. It is written when the process ends; the objects
//! in it were not released.
//!
//! `SIMCUDA_LEDGER` names a directory; a process that ends by itself writes `PID.json` there, a list of objects with
//! `kind`, `handle`, `bytes`, `call` and `index` (of the call in its process). Objects that end with their context stay
//! in the list, because the program did not release them. A process whose context has a fault can release only
//! descriptors, so its list contains only descriptors.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Mutex;

use partywall_os::lock::IgnorePoison;

use crate::entry::{self, Call};

/// The kind of an exported descriptor. The caller closes it, so only checking the descriptor shows whether it is left.
pub(crate) const EXPORTED_FD: &str = "exported fd";

struct Entry {
    bytes: u64,
    call: Call,
    /// The inode of an exported descriptor's file.
    inode: u64,
}

type Entries = BTreeMap<(&'static str, u64), Vec<Entry>>;

static ENTRIES: Mutex<Entries> = Mutex::new(BTreeMap::new());

/// Records that the current call created an object. One handle may be recorded several times (a context that is
/// retained twice); each record needs its own [`remove`].
pub(crate) fn record(kind: &'static str, handle: u64, bytes: u64) {
    let entry = Entry { bytes, call: entry::current(), inode: 0 };
    entries().entry((kind, handle)).or_default().push(entry);
}

/// Records that an object was released.
pub(crate) fn remove(kind: &'static str, handle: u64) {
    let mut entries = entries();
    if let Some(of_handle) = entries.get_mut(&(kind, handle)) {
        of_handle.pop();
        if of_handle.is_empty() {
            entries.remove(&(kind, handle));
        }
    }
}

/// Records a descriptor that the caller received.
pub(crate) fn record_fd(descriptor: RawFd, bytes: u64) {
    let entry = Entry { bytes, call: entry::current(), inode: inode(descriptor).unwrap_or(0) };
    // An earlier descriptor with this number must be closed.
    entries().insert((EXPORTED_FD, descriptor.unsigned_abs().into()), vec![entry]);
}

fn entries() -> std::sync::MutexGuard<'static, Entries> {
    ENTRIES.lock().ignore_poison()
}

fn inode(descriptor: RawFd) -> Option<u64> {
    // SAFETY: borrowed for one call; a number that is not open gives an error.
    let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
    rustix::fs::fstat(descriptor).ok().map(|stat| stat.st_ino)
}

/// Returns the list as JSON. Kinds and names of functions are ours and need no escapes.
fn to_json(entries: &Entries, lost: bool) -> String {
    let mut text = String::from("[");
    for ((kind, handle), of_handle) in entries {
        for Entry { bytes, call: Call { function, index }, inode: made } in of_handle {
            let left = if *kind == EXPORTED_FD { inode(*handle as RawFd) == Some(*made) } else { !lost };
            if !left {
                continue;
            }
            let comma = if text.len() == 1 { "" } else { "," };
            write!(
                text,
                "{comma}\n{{\"kind\":\"{kind}\",\"handle\":{handle},\"bytes\":{bytes},\"call\":\"{function}\",\
                 \"index\":{index}}}"
            )
            .expect("a String takes everything");
        }
    }
    text.push_str("]\n");
    text
}

/// Writes the ledger. `is_lost` returns whether a context has a fault. Writes nothing if CUDA was not initialised, because
/// a program that contains this driver may have loaded it as a library.
pub(crate) fn write(is_lost: fn() -> bool) {
    // The objects in a forked child belong to its parent.
    let Some(directory) = std::env::var_os("SIMCUDA_LEDGER").filter(|_| entry::is_initialized() && !entry::is_forked())
    else {
        return;
    };
    let path = std::path::Path::new(&directory).join(format!("{}.json", std::process::id()));
    // Read before the entries are locked, because calls lock the state first.
    let lost = is_lost();
    // In one step: a process that is killed here leaves no ledger, as if it had been killed before.
    let unfinished = path.with_extension("unfinished");
    let written = std::fs::write(&unfinished, to_json(&entries(), lost));
    if let Err(error) = written.and_then(|()| std::fs::rename(&unfinished, &path)) {
        eprintln!("SIMCUDA_LEDGER: {}: {error}", path.display());
    }
}
