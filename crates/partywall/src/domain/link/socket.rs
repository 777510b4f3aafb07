//! The call socket: one request out, one reply in.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use partywall_os::{
    Errno,
    socket::{self, Ready},
};
use partywall_wire::{Answer, Call, Reply, RequestId, WireError};

use super::{
    super::{connect, inbox::Inbox},
    SHORT_TIMEOUT, TIMEOUT,
};
use crate::adaptive_spin::AdaptiveSpin;

/// The call socket, and the replies that the broker still owes.
#[derive(Debug)]
pub(super) struct CallSocket {
    /// `None` while the connection is lost.
    socket: Option<OwnedFd>,
    inbox: Inbox,
    spin: AdaptiveSpin,
    next: RequestId,
    /// Whether a call was not answered in time, and nothing has come since.
    silent: bool,
    /// Calls of this connection that were not answered in time.
    unanswered: Vec<RequestId>,
    /// Calls whose outcomes no thread needs, such as those that give back grants for which no caller waited any more.
    owed: Vec<Call>,
}

/// Why no reply came.
pub(super) enum NoReply {
    /// The connection ended.
    Ended,
    /// Nothing came in time. The connection stays usable unless a message was sent in part.
    Silent,
    /// The kernel refuses file descriptors from all processes of this user. Nothing was sent, and the connection stays
    /// usable.
    InFlight,
    /// The bytes are malformed.
    Malformed(String),
}

impl CallSocket {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self {
            socket: Some(socket),
            inbox: Inbox::new(),
            spin: AdaptiveSpin::on_socket(),
            next: RequestId(1),
            silent: false,
            unanswered: Vec::new(),
            owed: Vec::new(),
        }
    }

    /// Continues with the socket of a renewed connection. Request numbers continue, and owed grants stay. The answers
    /// that were late do not come any more: what they would have granted is owed, too.
    pub(super) fn renew(&mut self, socket: OwnedFd) {
        let mut owed = std::mem::take(&mut self.owed);
        owed.extend(self.unanswered.drain(..).map(|request| Call::GiveUp { request }));
        *self = Self { next: self.next, owed, ..Self::new(socket) };
    }

    pub(super) fn is_connected(&self) -> bool {
        self.socket.is_some()
    }

    /// Closes the socket, which notifies the broker and the service thread.
    pub(super) fn close(&mut self) {
        self.socket = None;
    }

    pub(super) fn is_silent(&self) -> bool {
        self.silent
    }

    pub(super) fn set_silent(&mut self) {
        self.silent = true;
    }

    /// Returns how long the broker may take to answer.
    pub(super) fn timeout(&self) -> Duration {
        if self.silent { SHORT_TIMEOUT } else { TIMEOUT }
    }

    pub(super) fn next_id(&mut self) -> RequestId {
        let id = self.next;
        self.next = RequestId(id.0 + 1);
        id
    }

    /// Returns the calls whose outcomes no thread needs.
    pub(super) fn owed(&mut self) -> &mut Vec<Call> {
        &mut self.owed
    }

    /// Sends a request and waits for its reply.
    pub(super) fn exchange(
        &mut self,
        message: &[u8],
        id: RequestId,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Vec<OwnedFd>), NoReply> {
        // One reading of the clock serves both the time limit and the spin.
        let start = Instant::now();
        let deadline = start + self.timeout();
        self.send(message, fds, deadline)?;
        let socket = self.socket.as_ref().ok_or(NoReply::Ended)?.as_fd();
        loop {
            // Usually the socket's own time limit is enough, which saves a system call.
            let in_time = !self.silent || socket::wait(socket, Ready::Read, Some(deadline)) == Ok(true);
            match if in_time { self.inbox.read_soon(&self.spin, start, socket) } else { Err(Errno::AGAIN) } {
                Ok(true) => {}
                Err(Errno::AGAIN) => break,
                _ => return Err(NoReply::Ended),
            }
            while let Some((frame, fds)) = self.inbox.next().map_err(NoReply::Malformed)? {
                let reply: Reply = frame.decode().map_err(malformed)?;
                self.silent = false;
                if reply.id == id {
                    return Ok((reply, fds));
                }
                // The late answer to a call that gave up waiting; its file descriptors are closed here.
                let late = self.unanswered.iter().position(|asked| *asked == reply.id);
                let late = late.ok_or_else(|| NoReply::Malformed("an answer without a request".into()))?;
                self.unanswered.swap_remove(late);
                self.owed.extend(returning(reply));
            }
            // A broker that sends only other messages counts as silent, too.
            if Instant::now() >= deadline {
                break;
            }
        }
        self.silent = true;
        self.unanswered.push(id);
        Err(NoReply::Silent)
    }

    /// Sends a whole message. After a partial send nothing else can be sent: the connection ends.
    fn send(&mut self, message: &[u8], fds: &[BorrowedFd<'_>], deadline: Instant) -> Result<(), NoReply> {
        let socket = self.socket.as_ref().ok_or(NoReply::Ended)?.as_fd();
        let (mut rest, mut fds): (&[u8], &[BorrowedFd<'_>]) = (message, fds);
        while !rest.is_empty() {
            let in_time = !self.silent || socket::wait(socket, Ready::Write, Some(deadline)) == Ok(true);
            match if in_time { connect::send(socket, rest, fds) } else { Err(Errno::AGAIN) } {
                Ok(sent) => (rest, fds) = (&rest[sent..], &[]),
                Err(Errno::AGAIN) => {
                    self.silent = true;
                    if rest.len() < message.len() {
                        self.socket = None;
                    }
                    return Err(NoReply::Silent);
                }
                Err(Errno::TOOMANYREFS) => return Err(NoReply::InFlight),
                Err(_) => return Err(NoReply::Ended),
            }
        }
        Ok(())
    }
}

/// Returns the call that gives back what a reply grants.
fn returning(reply: Reply) -> Option<Call> {
    match reply.outcome {
        Ok(Answer::Pending) => Some(Call::Cancel { ticket: reply.id }),
        Ok(answer) => giving_back(&answer),
        Err(_) => None,
    }
}

/// Returns the call that gives back what an answer grants.
pub(in super::super) fn giving_back(answer: &Answer) -> Option<Call> {
    match answer {
        Answer::Opened(opened) => Some(Call::Release { lease: opened.lease }),
        Answer::Committed { lease, .. } => Some(Call::Release { lease: *lease }),
        Answer::Build { claim } => Some(Call::AbandonBuild { claim: *claim }),
        Answer::Timeline(opened) => Some(Call::Release { lease: opened.lease }),
        Answer::Semaphore { lease, .. } => Some(Call::Release { lease: *lease }),
        _ => None,
    }
}

fn malformed(error: WireError) -> NoReply {
    NoReply::Malformed(error.to_string())
}
