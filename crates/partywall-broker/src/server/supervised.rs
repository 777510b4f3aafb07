//! What a supervised broker records, so that the next process can continue.
//!
//! The registry's state follows from its events, so the events are recorded, with the numbers of the file descriptors
//! that came with them. What the server knows beyond the registry has records of its own.
//!
//! | order | step | killed before the next step |
//! |---|---|---|
//! | 1 | a request's control memory is created | it belongs to nothing, and is closed at the restart |
//! | 2 | the registry decides; fresh cells of timelines are started | the member repeats the request, and the cells are started again: no process has them |
//! | 3 | the event is recorded | the remaining effects are carried out at the restart |
//! | 4 | the other effects, such as ends of timelines, closes, the reply | as above; each may happen twice |
//!
//! A cell is started before the record because a second start would set its timeline back. A decision that panics is
//! not recorded, so no restart repeats it.
//!
//! A request that takes something is refused if no memory can be allocated for its record. Memory is kept for the
//! records of everything that members may give back. If even that is used up, the journal lacks an event, and a death
//! of the worker would end the domain until a snapshot has been written.

use std::{
    collections::{BTreeMap, VecDeque},
    os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd},
    sync::Arc,
    time::{Duration, Instant},
};

use partywall_os::{Errno, process, supervision::WaitedSignals};
use partywall_wire::Refusal;
use rustix::process::{Pid, Signal, getppid};
use serde::{Deserialize, Serialize};

use crate::{
    journal::Journal,
    page::Page,
    registry::{
        Event, FdId, MemberId, Registry, RequestId,
        types::{CellAt, Millis},
    },
    replacement::Format,
    server::{control::Clearing, membership::MemberFiles},
};

/// The connection of a worker to its supervisor.
#[derive(Debug)]
pub(crate) struct Supervised {
    pub(crate) journal: Journal,
    pub(crate) page: Page,
    /// Readable when the supervisor wants a sign of life.
    poke: Arc<OwnedFd>,
    supervisor: u32,
    /// Signals that are only noted. This process blocks them, too.
    stray: WaitedSignals,
    /// What the log says about the socket's file, if that is missing.
    says_lost: Option<String>,
    /// A request that was being handled at two deaths: it is not handled again.
    pub(super) fatal: Option<(MemberId, RequestId)>,
    /// Set while an event is missing in the journal, from which a restart would continue with a wrong state: when to
    /// begin the journal anew.
    behind: Option<Instant>,
}

/// An entry of the journal. Events and registries are written by reference.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Record<E> {
    Event {
        at: Millis,
        /// Whether all effects of earlier events had been carried out.
        begins: bool,
        /// New descriptors: the registry's number and the kernel's.
        fds: Vec<(FdId, RawFd)>,
        event: E,
    },
    /// The rows of a user's members were created.
    Rows { uid: u32, number: RawFd },
    /// A client became a member. The event follows.
    Joined(MemberFiles),
    /// A member continues on another connection.
    Connected { member: MemberId, call: RawFd },
    /// A connection of a member is about to be closed.
    Disconnected { member: MemberId, call: RawFd },
    /// A member's process has exited, and its pidfd is about to be closed.
    Exited { member: MemberId },
    /// The first pending step for a departed member is done. It was a detachment.
    Detached,
    /// A store to a cell after its end is about to be undone.
    Undone { at: CellAt, value: u64 },
}

/// Everything that a worker knows. Raise [`STATE_VERSION`](crate::replacement::STATE_VERSION) whenever the encoding
/// changes.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct State<R> {
    pub(super) format: Format,
    pub(super) started_at: Millis,
    pub(super) registry: R,
    /// The memory of the members' rows, by user.
    pub(super) rows: BTreeMap<u32, RawFd>,
    pub(super) fds: BTreeMap<FdId, RawFd>,
    pub(super) last_fd: u64,
    pub(super) members: BTreeMap<MemberId, MemberFiles>,
    pub(super) last_member: u64,
    pub(super) clearing: VecDeque<Clearing>,
    pub(super) undone: BTreeMap<CellAt, u64>,
    pub(super) fatal: Option<(MemberId, RequestId)>,
}

impl State<Registry> {
    /// Decodes a state, unless it has another format.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, String> {
        Format::check(bytes)?;
        postcard::from_bytes(bytes).map_err(|error| format!("the state is unreadable: {error}"))
    }
}

/// Checks that a state is one of this program: encoding it again leads to the same bytes.
pub(crate) fn check_state(bytes: &[u8]) -> Result<(), String> {
    let state = State::decode(bytes)?;
    if encode(&state).is_ok_and(|again| again == bytes) {
        Ok(())
    } else {
        Err("this release would read another state than was written".into())
    }
}

