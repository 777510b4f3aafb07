//! The identity of clients, and the proof of their deaths.
//!
//! A member counts as dead when three conditions hold:
//! 1. Its process has exited: its pidfd is readable.
//! 2. No process holds the other end of any of its connections. A forked child holds them, as it holds the GPU's files.
//! 3. Both have been true for the settle time.
//!
//! None of them suffices alone: a live process may close its connections, and the driver may still write for a process
//! that has just exited.
//!
//! In a sandbox without pidfds the first condition cannot be checked. Such a member counts as gone when no process has
//! held a connection of it for the settle time. This proves nothing about its work, so the registry puts its leases in
//! quarantine.

use std::{
    collections::BTreeSet,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd},
    time::{Duration, Instant},
};

use partywall_os::{
    Errno,
    process::{self, PidfdInfo},
    socket,
};
use partywall_wire::{ClientHello, Kill, Refusal, Resume, Token, handshake::Speaker, limits::MAX_COMMAND};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use crate::{
    registry::MemberId,
    server::{connection::ConnectionId, ids::IdMap, in_flight::ProcessKey},
};

/// All members that are not proved dead.
#[derive(Debug, Default)]
pub(super) struct Membership {
    records: IdMap<MemberId, MemberRecord>,
    last: u64,
}

/// The server's record of a member.
#[derive(Debug)]
pub(super) struct MemberRecord {
    who: Who,
    /// The time of its last request.
    last_request: Instant,
    /// Its current connection; absent while it is a suspect.
    pub(super) current: Option<ConnectionId>,
    /// Its connections whose other end a process still holds, including the current one.
    held: BTreeSet<ConnectionId>,
    /// Present until the process has exited.
    pidfd: Option<OwnedFd>,
    exited: Option<Instant>,
    hung_up: Option<Instant>,
    /// Whether the registry knows that a child holds its connection.
    held_by_child: bool,
    /// The result of the SIGKILL that an operator had it sent.
    killed: Option<Kill>,
    /// When it was restored after a restart, until it resumes. Its process closes its former connection first.
    restored: Option<Instant>,
}

/// What identifies a member, for as long as it is one.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Who {
    pub(super) token: Token,
    /// The number that its process drew for this attempt to join; 0 if it drew none.
    attempt: u64,
    pub(super) pid: u32,
    pub(super) uid: u32,
    pub(super) process: ProcessKey,
    operator: bool,
    /// Whether the member ever had a pidfd.
    provable: bool,
}

/// A member, as the journal describes it: its identity, and the kernel's numbers of its descriptors.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct MemberFiles {
    pub(super) member: MemberId,
    pub(super) who: Who,
    pub(super) pidfd: Option<RawFd>,
    /// The call sockets of its connections.
    pub(super) calls: Vec<RawFd>,
}

/// The numbers of members of one process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Share {
    pub(super) connected: u64,
    /// Members whose connections it has closed without `Bye`.
    pub(super) hung_up: u64,
    /// Its operators.
    pub(super) operators: u64,
}

/// The proof about the end of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Proof {
    /// Nothing is proved yet.
    None,
    /// It has exited, and a child holds a connection of it.
    HeldByChild,
    /// It is dead. For a member without a pidfd: its connections have ended for good.
    Dead,
}

impl Membership {
    pub(super) fn join(
        &mut self,
        client: Identified,
        token: Token,
        connection: ConnectionId,
        process: ProcessKey,
        hello: &ClientHello,
    ) -> MemberId {
        self.last += 1;
        let member = MemberId(self.last);
        let who = Who {
            token,
            attempt: hello.attempt,
            pid: client.pid,
            uid: client.uid,
            process,
            operator: hello.operator,
            provable: client.pidfd.is_some(),
        };
        let record = MemberRecord {
            who,
            last_request: Instant::now(),
            current: Some(connection),
            held: BTreeSet::from([connection]),
            pidfd: client.pidfd,
            exited: None,
            hung_up: None,
            held_by_child: false,
            killed: None,
            restored: None,
        };
        self.records.insert(member, record);
        member
    }

