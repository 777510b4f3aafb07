//! Listings. Every answer stays below the smallest message limit, however much exists.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound::{Excluded, Unbounded},
};

use partywall_wire::{
    HolderInfo, MemberInfo, NameInfo, ObjectDetail, ObjectHolder, ObjectInfo, SegmentInfo, SemaphoreInfo, StatusInfo,
    TimelineInfo, VersionInfo, WaitInfo, limits::MAX_NAME,
};

use super::{
    Registry,
    effect::{Answer, Decision, Granted, MemberAt, ObjectAt, Unread},
    event::Identity,
    names::{Entry, Version, Want},
    near::near,
    objects::{LeasedObject, Semaphore, Timeline},
    pages::{SLOTS_AS_A_BYTE, count, in_order, page},
    people::{Member, Waiting},
    types::{Awaited, FdId, LeaseId, MemberId, MemberState, Millis, Name, ObjectKind, Place, Refusal, VersionFacts},
};

impl Registry {
    /// Returns everything about one name. Without a number, shows the latest version, or the newest held one if the
    /// name was withdrawn: it explains why the memory is still held.
    pub(super) fn inspect(&self, member: MemberId, name: &Name, version: Option<u64>) -> Decision {
        let Some(entry) = self.names.entry(name).filter(|entry| !entry.versions.is_empty()) else {
            return Err(self.not_found(member, name.clone(), version));
        };
        if let Some((_, newest)) = entry.versions.last_key_value() {
            self.people.check_sight(member, name, newest.owned())?;
        }
        let newest = || entry.versions.last_key_value().map(|(number, _)| *number);
        let wanted = version.or(entry.latest).or_else(newest).unwrap_or(0);
        let Some(found) = entry.versions.get(&wanted) else {
            return Err(Refusal::VersionNotFound { name: name.clone(), version: wanted, latest: entry.latest });
        };
        self.people.check_sight(member, name, found.owned())?;
        let (_, holders, rows) = self.holders(name, Some(wanted));
        let info = SegmentInfo {
            name: name.to_string(),
            version: self.version_info(wanted, found),
            chunks: found.memory.chunk_bytes(),
            table: found.memory.table.sent(),
            is_latest: entry.latest == Some(wanted),
            // If there are too many versions for one answer, the newest matter most.
            versions: entry
                .versions
                .iter()
                .filter(|(_, version)| self.people.sees(member, version.owned()))
                .skip(entry.versions.len().saturating_sub(VERSIONS))
                .map(|(number, version)| self.version_info(*number, version))
                .collect(),
            holders,
            queues: self.holding_queues(name, Some(wanted)),
            builder: self.builder(entry),
            control: None,
        };
        let unread = found.memory.control.map_or(Unread::Nothing, |control| Unread::Version {
            slots: control.slot_table(),
            holders: rows,
            rows: self.people.rows_of(found.holders.keys()),
            attached: self.held_segments(&found.attached),
        });
        let fds = found.memory.table_fd().into_iter().collect();
        Ok(Granted(Answer::Info(Box::new(info)), fds, unread))
    }

    /// Returns a page of names that a member sees.
    pub(super) fn list(&self, member: MemberId, after: Option<&str>) -> Granted {
        let from = after.map_or(Unbounded, Excluded);
        let seen = |entry: &Entry| {
            entry.versions.last_key_value().is_some_and(|(_, newest)| self.people.sees(member, newest.owned()))
        };
        let existing = self.names.entries().range::<str, _>((from, Unbounded)).filter(|(_, entry)| seen(entry));
        let (names, more) = page(existing.map(|(name, entry)| self.name_row(name, entry)), |(info, _)| {
            // The server counts the free blocks of each row, as it counts permits.
            let control = info.latest.as_ref().and_then(|latest| latest.control);
            let blocks = control.map_or(0, |control| control.blocks as usize / SLOTS_AS_A_BYTE);
            info.name.len() + blocks
        });
        let (names, slots) = names.into_iter().unzip();
        Granted(Answer::Names { names, more }, Vec::new(), Unread::Names(slots))
    }

