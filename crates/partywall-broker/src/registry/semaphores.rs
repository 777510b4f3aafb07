//! Semaphores: names with a number of permits. The permits are in control memory alone. The registry knows which
//! members have a semaphore open, and therefore whose permits to return.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    Answer, Registry,
    effect::{Decision, Effect, Effects, Granted, Unread},
    objects::LeasedObject,
    people::Owned,
    types::{
        Change, ControlMemory, FdId, LeaseId, Limit, MemberId, Name, Named, Refusal, RequestId, STALE_LEASE, limit,
    },
};

/// A semaphore that a member has open.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Semaphore {
    pub(super) memory: ControlMemory,
    pub(super) maximum: u32,
    pub(super) owned: Owned,
    /// Leases by member.
    pub(super) holders: BTreeMap<MemberId, u64>,
}

impl Registry {
    /// Opens a semaphore, and creates it if there is none, in `memory`.
    pub(super) fn open_semaphore(
        &mut self,
        (member, request): (MemberId, RequestId),
        (name, maximum, shared): (Name, u32, bool),
        memory: Option<ControlMemory>,
        out: &mut Effects,
    ) -> Decision {
        let is_new = self.check_open_semaphore(member, &name, maximum, memory);
        if let Some(unused) = memory.filter(|_| is_new != Ok(true)) {
            out.push(Effect::Close(vec![unused.fd]));
        }
        if is_new? {
            let memory = memory.ok_or(Refusal::invalid("no memory was created for the semaphore"))?;
            let uid = self.people.uid_of(member);
            let owned = Owned { uid, shared };
            self.people.charge(uid, |totals| totals.add_control(memory));
            self.people.user_mut(uid).semaphores += 1;
            self.semaphores.insert(name.clone(), Semaphore { memory, maximum, owned, holders: BTreeMap::new() });
            let pid = self.people.pid_of(member);
            self.log(Named::Semaphore, &name, owned, Change::Created { pid });
        }
        if let Some(semaphore) = self.semaphores.get_mut(&name) {
            *semaphore.holders.entry(member).or_default() += 1;
        }
        let lease = self.lease_object(member, request, LeasedObject::Semaphore { name });
        self.opened_semaphore(lease).ok_or(STALE_LEASE)
    }

    /// Returns whether opening this semaphore creates it, in `memory` if that has been created already.
    pub(super) fn check_open_semaphore(
        &self,
        member: MemberId,
        name: &Name,
        maximum: u32,
        memory: Option<ControlMemory>,
    ) -> Result<bool, Refusal> {
        self.people.check_leases(member)?;
        if let Some(semaphore) = self.semaphores.get(name) {
            self.people.check_access(member, name, semaphore.owned)?;
            if semaphore.maximum != maximum {
                let has = semaphore.maximum;
                return Err(Refusal::WrongMaximum { name: name.clone(), maximum: has, asked: maximum });
            }
            return Ok(false);
        }
        limit(Limit::Semaphores, self.people.bounds().semaphores, self.semaphores.len() as u64 + 1)?;
        limit(Limit::Fds, self.people.bounds().fds, self.people.totals().fds + 1)?;
        let bytes = memory.map_or(0, |memory| memory.bytes);
        limit(Limit::Bytes, self.people.bounds().bytes, self.people.totals().bytes().saturating_add(bytes))?;
        self.check_new_name(member, name)?;
        let uid = self.people.uid_of(member);
        self.people.check_names(uid)?;
        self.people.check_one_more(uid, Limit::Semaphores, |user| user.semaphores)?;
        self.people.check_memory(uid, 1, bytes)?;
        Ok(true)
    }

    /// Drops a lease on a semaphore. Returns the semaphore's memory if it was the member's last lease, so its permits
    /// have to be returned.
    pub(super) fn drop_semaphore_lease(&mut self, member: MemberId, name: &Name, out: &mut Effects) -> Option<FdId> {
        let semaphore = self.semaphores.get_mut(name)?;
        let held = semaphore.holders.get_mut(&member)?;
        *held -= 1;
        if *held > 0 {
            return None;
        }
        semaphore.holders.remove(&member);
        if !semaphore.holders.is_empty() {
            return Some(semaphore.memory.fd);
        }
        if let Some(Semaphore { memory, owned, .. }) = self.semaphores.remove(name) {
            self.people.charge(owned.uid, |totals| totals.subtract_control(memory));
            self.people.user_mut(owned.uid).semaphores -= 1;
            out.push(Effect::Close(vec![memory.fd]));
            let pid = self.people.pid_of(member);
            self.log(Named::Semaphore, name, owned, Change::Withdrawn { pid });
        }
        None
    }

    /// Returns the answer for a lease on a semaphore.
    pub(super) fn opened_semaphore(&self, lease: LeaseId) -> Option<Granted> {
        let LeasedObject::Semaphore { name } = &self.object_leases.get(&lease)?.object else { return None };
        let semaphore = self.semaphores.get(name)?;
        Some(Granted(
            Answer::Semaphore { lease, maximum: semaphore.maximum },
            vec![semaphore.memory.fd],
            Unread::Nothing,
        ))
    }
}
