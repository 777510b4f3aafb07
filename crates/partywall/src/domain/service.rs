//! The one background thread of a connection: it reads events, renews the connection when it is lost, and tells others
//! that this process is well.
//!
//! It waits for a caller's answer only to give something back or to renew the connection, never for longer than the
//! caller may wait itself, and touches no memory of the user's.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use partywall_os::socket;
use partywall_shm::members::{self, Members};
use partywall_wire::Event;
use rustix::event::{EventfdFlags, eventfd};

use super::{
    connect::{self, Greeted},
    inbox::Inbox,
    link::{Link, Verdict, giving_back},
};
use crate::error::{Error, Result};

/// For how long a lost connection is renewed before the broker counts as gone.
const RENEWAL: Duration = Duration::from_secs(10);

/// How often to tell that we are well.
const HEARTBEAT: Duration = Duration::from_millis(250);

/// A running service thread.
#[derive(Debug)]
pub(super) struct Service {
    thread: Option<JoinHandle<()>>,
    stop: Arc<OwnedFd>,
}

impl Service {
    /// Starts the thread.
    pub(super) fn start(link: Arc<Link>, events: OwnedFd, members: &OwnedFd) -> Result<Self> {
        let members = Members::map(members).map_err(|e| Error::system("mapping the members' rows", e))?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::system("making the service thread's eventfd", e))?;
        let stop = Arc::new(stop);
        let thread = std::thread::Builder::new()
            .name("partywall".into())
            .spawn({
                let stop = stop.clone();
                move || Reader { link, stop, events, inbox: Inbox::new(), members, next_beat: Instant::now() }.run()
            })
            .map_err(|source| Error::System { what: "starting the service thread".into(), source })?;
        Ok(Self { thread: Some(thread), stop })
    }

    /// Ends the thread and waits for it; it ends within one step.
    pub(super) fn stop(&mut self) {
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported by the thread itself.
            let _ = thread.join();
        }
    }

    /// Lets the thread be forgotten in a forked child, where it does not exist.
    pub(super) fn forget(&mut self) {
        std::mem::forget(self.thread.take());
    }
}

struct Reader {
    link: Arc<Link>,
    stop: Arc<OwnedFd>,
    events: OwnedFd,
    inbox: Inbox,
    members: Members,
    next_beat: Instant,
}

/// What to do after a step.
enum Next {
    GoOn,
    Renew,
    Stop,
}

impl Reader {
    fn run(mut self) {
        loop {
            match self.step() {
                Next::GoOn => {}
                Next::Stop => return,
                // Whoever still waits here waits for nothing.
                Next::Renew if self.link.is_leaving() => return self.link.set_gone(),
                Next::Renew => {
                    self.link.lost();
                    let Some(Greeted { call, events, .. }) = self.renew() else { return self.link.set_gone() };
                    (self.events, self.inbox) = (events, Inbox::new());
                    if self.link.renewed(call) {
                        tracing::info!(socket = %self.link.socket_path().display(), "connection renewed");
                    }
                }
            }
        }
    }

    fn step(&mut self) -> Next {
        if self.next_beat <= Instant::now() {
            self.members.beat(self.link.row(), members::now());
            self.next_beat = Instant::now() + HEARTBEAT;
        }
        match socket::wait_any([self.stop.as_fd(), self.events.as_fd()], Some(self.next_beat)) {
            Ok(Some([true, _])) => return Next::Stop,
            Ok(None) => return Next::GoOn,
            Ok(Some(_)) => {}
            Err(error) => {
                tracing::error!(%error, "the service thread cannot wait");
                return Next::Renew;
            }
        }
        if !matches!(self.inbox.read(&self.events), Ok(true)) {
            return Next::Renew;
        }
        loop {
            match self.inbox.next() {
                Ok(Some(_)) if self.link.is_leaving() => return Next::GoOn,
                Ok(Some((frame, fds))) => match frame.decode() {
                    Ok(event) => self.handle(event, fds),
                    Err(error) => {
                        tracing::error!(%error, "an event was not understood");
                        return Next::Renew;
                    }
                },
                Ok(None) => return Next::GoOn,
                Err(error) => {
                    tracing::error!(error, "the events connection carries nonsense");
                    return Next::Renew;
                }
            }
        }
    }

    fn handle(&self, event: Event, fds: Vec<OwnedFd>) {
        let Event::Verdict { ticket, outcome } = event else {
            return;
        };
        // Its waiter may have given up meanwhile: then what it was granted goes back.
        if let Some(Verdict::Ended(Ok(answer), _)) = self.link.deliver(ticket, Verdict::Ended(outcome, fds))
            && let Some(call) = giving_back(&answer)
        {
            self.link.give_back(call);
        }
    }

    /// Connects as the member that we are. `None` if the broker is gone, or is another one.
    fn renew(&self) -> Option<Greeted> {
        let deadline = Instant::now() + RENEWAL;
        loop {
            let greeted = connect::open(&self.link.location)
                .and_then(|call| connect::greet(call, self.link.socket_path(), Some(self.link.resume.clone())));
            match greeted {
                Ok(greeted) if greeted.welcome.instance == self.link.resume.instance && greeted.welcome.resumed => {
                    return Some(greeted);
                }
                // Another broker, or one that has given us up; or nobody listens any more.
                Ok(_) | Err(Error::BrokerUnreachable { .. } | Error::VersionMismatch { .. } | Error::Refused(_)) => {
                    return None;
                }
                Err(_) => {}
            }
            // The broker itself is alive or about to be: try again, but stop at once when asked to.
            let pause = Instant::now() + Duration::from_millis(20);
            if Instant::now() >= deadline || matches!(socket::wait_any([self.stop.as_fd()], Some(pause)), Ok(Some(_))) {
                return None;
            }
        }
    }
}