    /// Returns a page of members that a member may act for.
    pub(super) fn list_members(&self, asker: MemberId, after: Option<MemberId>) -> Granted {
        let from = (after.map_or(Unbounded, Excluded), Unbounded);
        let is_seen = |identity: &Identity| !identity.operator && self.people.acts_for(asker, identity.uid);
        let living = self.people.members().range(from).filter(|(_, member)| is_seen(&member.identity));
        let living = living.map(|(id, member)| (*id, self.member_row(*id, member)));
        let dead = self.closing.dead().filter(|(id, _)| after.is_none_or(|after| **id > after));
        let dead = dead.filter(|(_, dead)| is_seen(&dead.identity));
        let dead: BTreeMap<_, _> = dead
            .map(|(id, dead)| (*id, (bare_info(*id, &dead.identity, dead.since, dead.bytes), MemberAt::default())))
            .collect();
        let all = in_order(living, dead.into_iter()).map(|(_, row)| row);
        let (members, more) = page(all, |(info, at)| {
            let waits: usize = info.waits.iter().map(|wait| wait.name.len() + WAIT_BYTES).sum();
            // The server adds the wait for a timeline, which is in the row.
            let timeline = at.row.map_or(0, |_| MAX_NAME + WAIT_BYTES);
            info.command.len() + waits + timeline
        });
        let (members, at) = members.into_iter().unzip();
        Granted(Answer::Members { members, more }, Vec::new(), Unread::Members(at))
    }

    /// Returns a page of timelines, then of semaphores, that a member sees.
    pub(super) fn list_objects(&self, member: MemberId, after: Option<(ObjectKind, String)>) -> Granted {
        let (timelines, semaphores) = match &after {
            None => (Some(Unbounded), Unbounded),
            Some((ObjectKind::Timeline, name)) => (Some(Excluded(name.as_str())), Unbounded),
            Some((_, name)) => (None, Excluded(name.as_str())),
        };
        let timelines =
            timelines.into_iter().flat_map(|from| self.objects.timelines().range::<str, _>((from, Unbounded)));
        let timelines = timelines.filter(|(_, timeline)| self.people.sees(member, timeline.owned));
        let semaphores = self.objects.semaphores().range::<str, _>((semaphores, Unbounded));
        let semaphores = semaphores.filter(|(_, semaphore)| self.people.sees(member, semaphore.owned));
        let timelines = timelines.map(|(name, timeline)| self.timeline_row(name, timeline));
        let rows = timelines.chain(semaphores.map(|(name, semaphore)| semaphore_row(name, semaphore)));
        let (objects, more) = page(rows, |(info, _)| {
            // The server counts the permits of each semaphore in the page, which must not delay other members for long.
            let permits =
                if let ObjectInfo::Semaphore(info) = info { info.maximum as usize / SLOTS_AS_A_BYTE } else { 0 };
            info.name().len() + permits
        });
        let (objects, at) = objects.into_iter().unzip();
        Granted(Answer::Objects { objects, more }, Vec::new(), Unread::Objects(at))
    }