    /// Restores a member that a former process knew. It has no current connection; `held` are its former ones.
    pub(super) fn restore(&mut self, files: &MemberFiles, pidfd: Option<OwnedFd>, held: Vec<ConnectionId>) {
        let gone = Instant::now();
        let record = MemberRecord {
            who: files.who,
            last_request: gone,
            current: None,
            hung_up: held.is_empty().then_some(gone),
            held: held.into_iter().collect(),
            exited: (files.who.provable && pidfd.is_none()).then_some(gone),
            pidfd,
            held_by_child: false,
            killed: None,
            restored: Some(gone),
        };
        self.records.insert(files.member, record);
    }

    /// Continues with the numbers after that of the last member of a former process.
    pub(super) fn after(last: u64) -> Self {
        Self { records: IdMap::default(), last }
    }

    /// Returns the number of the last member.
    pub(super) fn last(&self) -> u64 {
        self.last
    }

    /// Describes a member for the journal. `call` returns the number of a connection's call socket.
    pub(super) fn files(&self, member: MemberId, call: impl Fn(&ConnectionId) -> Option<RawFd>) -> Option<MemberFiles> {
        let record = self.records.get(&member)?;
        Some(MemberFiles {
            member,
            who: record.who,
            pidfd: record.pidfd.as_ref().map(AsRawFd::as_raw_fd),
            calls: record.held.iter().filter_map(call).collect(),
        })
    }

    /// Returns all members.
    pub(super) fn ids(&self) -> impl Iterator<Item = MemberId> {
        self.records.keys().copied()
    }

    /// Returns whether this is a connection of the member, present or former.
    pub(super) fn holds(&self, member: MemberId, connection: ConnectionId) -> bool {
        self.records.get(&member).is_some_and(|record| record.held.contains(&connection))
    }

    /// Returns whether a member is an operator that has not resumed in time after a restart.
    pub(super) fn is_lost_operator(&self, member: MemberId) -> bool {
        self.records.get(&member).is_some_and(|record| {
            record.who.operator && record.restored.is_some_and(|since| since.elapsed() >= TO_RESUME)
        })
    }

    /// Returns whether a member is an operator.
    pub(super) fn is_operator(&self, member: MemberId) -> bool {
        self.records.get(&member).is_some_and(|record| record.who.operator)
    }

    /// Returns how many members and operators a process has.
    pub(super) fn share_of(&self, process: ProcessKey) -> Share {
        let mut share = Share::default();
        for record in self.records.values().filter(|record| record.who.process == process && record.exited.is_none()) {
            match record {
                MemberRecord { who: Who { operator: true, .. }, .. } => share.operators += 1,
                MemberRecord { current: Some(_), .. } => share.connected += 1,
                MemberRecord { restored: Some(since), .. } if since.elapsed() < TO_RESUME => {}
                MemberRecord { current: None, .. } => share.hung_up += 1,
            }
        }
        share
    }

    /// Returns the number of operators of some users, and the one that has been idle for longest.
    pub(super) fn operators(&self, of: impl Fn(u32) -> bool) -> (u64, Option<(MemberId, Instant)>) {
        let operators = self.records.iter().filter(|(_, record)| record.who.operator && of(record.who.uid));
        let operators = operators.map(|(id, record)| (*id, record.last_request));
        (operators.clone().count() as u64, operators.min_by_key(|(_, last_request)| *last_request))
    }

    /// Records the time of a request. Returns whether the member is an operator.
    pub(super) fn note_request(&mut self, member: MemberId) -> bool {
        let operator = self.records.get_mut(&member).filter(|record| record.who.operator);
        operator.map(|record| record.last_request = Instant::now()).is_some()
    }

    /// Returns the member as which a client may resume.
    pub(super) fn resumable(&self, resume: &Resume, instance: u64, client: &Identified) -> Option<MemberId> {
        let member = resume.member;
        let record = self.records.get(&member)?;
        // A forked child knows its parent's token, but is another process. A process that has changed its user has lost
        // the rights of the former one.
        let same = resume.instance == instance && record.who.token == resume.token && record.is(client);
        (same && record.exited.is_none()).then_some(member)
    }

