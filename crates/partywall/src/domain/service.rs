//! The background thread of a connection: it reads events and runs [poll tasks](super::poll_tasks), such as the
//! heartbeat.
//!
//! The thread never blocks on the broker, whose calls are [background jobs](crate::completion::Worker), on the driver,
//! or on a stream. A thread or stream that waits for it therefore waits for nothing else. It accesses no memory of the
//! user.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use partywall_os::{Errno, lock::IgnorePoison, socket, thread::spawn};
use partywall_shm::{
    members::{self, Members},
    timeline::TimelineEnding,
};
use partywall_wire::Event;

use super::{
    connect::Greeted,
    health::Lost,
    inbox::Inbox,
    link::{Delivery, Link, MAX_OWED, NoBroker, giving_back},
    poll_tasks::{PollReason, PollTasks, Schedule},
    reported_waits::{HostWaits, ReportedWaits},
    stream_waits::StreamWaits,
    timeline_memory::{CellRef, TimelineMemory},
};
use crate::{
    completion::{Completions, Workers},
    error::{Error, Result, Unreachable},
    recorder::Recorder,
};

/// The interval of heartbeats and of polls that are not urgent.
const TICK: Duration = Duration::from_millis(250);

/// The interval of polls for cells that have ended without a broker.
const GUARD: Duration = Duration::from_millis(100);

/// How long the end of a connection waits for values that its own streams have promised, and then for the driver.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A running service thread.
#[derive(Debug)]
pub(super) struct Service {
    thread: Option<JoinHandle<()>>,
    shared: Arc<ServiceShared>,
}

/// The state that the service thread shares with others.
#[derive(Debug)]
pub(super) struct ServiceShared {
    pub(super) link: Arc<Link>,
    pub(super) poll_tasks: Arc<PollTasks>,
    pub(super) completions: Arc<Completions>,
    pub(super) workers: Workers,
    pub(super) timeline_memory: TimelineMemory,
    pub(super) stream_waits: StreamWaits,
    pub(super) host_waits: Arc<HostWaits>,
    pub(super) recorder: Recorder,
    stop: AtomicBool,
    /// True if a background job that ends the connection waits for its turn, which a renewal before it may have.
    ending: AtomicBool,
    /// The events of a connection that was renewed, for the service thread.
    renewed: Mutex<Option<OwnedFd>>,
}

impl Service {
    /// Starts the thread. `lost` is set when a CUDA context is lost. `begun` is when this process began to connect.
    ///
    /// # Errors
    /// [`Unreachable::Clock`] if the broker's clock does not agree with this process's.
    pub(super) fn start(
        link: Arc<Link>,
        events: OwnedFd,
        members: &OwnedFd,
        begun: u64,
        lost: Arc<OnceLock<Lost>>,
    ) -> Result<Self> {
        let members = Members::map(members).map_err(|e| Error::io("mapping the members' rows", e))?;
        check_clock(&link, &members, begun)?;
        let recorder = Recorder::new(Arc::new(members.traces()), link.row());
        let poll_tasks = Arc::new(PollTasks::new()?);
        let workers = Workers::new();
        let completions = Completions::new(poll_tasks.clone(), workers.gpu.clone(), lost);
        let shared = Arc::new(ServiceShared {
            link,
            poll_tasks,
            completions: Arc::new(completions),
            workers,
            timeline_memory: TimelineMemory::default(),
            stream_waits: StreamWaits::default(),
            host_waits: Arc::default(),
            recorder,
            stop: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            renewed: Mutex::default(),
        });
        let row = shared.link.row();
        let ticking = Arc::downgrade(&shared);
        let mut reported = ReportedWaits::default();
        shared.poll_tasks.add(Duration::ZERO, move |reason| {
            let now = members::now();
            members.beat(row, now);
            let shared = ticking.upgrade()?;
            shared.stream_waits.forget_passed();
            members.set_wait(row, reported.longest(&shared.host_waits, &shared.stream_waits, now));
            (reason == PollReason::Due).then_some(TICK)
        });
        let reader = EventReader { shared: shared.clone(), events: Some(events), inbox: Inbox::new() };
        let thread = spawn("partywall", move || reader.run())
            .map_err(|source| Error::starting("the service thread of a connection", source))?;
        Ok(Self { thread: Some(thread), shared })
    }

    /// Returns the state that the thread shares with others.
    pub(super) fn shared(&self) -> &Arc<ServiceShared> {
        &self.shared
    }

