//! Groups of processes that hand over to each other, and how they share a GPU.

use std::{
    cell::{Cell, RefCell},
    sync::atomic::AtomicU32,
};

use partywall_measure::Sampler;

use super::{
    Setting, failed,
    memory::asked,
    peer::Order,
    turns::{sleep_until, store_and_wake},
};
use crate::{bench::board::Board, prelude::*};

/// How processes share a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// They use none.
    None,
    /// One context at a time runs on it.
    TimeSliced,
    /// They are clients of one MPS server.
    Mps,
}

impl Sharing {
    /// Returns the end of a sentence that says what is measured.
    pub(crate) fn suffix(self) -> &'static str {
        match self {
            Self::None => "",
            Self::TimeSliced => ", time-sliced",
            Self::Mps => ", under MPS",
        }
    }

    fn environment(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::TimeSliced => &[("CUDA_MPS_PIPE_DIRECTORY", device::NO_DAEMON)],
            Self::None | Self::Mps => &[],
        }
    }
}

/// Measures with a group of processes in each way of sharing a GPU that this run can have; the others are noted.
pub(crate) fn in_each_sharing(
    setting: &Setting<'_>,
    what: &str,
    members: usize,
    measure: impl Fn(&Group, Sharing) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let Some(gpu) = &setting.gpu else {
        return measure(&Group::start(setting, members, Sharing::None)?, Sharing::None);
    };
    // A GPU in exclusive mode admits only clients of an MPS server.
    match Group::start(setting, members, Sharing::TimeSliced) {
        Ok(group) => measure(&group, Sharing::TimeSliced)?,
        Err(failure) => setting.note(format!("time-sliced {what} are left out, refused: {}", failure.message)),
    }
    // A driver that cannot answer has no server.
    if device::under_mps(gpu).unwrap_or(false) {
        return measure(&Group::start(setting, members, Sharing::Mps)?, Sharing::Mps);
    }
    setting.note(format!("{what} under MPS are left out: this process is no client of an MPS server"));
    Ok(())
}

/// What the members of a group agree on: the prefix of names, and the number of members.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Meeting {
    pub(crate) name: String,
    pub(crate) members: usize,
    /// The number of this member. Member 0 sends first, and its clock counts.
    pub(crate) index: usize,
}

/// Processes that hand over to each other. Dropping this ends them.
pub(crate) struct Group {
    members: Vec<RefCell<Peer>>,
    meetings: Cell<usize>,
}

/// Turns of one sample.
pub(crate) const TURNS: u64 = 100;

impl Group {
    /// Starts processes. On a GPU each has a context, even if only their hosts hand over.
    pub(crate) fn start(setting: &Setting<'_>, members: usize, sharing: Sharing) -> Result<Self, Failure> {
        let mut members = (0..members)
            .map(|_| setting.peer_on(setting.place, sharing.environment()))
            .collect::<Result<Vec<_>, _>>()?;
        for peer in &members {
            peer.say(Order::UseGpu)?;
        }
        for peer in &mut members {
            if peer.hear::<bool>()? != (sharing == Sharing::Mps) {
                return Err(unexpected(format!("a process does not share the GPU as it should{}", sharing.suffix())));
            }
        }
        Ok(Self { members: members.into_iter().map(RefCell::new).collect(), meetings: Cell::new(0) })
    }

    /// Makes the first members prepare their hand-offs. `files` has the files of each member.
    pub(crate) fn meet<const N: usize>(
        &self,
        files: Vec<[OwnedFd; N]>,
        order: impl Fn(Meeting) -> Order,
    ) -> Result<Meeting, Failure> {
        self.meetings.set(self.meetings.get() + 1);
        let name = format!("hand-off/{}/{}", self.members[0].borrow().pid, self.meetings.get());
        let meeting = Meeting { name, members: files.len(), index: 0 };
        // Each member opens what others create, so all get their orders before the first answer is awaited.
        for (index, files) in files.iter().enumerate() {
            let order = order(Meeting { index, ..meeting.clone() });
            self.members[index].borrow().say_with(order, &files.each_ref().map(AsFd::as_fd))?;
        }
        for member in &self.members[..files.len()] {
            member.borrow_mut().hear::<()>()?;
        }
        Ok(meeting)
    }

    /// Returns a sampler of the microseconds of a turn, there and back, by the clock of member 0.
    pub(crate) fn sampler<'a>(&'a self, meeting: &'a Meeting) -> Sampler<'a> {
        let members = &self.members[..meeting.members];
        Box::new(move || {
            // The others wait already when the clock of the first one starts.
            for member in members.iter().rev() {
                asked(member.borrow().say(Order::HandOff { name: meeting.name.clone(), turns: TURNS }))?;
            }
            let mut times = members.iter().map(|member| asked(member.borrow_mut().hear::<Duration>()));
            let time = times.next().ok_or("the group has no members")??;
            times.try_for_each(|time| time.map(drop))?;
            Ok(time.as_secs_f64() * 1e6 / TURNS as f64)
        })
    }
}

/// Shared words, one for each member of a group: the floor of a hand-off.
pub(crate) struct Words(Board);

impl Words {
    /// Returns `count` descriptors of one new file of words.
    pub(crate) fn files(count: usize) -> Result<Vec<OwnedFd>, Failure> {
        let (_, file) = Board::create().map_err(failed)?;
        (0..count).map(|_| file.try_clone().doing(MAKING)).collect()
    }

    pub(crate) fn map(file: &OwnedFd) -> Result<Self, Failure> {
        Ok(Self(Board::open(file).map_err(failed)?))
    }

    /// Returns the word of a member, which has two cache lines to itself.
    pub(crate) fn of(&self, member: usize) -> &AtomicU32 {
        self.0.futex(2 * member)
    }

    /// Writes the word of a member and wakes all that wait for it.
    pub(crate) fn write(&self, member: usize, value: u64) {
        store_and_wake(self.of(member), value as u32, u32::MAX);
    }

    /// Waits until a member has written a value. Returns the present value, which is another one after the timeout.
    pub(crate) fn wait(&self, member: usize, value: u64) -> u64 {
        sleep_until(self.of(member), value as u32).into()
    }
}

/// For errors.
pub(crate) const MAKING: &str = "making what processes hand over by";
