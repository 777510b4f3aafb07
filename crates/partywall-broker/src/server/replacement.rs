//! Hands over to another program: has it checked by a child process, and leaves everything to it.
//!
//! [`crate::replacement`] lists the steps, and what a kill between any two of them leaves.

use std::{
    os::fd::{AsFd, OwnedFd},
    process::Child,
    time::{Duration, Instant},
};

use partywall_os::{
    Errno, memfd,
    process::shares_namespaces,
    socket::{self, Ready},
    supervision::start_program,
};
use partywall_shm::crash::point;
use partywall_wire::{Answer, NoReplacement, OtherUsers, Refusal, Reply};
use rustix::{
    event::epoll::EventFlags,
    io::{read, retry_on_intr},
    pipe::{PipeFlags, pipe_with},
};

use crate::{
    bind::own_user,
    registry::{MemberId, RequestId, effect::Audited},
    replacement::{self, Purpose, VARIABLE},
    server::{
        connection::{Channel, Connection, ConnectionId},
        event_loop::Server,
        fds::missing,
        in_flight::Process,
        reactor::EventSource,
        reclaimer::Donated,
        supervised::encode,
        timers::Timer,
    },
};

/// A request that another program continues.
#[derive(Debug)]
pub(super) struct Replacement {
    member: MemberId,
    request: RequestId,
    /// The file of the program.
    program: Donated,
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

impl Server {
    /// Starts the check of the program that a member has sent.
    pub(super) fn begin_replacement(
        &mut self,
        id: ConnectionId,
        member: MemberId,
        request: RequestId,
        fds: Vec<Donated>,
    ) -> Result<(), Refusal> {
        let refused = |why| Err(Refusal::NotReplaced { why });
        if let Some(process) = self.peers.connections.get(&id).map(Connection::process).filter(|it| it.is_guest) {
            let Process { uid, pid, .. } = process;
            let owner = own_user();
            let what = OtherUsers::Replace;
            let pid = pid.unwrap_or_default();
            self.audit.note(&Audited::OtherUser { uid, pid, what: what.clone(), owner, granted: false });
            return Err(Refusal::OtherUser { what, owner, uid });
        }
        if !self.supervised.as_ref().is_some_and(|supervised| supervised.can_be_replaced()) {
            return refused(NoReplacement::Unsupervised);
        }
        match &mut self.replacement {
            // It has lost its connection meanwhile, and repeats its request.
            Some(running) if running.member == member => {
                running.request = request;
                return Ok(());
            }
            Some(_) => return refused(NoReplacement::InProgress),
            None => {}
        }
        if let Err(found) = self.may_replace(id, member) {
            return refused(NoReplacement::Elsewhere { found });
        }
        let mut fds = fds.into_iter();
        let program = fds.next().ok_or_else(|| missing(0))?;
        let check = self.start_check(&program).map_err(|error| {
            let said = format!("it could not be executed: {error}");
            Refusal::NotReplaced { why: NoReplacement::Program { said } }
        })?;
        tracing::info!(%member, "asked to hand over to another program");
        self.reactor.set_timer(MAX_CHECK, Timer::Answer);
        self.replacement = Some(Replacement { member, request, program, stage: Stage::Checking(check) });
        Ok(())
    }

    /// Checks that a process of the broker's user, at the other end of a connection, could as well start programs by
    /// itself where the broker runs. A process in a container that has been given the broker's socket could not.
    fn may_replace(&self, id: ConnectionId, member: MemberId) -> Result<(), String> {
        let connection = self.peers.connections.get(&id).ok_or("its connection has ended")?;
        // Not the pid that it has told, which is checked only if the kernel knows one.
        let pid = connection.process().pid.ok_or("it is not visible here")?;
        match shares_namespaces(pid) {
            Ok(true) => {}
            Ok(false) => return Err(format!("process {pid} is in another namespace")),
            Err(errno) => return Err(format!("the namespaces of process {pid} cannot be read: {errno}")),
        }
        // The pid has not been given to another process: the one that connected still runs.
        match self.peers.members.pidfd(member).map(|pidfd| socket::wait(pidfd, Ready::Read, Some(Instant::now()))) {
            Some(Ok(false)) => Ok(()),
            Some(_) => Err(format!("process {pid} has ended")),
            None => Err(format!("process {pid} has no pidfd, so it may be another process by now")),
        }
    }