    /// Leaves the domain and ends the thread. No handle uses the connection any more, but streams may.
    ///
    /// While a stream may wait for another process, connection and thread stay alive: they release the stream if that
    /// process dies. In that case, and if the driver is slow, this returns before they have ended. Without a context
    /// (`lost`) no stream waits any more.
    pub(super) fn end(&mut self, lost: bool) {
        let shared = self.shared.clone();
        // If no thread could be started for the job that ends the connection, the service thread runs it, and must not
        // block.
        let is_ours = self.thread.as_ref().is_some_and(|thread| thread.thread().id() == thread::current().id());
        if !is_ours {
            shared.completions.await_owed(TIMEOUT);
            if !shared.timeline_memory.is_registered() {
                shared.detach();
                return self.stop();
            }
        }
        if is_ours || !lost && shared.stream_waits.may_wait() {
            shared.poll_tasks.add(TICK, {
                let shared = shared.clone();
                move |reason| {
                    let is_owed = is_ours && shared.completions.are_owed();
                    if reason == PollReason::Due && (is_owed || !lost && shared.stream_waits.may_wait()) {
                        return Some(TICK);
                    }
                    shared.detach_later(|| ());
                    None
                }
            });
            return;
        }
        let (done, wait) = mpsc::channel();
        shared.detach_later(move || {
            let _ = done.send(());
        });
        if wait.recv_timeout(TIMEOUT).is_ok() {
            self.stop();
        }
    }

    /// Ends the thread and waits for it. The thread ends within one step, after a last run of its tasks.
    fn stop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.poll_tasks.wake();
        if let Some(thread) = self.thread.take() {
            // The thread itself has reported a panic.
            let _ = thread.join();
        }
        self.shared.workers.broker.finish();
    }

    /// Forgets the thread in a forked child, where it does not exist.
    pub(super) fn forget(&mut self) {
        std::mem::forget(self.thread.take());
        self.shared.workers.forget();
    }
}

/// Refuses a process whose clock does not agree with the broker's: leases and heartbeats compare the two. The broker
/// has written its time into the row of this process between the first call of [`members::now`] and this one.
fn check_clock(link: &Link, members: &Members, begun: u64) -> Result<()> {
    let Some(theirs) = members.heartbeat(link.row()) else { return Ok(()) };
    let ours = members::now();
    if (begun..=ours).contains(&theirs) {
        return Ok(());
    }
    let (socket, ahead) = (link.socket_path().to_owned(), ours > theirs);
    Err(Unreachable::Clock { socket, ahead, by: Duration::from_millis(ours.abs_diff(theirs)) }.into())
}

struct EventReader {
    shared: Arc<ServiceShared>,
    /// `None` while the connection is lost, and once it has ended.
    events: Option<OwnedFd>,
    inbox: Inbox,
}

impl EventReader {
    fn run(mut self) {
        let shared = self.shared.clone();
        let mut schedule = Schedule::default();
        while !shared.stop.load(Ordering::Acquire) {
            if let Some(events) = shared.take_renewed() {
                self.events = Some(events);
                self.inbox = Inbox::new();
            }
            let next = schedule.run(&shared.poll_tasks);
            let events = match self.sleep(next) {
                Ok(events) => events,
                Err(error) => {
                    tracing::error!(%error, "the service thread cannot wait");
                    // Pauses, so that a persistent failure does not spin.
                    thread::sleep(Duration::from_millis(10));
                    false
                }
            };
            if events && !self.read() {
                self.events = None;
                shared.lost();
            }
        }
        schedule.end(&shared.poll_tasks);
    }

    /// Sleeps until `until` or a wake-up. Returns whether there are events to read.
    fn sleep(&self, until: Option<Instant>) -> Result<bool, Errno> {
        let wake = self.shared.poll_tasks.wake_fd();
        let [is_woken, events] = match &self.events {
            Some(events) => socket::wait_any([wake, events.as_fd()], until)?.unwrap_or_default(),
            None => [socket::wait_any([wake], until)?.is_some(), false],
        };
        if is_woken {
            self.shared.poll_tasks.clear_wake();
        }
        Ok(events)
    }

    /// Reads the available events. Returns false if no further ones will come.
    fn read(&mut self) -> bool {
        let Some(events) = &self.events else { return true };
        if !matches!(self.inbox.read(events), Ok(true)) {
            return false;
        }
        loop {
            match self.inbox.next() {
                Ok(Some(_)) if self.shared.link.is_leaving() => return true,
                Ok(Some((frame, fds))) => match frame.decode() {
                    Ok(event) => self.shared.handle(event, fds),
                    Err(error) => {
                        tracing::error!(%error, "an event is malformed");
                        return false;
                    }
                },
                Ok(None) => return true,
                Err(error) => {
                    tracing::error!(error, "the events connection is malformed");
                    return false;
                }
            }
        }
    }
}

impl ServiceShared {
    fn handle(&self, event: Event, fds: Vec<OwnedFd>) {
        let (ticket, outcome) = match event {
            Event::Completion { ticket, outcome } => (ticket, outcome),
            Event::Stale { leases } => return self.link.set_stale(leases),
            _ => return,
        };
        // If the waiter no longer waits, the grant is given back.
        if let Some(Delivery::Ended(outcome, _)) = self.link.deliver(ticket, Delivery::Ended(Box::new(outcome), fds))
            && let Ok(answer) = *outcome
            && let Some(call) = giving_back(&answer)
        {
            let link = self.link.clone();
            self.workers.broker.run(move || link.call_later(call, MAX_OWED));
        }
    }

