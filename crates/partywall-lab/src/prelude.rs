//! The items that every lab uses.

pub(crate) use std::{
    fs,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

pub(crate) use clap::Args;
pub(crate) use partywall::{
    Block, DType, Domain, Error, ErrorKind, Gpu, IpcEvent, IpcEventHandle, Place, Policy, Publisher, Sample, Segment,
    Subscriber, Timeline, TimelineWriter, Topic, bytes,
    cuda::{
        Access, CuResult, CudaError, DeviceBuffer, DeviceSlice, DeviceUuid, IpcMapping, IpcMemoryHandle, Mapping,
        PhysicalMemory, Stream, StreamRef, experiment,
    },
    gpu,
};
pub(crate) use partywall_cli::text::{grouped, number_in};
pub(crate) use serde::{Deserialize, Serialize};
pub(crate) use serde_json::{Value, json};

pub(crate) use crate::{
    beliefs, broker,
    clock::{Moment, millis, short, spread, until},
    device::{self, first_byte},
    failure::{Doing, Failure, kind_of},
    lab::{Lab, Role, Session},
    peer::{Peer, has_ended},
    step::{Belief, Step, code},
};

/// Returns the failure of a lab whose other role, or whose own files, are not as expected.
pub fn unexpected(what: impl Into<String>) -> Failure {
    Failure::new(ErrorKind::CheckFailed, what, "start the lab again; if it fails again, report it")
}

/// The limit of a wait that must succeed: far longer than it takes, even on a slow machine.
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// How long to wait for something that must not happen.
pub const MOMENT: Duration = Duration::from_millis(100);
