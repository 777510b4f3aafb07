//! Claims: one member at a time builds a name that does not exist. If it gives up, the longest waiting request builds.

use super::{
    Registry,
    effect::{Answer, Decision, Effects},
    names::{Claim, Want},
    types::{Access, ClaimId, Limit, MemberId, Name, RequestId, STALE_CLAIM, limit},
};

impl Registry {
    /// Opens the latest version, makes the member its builder, or waits for the present builder.
    pub(super) fn open_or_build(&mut self, member: MemberId, request: RequestId, name: Name) -> Decision {
        let entry = self.names.entry(&name);
        if let Some(latest) = entry.and_then(|entry| entry.latest) {
            return self.grant(member, request, &name, latest, Access::Read);
        }
        if entry.is_some_and(|entry| entry.claim.is_some()) {
            return self.wait(member, request, &name, Want::Build);
        }
        // A claim is a future name. Without a bound, requests for ever new names would exhaust the broker's memory.
        limit(
            Limit::Names,
            self.people.bounds().names,
            self.people.totals().names + self.names.claims().len() as u64 + 1,
        )?;
        self.check_new_name(member, &name)?;
        self.people.check_names(self.people.uid_of(member))?;
        let claim = self.claim(member, request, &name);
        Ok(Answer::Build { claim }.into())
    }

    /// Gives a claim back unused.
    pub(super) fn abandon(&mut self, member: MemberId, claim: ClaimId, out: &mut Effects) -> Decision {
        self.names.claims().get(&claim).filter(|c| c.member == member).ok_or(STALE_CLAIM)?;
        self.hand_on(claim, out);
        Ok(Answer::Done.into())
    }

    /// Drops all claims of a member and makes the longest waiting request of each name the builder.
    pub(super) fn drop_claims(&mut self, member: MemberId, out: &mut Effects) {
        let Some(record) = self.people.member(member) else { return };
        for claim in record.claims.iter().copied().collect::<Vec<_>>() {
            self.hand_on(claim, out);
        }
    }

    /// Ends a claim that was fulfilled or whose holder will not build any more.
    pub(super) fn drop_claim(&mut self, id: ClaimId) -> Option<Claim> {
        let claim = self.names.drop_claim(id)?;
        self.people.drop_claim(claim.member, id);
        Some(claim)
    }

    /// Ends a claim. The longest waiting request whose user may have the name builds; those before it are refused.
    fn hand_on(&mut self, id: ClaimId, out: &mut Effects) {
        let Some(Claim { name, .. }) = self.drop_claim(id) else { return };
        while let Some((member, ticket)) = self.next_builder(&name) {
            let allowed =
                self.check_new_name(member, &name).and_then(|()| self.people.check_names(self.people.uid_of(member)));
            let is_allowed = allowed.is_ok();
            let decision = allowed.map(|()| Answer::Build { claim: self.claim(member, ticket, &name) }.into());
            self.conclude(member, ticket, decision, out);
            if is_allowed {
                return;
            }
        }
    }

    /// Returns the longest waiting request that would build a name.
    fn next_builder(&self, name: &Name) -> Option<(MemberId, RequestId)> {
        let waits = self.names.entry(name)?.waits.values();
        waits.filter(|wait| wait.want == Want::Build).map(|wait| (wait.member, wait.ticket)).next()
    }

    fn claim(&mut self, member: MemberId, origin: RequestId, name: &Name) -> ClaimId {
        let id = self.names.claim(member, origin, name);
        self.people.add_claim(member, id);
        id
    }
}
