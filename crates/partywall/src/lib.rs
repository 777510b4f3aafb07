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
//! let committed = build.commit()?; // frozen from now on; the name exists for as long as `committed` lives
//!
//! // Any other process, which may already be waiting:
//! let weights = Domain::connect()?.open("weights", Duration::from_secs(10))?;
//! assert_eq!(weights.tensor("w")?.as_slice::<f32>()?, [0.5; 6]); // read in place
//! # drop((domain, committed, weights));
//! # stop.stop();
//! # broker.join().expect("the broker does not panic")?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! For host memory that GPUs use at the speed of their bus the place is [`Place::Pinned`]. For GPU memory the place is
//! [`Place::Gpu`], which [`gpu::resolve`] finds. A tensor is then a [`DeviceRange`]: an address for the caller's
//! kernels, on the caller's streams.
//!
//! # The broker
//!
//! Names live in a *broker*, a process of the program `partywall`, one for each domain. [`Domain::connect`] starts it
//! in the background if none runs; it ends a minute after its last name and member are gone. The program must be
//! installed: `cargo install --locked --path crates/partywall-cli` in a clone of the repository. It is searched for in
//! this order:
//!
//! 1. the path in `PARTYWALL_BIN`; if it is set, no other place is tried;
//! 2. the path that [`DomainOptions::program`] names;
//! 3. `partywall` beside the running executable, and for Cargo's examples and tests one directory above it;
//! 4. `partywall` on `PATH`.
//!
//! [`Unreachable::NoProgram`](crate::error::Unreachable::NoProgram) lists the paths that were tried. With
//! [`DomainOptions::start`]`(false)`, or where `partywall serve` already runs, for example under a service manager, no
//! broker is started.
//!
//! # Environment
//!
//! [`DomainOptions`] take precedence over the environment.
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `PARTYWALL_SOCKET` | the broker's socket; takes precedence over `PARTYWALL_DOMAIN` | `DOMAIN.sock` in the directory below |
//! | `PARTYWALL_DOMAIN` | the domain: processes that share names are in the same one | `default` |
//! | `NVIDIA_DRA_LOCAL_IPC_DIR` | the socket is in `$NVIDIA_DRA_LOCAL_IPC_DIR/partywall-UID`, if this process may write there | `$XDG_RUNTIME_DIR` |
//! | `XDG_RUNTIME_DIR` | the socket is in `$XDG_RUNTIME_DIR/partywall` | `/tmp/partywall-UID`, or in `TMPDIR` |
//! | `PARTYWALL_BIN` | the program to start as the broker | searched for, see above |
//! | `PARTYWALL_LIBCUDA` | the CUDA driver library | `libcuda.so.1` |
//! | `CUDA_VISIBLE_DEVICES` | which GPUs the process sees, as in every CUDA program | all |
//!
//! A variable that is empty counts as unset. The directories also count as unset if they are not
//! absolute paths. In a program that gained privileges when it was executed (a set-user-ID bit, file capabilities) no
//! variable names a program, a library, a socket or a domain: its caller must not choose what runs with the privileges.
//! The broker is then the program of [`DomainOptions::program`], else `partywall` in `/usr/local/bin`, `/usr/bin` or
//! `/bin`, and it starts without the caller's environment.
//!
//! # Features
//!
//! No feature is on by default, and no feature changes the behaviour of the rest.
//!
//! | feature | adds |
//! |---|---|
//! | `half` | `half::f16` and `half::bf16` as [`Element`]s |
//! | `cudarc` | conversions from cudarc's streams and to its views: `Gpu::cudarc_stream`, `Tensor::to_cudarc` |
//! | `tokio` | futures and streams for asynchronous programs, see below |
//! | `experiment` | `cuda::experiment`: driver calls and kernels for the labs, which break the rules of sharing on purpose |
//!
//! # Blocking, and asynchronous programs
//!
//! - A call that takes a [`Wait`] blocks its thread for as long as that says. If it asks the broker (`open`,
//!   [`Watch::next`]), it may take up to 10 s more while the broker is stopped.
//! - Other calls that ask the broker, and drops of the last handle of an object, take some 10 µs; up to 10 s while the
//!   broker is stopped or restarted, then they fail. [`Domain::connect`] may take that long twice, and `open_or_create`
//!   waits up to 10 s for another process that creates the object.
//! - Calls that move or map bytes take as long as the copy; on a GPU they wait for it.
//! - Calls whose names begin with `try_`, and those that complete, signal or give back, never wait; except for a GPU
//!   whose address was handed out, and not those whose names end with `_on`.
//!
//! With the feature `tokio` these waits are also futures: `Domain::open_async`, `Subscriber::recv_async`,
//! `Timeline::wait_async`, `Queue::claim_async` and `submit_async`, `Ticket::wait_async`, `Semaphore::acquire_async`,
//! `Pool::alloc_async`, `Watch::next_async`; and `Subscriber::stream` and `Queue::claim_stream` are streams. They block
//! no thread, and use no file descriptor: while they wait, the connection's service thread polls for all of them, and
//! wakes their tasks. They may be dropped at any time, for example by `tokio::time::timeout`: they take something only
//! in the poll that returns it. Those that ask the broker need the runtime of tokio, for threads that may block; the
//! others run on any executor.
//!
//! # Errors
//!
//! Every operation returns [`Error`], whose message says what happened and [`Error::advice`] what to do.
//! [`Error::kind`] groups the variants as the exit codes of the program do.
//!
//! # Tracing
//!
//! `open`, `publish`, `receive`, `wait`, `submit` and `claim` are spans of the crate `tracing`, at level `TRACE`, with
//! the name of the object that they use. A program that installs a subscriber, for NVTX, Perfetto or Tracy, sees them
//! on the time line of its threads. Without a subscriber a span costs the load of a word.
//!
//! # Limits
//!
//! Partywall is for one Linux machine. The processes of a domain run as one user, or as users that its broker admits
//! ([`shared`](Builder::shared) names are theirs, too). Processes of one user trust each other: read-only memory
//! protects against mistakes, not against attacks. Names and memory end with the machine. Processes that write the same
//! `mutable` segment order their writes themselves. This library launches no kernels on a caller's stream.
//!
//! # Modules
//!
//! | module | contains |
//! |---|---|
//! | [`Domain`] | a connection to a broker, and everything that is shared through it |
//! | [`Segment`], [`Builder`], [`Build`], [`Tensor`] | names with versions: building, committing, opening |
//! | [`Descriptors`] | a segment's memory as file descriptors, for other APIs and languages |
//! | [`Growth`], [`Pinned`] | segments that grow; host segments that a GPU can access |
//! | [`Timeline`], [`TimelineWriter`] | order between processes: values that hosts and streams wait for |
//! | [`GraphLaunch`], [`GraphWait`], [`GraphSignal`] | timelines inside CUDA graphs, with new values at each launch |
//! | [`Semaphore`], [`Permit`] | a limited number of permits that processes share |
//! | [`Pool`], [`Block`], [`BlockRef`] | equal blocks of memory that processes take, give back and pass on |
//! | [`Queue`], [`Task`], [`Ticket`], [`ClaimedTask`] | tasks for worker processes, each with one result |
//! | [`Topic`], [`Publisher`], [`Subscriber`], [`Sample`] | streams of samples, written once and read in place |
//! | [`Heap`] | GPU memory for allocators of other libraries, whose tensors are then published without a copy |
//! | [`IpcHandle`] | published tensors for programs that open memory by the driver's handles |
//! | [`IpcEvent`] | CUDA's interprocess events, for code that already uses them |
//! | [`gpu`] | GPUs as this process sees them, and memory on them |
//! | [`doctor`] | checks of what works on this machine |
//! | [`mps`] | NVIDIA's MPS: a daemon for each domain |
//! | [`files`] | reading and writing model files |
//! | [`info`] | information about the names, members and broker of a domain |
//! | [`Tracer`], [`Recording`] | what processes publish, receive, signal and wait for, as it happens and as a file |
//! | [`Watch`] | events of names: committed, removed, ended |
//! | [`Wait`] | how long a call waits, and what cancels it |
//! | [`WhenSome`] | options that may be missing, set in a chain of setters |
//! | [`Error`] | everything that can go wrong, with advice |
#![forbid(unsafe_code)]