    /// Returns everything about one timeline or semaphore.
    pub(super) fn inspect_object(&self, member: MemberId, kind: ObjectKind, name: &Name) -> Decision {
        let found = match kind {
            ObjectKind::Timeline => {
                let timeline = self.objects.timelines().get(name);
                timeline.map(|timeline| (self.timeline_row(name, timeline), &timeline.holders, timeline.owned))
            }
            _ => {
                let semaphore = self.objects.semaphores().get(name);
                semaphore.map(|semaphore| (semaphore_row(name, semaphore), &semaphore.holders, semaphore.owned))
            }
        };
        let Some(((info, at), holders, owned)) = found else {
            let near = match kind {
                ObjectKind::Timeline => {
                    near(self.objects.timelines(), name, |timeline| self.people.sees(member, timeline.owned))
                }
                _ => near(self.objects.semaphores(), name, |semaphore| self.people.sees(member, semaphore.owned)),
            };
            return Err(Refusal::ObjectNotFound { kind, near, is: self.kinds_of(member, name), name: name.clone() });
        };
        self.people.check_sight(member, name, owned)?;
        let (holders, rows) = self.people.holders_of(holders);
        let holders = holders.into_iter().map(|holder| ObjectHolder { holder, permits: 0 }).collect();
        let detail = ObjectDetail { info, holders };
        Ok(Granted(Answer::Object(Box::new(detail)), Vec::new(), Unread::Object(at, rows)))
    }

    fn timeline_row(&self, name: &Name, timeline: &Timeline) -> (ObjectInfo, ObjectAt) {
        let info = TimelineInfo {
            name: name.to_string(),
            incarnation: self.objects.cells.incarnation(timeline.present).unwrap_or(0),
            writer: timeline.writer.and_then(|lease| self.holder_pid(lease)),
            value: 0,
            announced: 0,
            ending: None,
            leases: count(timeline.holders.leases()),
            uid: timeline.owned.uid,
            shared: timeline.owned.shared,
        };
        (ObjectInfo::Timeline(info), ObjectAt::Timeline(self.objects.cells.at(timeline.present)))
    }

    /// Returns the name of the timeline of a member's lease, and the pid of its writer if it has one.
    pub(crate) fn timeline_of(&self, member: MemberId, lease: LeaseId) -> Option<(&Name, Option<u32>)> {
        let held = self.objects.leases().get(&lease).filter(|held| held.member == member)?;
        let LeasedObject::Timeline { name, .. } = &held.object else { return None };
        let writer = self.objects.timelines().get(name)?.writer;
        Some((name, writer.and_then(|lease| self.holder_pid(lease))))
    }

    /// Returns the pid of the process that builds a name's next version under a claim.
    fn builder(&self, entry: &Entry) -> Option<u32> {
        let claim = self.names.claims().get(&entry.claim?)?;
        Some(self.people.member(claim.member)?.identity.pid)
    }

    /// Returns the first waits of a member for names.
    fn waits_of(&self, member: &Member) -> Vec<WaitInfo> {
        let row = |name: &Name, entry: &Entry, want| {
            let number = |lease| Some(self.names.leases().get(&lease)?.version);
            let (on, target, by) = match want {
                Want::Open { version, .. } => (Awaited::Commit, version, self.builder(entry)),
                Want::Build => (Awaited::Commit, None, self.builder(entry)),
                Want::Withdrawal(lease) => (Awaited::Withdrawal, number(lease), None),
                Want::Growth(lease) => {
                    let version = number(lease);
                    let owner = version.and_then(|version| entry.versions.get(&version)?.owner);
                    let owner =
                        owner.and_then(|owner| self.people.members().get(&self.names.leases().get(&owner)?.member));
                    (Awaited::Growth, version, owner.map(|owner| owner.identity.pid))
                }
            };
            WaitInfo { on, name: name.to_string(), target, by, ms: None }
        };
        let waits = member.waits.values().filter_map(|(id, what)| match what {
            Waiting::For(name) => {
                let entry = self.names.entry(name)?;
                Some(row(name, entry, entry.waits.get(id)?.want))
            }
            Waiting::Watching => None,
        });
        waits.take(WAITS).collect()
    }

