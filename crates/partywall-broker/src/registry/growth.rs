//! Growth of versions. The committer appends chunks; a member that has the version open asks for them when it needs
//! them.

use std::sync::Arc;

use partywall_wire::{Grow, Grown};

use super::{
    Registry,
    effect::{Answer, Decision, Effect, Effects, Granted, Unread},
    event::Received,
    names::Want,
    types::{LeaseId, Limit, MemberId, Memory, Name, NoGrowth, Refusal, RequestId, STALE_LEASE, joined, limit},
};

impl Registry {
    /// Adds chunks to a version and replaces its table. The version keeps its number, and its holders keep their
    /// mappings.
    pub(super) fn grow(&mut self, member: MemberId, growth: Grow, received: Received, out: &mut Effects) -> Decision {
        let grown = self.grown(member, growth, &received);
        let (name, number, memory) = grown.inspect_err(|_| out.push(Effect::Close(received.all())))?;
        let grown = self.names.grow(&name, number, Arc::clone(&memory));
        let Some((before, holders)) = grown else { return Err(STALE_LEASE) };
        for holder in holders {
            self.people.grow(holder, memory.bytes() - before.bytes());
        }
        let uid = self.people.uid_of(member);
        self.people.charge(uid, |totals| totals.subtract(&before));
        self.people.charge(uid, |totals| totals.add(&memory));
        out.extend(before.table_fd().map(|table| Effect::Close(vec![table])));
        self.notify_growth_waiters(&name, number, || Ok(Answer::Done.into()), out);
        Ok(Answer::Done.into())
    }

    /// Returns the name and number of the version to grow, and its memory after the growth.
    fn grown(&self, member: MemberId, growth: Grow, received: &Received) -> Result<(Name, u64, Arc<Memory>), Refusal> {
        let (lease, version) = self.names.held(member, growth.lease)?;
        let cannot = |why| Refusal::CannotGrow { name: lease.name.clone(), version: lease.version, why };
        let before = &*version.memory;
        match version.owner {
            _ if before.facts.reserved == 0 => return Err(cannot(NoGrowth::Fixed)),
            None => return Err(cannot(NoGrowth::CommitterGone)),
            Some(owner) if owner != growth.lease => return Err(cannot(NoGrowth::NotCommitter)),
            Some(_) if version.growths != growth.growths => return Err(cannot(NoGrowth::Behind)),
            Some(_) if before.facts.kind != growth.kind => {
                return Err(Refusal::invalid("a version has one kind of memory"));
            }
            Some(_) => {}
        }
        let (chunks, table) = joined(growth.kind, &growth.chunks, &growth.table, &received.fds)?;
        let chunks = [&before.chunks[..], &chunks].concat();
        let memory = Memory { chunks, table, tensors: growth.tensors, ..before.clone() };
        let reserved = before.facts.reserved;
        let needed = memory.bytes();
        if needed > reserved {
            return Err(cannot(NoGrowth::Reserved { reserved, needed }));
        }
        limit(Limit::Growths, self.people.bounds().growths, version.growths + 1)?;
        limit(Limit::Chunks, self.people.bounds().chunks, memory.chunks.len() as u64)?;
        let others = self.people.totals().bytes() - before.bytes() - before.other_bytes();
        limit(
            Limit::Bytes,
            self.people.bounds().bytes,
            others.saturating_add(needed).saturating_add(memory.other_bytes()),
        )?;
        let fds = self.people.totals().fds - before.fds().len() as u64 + memory.fds().len() as u64;
        limit(Limit::Fds, self.people.bounds().fds, fds)?;
        // A table may become small enough to need no descriptor.
        let more_fds = memory.fds().len().saturating_sub(before.fds().len()) as u64;
        let more_bytes = needed.saturating_sub(before.bytes());
        self.people.check_node(version.uid, memory.facts.place, more_bytes)?;
        let more_bytes = more_bytes.saturating_add(memory.other_bytes().saturating_sub(before.other_bytes()));
        self.people.check_memory(version.uid, more_fds, more_bytes)?;
        Ok((lease.name.clone(), lease.version, Arc::new(memory)))
    }

    /// Returns the new chunks and table of a version, for a member that has its first `chunks` chunks and knows of
    /// `growths` growths.
    pub(super) fn refresh(&self, member: MemberId, lease: LeaseId, growths: u64, chunks: u64) -> Decision {
        let (held, version) = self.names.held(member, lease)?;
        let memory = &version.memory;
        if version.growths <= growths && chunks >= memory.chunks.len() as u64 {
            return Ok(Answer::Done.into());
        }
        // What asks for all chunks had them before, and a stale segment stays mapped.
        if chunks > 0 {
            version.check_stale(&held.name, held.version)?;
        }
        let chunks = usize::try_from(chunks).ok().filter(|chunks| *chunks <= memory.chunks.len());
        let chunks = chunks.ok_or(Refusal::invalid("the version never had so many chunks"))?;
        let fds = memory.fds_from(chunks);
        let grown = Grown {
            growths: version.growths,
            chunks: memory.chunk_bytes().split_off(chunks),
            table: memory.table.sent(),
        };
        Ok(Granted(Answer::Grown(grown), fds, Unread::Nothing))
    }

    /// Answers as soon as a version has grown more than `growths` times.
    pub(super) fn await_growth(&mut self, member: MemberId, request: RequestId, id: LeaseId, growths: u64) -> Decision {
        let (lease, version) = self.names.held(member, id)?;
        if version.growths > growths {
            return Ok(Answer::Done.into());
        }
        let why = if version.memory.facts.reserved == 0 { Some(NoGrowth::Fixed) } else { None };
        match why.or(version.owner.is_none().then_some(NoGrowth::CommitterGone)) {
            Some(why) => Err(Refusal::CannotGrow { name: lease.name.clone(), version: lease.version, why }),
            None => self.wait_by(member, request, id, Want::Growth(id)),
        }
    }

    /// Refuses all requests that wait for a version's growth, because no member can grow it any more.
    pub(super) fn notify_last_length(&mut self, name: &Name, version: u64, out: &mut Effects) {
        let why = NoGrowth::CommitterGone;
        let refused = || Err(Refusal::CannotGrow { name: name.clone(), version, why });
        self.notify_growth_waiters(name, version, refused, out);
    }

    fn notify_growth_waiters(&mut self, name: &Name, version: u64, outcome: impl Fn() -> Decision, out: &mut Effects) {
        let Some(entry) = self.names.entry(name) else { return };
        let waiting = entry.waits.values().filter(|wait| match wait.want {
            Want::Growth(lease) => self.names.leases().get(&lease).is_some_and(|lease| lease.version == version),
            _ => false,
        });
        for (member, ticket) in waiting.map(|wait| (wait.member, wait.ticket)).collect::<Vec<_>>() {
            self.conclude(member, ticket, outcome(), out);
        }
    }
}
