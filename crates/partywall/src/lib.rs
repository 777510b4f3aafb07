//! Processes on one Linux machine share GPU memory by name, without copying it, and survive each other's deaths.
//!
//! A *party wall* is the wall that two neighbouring houses share.
//!
//! ```standalone_crate
//! use std::time::Duration;
//! use partywall::{DType, Domain, Place};
//!
//! # let directory = tempfile::tempdir()?;
//! # let socket = directory.path().join("sockets/doc.sock");
//! # let broker = partywall_broker::Broker::bind(partywall_broker::Config::new(&socket, "doc", partywall::VERSION))?;
//! # let stop = broker.stop_handle()?;
//! # unsafe { std::env::set_var("PARTYWALL_SOCKET", &socket) }; // no other thread runs yet
//! # let broker = std::thread::spawn(move || broker.run());
//! // One process:
//! let domain = Domain::connect()?; // starts the broker if none runs
//! let mut build = domain.create("weights", Place::Host).tensor("w", DType::F32, &[2, 3]).allocate()?;
//! build.as_mut_slice::<f32>("w")?.fill(0.5);
//! let committed = build.commit()?; // now it has a name, for as long as `committed` lives, and is frozen
//!
//! // Any other one, which may have been waiting:
//! let weights = Domain::connect()?.open("weights", Duration::from_secs(10))?;
//! assert_eq!(weights.tensor("w")?.as_slice::<f32>()?, [0.5; 6]); // read where it lies
//! # drop((domain, committed, weights));
//! # stop.stop();
//! # broker.join().expect("the broker does not panic")?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! On a GPU the place is [`Place::Gpu`], which [`gpu::resolve`] finds, and a tensor is a [`DeviceRange`]: an address for
//! kernels of the caller's, on streams of the caller's.
//!
//! # The broker
//!
//! Names live in a *broker*, a process of the program `partywall`, one for each domain. [`Domain::connect`] starts it in
//! the background if none runs; it ends a minute after its last name and member are gone. The program must be installed:
//! `cargo install --locked --path crates/partywall-cli` in a clone of the repository. It is looked for in this order:
//!
//! 1. the path in `PARTYWALL_BIN`, and then nowhere else;
//! 2. the path that [`DomainOptions::program`] names;
//! 3. `partywall` beside the running executable, and for Cargo's examples and tests one directory above it;
//! 4. `partywall` on `PATH`.
//!
//! [`Unreachable::NoProgram`](crate::error::Unreachable::NoProgram) lists what was tried. With [`DomainOptions::start`]`(false)`, or where `partywall serve` runs
//! under a service manager, nothing is started.
//!
//! # Environment
//!
//! What [`DomainOptions`] says counts before the environment.
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `PARTYWALL_SOCKET` | the broker's socket; counts before `PARTYWALL_DOMAIN` | `DOMAIN.sock` in the directory below |
//! | `PARTYWALL_DOMAIN` | the domain: processes that share names are in the same one | `default` |
//! | `XDG_RUNTIME_DIR` | the socket is in `$XDG_RUNTIME_DIR/partywall` | `/tmp/partywall-UID`, or in `TMPDIR` |
//! | `PARTYWALL_BIN` | the program to start as the broker | looked for, see above |
//! | `PARTYWALL_LIBCUDA` | another library than `libcuda.so.1` | |
//! | `CUDA_VISIBLE_DEVICES` | which GPUs the process sees, as in every CUDA program | all |
//!
//! # Features
//!
//! None is on by default, and none changes what is there without it.
//!
//! | feature | adds |
//! |---|---|
//! | `half` | `half::f16` and `half::bf16` as [`Element`]s |
//! | `cudarc` | streams of cudarc go in, its views come out: `Tensor::to_cudarc`, `Gpu::cudarc_stream` |
//! | `experiment` | `cuda::experiment`: driver calls and kernels for the labs, which break the rules of sharing on purpose |
//!
//! # Errors
//!
//! Every operation returns [`Error`], whose message says what happened and [`Error::advice`] what to do.
//! [`Error::kind`] groups the variants as the exit codes of the program do.
//!
//! # Tracing
//!
//! `open`, `publish`, `receive`, `wait`, `submit` and `claim` are spans of the crate `tracing`, at level `TRACE`, with the name of
//! what they use. A program that installs a subscriber, for NVTX, Perfetto or Tracy, sees them on the time line of its threads.
//! Without one a span costs the load of a word.
//!
//! # Limits
//!
//! One machine, one user, Linux. Processes of that user trust each other: what is read-only is so against mistakes,
//! not against attacks. Nothing is ever on disk. Processes that write one `mutable` segment order that themselves.
//! This library launches nothing on a caller's stream.
//!
//! # Modules
//!
//! | module | contains |
//! |---|---|
//! | [`Domain`] | a connection to a broker, and everything that is shared through it |
//! | [`Segment`], [`Builder`], [`Build`], [`Tensor`] | names with versions: building, committing, opening |
//! | [`Growth`], [`Pinned`] | segments that become longer; host segments that a GPU reaches |
//! | [`Timeline`], [`TimelineWriter`] | order between processes: values that hosts and streams wait for |
//! | [`Semaphore`], [`Permit`] | at most so many processes at a time |
//! | [`Pool`], [`Block`], [`BlockRef`] | equal blocks of memory that go round between processes |
//! | [`Queue`], [`Task`], [`Ticket`], [`ClaimedTask`] | tasks for worker processes, each with one result |
//! | [`Topic`], [`Publisher`], [`Subscriber`], [`Sample`] | streams of samples, written once and read in place |
//! | [`IpcEvent`] | CUDA's interprocess events, for code that uses them already |
//! | [`gpu`] | GPUs as this process sees them, and memory on them |
//! | [`doctor`] | finding out what works on this machine |
//! | [`files`] | model files into segments and back |
//! | [`info`] | what a domain tells about itself |
//! | [`Watch`] | what happens to names, as it happens |
//! | [`Wait`] | how long a call waits, and what cancels it |
//! | [`Error`] | everything that can go wrong, with advice |
#![forbid(unsafe_code)]

