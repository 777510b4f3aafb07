//! In-flight descriptors, which clients have not read yet: counted for each process and for all together.
//!
//! The kernel counts descriptors in flight per user, not per socket, and refuses to send more (`ETOOMANYREFS`, unix(7))
//! once they exceed the sender's limit of open files. Without a bound here, one process that does not read would keep
//! every other process of its user from connecting. The kernel gives a descriptor back when the receiver reads it or
//! closes its end; closing our end does not. A socket with unread descriptors is therefore kept here even after its
//! connection is gone.
//!
//! For the kernel all descriptors that the broker sends are in flight for the broker's user. Processes of other users
//! may therefore leave only a part of them unread, each user a smaller one.
//!
//! A message reserves a slot for each descriptor that it sends at once, at most [`FDS_AT_ONCE`]. *Carriers*, frame
//! heads without a body, carry the first groups of a longer message, and the message itself carries the last. The next
//! group goes out once the peer has read everything (`SIOCOUTQ`). The message keeps its slots until its last group has
//! been read, so a message that has begun never waits for other processes.
//!
//! An edge-triggered `EPOLLOUT` announces that the peer has read. On Linux 6.18 an event followed 20,000 of 20,000
//! reads; the peer's close sets the count of `SIOCOUTQ` to zero, and our own does not (measured 2026-11-22).

use std::{
    collections::{BTreeMap, HashMap},
    os::fd::BorrowedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use partywall_os::{
    process,
    socket::{self, Peer},
};
use partywall_wire::{Refusal, limits::FDS_AT_ONCE};
use serde::{Deserialize, Serialize};

use crate::{
    bind::own_user,
    server::{
        connection::{Channel, ConnectionId},
        reclaimer::ClientSocket,
    },
};

/// Unread descriptors, by the sockets that carry them.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    held: BTreeMap<Port, UnreadMessage>,
    by_process: HashMap<ProcessKey, usize>,
    /// Of each user other than the broker's.
    by_guest: HashMap<u32, usize>,
    total: usize,
}

/// One direction to a client.
pub(super) type Port = (ConnectionId, Channel);

/// A process, as far as the kernel lets the broker distinguish processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Process {
    pub(super) key: ProcessKey,
    /// Its pid, if known, for messages to people.
    pub(super) pid: Option<u32>,
    /// Its user.
    pub(super) uid: u32,
    /// Whether that is another user than the broker's.
    pub(super) is_guest: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum ProcessKey {
    Pid(u32),
    /// The inode of its pidfds, for a process without a pid in our PID namespace. The pid that it reports itself does
    /// not help: in its container it may be pid 1, as in many others.
    Pidfd(u64),
    /// The kernel reports neither. Each connection then counts as a process.
    Unknown(ConnectionId),
}

impl Process {
    /// Identifies the process that connected.
    pub(super) fn of(call: BorrowedFd<'_>, peer: Peer, id: ConnectionId) -> Self {
        let key = match peer.pid {
            Some(pid) => ProcessKey::Pid(pid),
            None => process::peer_pidfd(call)
                .and_then(process::pidfd_inode)
                .map_or(ProcessKey::Unknown(id), ProcessKey::Pidfd),
        };
        Self::new(key, peer.pid, peer.uid)
    }

    pub(super) fn new(key: ProcessKey, pid: Option<u32>, uid: u32) -> Self {
        Self { key, pid, uid, is_guest: uid != own_user() }
    }
}

#[derive(Debug)]
struct UnreadMessage {
    socket: Arc<ClientSocket>,
    process: Process,
    slots: usize,
    /// Whether the message has groups of descriptors that are not sent yet.
    unfinished: bool,
    /// When the client had last read everything.
    since: Instant,
}

/// Whether a message with descriptors may be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Room {
    Free,
    /// No: the process has not read earlier descriptors for too long.
    Refused(Refusal),
    /// Not yet: a process has to read earlier descriptors first, and may be about to.
    Later(Refusal),
}

