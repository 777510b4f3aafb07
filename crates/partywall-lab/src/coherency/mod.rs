//! `partywall lab coherency`: when and in which order a kernel sees the stores of another process's kernel.
//!
//! | role | process | does |
//! |---|---|---|
//! | writer | child | creates the memory; its kernels store, once or as fast as they can |
//! | reader | `partywall lab coherency` | its kernels poll, and read flags and data; concludes |
//! | (again) | child of the reader, with its own writer | if MPS runs: the same experiments without MPS |
//!
//! Every kernel has a time limit.

mod reader;
mod shared;
mod writer;

use std::fmt;

use partywall::cuda::experiment::{Handover, Load, Scope, Store};

use crate::prelude::*;

pub(super) static LAB: Lab = Lab {
    name: "coherency",
    title: "what a kernel sees of another process's stores, when, and in which order",
    roles: &[
        Role::new("writer", "Create the memory, and store to it when the reader polls", writer::play),
        Role::hidden("again", reader::play_again),
    ],
    observer: Role::new("reader", "Poll the memory with every kind of load, and report what was seen", reader::play),
    beliefs: BELIEFS,
    ..Lab::DEFAULT
};

/// Where the words are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Memory {
    Gpu,
    Host,
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gpu => "GPU memory",
            Self::Host => "host memory",
        })
    }
}

/// A command of the reader. The writer answers when its kernel has ended, most commands with `()`.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Command {
    /// One store, of the kind with this index in [`STORES`]; answered by [`Stored`].
    Store { memory: Memory, how: usize, value: u64, limit: Duration },
    /// Alternating stores of both kernels; the writer's kernel goes second.
    Turns { memory: Memory },
    /// Data and flags, by the method with this index in [`HANDOVERS`].
    Pairs { memory: Memory, how: usize },
}

/// When a store was made, and when its kernel saw the answer to it.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Stored {
    at: u64,
    answered: Option<u64>,
}

/// The loads by which a kernel polls, except the plain load in a loop: their PTX, and whether they must see a store of
/// another kernel on the same GPU.
const LOADS: [(&str, Load, bool); 8] = [
    ("ld.weak", Load::Weak, false),
    ("ld.volatile", Load::Volatile, true),
    ("ld.relaxed.cta", Load::Relaxed(Scope::Block), false),
    ("ld.relaxed.gpu", Load::Relaxed(Scope::Gpu), true),
    ("ld.relaxed.sys", Load::Relaxed(Scope::System), true),
    ("ld.acquire.cta", Load::Acquire(Scope::Block), false),
    ("ld.acquire.gpu", Load::Acquire(Scope::Gpu), true),
    ("ld.acquire.sys", Load::Acquire(Scope::System), true),
];

/// The stores that are polled for.
const STORES: [(&str, Store); 8] = [
    ("st.weak", Store::Weak),
    ("st.volatile", Store::Volatile),
    ("st.relaxed.cta", Store::Relaxed(Scope::Block)),
    ("st.relaxed.gpu", Store::Relaxed(Scope::Gpu)),
    ("st.relaxed.sys", Store::Relaxed(Scope::System)),
    ("st.release.cta", Store::Release(Scope::Block)),
    ("st.release.gpu", Store::Release(Scope::Gpu)),
    ("st.release.sys", Store::Release(Scope::System)),
];

/// The store that the loads poll for, and the load that polls for the stores.
const PLAIN_STORE: usize = 0;
const SURE_LOAD: Load = Load::Acquire(Scope::System);

/// The ways to hand data over, and whether the order must hold between kernels on the same GPU.
const HANDOVERS: [(&str, Handover, bool); 11] = [
    ("plain data, plain flag", Handover::Weak, false),
    ("plain data, volatile flag", Handover::VolatileFlag, false),
    ("both volatile", Handover::Volatile, false),
    ("both relaxed.gpu", Handover::Relaxed, false),
    ("__threadfence in the writer", Handover::WriterFence, false),
    ("__threadfence_block in both", Handover::Fence(Scope::Block), false),
    ("__threadfence in both", Handover::Fence(Scope::Gpu), true),
    ("__threadfence_system in both", Handover::Fence(Scope::System), true),
    ("release, acquire: cta", Handover::ReleaseAcquire(Scope::Block), false),
    ("release, acquire: gpu", Handover::ReleaseAcquire(Scope::Gpu), true),
    ("release, acquire: sys", Handover::ReleaseAcquire(Scope::System), true),
];

/// How long a kernel polls for a store that it must see: far longer than that takes.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long it polls for a store that it may never see: some tens of time slices.
const TRIAL: Duration = Duration::from_millis(60);
/// How long data and flags are written and read.
const RACE: Duration = Duration::from_millis(40);
/// How often each load and each store is tried.
const TRIES: u64 = 5;
/// How many turns each kernel takes.
const TURNS: u64 = 20;

beliefs! {
    LOOP = "loop": "A loop that reads a variable sees the changes of another kernel.",
    EVERY_LOAD = "every-load": "A load sees what is in memory at that moment.",
    KERNEL_END = "kernel-end": "What a kernel writes becomes visible to others when it ends.",
    SIDE_BY_SIDE = "side-by-side": "Kernels of two processes run side by side on a GPU.",
    IN_ORDER = "in-order": "A kernel that sees the flag sees the data that was written before it.",
    VOLATILE = "volatile": "A volatile flag is enough.",
    WRITER_FENCE = "writer-fence": "A fence in the writer is enough.",
    BLOCK = "block": "For kernels on one GPU, a fence of block scope is enough.",
    SCOPED = "scoped": "Release and acquire of GPU or system scope keep data and flag in order.",
}
