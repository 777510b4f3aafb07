//! The subjects that are measured.

mod gpu_bandwidth;
mod gpu_open;
mod gpu_put;
mod host_open;
pub(crate) mod hostile;
mod many;
pub(crate) mod ordering;
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
pub(crate) mod peer_table;
mod peer_topics;
mod peer_updates;
mod pinned;
pub(crate) mod pools;
mod put;
pub(crate) mod queues;
mod round_trip;
mod table_open;
mod topics;

use partywall_measure::Failure;

use self::ordering::{deaths, semaphore, streams, wakes};
use crate::{bench::Bench, broker::Broker};

/// A subject of measurements, which gets its own broker.
#[derive(Debug)]
pub(crate) struct Subject {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    pub(crate) needs_gpu: bool,
    /// True if it needs programs of `benches/peers`.
    pub(crate) needs_peers: bool,
    pub(crate) run: Run,
}

/// All subjects, in the order in which they are measured.
pub(crate) const SUBJECTS: &[Subject] = &[
    host("round_trip", "an empty request to the broker and its answer", round_trip::run),
    host("host_open", "opening host memory by name", host_open::run),
    host("table_open", "opening a segment of 70,000 tensors", table_open::run),
    host("put", "a cached safetensors file into host memory", put::run),
    host("many", "10,000 names; 1,000 members", many::run),
    host("hostile", "calls beside clients that misbehave, as an unprivileged user", hostile::run),
    host("ordering_wakes", "one host signals, another waits", wakes::run),
    host("ordering_permits", "semaphores, alone and contended", semaphore::run),
    host("ordering_count", "ten million operations on permits, none lost", semaphore::count),
    host("pools", "blocks of a pool, alone and contended", pools::run),
    host("topics", "messages from one process to another", topics::run),
    host("queues", "tasks of a queue, to one worker and to several", queues::run),
    host("ordering_deaths", "resources of dead processes, until others get them", deaths::run),
    gpu("gpu_open", "opening GPU memory by name", gpu_open::run),
    gpu("gpu_bandwidth", "a kernel reading through an imported mapping", gpu_bandwidth::run),
    gpu("gpu_put", "a cached safetensors file into GPU memory", gpu_put::run),
    gpu("pinned_attach", "attaching pinned host memory by name", pinned::attach::run),
    gpu("pinned_copies", "a model between pinned host memory and a GPU", pinned::copies::run),
    gpu(
        "pinned_readers",
        "kernels and the CPU reading pinned host memory, a memfd and a GPU's memory",
        pinned::readers::run,
    ),
    gpu("ordering_streams", "streams of two processes in order, time-sliced", streams::time_sliced),
    gpu("ordering_mps", "streams of two processes in order, under MPS", streams::under_mps),
    gpu("gpu_pools", "blocks of a pool on a GPU, beside the driver's memory", pools::on_gpu),
    gpu("gpu_topics", "messages from streams to streams of another process", topics::on_gpu),
    gpu("ordering_gpu_deaths", "resources of dead processes whose streams wait", deaths::on_gpu),
    peers("peer_host_open", "opening host memory from Python and from Rust", false, peer_open::host),
    peers("peer_gpu_open", "opening GPU memory from Python and from Rust", true, peer_open::gpu),
    peers("peer_model", "a model of 14 GiB as torch tensors, by name and from a file", true, peer_model::run),
    peers("peer_modules", "a model of 14 GiB from shared memory into a model of torch", true, peer_modules::run),
    peers("peer_advance", "a model of torch that gets another version", true, peer_advance::run),
    peers("peer_spares", "a killed worker of a model, until the next forward", true, peer_spares::run),
    peers("peer_stranded", "memory that exports leave behind, with torch.multiprocessing", true, peer_stranded::run),
    peers("peer_reductions", "tensors of torch.multiprocessing, by Partywall and by torch", true, peer_reductions::run),
    peers("peer_table_host", "sharing host memory and messages, in all ways that there are", false, peer_table::host),
    peers("peer_table_gpu", "sharing memory of a GPU, in all ways that there are", true, peer_table::gpu),
    peers("peer_table_gpus", "sharing memory with a process on another GPU, likewise", true, peer_table::another_gpu),
    peers("peer_allocation", "tensors of torch in a pool, beside torch's own memory", true, peer_allocation::run),
    peers("peer_updates_host", "new weights in host memory for four workers", false, peer_updates::on_host),
    peers("peer_updates_gpu", "new weights on a GPU for four workers", true, peer_updates::on_gpu),
    peers("peer_loader", "batches of 256 MiB that workers decode for a GPU", true, peer_loader::run),
    peers("peer_queues", "tasks from Python to Python workers", false, peer_queues::run),
    peers("peer_topics_host", "tensors in host memory to another Python process", false, peer_topics::host),
    peers("peer_topics", "tensors on a GPU to another Python process, time-sliced", true, peer_topics::time_sliced),
    peers("peer_topics_mps", "tensors on a GPU to another Python process, under MPS", true, peer_topics::under_mps),
];

type Run = fn(&mut Bench, &Broker) -> Result<(), Failure>;

const fn host(name: &'static str, about: &'static str, run: Run) -> Subject {
    Subject { name, about, needs_gpu: false, needs_peers: false, run }
}

const fn gpu(name: &'static str, about: &'static str, run: Run) -> Subject {
    Subject { name, about, needs_gpu: true, needs_peers: false, run }
}

const fn peers(name: &'static str, about: &'static str, needs_gpu: bool, run: Run) -> Subject {
    Subject { name, about, needs_gpu, needs_peers: true, run }
}