/// Encodes a state.
pub(super) fn encode(state: &impl Serialize) -> Result<Vec<u8>, postcard::Error> {
    postcard::to_extend(state, Vec::new())
}

impl Supervised {
    pub(crate) fn new(journal: Journal, page: Page, poke: Arc<OwnedFd>, supervisor: u32, stray: WaitedSignals) -> Self {
        Self { journal, page, poke, supervisor, stray, says_lost: None, fatal: None, behind: None }
    }

    /// Notes the signals that have come to this process or to the supervisor.
    fn note_signals(&self) {
        while let Ok(Some(signal)) = self.stray.wait(Duration::ZERO) {
            let name = Signal::from_named_raw(signal);
            // A moved log is opened anew by each line.
            if name == Some(Signal::HUP) {
                tracing::info!("SIGHUP: the log goes on in this file");
            } else {
                tracing::warn!(signal, ?name, "ignored a signal; SIGTERM ends the broker");
            }
        }
    }

    pub(super) fn poke(&self) -> BorrowedFd<'_> {
        self.poke.as_fd()
    }

    /// Returns the supervisor's pid, unless it has died.
    pub(super) fn supervisor(&self) -> Option<u32> {
        let parent = u32::try_from(Pid::as_raw(getppid())).ok();
        parent.filter(|parent| *parent == self.supervisor)
    }

    /// Returns a pidfd of the supervisor, unless that has died.
    pub(super) fn supervisor_pidfd(&self) -> Option<OwnedFd> {
        let pidfd = process::pidfd(self.supervisor()?).ok()?;
        // A process whose parent is still the supervisor has opened the supervisor's.
        self.supervisor().map(|_| pidfd)
    }

    /// Looks after what other processes may have changed, because the supervisor has asked for a sign of life. `is_new`
    /// says that the socket was bound again, `lost` why no process can connect.
    pub(super) fn on_poke(&mut self, is_new: bool, lost: Option<String>) {
        self.note_signals();
        if is_new {
            tracing::warn!("the socket's file was removed or replaced; the socket is bound again");
        } else if let Some(why) = lost.as_ref().filter(|why| self.says_lost.as_ref() != Some(why)) {
            tracing::warn!(
                why,
                "the socket's file was removed or replaced; no process can connect until the supervisor binds it again"
            );
        }
        self.says_lost = lost.filter(|_| !is_new);
    }

    /// Prepares the record of an event, with the descriptors that came with it. Returns whether it can be committed.
    pub(super) fn prepare(&mut self, record: &Record<&Event>) -> bool {
        if self.is_behind() {
            return false;
        }
        self.journal.prepare(record).map_err(|errno| self.fall_behind(errno)).is_ok()
    }

    /// Records what was prepared.
    pub(super) fn commit(&mut self) {
        if let Err(errno) = self.journal.commit() {
            self.fall_behind(errno);
        }
    }

    /// Records something that the registry does not know.
    pub(super) fn record(&mut self, record: &Record<()>) {
        if !self.is_behind()
            && let Err(errno) = self.journal.append(record)
        {
            self.fall_behind(errno);
        }
    }

    /// Prepares for a request. Refuses it if it was fatal twice.
    pub(super) fn begin_request(&self, member: MemberId, request: RequestId) -> Result<(), Refusal> {
        if self.fatal == Some((member, request)) {
            let why = "the broker has died twice while it handled this request, and does not try a third time";
            return Err(Refusal::Invalid { why: why.into() });
        }
        self.page.begin_request(member.0, request.0);
        Ok(())
    }

    /// Makes room in the journal for `bytes` that a client asks for, beside what is kept for all that members may give
    /// back.
    pub(super) fn make_room(&mut self, bytes: u64, registry: &Registry) -> Result<(), Refusal> {
        if self.is_behind() {
            return Ok(());
        }
        self.journal.keep(to_give_back(registry));
        self.journal.reserve(bytes).map_err(|errno| Refusal::System {
            what: "making room in the broker's journal".into(),
            errno: errno.raw_os_error(),
        })
    }

    /// Returns whether the journal is to begin anew: its records take much memory, or one is missing.
    pub(super) fn wants_snapshot(&self) -> bool {
        match self.behind {
            Some(retry_at) => Instant::now() >= retry_at,
            None => self.journal.is_long(),
        }
    }

    /// Begins the journal anew with a state. Returns whether it consists of that alone.
    pub(super) fn begin_journal(&mut self, state: &State<&Registry>) -> bool {
        let written = self.journal.begin(state);
        match written {
            Ok(()) => self.catch_up(),
            Err(errno) if self.is_behind() || self.journal.is_empty() => self.fall_behind(errno),
            Err(errno) => tracing::warn!(%errno, "no snapshot was written; the journal goes on"),
        }
        written.is_ok()
    }

    /// Returns whether another program could continue.
    pub(super) fn can_be_replaced(&self) -> bool {
        self.supervisor().is_some() && !self.is_behind()
    }

    fn is_behind(&self) -> bool {
        self.behind.is_some()
    }

    /// Stops recording until the journal can begin anew: until then the supervisor must not start another worker.
    fn fall_behind(&mut self, errno: Errno) {
        if self.behind.replace(Instant::now() + RETRY).is_none() {
            tracing::error!(%errno, "the journal cannot be written: names are lost if this process dies");
            self.page.set_unrecorded(true);
        }
    }

    /// Records again, because the journal has begun anew.
    fn catch_up(&mut self) {
        if self.behind.take().is_some() {
            tracing::info!("the journal can be written again");
            self.page.set_unrecorded(false);
        }
    }
}