    /// Returns the member that a client has become by an earlier connection of the same attempt: the welcome was lost.
    pub(super) fn joined_by(&self, attempt: u64, client: &Identified) -> Option<MemberId> {
        let is_same = |record: &MemberRecord| {
            attempt != 0 && record.who.attempt == attempt && record.is(client) && record.exited.is_none()
        };
        self.records.iter().find(|(_, record)| is_same(record)).map(|(member, _)| *member)
    }

    /// Moves a member to another connection. Returns its previous one.
    pub(super) fn resume(&mut self, member: MemberId, connection: ConnectionId) -> Option<ConnectionId> {
        let record = self.records.get_mut(&member)?;
        record.held.insert(connection);
        record.hung_up = None;
        record.restored = None;
        record.current.replace(connection)
    }

    /// Takes away a member's current connection, whose other end a process may still hold. Returns false if another
    /// connection is current.
    pub(super) fn suspend(&mut self, member: MemberId, connection: ConnectionId) -> bool {
        match self.records.get_mut(&member) {
            Some(record) if record.current == Some(connection) => {
                record.current = None;
                true
            }
            _ => false,
        }
    }

    /// Records that no process holds the other end of a connection any more.
    pub(super) fn closed(&mut self, member: MemberId, connection: ConnectionId) {
        if let Some(record) = self.records.get_mut(&member) {
            record.held.remove(&connection);
            if record.held.is_empty() {
                record.hung_up = Some(Instant::now());
            }
        }
    }

    /// Records that the member's process has exited. Returns its pidfd, which is not needed any more.
    pub(super) fn exited(&mut self, member: MemberId) -> Option<OwnedFd> {
        let record = self.records.get_mut(&member)?;
        record.exited.get_or_insert_with(Instant::now);
        record.pidfd.take()
    }

    /// Sends SIGKILL to a member's process. Uses only the pidfd, because the pid may belong to another process by now.
    pub(super) fn kill(&mut self, member: MemberId) {
        let Some(record) = self.records.get_mut(&member) else { return };
        let outcome = match record.pidfd.as_ref().map(|pidfd| process::kill(pidfd, Signal::KILL)) {
            Some(Ok(())) => Kill::Sent,
            Some(Err(Errno::SRCH)) => Kill::Exited,
            Some(Err(errno)) => Kill::Refused(errno.raw_os_error()),
            None if record.exited.is_some() => Kill::Exited,
            None => Kill::NoPidfd,
        };
        tracing::warn!(%member, ?outcome, "killing an evicted member");
        record.killed = Some(outcome);
    }

    /// Records that the registry knows of the child. Returns false if it knew already.
    pub(super) fn note_child(&mut self, member: MemberId) -> bool {
        self.records.get_mut(&member).is_some_and(|record| !std::mem::replace(&mut record.held_by_child, true))
    }

    /// Forgets a member. Returns its pidfd and its connections.
    pub(super) fn remove(&mut self, member: MemberId) -> Option<(Option<OwnedFd>, Vec<ConnectionId>)> {
        let record = self.records.remove(&member)?;
        Some((record.pidfd, record.held.into_iter().collect()))
    }

    /// Returns the oldest former connection of a member, if it has more than [`MAX_LINGERING`] of them.
    pub(super) fn surplus(&self, member: MemberId) -> Option<ConnectionId> {
        let record = self.records.get(&member)?;
        let mut old = record.held.iter().filter(|held| record.current != Some(**held));
        old.next().copied().filter(|_| old.count() >= MAX_LINGERING)
    }

    pub(super) fn current(&self, member: MemberId) -> Option<ConnectionId> {
        self.records.get(&member)?.current
    }

    pub(super) fn token(&self, member: MemberId) -> Option<Token> {
        Some(self.records.get(&member)?.who.token)
    }

