//! What exists, and which call made it. Written when the process ends: whatever is there was not given back.
//!
//! `SIMCUDA_LEDGER` names a directory; a process that ends by itself writes `PID.json` there, a list of objects with
//! `kind`, `handle`, `bytes`, `call` and `index` (of the call in its process). What a context takes along when its last
//! reference is released stays in the list: the program did not give it back. A process whose context has a fault can
//! give nothing back but descriptors, and only they are in its list.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Mutex;

use partywall_os::lock::IgnorePoison;

use crate::entry::{self, Call};
use crate::state;

/// The kind of an exported descriptor: the caller closes it, so that only a look at it tells whether it is left.
pub(crate) const EXPORTED_FD: &str = "exported fd";

struct Entry {
    bytes: u64,
    call: Call,
    /// Of the file behind an exported descriptor.
    inode: u64,
}

type Entries = BTreeMap<(&'static str, u64), Vec<Entry>>;

static ENTRIES: Mutex<Entries> = Mutex::new(BTreeMap::new());

/// Notes that the present call made an object. One handle may be there several times (a context that is retained
/// twice): each needs a [`remove`] of its own.
pub(crate) fn record(kind: &'static str, handle: u64, bytes: u64) {
    let entry = Entry { bytes, call: entry::current(), inode: 0 };
    entries().entry((kind, handle)).or_default().push(entry);
}

/// Notes that an object was given back.
pub(crate) fn remove(kind: &'static str, handle: u64) {
    let mut entries = entries();
    if let Some(of_handle) = entries.get_mut(&(kind, handle)) {
        of_handle.pop();
        if of_handle.is_empty() {
            entries.remove(&(kind, handle));
        }
    }
}

/// Notes a descriptor that the caller was given.
pub(crate) fn record_fd(descriptor: RawFd, bytes: u64) {
    let entry = Entry { bytes, call: entry::current(), inode: inode(descriptor).unwrap_or(0) };
    // One that had this number before is closed.
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

/// Runs when the process ends by `exit` or a return from `main`; not when it is killed. Writes nothing where CUDA was
/// not initialised: a program that contains this driver may have loaded it as a library.
extern "C" fn write() {
    // A child that forked is another process: what it copied is its parent's.
    let Some(directory) = std::env::var_os("SIMCUDA_LEDGER").filter(|_| state::initialized() && !state::forked())
    else {
        return;
    };
    let path = std::path::Path::new(&directory).join(format!("{}.json", std::process::id()));
    // Asked before the entries are locked: calls lock the state first.
    let lost = state::initialized() && state::lock().contexts.any_fault();
    if let Err(error) = std::fs::write(&path, to_json(&entries(), lost)) {
        eprintln!("SIMCUDA_LEDGER: {}: {error}", path.display());
    }
}

#[used]
// SAFETY: the linker's list of functions without arguments that run at the end.
#[unsafe(link_section = ".fini_array")]
static WRITE: extern "C" fn() = write;