    /// Renews a lost connection, unless it was closed on purpose.
    fn lost(self: &Arc<Self>) {
        let shared = self.clone();
        self.workers.broker.run(move || {
            let Self { link, .. } = &*shared;
            // The remaining waits end here.
            if link.is_leaving() {
                return link.set_gone();
            }
            link.lost();
            let Greeted { call, events, .. } = match link.renew(&shared.stop, &shared.ending) {
                Ok(greeted) => greeted,
                Err(NoBroker { gone }) => {
                    link.set_gone();
                    return shared.end_waits(gone);
                }
            };
            if link.renewed(call) {
                tracing::info!(socket = %link.socket_path().display(), "connection renewed");
            }
            *shared.renewed.lock().ignore_poison() = Some(events);
            shared.poll_tasks.wake();
        });
    }

    /// Ends the waits of this process's hosts. If the broker is `gone`, ends all waits for its open timelines, also
    /// those of streams and other processes, because nothing else would end them when a writer dies.
    fn end_waits(self: &Arc<Self>, gone: bool) {
        self.timeline_memory.set_gone();
        if !gone {
            return;
        }
        self.each_cell(|cell| {
            cell.get().end(TimelineEnding::BrokerGone);
        });
        let guarding = Arc::downgrade(self);
        self.poll_tasks.add(GUARD, move |reason| {
            // A stream of a living writer may have stored a value since.
            guarding.upgrade()?.each_cell(|cell| {
                let cell = cell.get();
                cell.late_store().into_iter().for_each(|late| cell.undo(late));
            });
            (reason == PollReason::Due).then_some(GUARD)
        });
    }

    /// Returns every cell that a thread or a stream of this process may wait for.
    fn each_cell(&self, act: impl Fn(&CellRef)) {
        self.timeline_memory.cells().iter().chain(&self.stream_waits.cells()).for_each(act);
    }

    /// Has a background job [detach](Self::detach), and then call `done`.
    fn detach_later(self: &Arc<Self>, done: impl FnOnce() + Send + 'static) {
        self.ending.store(true, Ordering::Release);
        let shared = self.clone();
        self.workers.broker.run(move || {
            shared.detach();
            done();
        });
    }

    /// Unregisters memory from the driver, leaves the domain, and ends the service thread.
    fn detach(&self) {
        // Waits for running work, because no stream may still be about to wait for a word whose lease is given back.
        self.timeline_memory.unregister();
        // After this call the broker needs no proof of death; if the call fails, the proof follows. It comes before the
        // service thread closes its socket, which would look like a death.
        if let Err(error) = self.link.leave() {
            tracing::debug!(%error, "could not leave the domain");
        }
        self.stop.store(true, Ordering::Release);
        self.poll_tasks.wake();
    }

    fn take_renewed(&self) -> Option<OwnedFd> {
        self.renewed.lock().ignore_poison().take()
    }
}

#[cfg(test)]
mod tests {
    use partywall_harness::World;

    use super::*;
    use crate::Domain;

    #[test]
    fn service_thread_may_drop_the_last_handle() {
        let world = World::new();
        let connect = || Domain::options().socket(world.socket()).start(false).connect().unwrap();
        let domain = connect();
        let other = connect();
        let (sender, receiver) = mpsc::channel();
        let shared = domain.connection.service.shared().clone();
        let mut last = Some(domain);
        shared.poll_tasks.add(Duration::ZERO, move |_| {
            drop(last.take());
            sender.send(()).unwrap();
            None
        });
        receiver.recv().unwrap();
        partywall_harness::eventually("it is closed", || other.members().unwrap().len() == 1);
    }

    /// The worker that gives leases back also renews the connection.
    // Holds 132.
    #[test]
    fn lease_that_goes_back_while_the_connection_is_lost_does_not_wait_for_its_renewal() {
        let world = World::new();
        let connect = || Domain::options().socket(world.socket()).start(false).connect().unwrap();
        let domain = connect();
        let other = connect();
        let (lease, _) = domain.open_semaphore("seats", 1, false).unwrap();
        let guard = domain.keep(lease);
        let shared = domain.connection.service.shared();
        let (open, gate) = mpsc::channel::<()>();
        shared.workers.broker.run(move || gate.recv().unwrap_or_default());
        drop(guard);
        // The service thread has the connection renewed after that.
        shared.link.lost();
        drop(open);
        domain.ping().unwrap();
        partywall_harness::eventually("the lease is back", || other.status().unwrap().semaphores == 0);
    }
}