    pub(super) fn pidfd(&self, member: MemberId) -> Option<BorrowedFd<'_>> {
        self.records.get(&member)?.pidfd.as_ref().map(std::os::fd::AsFd::as_fd)
    }

    /// Returns what is proved about the end of a member.
    pub(super) fn proof(&self, member: MemberId, settle: Duration) -> Proof {
        let Some(record) = self.records.get(&member) else { return Proof::None };
        let settled = |since: Instant| since.elapsed() >= settle;
        match (record.exited, record.hung_up) {
            (Some(exited), Some(hung_up)) if settled(exited) && settled(hung_up) => Proof::Dead,
            (Some(exited), None) if settled(exited) => Proof::HeldByChild,
            (None, Some(hung_up)) if !record.who.provable && settled(hung_up) && record.has_had_time() => Proof::Dead,
            _ => Proof::None,
        }
    }

    /// Returns the result of the SIGKILL for a member, also for a repeated request. A former worker has not left it,
    /// and of a member that is proved dead nothing is left: both count as killed, unless the member never had a pidfd.
    pub(super) fn killed(&self, member: MemberId) -> Kill {
        let Some(record) = self.records.get(&member) else { return Kill::Sent };
        record.killed.unwrap_or(if record.who.provable { Kill::Sent } else { Kill::NoPidfd })
    }

    /// Returns whether the end of its last connection completes the proof: its process has exited, or has no pidfd.
    pub(super) fn ends_with_its_connections(&self, member: MemberId) -> bool {
        self.records.get(&member).is_some_and(|record| record.exited.is_some() || !record.who.provable)
    }
}

/// A client that has proved which process it is.
#[derive(Debug)]
pub(super) struct Identified {
    pub(super) pid: u32,
    pub(super) uid: u32,
    /// Absent if neither the client nor the broker can open one.
    pub(super) pidfd: Option<OwnedFd>,
}

/// Identifies the process at the other end of `call`. `sent` is the pidfd that it sent, if it could open one.
pub(super) fn identify(call: BorrowedFd<'_>, speaker: &Speaker, sent: Option<OwnedFd>) -> Result<Identified, Refusal> {
    let no_pidfd = |why: String| Refusal::NoPidfd { why };
    let peer = socket::peer(call)
        .map_err(|errno| no_pidfd(format!("the kernel does not report which process connected: {errno}")))?;
    match sent.as_ref().map(|sent| (process::pidfd_info(sent), peer.pid)) {
        Some((None, _)) if !process::has_proc() => {
            return Err(no_pidfd("/proc, which says whose a pidfd is, is not mounted where the broker runs".into()));
        }
        Some((None, _)) => return Err(no_pidfd("the received file descriptor is not a pidfd".into())),
        Some((Some(PidfdInfo::Gone), _)) => {
            return Err(no_pidfd("the received pidfd belongs to a process that has ended".into()));
        }
        Some((Some(PidfdInfo::Process(sent)), Some(connected))) if sent != connected => {
            return Err(no_pidfd(format!(
                "the received pidfd belongs to process {sent}, but process {connected} connected"
            )));
        }
        // A process of another PID namespace is not visible here. The pidfd that the kernel gives below is preferred.
        Some((Some(PidfdInfo::Process(_) | PidfdInfo::Elsewhere), _)) | None => {}
    }
    let pidfd = process::peer_pidfd(call).or(sent);
    Ok(Identified { pid: peer.pid.unwrap_or(speaker.pid), uid: peer.uid, pidfd })
}

