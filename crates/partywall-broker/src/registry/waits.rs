//! Requests that wait, and their completion.
//!
//! A request waits in its name's entry, in order of arrival, or among the watchers. It is completed exactly once,
//! because it is removed before it is completed ([`Registry::conclude`]). When a member loses its connection its waits
//! end; it sends its requests again.

use super::{
    Registry,
    effect::{Answer, Decision, Effect, Effects, split},
    names::{Wait, Want},
    people::Waiting,
    types::{Access, ClaimId, LeaseId, MemberId, Name, RequestId, STALE_LEASE, STALE_TICKET},
};

impl Registry {
    /// Makes a request wait.
    pub(super) fn wait(&mut self, member: MemberId, ticket: RequestId, name: &Name, want: Want) -> Decision {
        let id = self.people.enlist(member, ticket, Waiting::For(name.clone()))?;
        self.names.add_wait(name, id, Wait { member, ticket, want });
        Ok(Answer::Pending.into())
    }

    /// Cancels a waiting request.
    pub(super) fn cancel(&mut self, member: MemberId, ticket: RequestId) -> Decision {
        self.end_wait(member, ticket).ok_or(STALE_TICKET)?;
        Ok(Answer::Done.into())
    }

    /// Gives back what an earlier request of a member was granted, or waits for: the member has not seen the answer,
    /// and does not know whether there was one.
    pub(super) fn give_up(&mut self, member: MemberId, request: RequestId, out: &mut Effects) -> Decision {
        self.end_wait(member, request);
        let Some(record) = self.people.member(member) else { return Ok(Answer::Done.into()) };
        let made = |id: &&ClaimId| self.names.claims().get(id).is_some_and(|claim| claim.origin == request);
        let claim = record.claims.iter().find(made).copied();
        let made = |id: &&LeaseId| self.names.leases().get(id).is_some_and(|lease| lease.origin == request);
        let of_version = record.version_leases.iter().find(made).copied();
        let lease = of_version.or_else(|| self.objects.lease_of(&record.object_leases, request));
        if let Some(claim) = claim {
            self.abandon(member, claim, out)?;
        }
        if let Some(lease) = lease {
            self.release(member, lease, false, out)?;
        }
        Ok(Answer::Done.into())
    }

    /// Answers as soon as the version behind a lease is withdrawn. A newer version does not count as a withdrawal.
    pub(super) fn await_withdrawal(&mut self, member: MemberId, request: RequestId, id: LeaseId) -> Decision {
        let (_, version) = self.names.held(member, id)?;
        if version.withdrawn {
            return Ok(version.withdrawn_answer().into());
        }
        self.wait_by(member, request, id, Want::Withdrawal(id))
    }

    /// Makes a request wait for a change of the version behind a lease, for as long as the lease exists.
    pub(super) fn wait_by(&mut self, member: MemberId, request: RequestId, id: LeaseId, want: Want) -> Decision {
        let name = self.names.leases().get(&id).ok_or(STALE_LEASE)?.name.clone();
        self.wait(member, request, &name, want)
    }

    /// Grants the version `number`, which has just become the latest, to all requests that wait for it.
    pub(super) fn grant_waiters(&mut self, name: &Name, number: u64, out: &mut Effects) {
        let Some(entry) = self.names.entry(name) else { return };
        let waiting = entry.waits.values().filter_map(|wait| match wait.want {
            Want::Open { version, access } => {
                version.is_none_or(|v| v == number).then_some((wait.member, wait.ticket, access))
            }
            Want::Build => Some((wait.member, wait.ticket, Access::Read)),
            Want::Withdrawal(_) | Want::Growth(_) => None,
        });
        for (member, ticket, access) in waiting.collect::<Vec<_>>() {
            let granted = self.grant(member, ticket, name, number, access);
            self.conclude(member, ticket, granted, out);
        }
    }

    /// Completes the requests that wait for the withdrawal of a name, or of a version of it.
    pub(super) fn notify_withdrawn(&mut self, name: &Name, out: &mut Effects) {
        let Some(entry) = self.names.entry(name) else { return };
        let withdrawn = |wait: &Wait| {
            let Want::Withdrawal(lease) = wait.want else { return None };
            let version = entry.versions.get(&self.names.leases().get(&lease)?.version)?;
            version.withdrawn.then(|| (wait.member, wait.ticket, version.withdrawn_answer()))
        };
        for (member, ticket, answer) in entry.waits.values().filter_map(withdrawn).collect::<Vec<_>>() {
            self.conclude(member, ticket, Ok(answer.into()), out);
        }
    }

    /// Completes a waiting request.
    pub(super) fn conclude(&mut self, member: MemberId, ticket: RequestId, granted: Decision, out: &mut Effects) {
        if self.end_wait(member, ticket).is_none() {
            return;
        }
        // Only requests that ask get answers with something unread, and those never wait.
        let (outcome, fds, _) = split(granted);
        let audited = self.audited(member, &outcome);
        out.push(Effect::Notify { member, ticket, outcome, fds });
        out.extend(audited);
    }

    /// Drops all waiting requests of a member.
    pub(super) fn drop_waits(&mut self, member: MemberId) {
        let Some(record) = self.people.member(member) else { return };
        for ticket in record.waits.keys().copied().collect::<Vec<_>>() {
            self.end_wait(member, ticket);
        }
    }

    fn end_wait(&mut self, member: MemberId, ticket: RequestId) -> Option<()> {
        let (id, what) = self.people.drop_wait(member, ticket)?;
        let name = match what {
            Waiting::For(name) => name,
            Waiting::Watching => return self.log.drop_watcher(id),
        };
        self.names.drop_wait(name, id)
    }
}