    fn name_row(&self, name: &Name, entry: &Entry) -> (NameInfo, Option<FdId>) {
        let older = entry.versions.iter().filter(|(number, _)| entry.latest != Some(**number));
        let latest = entry.latest();
        let info = NameInfo {
            name: name.to_string(),
            latest: latest.map(|(number, version)| self.version_info(number, version)),
            usage: None,
            older: count(older.clone().count() as u64),
            older_bytes: older.fold(0, |sum, (_, version)| sum.saturating_add(version.memory.bytes())),
            notice: entry.notice(),
            lost: entry.latest.is_none() && entry.versions.last_key_value().is_some_and(|(_, newest)| newest.is_lost()),
        };
        (info, latest.and_then(|(_, version)| Some(version.memory.control?.slot_table())))
    }

    fn version_info(&self, number: u64, version: &Version) -> VersionInfo {
        let VersionFacts { kind, place, mutable, reserved, lifetime, shared, control } = version.memory.facts;
        VersionInfo {
            version: number,
            kind,
            place,
            bytes: version.memory.bytes(),
            tensors: version.memory.tensors,
            mutable,
            reserved,
            growths: version.growths,
            lifetime,
            control,
            committer: version.committer,
            owner: version
                .keeper
                .and_then(|id| self.people.member(id))
                .map_or(version.committer, |keeper| keeper.identity.pid),
            uid: version.uid,
            shared,
            leases: count(version.all_leases()),
            notice: version.notice.map(|(_, notice)| notice),
            lost: version.is_lost(),
            committed_at: version.committed_at,
        }
    }

    fn member_row(&self, id: MemberId, member: &Member) -> (MemberInfo, MemberAt) {
        let held = || {
            member.object_leases.iter().filter_map(|lease| Some((*lease, &self.objects.leases().get(lease)?.object)))
        };
        let written = held().filter(|(lease, object)| match object {
            LeasedObject::Timeline { name, .. } => {
                self.objects.timelines().get(name).is_some_and(|line| line.writer == Some(*lease))
            }
            LeasedObject::Semaphore { .. } => false,
        });
        let semaphores = held().filter_map(|(_, object)| match object {
            LeasedObject::Semaphore { name } => Some(self.objects.semaphores().get(name)?.memory.fd),
            LeasedObject::Timeline { .. } => None,
        });
        let pools = self.versions_of(id).filter_map(|(_, version)| Some(version.memory.control?.slot_table()));
        let at = MemberAt {
            row: Some(member.row),
            semaphores: semaphores.collect::<BTreeSet<_>>().into_iter().collect(),
            pools: pools.collect::<BTreeSet<_>>().into_iter().collect(),
        };
        let info = MemberInfo {
            state: member.state(),
            doubt: member.doubt(),
            mps: member.mps.as_deref().map(str::to_owned),
            leases: count(member.all_leases()),
            timelines: count(written.count() as u64),
            waits: self.waits_of(member),
            ..bare_info(id, &member.identity, member.since, member.bytes)
        };
        (info, at)
    }

    /// Returns the sums, without the member `asker`.
    pub(super) fn status(&self, asker: MemberId) -> Answer {
        let mut bytes: Vec<(Place, u64)> =
            self.people.totals().places.iter().map(|(place, bytes)| (*place, *bytes)).collect();
        bytes.sort_by_key(|(place, bytes)| (std::cmp::Reverse(*bytes), *place));
        bytes.truncate(PLACES);
        let mut largest: Vec<(&Name, Place, u64)> = self
            .names
            .entries()
            .iter()
            .filter_map(|(name, entry)| {
                let (_, newest) = entry.versions.last_key_value()?;
                self.people.sees(asker, newest.owned()).then_some(())?;
                let bytes = entry.versions.values().fold(0, |sum: u64, v| sum.saturating_add(v.memory.held_bytes()));
                Some((name, newest.memory.facts.place, bytes))
            })
            .collect();
        if largest.len() > LARGEST {
            // Sorting a very large number of names would delay other members.
            largest.select_nth_unstable_by(LARGEST, |a, b| (b.2, a.0).cmp(&(a.2, b.0)));
            largest.truncate(LARGEST);
        }
        largest.sort_by(|a, b| (b.2, a.0).cmp(&(a.2, b.0)));
        let (unproven, unproven_bytes) = self.unproven();
        let (deaths, unproven_deaths) = self.people.deaths();
        Answer::Status(Box::new(StatusInfo {
            simulated: self.people.runs_simulated(asker),
            members: self.people.others(asker),
            names: self.people.totals().names,
            versions: self.people.totals().versions,
            timelines: self.objects.timelines().len() as u64,
            semaphores: self.objects.semaphores().len() as u64,
            leases: self.people.all_leases(),
            unproven,
            unproven_bytes,
            deaths,
            unproven_deaths,
            fds: self.people.totals().fds,
            bytes,
            largest: largest.into_iter().map(|(name, place, bytes)| (name.to_string(), place, bytes)).collect(),
            users: self.people.users_seen_by(asker),
            ..StatusInfo::default()
        }))
    }