impl InFlight {
    /// Returns whether a process may get a message with descriptors.
    pub(super) fn room(&mut self, process: Process, operator: bool) -> Room {
        let full = |all: &Self| {
            let own = all.by_process.get(&process.key).copied().unwrap_or(0) + FDS_AT_ONCE > MAX_OF_PROCESS;
            let allowed = if operator { MAX_TOTAL } else { MAX_TOTAL - KEPT_FOR_OPERATORS };
            (own, all.total + FDS_AT_ONCE > allowed || !all.has_room_for_guest(process, FDS_AT_ONCE))
        };
        if full(self) != (false, false) {
            self.settle();
        }
        let refusal = |unread: usize, allowed: usize, pids| Refusal::Unread {
            unread: unread as u64,
            allowed: allowed as u64,
            pids,
        };
        match full(self) {
            (false, false) => Room::Free,
            (true, _) => {
                let unread = self.by_process.get(&process.key).copied().unwrap_or(0);
                let own = refusal(unread, MAX_OF_PROCESS, Vec::new());
                let mut held = self.held.values().filter(|held| held.process.key == process.key);
                // Several threads with a connection each may send requests faster than they read.
                if held.any(|held| held.since.elapsed() >= GRACE) { Room::Refused(own) } else { Room::Later(own) }
            }
            (false, true) => {
                let total = if self.has_room_for_guest(process, FDS_AT_ONCE) { MAX_TOTAL } else { MAX_OF_GUEST };
                let is_rival = |held: &UnreadMessage| total == MAX_TOTAL || held.process.is_guest;
                let slots = self.held.values().filter(|held| is_rival(held)).map(|held| held.slots).sum();
                Room::Later(refusal(slots, total, self.slowest(is_rival)))
            }
        }
    }

    /// Reserves `slots` for a message on `port`. Returns false if its process, or all together, have too many.
    pub(super) fn reserve(&mut self, port: Port, socket: &Arc<ClientSocket>, process: Process, slots: usize) -> bool {
        let full = |all: &Self| {
            all.total + slots > MAX_TOTAL
                || !all.has_room_for_guest(process, slots)
                || all.by_process.get(&process.key).copied().unwrap_or(0) + slots > MAX_OF_PROCESS
        };
        if full(self) {
            self.settle();
        }
        if full(self) {
            return false;
        }
        self.release(port);
        let held =
            UnreadMessage { socket: Arc::clone(socket), process, slots, unfinished: true, since: Instant::now() };
        self.held.insert(port, held);
        *self.by_process.entry(process.key).or_default() += slots;
        if process.is_guest {
            *self.by_guest.entry(process.uid).or_default() += slots;
        }
        self.total += slots;
        true
    }

    /// Returns whether a process may have more slots, as far as its user is concerned.
    fn has_room_for_guest(&self, process: Process, slots: usize) -> bool {
        let own = self.by_guest.get(&process.uid).copied().unwrap_or(0);
        let all: usize = self.by_guest.values().sum();
        !process.is_guest || own + slots <= MAX_OF_GUEST && all + slots <= MAX_OF_GUESTS
    }

    /// Records that all descriptors of the port's message have been sent. Its slots become free once these are read.
    pub(super) fn finish(&mut self, port: Port) {
        if let Some(held) = self.held.get_mut(&port) {
            held.unfinished = false;
        }
    }

    /// Records that the client has read everything that was sent of the port's message so far.
    pub(super) fn renew(&mut self, port: Port) {
        if let Some(held) = self.held.get_mut(&port) {
            held.since = Instant::now();
        }
    }

