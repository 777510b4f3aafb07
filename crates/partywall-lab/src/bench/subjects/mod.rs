//! The subjects that are measured.

mod gpu_open;
mod gpu_put;
mod hostile;
mod many;
pub(super) mod ordering;
mod peer_advance;
mod peer_allocation;
mod peer_loader;
mod peer_model;
mod peer_modules;
mod peer_open;
mod peer_queues;
mod peer_reductions;
mod peer_spares;
mod peer_stranded;
pub(super) mod peer_table;
mod peer_topics;
mod peer_updates;
mod pinned;
pub(super) mod pools;
mod put;
pub(super) mod queues;
mod round_trip;
pub(super) mod sharing;
mod table_open;
mod topics;

use partywall::{Place, gpu};
use partywall_measure::Failure as Sampled;

use self::{
    ordering::{deaths, semaphore, streams, wakes},
    sharing::{Setting, alloc, attach, copies, fanout, handoff, memory, with_overhead},
};
use super::{Bench, failed};
use crate::{Failure, broker::Broker, failure::Doing};

/// A subject of measurements.
#[derive(Debug)]
pub(crate) struct Subject {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    pub(crate) choice: Choice,
    pub(crate) needs_gpu: bool,
    run: Run,
}

/// Subjects that are chosen together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice {
    /// What sharing costs, beside the same without sharing.
    All,
    /// What Partywall costs beside the least that the machine could take.
    Floors,
    /// Partywall beside programs that do the same by other means.
    Peers,
}

