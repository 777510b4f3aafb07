//! What a broker is asked about timelines and semaphores. Their types are built on this.

use std::os::fd::OwnedFd;

use partywall_wire::{Answer, Call, ObjectDetail, ObjectInfo, ObjectKind, OpenedTimeline};

use super::{Domain, check_name, unexpected};
use crate::error::{LimitReached, Result, Unreachable};

impl Domain {
    /// All timelines, then all semaphores, each in order of their names.
    ///
    /// # Errors
    /// Those of every call.
    pub fn objects(&self) -> Result<Vec<ObjectInfo>> {
        let mut all: Vec<ObjectInfo> = Vec::new();
        loop {
            let after = all.last().map(|last| (last.kind(), last.name().to_owned()));
            match self.link().call(Call::Objects { after: after.clone() })? {
                Answer::Objects { objects, more } => {
                    let goes_on = |row: &ObjectInfo| {
                        after.as_ref().is_none_or(|(kind, name)| (row.kind(), row.name()) > (*kind, name.as_str()))
                    };
                    if !objects.iter().all(goes_on) {
                        return Err(Unreachable::Protocol(
                            "its list of timelines and semaphores does not go on".into(),
                        )
                        .into());
                    }
                    let more = more && !objects.is_empty();
                    all.extend(objects);
                    if !more {
                        return Ok(all);
                    }
                }
                other => return Err(unexpected(&other)),
            }
        }
    }

    /// Everything about one timeline or semaphore, without opening it.
    ///
    /// # Errors
    /// [`NotFound::Object`](crate::error::NotFound::Object).
    pub fn inspect_object(&self, kind: ObjectKind, name: &str) -> Result<ObjectDetail> {
        check_name(name)?;
        match self.link().call(Call::InspectObject { kind, name: name.to_owned() })? {
            Answer::Object(detail) => Ok(*detail),
            other => Err(unexpected(&other)),
        }
    }

    /// Ends all waits for what timeline `name` has not reached, for everybody. Its writer has to open it again.
    ///
    /// # Errors
    /// [`NotFound::Object`](crate::error::NotFound::Object).
    pub fn abandon_timeline(&self, name: &str) -> Result<()> {
        check_name(name)?;
        match self.link().call(Call::AbandonTimeline { name: name.to_owned() })? {
            Answer::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Opens a timeline; `slabs` are mapped already, those that follow up to the timeline's come with the answer.
    pub(crate) fn open_timeline(&self, name: &str, writer: bool, slabs: u32) -> Result<(OpenedTimeline, Vec<OwnedFd>)> {
        check_name(name)?;
        timeline(self.link().call_with(Call::OpenTimeline { name: name.to_owned(), writer, slabs }, &[])?)
    }

    /// The present incarnation of the timeline behind a lease; slabs as with [`Domain::open_timeline`].
    pub(crate) fn follow_timeline(&self, lease: u64, slabs: u32) -> Result<(OpenedTimeline, Vec<OwnedFd>)> {
        timeline(self.link().call_with(Call::FollowTimeline { lease, slabs }, &[])?)
    }

    /// Opens a semaphore: its lease and its memory.
    pub(crate) fn open_semaphore(&self, name: &str, maximum: u32) -> Result<(u64, OwnedFd)> {
        check_name(name)?;
        let (answer, fds) = self.link().call_with(Call::OpenSemaphore { name: name.to_owned(), maximum }, &[])?;
        match answer {
            Answer::Semaphore { lease, .. } => match fds.into_iter().next() {
                Some(fd) => Ok((lease, fd)),
                None => {
                    // The lease is nobody's now; should it not go back, the connection's end takes it.
                    let _ = self.link().call(Call::Release { lease });
                    Err(LimitReached::FileDescriptors(format!("the memory of semaphore {name:?}")).into())
                }
            },
            other => Err(unexpected(&other)),
        }
    }
}

fn timeline((answer, fds): (Answer, Vec<OwnedFd>)) -> Result<(OpenedTimeline, Vec<OwnedFd>)> {
    match answer {
        Answer::Timeline(opened) => Ok((opened, fds)),
        other => Err(unexpected(&other)),
    }
}