    /// Frees the slots of messages that have been read, and closes sockets that were kept only for them.
    pub(super) fn settle(&mut self) {
        let read: Vec<_> = self
            .held
            .iter()
            .filter(|(_, held)| !held.unfinished && socket::is_drained(&held.socket))
            .map(|(port, _)| *port)
            .collect();
        read.into_iter().for_each(|port| self.release(port));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    fn release(&mut self, port: Port) {
        let Some(held) = self.held.remove(&port) else { return };
        self.total -= held.slots;
        if let Some(slots) = self.by_process.get_mut(&held.process.key) {
            *slots -= held.slots;
        }
        if let Some(slots) = self.by_guest.get_mut(&held.process.uid) {
            *slots -= held.slots;
        }
        self.by_process.retain(|_, slots| *slots > 0);
        self.by_guest.retain(|_, slots| *slots > 0);
    }

    /// Returns the pids of processes that have not read for the longest time, of those that are meant.
    fn slowest(&self, is_meant: impl Fn(&UnreadMessage) -> bool) -> Vec<u32> {
        let meant = self.held.values().filter(|held| is_meant(held));
        let mut held: Vec<_> = meant.filter_map(|held| Some((held.since, held.process.pid?))).collect();
        held.sort_unstable();
        let mut pids = Vec::new();
        for (_, pid) in held {
            if !pids.contains(&pid) {
                pids.push(pid);
            }
            if pids.len() == SLOWEST {
                break;
            }
        }
        pids
    }
}

/// Maximum number of unread descriptors of one process.
const MAX_OF_PROCESS: usize = 64;

/// A process that leaves descriptors unread for this long counts as one that does not read. On a busy machine a thread
/// may wait for a processor for tens of milliseconds, and the requests of its process are not refused for that. Without
/// this grace, threads of one process that all read were refused 19 of 40 opens; with 50 ms it was one in 40, on a
/// machine with six times as many busy threads as processors.
const GRACE: Duration = Duration::from_millis(500);

/// Maximum number of unread descriptors of all processes. The kernel limits what a client may send by the client's soft
/// limit of open files; this is half of the usual one.
const MAX_TOTAL: usize = 512;

/// Maximum number of unread descriptors of one user other than the broker's, and of all such users.
const MAX_OF_GUEST: usize = MAX_TOTAL / 4;
const MAX_OF_GUESTS: usize = MAX_TOTAL / 2;

/// The part of [`MAX_TOTAL`] that only operators may use. Without it, no one could find out which process does not
/// read.
const KEPT_FOR_OPERATORS: usize = 2 * FDS_AT_ONCE;

/// Maximum number of processes that a refusal names.
const SLOWEST: usize = 4;

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use partywall_os::memfd;

    use super::*;
    use crate::server::{
        connection::{Connection, Sent},
        reclaimer::Reclaimer,
    };

    fn process(pid: u32) -> Process {
        Process::new(ProcessKey::Pid(pid), Some(pid), own_user())
    }

    fn guest(pid: u32, user: u32) -> Process {
        Process::new(ProcessKey::Pid(pid), Some(pid), own_user() + user)
    }

    fn port(id: u64) -> Port {
        (ConnectionId(id), Channel::Call)
    }

    fn pair() -> (Arc<ClientSocket>, OwnedFd) {
        let (ours, theirs) = socket::pair().unwrap();
        socket::send(&ours, b"unread", &[]).unwrap();
        (Arc::new(Reclaimer::start().unwrap().keep_socket(ours)), theirs)
    }

