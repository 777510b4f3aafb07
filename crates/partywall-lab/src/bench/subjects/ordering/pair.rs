//! Two processes that hand over to each other in turns, by timelines or by the words of a board.
//!
//! Each process is the writer of one timeline and waits for the other's. A *way* is a function that both processes run
//! at the same time, a given number of times; it returns the samples of the first process. Both count steps together,
//! so that a number means the same step on both sides, in every way.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, VecDeque},
    os::fd::AsFd,
    rc::Rc,
    sync::atomic::Ordering,
};

use partywall::{DeviceUuid, Domain, Place, Timeline, TimelineWriter, mps::PIPES};
use partywall_measure::{Failure, Plan, Sampler, Unit};

use super::streams::{self, Device};
use crate::{
    bench::{
        Bench,
        board::{Board, yield_until},
        mps::Mps,
        peer,
        placement::Placement,
        turns::{Queues, Topics},
    },
    broker::Broker,
    peer::Peer,
    prelude::TIMEOUT,
};

/// A way of handing over, with its name.
pub(super) type Way = (&'static str, fn(&Side, usize) -> Result<Vec<f64>, Failure>);

/// Words of the board that each side writes, as a word and as a futex, by side.
pub(super) const VALUE: [usize; 2] = [1, 2];
pub(super) const WAKE: [usize; 2] = [3, 4];
/// A stream of the first side waits here until everything is enqueued.
pub(super) const GATE: usize = 5;
/// The time at which the second side was woken.
pub(super) const STAMP: usize = 6;
const MEETING: [usize; 2] = [7, 8];

/// The two processes. Dropping this ends them.
pub(crate) struct Pair {
    processes: RefCell<Vec<Peer>>,
    under_mps: bool,
}

impl Pair {
    /// Starts both processes, and waits until they are ready. `gpu` names their GPU and the number of bytes that a long
    /// kernel reads. With a server of MPS they are its clients.
    pub(crate) fn start(
        bench: &Bench<'_>,
        broker: &Broker,
        gpu: Option<(DeviceUuid, u64)>,
        mps: Option<&Mps>,
    ) -> Result<Self, Failure> {
        let (_board, fd) = Board::create()?;
        let pipes = mps.map(Mps::pipes);
        let environment: Vec<_> = pipes.iter().map(|pipes| (PIPES, pipes.as_str())).collect();
        let start = |first: bool| {
            let process = bench.start_on(broker, peer::PAIR, Place::Host, &environment)?;
            process.say_with((first, gpu.map(|(gpu, large)| (gpu.to_string(), large))), &[fd.as_fd()])?;
            Ok::<_, Failure>(process)
        };
        let mut processes = vec![start(true)?, start(false)?];
        let under_mps: bool = processes[0].hear()?;
        if under_mps != processes[1].hear::<bool>()? {
            return Err("one of two processes is a client of an MPS server, and the other is not".into());
        }
        Ok(Self { processes: RefCell::new(processes), under_mps })
    }

    /// Returns whether both processes are clients of an MPS server, and so share a context on their GPU.
    pub(crate) fn is_under_mps(&self) -> bool {
        self.under_mps
    }

    /// Places the processes; returns `false` if there are not enough processors.
    pub(crate) fn place(&self, placement: Placement) -> Result<bool, Failure> {
        let processes = self.processes.borrow();
        placement.apply_to(processes[0].pid, processes[1].pid)
    }

    /// Returns samples of a way, taken `batch` at a time.
    pub(crate) fn sampler(&self, way: &'static str, unit: Unit, batch: usize) -> Sampler<'_> {
        let mut taken = VecDeque::new();
        Box::new(move || {
            if taken.is_empty() {
                taken.extend(self.take(way, batch)?);
            }
            let nanoseconds: f64 = taken.pop_front().ok_or("the pair took no samples")?;
            Ok(Unit::Nanoseconds.convert(nanoseconds, unit)?)
        })
    }

    /// Returns the plan for `samples` samples, and the number of samples in a batch.
    pub(crate) fn plan(bench: &Bench<'_>, samples: usize) -> (Plan, usize) {
        let plan = bench.plan(samples);
        let batch = plan.block;
        (plan.warm_up(batch), batch)
    }

    fn take(&self, way: &str, batch: usize) -> Result<Vec<f64>, Failure> {
        let mut processes = self.processes.borrow_mut();
        for process in &*processes {
            process.say((way, batch))?;
        }
        let samples = processes[0].hear()?;
        processes[1].hear::<Vec<f64>>()?;
        Ok(samples)
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // Their streams are idle, and a server of MPS must not lose its clients.
        self.processes.take().into_iter().for_each(Peer::end);
    }
}

/// One of the two, in its own process.
pub(super) struct Side {
    pub(super) first: bool,
    pub(super) board: Board,
    pub(super) ours: TimelineWriter,
    pub(super) theirs: Timeline,
    /// The last step, which is the same on both sides.
    pub(super) at: Cell<u64>,
    domain: Domain,
    device: Option<Device>,
    /// The ends of topics, by the number of subscribers and the bytes of a sample.
    ends: RefCell<BTreeMap<(usize, u64), Rc<Topics>>>,
    queues: RefCell<Option<Rc<RefCell<Queues>>>>,
    meetings: Cell<u64>,
}

impl Side {
    pub(super) fn new(
        domain: Domain,
        first: bool,
        board: Board,
        gpu: Option<(DeviceUuid, u64)>,
    ) -> Result<Self, Failure> {
        let (ours, theirs) = if first { ("first", "second") } else { ("second", "first") };
        let device = gpu.map(|(gpu, large)| Device::new(&domain, gpu, large, first, &board)).transpose()?;
        let ours = domain.timeline_writer(ours)?;
        let theirs = domain.timeline(theirs)?;
        let ends = RefCell::default();
        let queues = RefCell::default();
        let meetings = Cell::new(0);
        let side = Self { first, board, ours, theirs, at: Cell::new(1), domain, device, ends, queues, meetings };
        side.ours.signal(1)?;
        side.theirs.wait(1, TIMEOUT)?;
        if side.device.is_some() {
            streams::warm_up(&side)?;
        }
        Ok(side)
    }

    /// Waits until the other side has reached the same point.
    pub(super) fn meet(&self) -> Result<(), Failure> {
        let meeting = self.meetings.get() + 1;
        self.meetings.set(meeting);
        let [ours, theirs] = self.sides(MEETING).map(|line| self.board.word(line));
        ours.store(meeting, Ordering::Release);
        yield_until(theirs, meeting)
    }

    /// Returns the value of this side, then that of the other side.
    pub(super) fn sides<T: Copy>(&self, [first, second]: [T; 2]) -> [T; 2] {
        if self.first { [first, second] } else { [second, first] }
    }

    /// Returns the next step.
    pub(super) fn step(&self) -> u64 {
        self.at.set(self.at.get() + 1);
        self.at.get()
    }

    /// Returns this side's ends of two topics, one each way, with the given number of subscribers on either side and
    /// of bytes of a sample.
    pub(super) fn ends(&self, subscribers: usize, bytes: u64) -> Result<Rc<Topics>, Failure> {
        if let Some(ends) = self.ends.borrow().get(&(subscribers, bytes)) {
            return Ok(ends.clone());
        }
        let place = self.device.as_ref().map_or(Place::Host, Device::place);
        let names = self.sides(["first", "second"]).map(|side| format!("{side}.{subscribers}.{bytes}"));
        let names = names.each_ref().map(String::as_str);
        let ends = Rc::new(Topics::new(&self.domain, names, place, subscribers, bytes)?);
        self.ends.borrow_mut().insert((subscribers, bytes), ends.clone());
        // The other side would miss messages that are published before it has subscribed.
        self.meet()?;
        Ok(ends)
    }

    /// Returns this side's ends of two queues, one each way.
    pub(super) fn queues(&self) -> Result<Rc<RefCell<Queues>>, Failure> {
        if let Some(queues) = &*self.queues.borrow() {
            return Ok(queues.clone());
        }
        let queues = Queues::new(&self.domain, self.sides(["first", "second"]))?;
        let queues = Rc::new(RefCell::new(queues));
        self.queues.replace(Some(queues.clone()));
        Ok(queues)
    }

    pub(super) fn device(&self) -> Result<&Device, Failure> {
        self.device.as_ref().ok_or_else(|| "this pair was started without a GPU".into())
    }
}