#[derive(Debug, Clone, Copy)]
enum Run {
    Sharing(fn(&Setting<'_>) -> Result<(), Failure>),
    Other(Other),
}

impl Choice {
    /// All choices, with their names and what they contain.
    pub(crate) const EACH: [(Self, &'static str, &'static str); 3] = [
        (Self::All, "all", "All of these"),
        (Self::Floors, "floors", "What Partywall costs beside the least that the machine could take: see --list"),
        (Self::Peers, "peers", "Partywall beside programs that do the same by other means: see --list"),
    ];
}

impl Subject {
    /// Returns what the subject lacks with memory at this place, the end of a sentence that begins with the subject.
    pub(super) fn lacks(&self, place: Place) -> Result<Option<&'static str>, Failure> {
        let Some(gpu) = place.gpu() else { return Ok(self.needs_gpu.then_some("needs a GPU")) };
        // Programs of others name no GPU.
        if self.choice == Choice::Peers && self.needs_gpu {
            let first = gpu::devices()?.first().map(|device| device.uuid().doing("asking for a UUID")).transpose()?;
            return Ok((first != Some(gpu)).then_some("uses the first GPU alone"));
        }
        Ok(None)
    }

    /// Measures the subject, with a broker of its own.
    pub(super) fn measure(&self, bench: &Bench<'_>) -> Result<(), Failure> {
        match self.run {
            Run::Sharing(run) => run(&Setting::new(bench)?),
            Run::Other(run) => {
                let broker = bench.broker("bench")?;
                run(bench, &broker).map_err(failed)
            }
        }
    }
}

/// All subjects, in the order in which they are measured.
pub(crate) const SUBJECTS: &[Subject] = &[
    sharing("latency", "Dependent loads and writes in own and in shared memory", |s| with_overhead(s, memory::latency)),
    // Holds 38.
    sharing("bandwidth", "Reading own and shared memory at full speed", |s| with_overhead(s, memory::bandwidth)),
    sharing("copy", "Copies into and out of shared memory", copies::run),
    sharing("handoff", "How long one process takes to notify another", handoff::run),
    // Holds 340, 341.
    sharing("attach", "Opening and closing segments", |s| with_overhead(s, attach::run)),
    // Holds 349.
    sharing("alloc", "Blocks of a pool beside allocations", alloc::run),
    sharing("fanout", "One process to 1 to 8 others", fanout::run),
    // Holds 339.
    host("round_trip", "An empty request to the broker and its answer", round_trip::run),
    // Holds 342.
    host("table_open", "Opening a segment of 70,000 tensors", table_open::run),
    // Holds 343.
    host("put", "A cached safetensors file into host memory", put::run),
    // Holds 139, 323.
    host("many", "10,000 names; 1,000 members", many::run),
    // Holds 164.
    host("hostile", "Calls beside clients that misbehave, as an unprivileged user", hostile::run),
    // Holds 347.
    host("ordering_wakes", "One host signals, another waits", wakes::run),
    // Holds 348.
    host("ordering_permits", "Semaphores, alone and contended", semaphore::run),
    // Holds 178.
    host("ordering_count", "Ten million operations on permits, none lost", semaphore::count),
    host("pools", "Blocks of a pool, contended", pools::run),
    // Holds 350, 351, 353, 354, 355.
    host("topics", "Messages from one process to another", topics::run),
    // Holds 356, 357.
    host("queues", "Tasks of a queue, to one worker and to several", queues::run),
    // Holds 9.
    host("ordering_deaths", "Resources of dead processes, until others get them", deaths::run),
    // Holds 341.
    gpu("gpu_open", "Opening 64 tensors of 1 GiB on a GPU by name", gpu_open::run),
    gpu("gpu_put", "A cached safetensors file into GPU memory", gpu_put::run),
    // Holds 96.
    gpu("pinned_attach", "Attaching pinned host memory by name", pinned::attach::run),
    // Holds 97.
    gpu("pinned_copies", "A model between pinned host memory and a GPU", pinned::copies::run),
    gpu(
        "pinned_readers",
        "Kernels and the CPU reading pinned host memory, a memfd and a GPU's memory",
        pinned::readers::run,
    ),
    // Holds 40, 345, 346.
    gpu("ordering_streams", "Streams of two processes in order, time-sliced", streams::time_sliced),
    // Holds 40, 345, 346.
    gpu("ordering_mps", "Streams of two processes in order, under MPS", streams::under_mps),
    // Holds 352.
    gpu("gpu_topics", "Messages from streams to streams of another process", topics::on_gpu),
    // Holds 9.
    gpu("ordering_gpu_deaths", "Resources of dead processes whose streams wait", deaths::on_gpu),
    // Holds 344.
    peers("peer_host_open", "Opening host memory from Python and from Rust", false, peer_open::host),
    // Holds 344.
    peers("peer_gpu_open", "Opening GPU memory from Python and from Rust", true, peer_open::gpu),
    // Holds 39.
    peers("peer_model", "A model of 14 GiB as torch tensors, by name and from a file", true, peer_model::run),
    // Holds 271.
    peers("peer_modules", "A model of 14 GiB from shared memory into a model of torch", true, peer_modules::run),
    // Holds 277.
    peers("peer_advance", "A model of torch that gets another version", true, peer_advance::run),
    // Holds 291.
    peers("peer_spares", "A killed worker of a model, until the next forward", true, peer_spares::run),
    // Holds 65.
    peers("peer_stranded", "Memory that exports leave behind, with torch.multiprocessing", true, peer_stranded::run),
    // Holds 285.
    peers("peer_reductions", "Tensors of torch.multiprocessing, by Partywall and by torch", true, peer_reductions::run),
    peers("peer_table_host", "Sharing host memory and messages, in all ways that there are", false, peer_table::host),
    peers("peer_table_gpu", "Sharing memory of a GPU, in all ways that there are", true, peer_table::gpu),
    peers("peer_table_gpus", "Sharing memory with a process on another GPU, likewise", true, peer_table::another_gpu),
    // Holds 80.
    peers("peer_allocation", "Tensors of torch in a pool, beside torch's own memory", true, peer_allocation::run),
    peers("peer_updates_host", "New weights in host memory for four workers", false, peer_updates::on_host),
    // Holds 278.
    peers("peer_updates_gpu", "New weights on a GPU for four workers", true, peer_updates::on_gpu),
    // Holds 98, 384.
    peers("peer_loader", "Batches that workers decode for a GPU", true, peer_loader::run),
    // Holds 359.
    peers("peer_queues", "Tasks from Python to Python workers", false, peer_queues::run),
    peers("peer_topics_host", "Tensors in host memory to another Python process", false, peer_topics::host),
    // Holds 360, 361.
    peers("peer_topics", "Tensors on a GPU to another Python process, time-sliced", true, peer_topics::time_sliced),
    // Holds 360, 361.
    peers("peer_topics_mps", "Tensors on a GPU to another Python process, under MPS", true, peer_topics::under_mps),
];

type Other = fn(&Bench<'_>, &Broker) -> Result<(), Sampled>;

const fn sharing(name: &'static str, about: &'static str, run: fn(&Setting<'_>) -> Result<(), Failure>) -> Subject {
    Subject { name, about, choice: Choice::All, needs_gpu: false, run: Run::Sharing(run) }
}

const fn host(name: &'static str, about: &'static str, run: Other) -> Subject {
    Subject { name, about, choice: Choice::Floors, needs_gpu: false, run: Run::Other(run) }
}

const fn gpu(name: &'static str, about: &'static str, run: Other) -> Subject {
    Subject { name, about, choice: Choice::Floors, needs_gpu: true, run: Run::Other(run) }
}

const fn peers(name: &'static str, about: &'static str, needs_gpu: bool, run: Other) -> Subject {
    Subject { name, about, choice: Choice::Peers, needs_gpu, run: Run::Other(run) }
}