mod adaptive_spin;
mod backoff;
mod completion;
pub mod doctor;
mod domain;
pub mod error;
mod get;
pub mod gpu;
pub mod info;
mod ipc_event;
mod kind;
mod mps;
mod place;
mod pool;
mod put;
mod queue;
mod segment;
mod semaphore;
mod slots;
mod timeline;
mod topic;
mod wait;

pub use partywall_cuda as cuda;
pub use partywall_cuda::DeviceUuid;
pub use partywall_files as files;
pub use partywall_os::map::SharedSlice;
pub use partywall_shm::{
    DType, TableBuilder,
    topic::{PublisherState, SubscriberState},
};
pub use partywall_wire::{Ending, FdFault, Limit, NoGrowth, Pattern, TimelineEnding};

pub use self::{
    domain::{DEFAULT_DOMAIN, Domain, DomainOptions, Location, VERSION, Watch, WatchEvent, broker_pid},
    error::{Ended, Error, ErrorKind, Held, Language, MemoryLimit, Result, bytes, cuda_anchor},
    get::Address,
    gpu::{DeviceRange, Gpu},
    ipc_event::{IpcEvent, IpcEventHandle},
    kind::kind_name,
    place::{DeviceChoice, Place, UnknownDevice},
    pool::{Block, BlockRef, MAX_BLOCKS, Pool, PoolOptions, PoolStats, UnreleasedBlock},
    put::{Put, check_name},
    queue::{
        Attachment, ClaimedTask, EnqueuedResult, MAX_ARGUMENTS, MAX_INPUTS, MAX_KIND, MAX_TASKS, Queue, QueueEvent,
        QueueOptions, QueueStats, SegmentPart, Task, TaskFailure, TaskInfo, TaskInput, TaskRef, TaskResult, TaskStatus,
        Ticket, Unsubmitted,
    },
    segment::{
        Build, Builder, Claim, Element, Growth, OpenOptions, OpenOrBuild, Pinned, Publication, Refreshed, Segment,
        Tensor, Uncommitted, UploadLane, Uploader,
    },
    semaphore::{MAX_PERMITS, Permit, Semaphore, Unreleased},
    timeline::{LimitedWait, MAX_VALUE, Timeline, TimelineEvent, TimelineWriter},
    topic::{
        Filled, Loan, MAX_HEADER, Policy, Published, Publisher, Sample, SampleType, Samples, Subscriber,
        SubscriberEvent, SubscriberOptions, SubscriberStats, Topic, TopicOptions, TopicStats, Turn, UnpublishedSample,
        UnreleasedSample,
    },
    wait::{Cancel, Wait},
};
