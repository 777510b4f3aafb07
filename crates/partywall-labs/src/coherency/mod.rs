//! `partywall lab coherency`: what a kernel sees of words that another process's kernel changes, when, and in which
//! order.
//!
//! | role | process | does |
//! |---|---|---|
//! | writer | child | makes the memory; its kernels store, once or as fast as they can |
//! | reader | `partywall lab coherency` | its kernels poll, and read flags and data; concludes |
//! | (again) | child of the reader, with a writer of its own | where MPS runs: the reader once more, without it |
//!
//! Every kernel ends at a limit, whatever it sees.

mod reader;
mod shared;
mod writer;

use std::time::Duration;

use clap::{Args, Subcommand};
use partywall::cuda::experiment::{Handover, Load, Scope, Store};
use serde::{Deserialize, Serialize};

use super::{Options, device, peer::Peer, step::Belief, teller::Teller};
use crate::{Context, failure::Failure};

pub(super) const TITLE: &str = "what a kernel sees of another process's stores, when, and in which order";

pub(super) const ROLES: [&str; 2] = ["writer", "reader"];

/// Its arguments.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Debug, Clone, Copy, Subcommand)]
enum Role {
    /// Make the memory, and store to it when the reader looks
    Writer,
    /// Poll the memory in every way, and say what was seen
    Reader,
    #[command(hide = true)]
    Again,
}

/// Runs it.
pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let Arguments { options, role } = arguments;
    let output = context.console;
    match role {
        Some(Role::Writer) => writer::run(context, options, &mut Teller::new(output, LAB, "writer", false)),
        Some(Role::Again) => reader::run_again(options, &mut Teller::new(output, LAB, "reader", false)),
        Some(Role::Reader) => {
            let mut teller = Teller::new(output, LAB, "reader", false);
            reader::run(options, Peer::find(context, LAB, "writer")?, &mut teller)
        }
        None => {
            let gpu = device::open(options.device())?;
            let mut teller = Teller::new(output, LAB, "reader", true);
            let peer = Peer::spawn(LAB, "writer", &gpu.uuid().to_string())?;
            reader::run(options, peer, &mut teller)
        }
    }
}

/// What the writer says first. Two file descriptors come with it: of the GPU memory, and of the host memory.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    uuid: String,
    bytes: u64,
}

/// Where the words are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Memory {
    Gpu,
    Host,
}

/// What the reader wants next. The writer's answer is the outcome of the kernel.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Wish {
    /// One store, in the way with this index in [`STORES`]; answered by [`Stored`].
    Store { memory: Memory, how: usize, value: u64, limit: Duration },
    /// Turns, as the one who follows; answered by [`Over`].
    Turns { memory: Memory },
    /// Data and flags, in the way with this index in [`HANDOVERS`]; answered by [`Over`].
    Pairs { memory: Memory, how: usize },
    /// End.
    End,
}

/// When a store was made, and when its kernel saw the answer to it.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Stored {
    at: u64,
    answered: Option<u64>,
}

/// The writer's kernel has ended.
#[derive(Debug, Serialize, Deserialize)]
struct Over;

/// The loads by which a kernel polls, but for the compiler's: their PTX, and whether they must see a store of another
/// kernel on the same GPU.
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

/// The one of them that is made for the loads to see, and the load that looks for the stores.
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

const LAB: &str = "coherency";

/// How long a kernel polls for what it must see: far more than it takes, also on a slow day.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long it polls for what it may never see: some tens of time slices.
const TRIAL: Duration = Duration::from_millis(60);
/// How long data and flags are written and read.
const RACE: Duration = Duration::from_millis(40);
/// How often each load and each store is tried.
const TRIES: u64 = 5;
/// How many turns two kernels take.
const TURNS: u64 = 20;

const LOOP: Belief = belief("loop", "A loop that reads a variable sees when another kernel changes it.");
const EVERY_LOAD: Belief = belief("every-load", "A load that is made sees what is in memory at that moment.");
const KERNEL_END: Belief = belief("kernel-end", "What a kernel writes becomes visible to others when it ends.");
const SIDE_BY_SIDE: Belief = belief("side-by-side", "Kernels of two processes run side by side on a GPU.");
const IN_ORDER: Belief = belief("in-order", "Who sees the flag sees the data that was written before it.");
const VOLATILE: Belief = belief("volatile", "It is enough that the flag is volatile.");
const WRITER_FENCE: Belief = belief("writer-fence", "It is enough that the writer has a fence.");
const BLOCK: Belief = belief("block", "For kernels on one GPU, a fence for the block is enough.");
const SCOPED: Belief = belief("scoped", "Release and acquire for the GPU or the system keep data and flag in order.");

const BELIEFS: [Belief; 9] =
    [LOOP, EVERY_LOAD, KERNEL_END, SIDE_BY_SIDE, IN_ORDER, VOLATILE, WRITER_FENCE, BLOCK, SCOPED];

const fn belief(id: &'static str, text: &'static str) -> Belief {
    Belief { id, text }
}
