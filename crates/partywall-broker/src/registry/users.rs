//! Names of users: which names a user may create, and the audit lines for what users do to each other.
//!
//! A name belongs to the user whose process created it, and with it all names under it: `a/b` under `a`. The user's
//! processes alone replace, remove and abandon it. Processes of other users may open what was created shared. Listings
//! show a user its own names and those that are shared.

use std::ops::Bound::{Included, Unbounded};

use partywall_wire::OpenedTimeline;

use super::{
    Registry,
    effect::{Answer, Audited, Effect, Outcome},
    names::{Entry, Version},
    people::Owned,
    types::{MemberId, Name, OtherUsers, Refusal},
};

impl Registry {
    /// Refuses to create a name under one of another user.
    pub(super) fn check_new_name(&self, member: MemberId, name: &Name) -> Result<(), Refusal> {
        self.check_names_above(member, name, |_| false)
    }

    /// Refuses to create a timeline under a name of another user. A member that has a shared topic or queue open may:
    /// its streams signal there.
    pub(super) fn check_new_timeline(&self, member: MemberId, name: &Name) -> Result<(), Refusal> {
        let is_used = |version: &Version| version.memory.control.is_some() && version.holders.contains_key(&member);
        // The name may be another user's by now, and the removed topic still in use.
        self.check_names_above(member, name, |entry| entry.versions.values().any(|version| is_used(version)))
    }

    fn check_names_above(
        &self,
        member: MemberId,
        name: &Name,
        is_allowed: impl Fn(&Entry) -> bool,
    ) -> Result<(), Refusal> {
        for (end, _) in name.as_str().match_indices('/') {
            let above = &name.as_str()[..end];
            let entry = self.names.entries().get(above).filter(|entry| !is_allowed(entry));
            if let Some(owner) = entry.and_then(Entry::owner) {
                self.people.check_owner(member, owner, || OtherUsers::Create { name: above.to_owned() })?;
            }
        }
        Ok(())
    }

    /// Refuses to create a pool, topic or queue above timelines of another user, which members would take for its own.
    pub(super) fn check_names_below(&self, member: MemberId, name: &Name) -> Result<(), Refusal> {
        let uid = self.people.uid_of(member);
        let below = format!("{name}/");
        let timelines = self.objects.timelines().range::<str, _>((Included(below.as_str()), Unbounded));
        let foreign = timelines
            .take_while(|(other, _)| other.as_str().starts_with(&below))
            .find(|(_, timeline)| timeline.owned.uid != uid);
        match foreign {
            Some((other, timeline)) => {
                let what = OtherUsers::Create { name: other.to_string() };
                Err(Refusal::OtherUser { what, owner: timeline.owned.uid, uid })
            }
            None => Ok(()),
        }
    }

    /// Refuses to replace a name of another user.
    pub(super) fn check_replaces(&self, member: MemberId, name: &Name) -> Result<(), Refusal> {
        match self.names.entry(name).and_then(Entry::owner) {
            Some(owner) => self.people.check_owner(member, owner, || OtherUsers::Create { name: name.to_string() }),
            None => self.check_new_name(member, name),
        }
    }

    /// Returns whether a user has memory that a driver has allocated.
    pub(super) fn has_driver_memory(&self, uid: u32) -> bool {
        self.names
            .versions()
            .filter(|version| version.uid == uid)
            .any(|version| version.memory.facts.place.needs_driver())
    }

    /// Returns the audit lines for the outcome of a request: what a member got of another user, or was refused because
    /// of its user.
    pub(super) fn audited(&self, member: MemberId, outcome: &Outcome) -> Vec<Effect> {
        let uid = self.people.uid_of(member);
        let line = |what: OtherUsers, owner: u32, granted: bool| {
            let pid = self.people.pid_of(member);
            Effect::Audit(Audited::OtherUser { uid, pid, what, owner, granted })
        };
        let opened = |name: &Name, owned: Owned| {
            (owned.uid != uid).then(|| line(OtherUsers::Open { name: name.to_string() }, owned.uid, true))
        };
        match outcome {
            Err(Refusal::OtherUser { what, owner, .. }) => vec![line(what.clone(), *owner, false)],
            Err(Refusal::Quota { limit, allowed, needed, .. }) => {
                let pid = self.people.pid_of(member);
                vec![Effect::Audit(Audited::Quota { uid, pid, limit: *limit, allowed: *allowed, needed: *needed })]
            }
            Ok(Answer::Opened(found)) => {
                let version = self.names.version(&found.name, found.version);
                version.and_then(|version| opened(&found.name, version.owned())).into_iter().collect()
            }
            Ok(Answer::Timeline(OpenedTimeline { lease, .. }) | Answer::Semaphore { lease, .. }) => {
                self.objects.owned(*lease).and_then(|(name, owned)| opened(name, owned)).into_iter().collect()
            }
            Ok(Answer::Evicted(evicted)) => {
                let others =
                    evicted.iter().map(|departed| (departed.pid, self.people.uid_of(MemberId(departed.member))));
                let others = others.filter(|(_, owner)| *owner != uid);
                others.map(|(pid, owner)| line(OtherUsers::Evict { pid }, owner, true)).collect()
            }
            _ => Vec::new(),
        }
    }
}
