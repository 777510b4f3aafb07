//! The items that every lab uses.

pub(crate) use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

pub(crate) use partywall::{
    Domain, Error, ErrorKind, Gpu, Place,
    cuda::{Access, CuResult, CudaError, Mapping, PhysicalMemory, Stream, StreamRef, experiment},
};
pub(crate) use serde::{Deserialize, Serialize};

pub(crate) use crate::{
    broker,
    clock::{Moment, millis, short, spread},
    device::{self, first_byte},
    failure::{Doing, Failure},
    lab::{Lab, Role, Session},
    peer::{Peer, has_ended},
    step::{Claim, Step, claims, code},
    text::number_in,
};

/// Returns the failure of a lab whose other role, or whose own files, are not as expected.
pub(crate) fn unexpected(what: &str) -> Failure {
    Failure::new(ErrorKind::CheckFailed, what, "start the lab again; if it fails again, report it")
}

/// The limit of a wait that must succeed: far longer than it takes, even on a slow machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);

/// How long to wait for something that must not happen.
pub(crate) const MOMENT: Duration = Duration::from_millis(100);