    fn start_check(&self, program: &Donated) -> std::io::Result<ProgramCheck> {
        let Some((supervised, program)) = self.supervised.as_ref().zip(program.fd()) else {
            return Err(Errno::BADF.into());
        };
        let state = encode(&self.state(supervised)).map_err(|_| Errno::INVAL)?;
        let state = memfd::frozen("partywall:state", &state)?;
        let (answer, theirs) = pipe_with(PipeFlags::CLOEXEC)?;
        rustix::io::ioctl_fionbio(&answer, true)?;
        self.reactor.watch(&answer, EventSource::Answer, EventFlags::IN)?;
        point("broker: check prepared, not started");
        let child = start_program(program, &[state.as_fd(), theirs.as_fd()], VARIABLE, Purpose::check)?;
        point("broker: check started, not answered");
        Ok(ProgramCheck { child, answer, said: Vec::new(), until: Instant::now() + MAX_CHECK })
    }

    /// Reads what the child has said so far.
    pub(super) fn on_answer(&mut self) {
        let Some(Replacement { stage: Stage::Checking(check), .. }) = &mut self.replacement else { return };
        let mut bytes = [0; 1024];
        match retry_on_intr(|| read(&check.answer, &mut bytes)) {
            Ok(0) => self.end_check(None),
            Ok(count) => {
                check.said.extend_from_slice(&bytes[..count]);
                if check.said.len() > MAX_ANSWER {
                    self.end_check(Some("it writes without end".into()));
                }
            }
            Err(Errno::AGAIN) => {}
            Err(errno) => self.end_check(Some(errno.to_string())),
        }
    }

    /// Ends a check that has taken too long.
    pub(super) fn end_late_check(&mut self) {
        if let Some(Replacement { stage: Stage::Checking(check), .. }) = &self.replacement
            && check.until <= Instant::now()
        {
            self.end_check(Some(format!("it did not answer within {} s", MAX_CHECK.as_secs())));
        }
    }

    /// Ends the child, and decides by its answer. `failed` says why it has none.
    fn end_check(&mut self, failed: Option<String>) {
        let Some(mut replacement) = self.replacement.take() else { return };
        let Stage::Checking(check) = &mut replacement.stage else { return };
        self.reactor.unwatch(&check.answer);
        // It has closed the pipe, so it is about to end; or else it is killed. In both cases the wait is short.
        let _ = check.child.kill();
        let _ = check.child.wait();
        let answer = match failed {
            Some(said) => Err(said),
            None => match replacement::ProgramAnswer::decode(&check.said) {
                Some(answer) if answer.can_continue => Ok(answer.said),
                Some(answer) => Err(answer.said),
                None => Err("it is not a program that can be a broker, or it has crashed".into()),
            },
        };
        match answer {
            // Handed over between two turns of the loop, when no effect is left to be carried out.
            Ok(release) => {
                replacement.stage = Stage::Accepted(release);
                self.replacement = Some(replacement);
            }
            Err(said) => self.refuse_replacement(&replacement, said),
        }
    }

    fn refuse_replacement(&mut self, Replacement { member, request, .. }: &Replacement, said: String) {
        tracing::warn!(said, "not handing over to another program");
        if let Some(id) = self.peers.members.current(*member) {
            self.refuse_request(id, *member, *request, Refusal::NotReplaced { why: NoReplacement::Program { said } });
        }
    }

    /// Leaves everything to the program that was accepted, if there is one. Returns whether this process has to end
    /// now, without closing anything.
    pub(super) fn hand_over(&mut self) -> bool {
        let Some(replacement) = self.replacement.take_if(|replacement| matches!(replacement.stage, Stage::Accepted(_)))
        else {
            return false;
        };
        let Replacement { member, request, ref program, ref stage } = replacement;
        let (Stage::Accepted(release), Some(number)) = (stage, program.number()) else { return false };
        if self.peers.members.current(member).is_none() {
            tracing::warn!("not handing over to another program: the process that asked for it is gone");
            return false;
        }
        // The program finds a snapshot alone, and no event of this one.
        if !self.write_snapshot() {
            self.refuse_replacement(&replacement, "there is no memory for the state".into());
            return false;
        }
        point("broker: snapshot for another program written, request not answered");
        let reply = Reply { id: request, outcome: Ok(Answer::Done) };
        // The asking process can see the outcome without it.
        let _ = self.peers.send(&mut self.reactor, member, Channel::Call, &reply, Vec::new());
        point("broker: replacement answered, not noted");
        let Some(supervised) = &self.supervised else { return false };
        supervised.page.set_program(number);
        point("broker: replacement noted, not handed over");
        tracing::info!(release, "handing over to another program");
        // Its number is noted, so it has to stay open.
        std::mem::forget(replacement);
        true
    }
}

/// How long a program may take to say whether it can continue. Members wait for an answer of the broker for 10 s.
const MAX_CHECK: Duration = Duration::from_secs(5);

/// The longest answer.
const MAX_ANSWER: usize = 64 * 1024;
