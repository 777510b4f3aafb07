//! Calls to the broker about timelines and semaphores.

use std::os::fd::OwnedFd;

use partywall_wire::{Answer, Call, LeaseId, ObjectDetail, ObjectInfo, ObjectKind, OpenedTimeline};

use super::{Domain, answered, check_name, pages};
use crate::error::{LimitReached, Result};

impl Domain {
    /// Returns all timelines, then all semaphores, each in order of their names.
    ///
    /// # Errors
    /// The errors of every call.
    pub fn objects(&self) -> Result<Vec<ObjectInfo>> {
        let ask = |after| answered!(self.link().call(Call::Objects { after })?, Answer::Objects { objects, more } => (objects, more));
        pages("timelines and semaphores", |row: &ObjectInfo| (row.kind(), row.name().to_owned()), ask)
    }

    /// Returns everything about one timeline or semaphore, without opening it.
    ///
    /// # Errors
    /// [`NotFound::Object`](crate::error::NotFound::Object).
    pub fn inspect_object(&self, kind: ObjectKind, name: &str) -> Result<ObjectDetail> {
        let answer = self.link().call(Call::InspectObject { kind, name: check_name(name)? })?;
        answered!(answer, Answer::Object(detail) => *detail)
    }

    /// Ends the waits of all processes for values that timeline `name` has not reached. Its writer then has to open it
    /// again.
    ///
    /// # Errors
    /// [`NotFound::Object`](crate::error::NotFound::Object).
    pub fn abandon_timeline(&self, name: &str) -> Result<()> {
        answered!(self.link().call(Call::AbandonTimeline { name: check_name(name)? })?, Answer::Done => ())
    }

    /// Opens a timeline. Returns its slab as well, unless no file descriptor was free for that.
    pub(crate) fn open_timeline(
        &self,
        name: &str,
        writer: bool,
        shared: bool,
    ) -> Result<(OpenedTimeline, Option<OwnedFd>)> {
        timeline(self.link().call_with(Call::OpenTimeline { name: check_name(name)?, writer, shared }, &[])?)
    }

    /// Opens the present incarnation of the timeline behind a lease, as [`Domain::open_timeline`] does.
    pub(crate) fn follow_timeline(&self, lease: LeaseId) -> Result<(OpenedTimeline, Option<OwnedFd>)> {
        timeline(self.link().call_with(Call::FollowTimeline { lease }, &[])?)
    }

    /// Opens a semaphore. Returns its lease and its memory.
    pub(crate) fn open_semaphore(&self, name: &str, maximum: u32, shared: bool) -> Result<(LeaseId, OwnedFd)> {
        let call = Call::OpenSemaphore { name: check_name(name)?, maximum, shared };
        let (answer, fds) = self.link().call_with(call, &[])?;
        let lease = answered!(answer, Answer::Semaphore { lease, .. } => lease)?;
        let Some(fd) = fds.into_iter().next() else {
            // If the lease cannot be released here, it ends with the connection.
            let _ = self.link().call(Call::Release { lease });
            return Err(LimitReached::FileDescriptors(format!("the memory of semaphore {name:?}")).into());
        };
        Ok((lease, fd))
    }
}

fn timeline((answer, fds): (Answer, Vec<OwnedFd>)) -> Result<(OpenedTimeline, Option<OwnedFd>)> {
    answered!(answer, Answer::Timeline(opened) => (opened, fds.into_iter().next()))
}