    /// Returns the number of dead members in quarantine, and the bytes of the versions that they hold leases on.
    fn unproven(&self) -> (u64, u64) {
        let unproven = |id: &MemberId| self.people.is_unproven(*id);
        let members = self.people.members().keys().filter(|id| unproven(id)).count() as u64;
        if members == 0 {
            return (0, 0);
        }
        let held = self.names.versions().filter(|version| version.holders.keys().any(unproven));
        (members, held.fold(0, |sum: u64, version| sum.saturating_add(version.memory.bytes())))
    }

    /// Returns the bytes that leases hold on one version of a name, or on all, and the holders of these leases with
    /// their rows.
    pub(super) fn holders(&self, name: &Name, only: Option<u64>) -> (u64, Vec<HolderInfo>, Vec<u16>) {
        let Some(entry) = self.names.entry(name) else { return (0, Vec::new(), Vec::new()) };
        let mut bytes = 0_u64;
        let mut leases = BTreeMap::<MemberId, u64>::new();
        for (number, version) in &entry.versions {
            if only.is_none_or(|only| only == *number) && version.is_held() {
                bytes = bytes.saturating_add(version.memory.bytes());
                for (member, held) in &*version.holders {
                    *leases.entry(*member).or_default() += held;
                }
            }
        }
        let (holders, rows) = self.people.holders_of(&leases);
        (bytes, holders, rows)
    }
}

fn semaphore_row(name: &Name, semaphore: &Semaphore) -> (ObjectInfo, ObjectAt) {
    let info = SemaphoreInfo {
        name: name.to_string(),
        maximum: semaphore.maximum,
        held: 0,
        waiting: 0,
        leases: count(semaphore.holders.leases()),
        uid: semaphore.owned.uid,
        shared: semaphore.owned.shared,
    };
    (ObjectInfo::Semaphore(info), ObjectAt::Semaphore(semaphore.memory.fd))
}

/// Returns what a listing says of a dead member, without leases. Rows of living members add to it.
fn bare_info(id: MemberId, identity: &Identity, since: Millis, bytes: u64) -> MemberInfo {
    MemberInfo {
        member: id.0,
        pid: identity.pid,
        uid: identity.uid,
        command: identity.command.to_string(),
        state: MemberState::Dead,
        doubt: None,
        mps: None,
        quiet: None,
        leases: 0,
        timelines: 0,
        permits: Some(0),
        blocks: Some(0),
        tasks: Some(0),
        bytes,
        since,
        waits: Vec::new(),
        simulated: identity.simulated,
    }
}

/// Upper bound on a wait in a listing without its name: a kind, three numbers, and which of them are there.
const WAIT_BYTES: usize = 40;

/// Waits for names in a listing of members, for each of them.
const WAITS: usize = 4;

/// Versions in one answer.
const VERSIONS: usize = 50;

/// Places in one answer. Members report the UUIDs of GPUs, so there may be more places than GPUs.
const PLACES: usize = 64;

/// Names in a status.
const LARGEST: usize = 10;