mod adaptive_spin;
mod backoff;
mod completion;
mod descriptors;
#[doc(hidden)]
pub mod dlpack; // for the Python package and the C library
pub mod doctor;
mod domain;
mod element;
pub mod error;
mod get;
pub mod gpu;
mod heap;
pub mod info;
mod ipc_event;
mod kind;
pub mod mps;
mod place;
mod pool;
mod put;
mod queue;
mod recorder;
mod segment;
mod semaphore;
mod slots;
mod task_ref;
mod timeline;
mod topic;
mod trace;
mod wait;
mod when_some;

pub use partywall_cuda as cuda;
pub use partywall_cuda::DeviceUuid;
pub use partywall_files as files;
pub use partywall_os::map::SharedSlice;
pub use partywall_shm::{
    DType, TableBuilder,
    topic::{MAX_DEPTH, PublisherState, SubscriberState},
};
#[doc(hidden)]
pub use partywall_wire::near; // for the command and the Python package
pub use partywall_wire::{Ending, FdFault, Limit, NoGrowth, NoReplacement, OtherUsers, Pattern, Then, TimelineEnding};

pub use self::{
    descriptors::{ChunkDescriptor, Descriptors, HeldBlock},
    domain::{DEFAULT_DOMAIN, Domain, DomainOptions, Location, VERSION, Watch, WatchEvent, broker_pid, broker_pidfd},
    element::Element,
    error::{Ended, Error, ErrorKind, Failed, Held, Language, MemoryLimit, Result, bytes, cuda_anchor},
    get::Address,
    gpu::{DeviceRange, Gpu},
    heap::Heap,
    ipc_event::{IpcEvent, IpcEventHandle},
    kind::kind_name,
    place::{Access, DeviceChoice, Place, UnknownDevice},
    pool::{Block, BlockRef, MAX_BLOCKS, Pool, PoolOptions, PoolStats},
    put::{Put, check_name},
    queue::{
        Attachment, ClaimedTask, EnqueuedResult, MAX_ARGUMENTS, MAX_INPUTS, MAX_KIND, MAX_TASKS, Queue, QueueEvent,
        QueueOptions, QueueStats, SegmentPart, Task, TaskFailure, TaskInfo, TaskInput, TaskMemory, TaskResult,
        TaskStatus, Ticket, Unsubmitted,
    },
    segment::{
        Build, Builder, Claim, Drain, Growth, IpcHandle, OpenOptions, OpenOrBuild, Pinned, Publication, Refreshed,
        Segment, Tensor, UploadLane, Uploader, check_suspended,
    },
    semaphore::{MAX_PERMITS, Permit, Semaphore, SemaphoreOptions},
    task_ref::TaskRef,
    timeline::{
        GraphLaunch, GraphSignal, GraphWait, LimitedWait, MAX_VALUE, Timeline, TimelineEvent, TimelineOptions,
        TimelineWriter,
    },
    topic::{
        Filled, Loan, LoanMemory, MAX_HEADER, Policy, Published, Publisher, Sample, SampleType, Samples, Subscriber,
        SubscriberEvent, SubscriberOptions, SubscriberStats, Topic, TopicOptions, TopicStats,
    },
    trace::{Action, ChromeTrace, Recording, TraceEvent, Tracer},
    wait::{Cancel, Wait},
    when_some::WhenSome,
};
