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
    clock::{MOMENT, Moment, TIMEOUT, millis, short, spread, until},
    device::{self, first_byte},
    failure::{Doing, Failure, kind_of, unexpected},
    lab::{Lab, Role, Session},
    peer::{Peer, has_ended},
    step::{Belief, Step, code},
};
