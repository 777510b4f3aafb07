//! Segments that queues hold.
//!
//! Any member that has a queue open may attach a segment to it, and tasks of the queue then name parts of the segment
//! as inputs. The queue's version keeps the segment's version, as a member's lease does. The memory stays if the member
//! that attached it dies, and if the segment's name ends. An attachment belongs to the queue: any member that has the
//! queue open may end it, unless tasks name it. Otherwise it ends with the queue.
//!
//! Whether tasks name an attachment is in control memory. The server looks there before it applies the request: see
//! [`Registry::to_detach`].

use partywall_shm::queue::InUse;
use partywall_wire::{AttachedInfo, QueueHolder};

use super::{
    Registry,
    effect::{Answer, Decision, Effect, Effects},
    event::Call,
    names::{Attached, Attachment, QueueId},
    types::{Access, FdId, LeaseId, MemberId, Name, Named, Refusal, RequestId},
};

impl Registry {
    /// Has a queue hold a segment, unless it does already.
    pub(super) fn attach(
        &mut self,
        member: MemberId,
        queue: LeaseId,
        segment: LeaseId,
        before: &mut Effects,
    ) -> Decision {
        let (queue, object) = self.queue_of(member, queue)?;
        let (held, found) = self.names.held(member, segment)?;
        let name = held.name.clone();
        let version = held.version;
        if found.memory.control.is_some() {
            return Err(Refusal::invalid("a queue holds nothing but segments"));
        }
        if found.is_legacy() {
            return Err(Refusal::CannotHold { name, version });
        }
        if let Some(attachment) = found.queues.get(&queue) {
            return Ok(Answer::Attached { attachment: *attachment }.into());
        }
        let attachment = self.names.attach(queue, name, version, self.people.bounds().attachments)?;
        before.push(Effect::Attach { object, attachment });
        Ok(Answer::Attached { attachment }.into())
    }

    /// Returns the control memory in which the server has to end an attachment before it applies a request, and the
    /// attachment: only there it is known whether tasks name it. `None` if the request is another, or would be refused.
    pub(crate) fn to_detach(&self, member: MemberId, call: &Call) -> Option<(FdId, u32)> {
        let Call::DetachSegment { queue, attachment } = call else { return None };
        self.people.check_evicted(member, call).and_then(|()| self.people.check_membership(member, call)).ok()?;
        let (queue, object) = self.queue_of(member, *queue).ok()?;
        self.attachment(&queue, *attachment).ok().map(|_| (object, *attachment))
    }

    /// Ends an attachment, unless tasks name it.
    pub(super) fn detach_segment(
        &mut self,
        member: MemberId,
        queue: LeaseId,
        attachment: u32,
        in_use: Option<InUse>,
    ) -> Decision {
        let (queue, _) = self.queue_of(member, queue)?;
        let (name, version) = self.attachment(&queue, attachment)?;
        if let Some(in_use) = in_use {
            let (queue, queue_version) = queue;
            let tasks = in_use.tasks;
            let first = (in_use.first.index, in_use.first.generation);
            return Err(Refusal::AttachmentInUse { queue, queue_version, name, version, tasks, first });
        }
        self.names.detach(&queue, attachment);
        Ok(Answer::Done.into())
    }

    /// Opens an attached segment for reading.
    pub(super) fn open_attached(
        &mut self,
        member: MemberId,
        request: RequestId,
        queue: LeaseId,
        attachment: u32,
    ) -> Decision {
        let (queue, _) = self.queue_of(member, queue)?;
        let (name, version) = self.attachment(&queue, attachment)?;
        self.grant(member, request, &name, version, Access::Read)
    }

    /// The queues that hold a version of a name, or any version of it.
    pub(super) fn holding_queues(&self, name: &Name, only: Option<u64>) -> Vec<QueueHolder> {
        let versions = self.names.entry(name).into_iter().flat_map(|entry| &entry.versions);
        let meant = versions.filter(|(number, _)| only.is_none_or(|only| only == **number));
        let queues = meant.flat_map(|(_, version)| &version.queues).take(QUEUES);
        let holding = |((name, version), attachment): (&QueueId, &u32)| QueueHolder {
            name: name.to_string(),
            version: *version,
            attachment: *attachment,
        };
        queues.map(holding).collect()
    }

    /// The segments that a queue holds, without the tasks that name them.
    pub(super) fn held_segments(&self, attached: &Attached) -> Vec<AttachedInfo> {
        let held = attached.segments.iter().map(|(attachment, Attachment { name, version, .. })| AttachedInfo {
            attachment: *attachment,
            name: name.to_string(),
            version: *version,
            tasks: 0,
            bytes: self.names.version(name, *version).map_or(0, |version| version.memory.bytes()),
        });
        held.collect()
    }

    /// The queue that a member's lease is on, and its control memory.
    fn queue_of(&self, member: MemberId, lease: LeaseId) -> Result<(QueueId, FdId), Refusal> {
        let (held, version) = self.names.held(member, lease)?;
        let control = version.memory.control.filter(|_| version.memory.facts.named() == Named::Queue);
        match control.and_then(|control| control.object) {
            Some(object) => Ok(((held.name.clone(), held.version), object.fd)),
            None => Err(Refusal::invalid("only a queue has segments attached")),
        }
    }

    /// The segment behind a number of a queue.
    fn attachment(&self, queue: &QueueId, attachment: u32) -> Result<(Name, u64), Refusal> {
        let segments = self.names.version(&queue.0, queue.1).map(|version| &version.attached.segments);
        match segments.and_then(|segments| segments.get(&attachment)) {
            Some(held) => Ok((held.name.clone(), held.version)),
            None => Err(Refusal::NotAttached { queue: queue.0.clone(), attachment }),
        }
    }
}

/// Queues in one answer.
const QUEUES: usize = 32;