/// Returns the bytes of the records of everything that members may give back.
pub(super) fn to_give_back(registry: &Registry) -> u64 {
    let (leases, members) = registry.given_out();
    leases * OF_LEASE + members * OF_MEMBER
}

/// Bytes of the records of a lease or claim that is given back: the request, the close of its memory, the end of its
/// cell.
const OF_LEASE: u64 = 128;

/// Bytes of the records of a member that leaves or dies: its connections, its process, its detachments, its row.
const OF_MEMBER: u64 = 512;

/// How long to wait before the journal is begun anew that could not be written.
const RETRY: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use partywall_wire::{ClientHello, TimelineEnding, Token};

    use super::*;
    use crate::{
        registry,
        replacement::STATE_VERSION,
        server::{
            connection::ConnectionId,
            in_flight::ProcessKey,
            membership::{Identified, Membership},
        },
    };

    fn sample() -> State<Registry> {
        let mut members = Membership::default();
        let hello = ClientHello { command: "".into(), operator: false, simulated: false, resume: None, attempt: 5 };
        let client = Identified { pid: 7, uid: 0, pidfd: None };
        let member = members.join(client, Token([7; 16]), ConnectionId(1), ProcessKey::Pid(7), &hello);
        let files = members.files(member, |_| Some(20)).unwrap();
        let detach = Clearing::Detach { object: FdId(3), row: 2, ending: TimelineEnding::Closed };
        let row = Clearing::Row { row: 2, tables: vec![FdId(3)] };
        State {
            format: Format::OURS,
            started_at: 2,
            registry: registry::sample().0,
            rows: BTreeMap::from([(0, 10)]),
            fds: BTreeMap::from([(FdId(1), 11)]),
            last_fd: 3,
            members: BTreeMap::from([(member, files)]),
            last_member: 1,
            clearing: VecDeque::from([detach, row]),
            undone: BTreeMap::from([(CellAt { slab: FdId(1), index: 4 }, 9)]),
            fatal: Some((member, RequestId(8))),
        }
    }

    // Holds 367.
    #[test]
    fn state_has_the_form_of_its_version() {
        let state = encode(&sample()).unwrap();
        assert_eq!(check_state(&state), Ok(()));
        // Layouts have a number of their own.
        let form = state.strip_prefix(&encode(&Format::OURS).unwrap()[..]).unwrap();
        let found = (STATE_VERSION, crc32fast::hash(form), crc32fast::hash(&registry::sample().1));
        assert_eq!(
            found,
            (14, 3_752_384_859, 2_034_673_898),
            "the state or the records have another form: raise STATE_VERSION, and note the new numbers here"
        );
    }

    // Holds 367.
    #[test]
    fn journal_of_an_unknown_format_is_not_replayed() {
        let mut journal = Journal::create().unwrap();
        journal.begin(&State { format: Format::unknown(), ..sample() }).unwrap();
        let contents = journal.read().unwrap().unwrap();
        let refused = State::decode(contents.snapshot()).unwrap_err();
        let (theirs, ours) = (STATE_VERSION + 1, STATE_VERSION);
        assert_eq!(refused, format!("the state has format {theirs}, and this release reads format {ours}"));
        journal.begin(&sample()).unwrap();
        let contents = journal.read().unwrap().unwrap();
        assert!(State::decode(contents.snapshot()).is_ok());
    }

    #[test]
    fn state_that_is_cut_off_or_longer_is_refused() {
        let mut state = encode(&sample()).unwrap();
        for end in 0..state.len() {
            assert!(check_state(&state[..end]).is_err(), "{end}");
        }
        state.push(0);
        assert!(check_state(&state).is_err());
    }
}