/// Returns a member's text that is safe to show, such as its command line: shortened, and without control characters.
pub(super) fn presentable(text: &str) -> String {
    let mut text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let end = (0..=MAX_COMMAND.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    text.truncate(end.unwrap_or(0));
    text
}

impl MemberRecord {
    /// Returns whether a client is its process, as the same user.
    fn is(&self, client: &Identified) -> bool {
        (self.who.pid, self.who.uid) == (client.pid, client.uid)
    }

    /// Returns whether it could have resumed after a restart.
    fn has_had_time(&self) -> bool {
        self.restored.is_none_or(|since| since.elapsed() >= TO_RESUME)
    }
}

/// How long members have to resume after a restart: as long as the library tries.
pub(super) const TO_RESUME: Duration = Duration::from_secs(10);

/// Former connections of one member that are watched, because a child may hold them.
const MAX_LINGERING: usize = 4;

/// Fills `bytes` with random bytes.
pub(super) fn random(bytes: &mut [u8]) -> Result<(), Errno> {
    // A request for up to 256 bytes is never cut short, once the kernel has gathered entropy at boot (getrandom(2)).
    rustix::rand::getrandom(bytes, rustix::rand::GetRandomFlags::empty()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client() -> Identified {
        Identified { pid: std::process::id(), uid: 0, pidfd: Some(process::own_pidfd().unwrap()) }
    }

    fn join(members: &mut Membership, client: Identified, connection: ConnectionId) -> MemberId {
        let hello = ClientHello { command: "".into(), operator: false, simulated: false, resume: None, attempt: 5 };
        members.join(client, Token([7; 16]), connection, ProcessKey::Pid(1), &hello)
    }

    fn member() -> (Membership, MemberId, ConnectionId) {
        let mut members = Membership::default();
        let connection = ConnectionId(1);
        let member = join(&mut members, client(), connection);
        (members, member, connection)
    }

    #[test]
    fn death_needs_both_exit_and_hang_up() {
        let (mut members, member, connection) = member();
        assert_eq!(members.proof(member, Duration::ZERO), Proof::None);
        members.closed(member, connection);
        assert_eq!(members.proof(member, Duration::ZERO), Proof::None);

        let (mut members, member, connection) = self::member();
        members.exited(member);
        assert_eq!(members.proof(member, Duration::ZERO), Proof::HeldByChild);
        members.closed(member, connection);
        assert_eq!(members.proof(member, Duration::ZERO), Proof::Dead);
        assert_eq!(members.proof(member, Duration::from_secs(3600)), Proof::None);
    }

    #[test]
    fn without_pidfd_closed_connections_are_the_only_evidence() {
        let mut members = Membership::default();
        let connection = ConnectionId(1);
        let member = join(&mut members, Identified { pidfd: None, ..client() }, connection);
        assert_eq!(members.proof(member, Duration::ZERO), Proof::None);
        members.closed(member, connection);
        assert_eq!(members.proof(member, Duration::from_secs(3600)), Proof::None);
        assert!(members.ends_with_its_connections(member));
        assert_eq!(members.proof(member, Duration::ZERO), Proof::Dead);
        assert_eq!(members.resume(member, ConnectionId(2)), Some(connection));
        assert_eq!(members.proof(member, Duration::ZERO), Proof::None, "it has come back");
    }

    #[test]
    fn death_needs_the_end_of_every_connection() {
        let (mut members, member, first) = member();
        let second = ConnectionId(2);
        assert_eq!(members.resume(member, second), Some(first));
        members.exited(member);
        members.closed(member, second);
        assert_eq!(members.proof(member, Duration::ZERO), Proof::HeldByChild);
        members.closed(member, first);
        assert_eq!(members.proof(member, Duration::ZERO), Proof::Dead);
    }

    #[test]
    fn only_the_same_live_process_resumes() {
        let (mut members, member, _) = member();
        let right = Resume { instance: 5, member: MemberId(member.0), token: Token([7; 16]) };
        assert_eq!(members.resumable(&right, 5, &client()), Some(member));
        assert_eq!(members.resumable(&right, 6, &client()), None);
        assert_eq!(members.resumable(&Resume { token: Token([8; 16]), ..right.clone() }, 5, &client()), None);
        assert_eq!(members.resumable(&Resume { member: MemberId(9), ..right.clone() }, 5, &client()), None);
        assert_eq!(members.resumable(&right, 5, &Identified { pid: 1, ..client() }), None);
        members.exited(member);
        assert_eq!(members.resumable(&right, 5, &client()), None);
    }

    #[test]
    fn client_that_repeats_its_attempt_is_the_same_member() {
        let (mut members, member, _) = member();
        assert_eq!(members.joined_by(5, &client()), Some(member));
        assert_eq!(members.joined_by(6, &client()), None);
        assert_eq!(members.joined_by(5, &Identified { pid: 1, ..client() }), None, "a forked child");
        assert_eq!(members.joined_by(0, &client()), None);
        members.exited(member);
        assert_eq!(members.joined_by(5, &client()), None);
    }

    #[test]
    fn commands_are_shortened_and_escaped() {
        let shown = |command: &str| presentable(command);
        assert_eq!(shown("a\x1b[31mb\nc"), "a [31mb c");
        assert_eq!(shown(&"ä".repeat(MAX_COMMAND)), "ä".repeat(MAX_COMMAND / 2));
    }
}
