//! Processes on one Linux machine share GPU memory by name, without copying it, and survive each other's deaths.
//!
//! A *party wall* is the wall that two neighbouring houses share.
//!
//! ```
//! use std::time::Duration;
//! use partywall::{DType, Domain, Place};
//!
//! # let directory = tempfile::tempdir()?;
//! # let socket = directory.path().join("sockets/doc.sock");
//! # let broker = partywall_broker::Broker::bind(partywall_broker::Config::new(&socket, "doc", partywall::VERSION))?;
//! # let stop = broker.stop_handle()?;
//! # let broker = std::thread::spawn(move || broker.run());
//! # let connect = || Domain::options().socket(&socket).connect();
//! // One process: `connect` is `Domain::connect`.
//! let domain = connect()?;
//! let mut build = domain.create("weights", Place::Host).tensor("w", DType::F32, &[2, 3]).allocate()?;
//! build.as_mut_slice::<f32>("w")?.fill(0.5);
//! let committed = build.commit()?; // now it has a name, and is frozen
//!
//! // Any other one, which may have been waiting:
//! let weights = connect()?.open("weights", Duration::from_secs(10))?;
//! assert_eq!(weights.tensor("w")?.as_slice::<f32>()?, [0.5; 6]); // read where it lies
//! # drop((domain, committed, weights));
//! # stop.stop();
//! # broker.join().expect("the broker does not panic")?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! On a GPU the place is [`Place::Gpu`], and a tensor is a [`DeviceRange`]: an address for kernels of the caller's, on
//! streams of the caller's.
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
//! | [`Topic`], [`Publisher`], [`Subscriber`], [`Sample`] | streams of samples, written once and read in place |
//! | [`IpcEvent`] | CUDA's interprocess events, for code that uses them already |
//! | [`gpu`] | GPUs as this process sees them, and memory on them |
//! | [`doctor`] | finding out what works on this machine |
//! | [`files`] | model files into segments and back |
//! | [`info`] | what a domain tells about itself |
//! | [`Watch`] | what happens to names, as it happens |
//! | [`Error`] | everything that can go wrong, with advice |
#![forbid(unsafe_code)]

mod attention;
mod backoff;
pub mod doctor;
mod domain;
mod error;
pub mod files;
mod get;
pub mod gpu;
pub mod info;
mod ipc_event;
mod kind;
mod mps;
mod place;
mod pool;
mod put;
mod segment;
mod semaphore;
mod slots;
mod timeline;
mod topic;

pub use partywall_cuda as cuda;
pub use partywall_cuda::DeviceUuid;
pub use partywall_os::map::SharedSlice;
pub use partywall_shm::{
    DType, TableBuilder,
    topic::{PublisherState, SubscriberState},
};
pub use partywall_wire::{Ending, FdFault, Limit, NoGrowth, Pattern, TimelineEnding};

pub use self::{
    domain::{DEFAULT_DOMAIN, Domain, DomainOptions, Location, VERSION, Watch, WatchEvent, broker_pid},
    error::{Ended, Error, ErrorKind, Held, Language, Result, bytes, cuda_anchor},
    get::Address,
    gpu::{DeviceRange, Gpu},
    ipc_event::{IpcEvent, IpcEventHandle},
    kind::kind_name,
    place::{DeviceChoice, Place, UnknownDevice},
    pool::{Block, BlockRef, MAX_BLOCKS, Pool, PoolOptions, PoolStats, UnreleasedBlock},
    put::{Put, check_name},
    segment::{
        Build, Builder, Claim, Element, Growth, OpenOptions, OpenOrBuild, Pinned, Publication, Refreshed, Segment,
        Tensor, Uncommitted, UploadLane, Uploader,
    },
    semaphore::{MAX_PERMITS, Permit, Semaphore, Unreleased},
    timeline::{LimitedWait, MAX_VALUE, Timeline, TimelineEvent, TimelineWriter},
    topic::{
        Filled, Loan, MAX_HEADER, Policy, Published, Publisher, Sample, SampleType, Samples, Subscriber,
        SubscriberEvent, SubscriberOptions, SubscriberStats, Topic, TopicOptions, TopicStats, UnpublishedSample,
        UnreleasedSample,
    },
};
