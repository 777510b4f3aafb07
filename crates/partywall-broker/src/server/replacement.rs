//! The check of a program that is to continue, by a child process. Nothing waits for the child.
//!
//! [`crate::replacement`] lists the steps of handing over, and what a kill between any two of them leaves.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    process::Child,
    time::{Duration, Instant},
};

use partywall_os::{Errno, memfd, supervision::start_program};
use partywall_shm::crash::point;
use rustix::{
    event::epoll::EventFlags,
    io::{read, retry_on_intr},
    pipe::{PipeFlags, pipe_with},
};

use crate::{
    registry::{MemberId, RequestId},
    replacement::{ProgramAnswer, Purpose, VARIABLE},
    server::{
        reactor::{EventSource, Reactor},
        reclaimer::Donated,
        timers::Timer,
    },
};

/// A request that another program continues.
#[derive(Debug)]
pub(super) struct Replacement {
    pub(super) member: MemberId,
    pub(super) request: RequestId,
    /// The file of the program.
    pub(super) program: Donated,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// A child checks whether the program can continue.
    Checking(ProgramCheck),
    /// It can. This is its release.
    Accepted(String),
}

/// A child that checks whether its program can continue.
#[derive(Debug)]
struct ProgramCheck {
    child: Child,
    /// The pipe through which it answers.
    answer: OwnedFd,
    said: Vec<u8>,
    until: Instant,
}

impl Replacement {
    /// Starts the check of a program, which gets the state.
    pub(super) fn start(
        reactor: &mut Reactor,
        member: MemberId,
        request: RequestId,
        program: Donated,
        state: Option<Vec<u8>>,
    ) -> io::Result<Self> {
        let fd = program.fd().ok_or(Errno::BADF)?;
        let state = memfd::frozen("partywall:state", &state.ok_or(Errno::INVAL)?)?;
        let (answer, theirs) = pipe_with(PipeFlags::CLOEXEC)?;
        rustix::io::ioctl_fionbio(&answer, true)?;
        reactor.watch(&answer, EventSource::Answer, EventFlags::IN)?;
        point("broker: check prepared, not started");
        let child = start_program(fd, &[state.as_fd(), theirs.as_fd()], VARIABLE, Purpose::check)?;
        point("broker: check started, not answered");
        let check = ProgramCheck { child, answer, said: Vec::new(), until: Instant::now() + MAX_CHECK };
        reactor.set_timer(MAX_CHECK, Timer::Answer);
        Ok(Self { member, request, program, stage: Stage::Checking(check) })
    }

    /// Returns the release of the program, if it can continue.
    pub(super) fn accepted(&self) -> Option<&str> {
        match &self.stage {
            Stage::Checking(_) => None,
            Stage::Accepted(release) => Some(release),
        }
    }

    /// Reads what the child has said so far.
    ///
    /// # Errors
    /// Why the program cannot continue.
    pub(super) fn on_answer(&mut self, reactor: &Reactor) -> Result<(), String> {
        let Stage::Checking(check) = &mut self.stage else { return Ok(()) };
        let mut bytes = [0; 1024];
        match retry_on_intr(|| read(&check.answer, &mut bytes)) {
            Ok(0) => self.end(reactor, None),
            Ok(count) => {
                check.said.extend_from_slice(&bytes[..count]);
                if check.said.len() <= MAX_ANSWER {
                    return Ok(());
                }
                self.end(reactor, Some("it writes without end".into()))
            }
            Err(Errno::AGAIN) => Ok(()),
            Err(errno) => self.end(reactor, Some(errno.to_string())),
        }
    }

    /// Ends a check that has taken too long.
    ///
    /// # Errors
    /// That it has.
    pub(super) fn end_if_late(&mut self, reactor: &Reactor) -> Result<(), String> {
        match &self.stage {
            Stage::Checking(check) if check.until <= Instant::now() => {
                self.end(reactor, Some(format!("it did not answer within {} s", MAX_CHECK.as_secs())))
            }
            _ => Ok(()),
        }
    }

    /// Ends the child, and decides by its answer. `failed` says why it has none.
    fn end(&mut self, reactor: &Reactor, failed: Option<String>) -> Result<(), String> {
        let Stage::Checking(check) = &mut self.stage else { return Ok(()) };
        reactor.unwatch(&check.answer);
        // It has closed the pipe, so it is about to end; or else it is killed. In both cases the wait is short.
        let _ = check.child.kill();
        let _ = check.child.wait();
        // Handed over between two turns of the loop, when no effect is left to be carried out.
        self.stage = Stage::Accepted(match failed {
            Some(said) => return Err(said),
            None => match ProgramAnswer::decode(&check.said) {
                Some(answer) if answer.can_continue => answer.said,
                Some(answer) => return Err(answer.said),
                None => return Err("it is not a program that can be a broker, or it has crashed".into()),
            },
        });
        Ok(())
    }
}

/// How long a program may take to say whether it can continue. Members wait for an answer of the broker for 10 s.
const MAX_CHECK: Duration = Duration::from_secs(5);

/// The longest answer.
const MAX_ANSWER: usize = 64 * 1024;