    #[test]
    fn per_process_bound_applies_before_the_common_one() {
        let mut in_flight = InFlight::default();
        let mut theirs = Vec::new();
        let mut last = 0;
        for pid in 1..=8 {
            for _ in 0..MAX_OF_PROCESS / FDS_AT_ONCE {
                let (ours, their) = pair();
                theirs.push(their);
                last += 1;
                assert!(in_flight.reserve(port(last), &ours, process(pid), FDS_AT_ONCE));
                in_flight.finish(port(last));
            }
            let own = Refusal::Unread { unread: 64, allowed: 64, pids: Vec::new() };
            assert_eq!(in_flight.room(process(pid), false), Room::Later(own.clone()), "it may be about to read");
            std::thread::sleep(GRACE);
            assert_eq!(in_flight.room(process(pid), false), Room::Refused(own));
        }
        let common = Refusal::Unread { unread: 512, allowed: 512, pids: vec![1, 2, 3, 4] };
        assert_eq!(in_flight.room(process(9), false), Room::Later(common.clone()));
        assert_eq!(in_flight.room(process(9), true), Room::Later(common));
        // Two sockets' worth is kept for operators that look for the process that does not read.
        theirs.drain(..2);
        assert!(matches!(in_flight.room(process(9), false), Room::Later(_)));
        assert_eq!(in_flight.room(process(9), true), Room::Free);
        theirs.drain(..1);
        assert_eq!(in_flight.room(process(9), false), Room::Free);
        theirs.clear();
        in_flight.settle();
        assert!(in_flight.is_empty());
        assert_eq!((in_flight.total, in_flight.by_process.len()), (0, 0));
    }

    // Holds 151.
    #[test]
    fn other_users_leave_room_for_the_brokers_own() {
        let mut in_flight = InFlight::default();
        let mut theirs = Vec::new();
        let mut last = 0;
        let mut fill = |in_flight: &mut InFlight, process: Process| {
            let (ours, their) = pair();
            theirs.push(their);
            last += 1;
            let taken = in_flight.reserve(port(last), &ours, process, FDS_AT_ONCE);
            in_flight.finish(port(last));
            taken
        };
        // Each process takes its share, until its user has its share, until all these users have theirs.
        for user in 1..=2 {
            for pid in 0..2 {
                for _ in 0..MAX_OF_PROCESS / FDS_AT_ONCE {
                    assert!(fill(&mut in_flight, guest(10 * user + pid, user)));
                }
            }
            assert!(!fill(&mut in_flight, guest(10 * user + 2, user)), "another process of the same user");
        }
        assert!(!fill(&mut in_flight, guest(30, 3)), "another user");
        let refusal = Refusal::Unread { unread: 256, allowed: 128, pids: vec![10, 11, 20, 21] };
        assert_eq!(in_flight.room(guest(30, 3), false), Room::Later(refusal));
        for pid in 1..=3 {
            for _ in 0..MAX_OF_PROCESS / FDS_AT_ONCE {
                assert_eq!(in_flight.room(process(pid), false), Room::Free);
                assert!(fill(&mut in_flight, process(pid)));
            }
        }
        drop(theirs);
        in_flight.settle();
        assert!(in_flight.by_guest.is_empty() && in_flight.is_empty());
    }

    // Holds 123.
    #[test]
    fn client_that_reads_group_after_group_counts_as_one_that_reads() {
        let reclaimer = Reclaimer::start().unwrap();
        let fd = || Arc::new(reclaimer.keep(memfd::frozen("partywall:test", b"x").unwrap()));
        let (ours, theirs) = socket::pair().unwrap();
        let mut connection = Connection::new(ConnectionId(1), reclaimer.keep_socket(ours), process(1));
        let mut in_flight = InFlight::default();
        let fds = (0..2 * FDS_AT_ONCE).map(|_| fd()).collect();
        assert_eq!(connection.send(Channel::Call, vec![0; 8], fds, &mut in_flight).unwrap(), Sent::Unread);
        let begun = in_flight.held[&port(1)].since;
        socket::recv(&theirs, &mut [0; 64], &mut Default::default()).unwrap();
        assert_eq!(connection.flush(Channel::Call, &mut in_flight).unwrap(), Sent::All);
        assert!(in_flight.held[&port(1)].since > begun);
    }

    #[test]
    fn message_keeps_its_slots_between_groups() {
        let mut in_flight = InFlight::default();
        let (ours, theirs) = pair();
        assert!(in_flight.reserve(port(1), &ours, process(1), FDS_AT_ONCE));
        drop(theirs);
        in_flight.settle();
        assert!(!in_flight.is_empty());
        in_flight.finish(port(1));
        in_flight.settle();
        assert!(in_flight.is_empty());
    }
}
