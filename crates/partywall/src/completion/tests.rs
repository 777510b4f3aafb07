use std::sync::mpsc;

use partywall_cuda::{CuResult, CudaError};
use partywall_shm::timeline::TimelineEnding;

use super::*;
use crate::domain::Schedule;

/// Completions without a service thread: a test polls them itself.
struct World {
    completions: Arc<Completions>,
    poll_tasks: Arc<PollTasks>,
    lost: Arc<OnceLock<Lost>>,
    sender: mpsc::Sender<(u32, Completion)>,
    receiver: mpsc::Receiver<(u32, Completion)>,
}

impl World {
    fn new() -> Self {
        Self::of_process(fork_generation())
    }

    fn of_process(generation: u64) -> Self {
        let poll_tasks = Arc::new(PollTasks::new().unwrap());
        let lost = Arc::default();
        let gpu = Workers::new().gpu;
        let completions = Completions { generation, ..Completions::new(poll_tasks.clone(), gpu, Arc::clone(&lost)) };
        let (sender, receiver) = mpsc::channel();
        Self { completions: Arc::new(completions), poll_tasks, lost, sender, receiver }
    }

    /// Hands in a fence whose callback notes `number`.
    fn on(&self, number: u32, fence: Fence) {
        let sender = self.sender.clone();
        self.completions.on(fence, move |completion| sender.send((number, completion)).unwrap());
    }

    /// The callbacks that have run since the last call.
    fn ran(&self) -> Vec<(u32, Completion)> {
        self.receiver.try_iter().collect()
    }

    fn lose_context(&self) {
        let error = CudaError::new("cuStreamQuery", CuResult::ILLEGAL_ADDRESS);
        self.lost.set(Lost { gpu: DeviceUuid([0; 16]), error }).unwrap();
    }

    /// Ends the connection, as its service thread does.
    fn end(&self) {
        Schedule::default().end(&self.poll_tasks);
    }
}

/// A private word, and the stream's store into it.
fn private_word() -> (Fence, impl Fn()) {
    let word = PrivateWord::of_hosts();
    let cell = word.cell.clone();
    let target = word.target;
    (Fence::PrivateWord(word), move || cell.get().signal(target).unwrap())
}

fn timeline(value: u64) -> (Fence, Arc<Word>) {
    let word = Arc::new(Word::of_hosts());
    (Fence::Timeline(word.clone(), value), word)
}

#[test]
fn callbacks_run_in_the_order_in_which_they_were_handed_in() {
    let world = World::new();
    let (first, store_first) = private_word();
    let (second, word) = timeline(3);
    let (third, store_third) = private_word();
    world.on(1, first);
    world.on(2, second);
    world.on(3, third);
    store_third();
    world.completions.poll();
    assert_eq!(world.ran(), [(3, Completion::Done)]);
    word.cell().signal(3).unwrap();
    store_first();
    world.completions.poll();
    assert_eq!(world.ran(), [(1, Completion::Done), (2, Completion::Done)]);
    world.completions.poll();
    assert_eq!(world.ran(), []);
}

#[test]
fn service_thread_polls_until_nothing_is_pending() {
    let world = World::new();
    let mut schedule = Schedule::default();
    let (fence, store) = private_word();
    world.on(1, fence);
    let mut next = schedule.run(&world.poll_tasks);
    assert!(next.is_some() && world.ran().is_empty());
    store();
    while let Some(at) = next {
        std::thread::sleep(at.saturating_duration_since(Instant::now()));
        next = schedule.run(&world.poll_tasks);
    }
    assert_eq!(world.ran(), [(1, Completion::Done)]);
    let (fence, _) = private_word();
    world.on(2, fence);
    assert!(schedule.run(&world.poll_tasks).is_some(), "it polls again");
}

#[test]
fn reached_fence_runs_its_callback_immediately() {
    let world = World::new();
    let (fence, store) = private_word();
    store();
    world.on(1, fence);
    world.on(2, Fence::Condition(Box::new(|| true)));
    assert_eq!(world.ran(), [(1, Completion::Done), (2, Completion::Done)]);
}

#[test]
fn panicking_callback_does_not_stop_others() {
    let world = World::new();
    let (panics, store_panics) = private_word();
    let (fence, store) = private_word();
    world.completions.on(panics, |_| panic!("as it is meant"));
    world.on(1, fence);
    store_panics();
    store();
    world.completions.poll();
    assert_eq!(world.ran(), [(1, Completion::Done)]);
}

#[test]
fn callback_may_add_a_fence() {
    let world = World::new();
    let (first, store_first) = private_word();
    let (second, store_second) = private_word();
    let completions = world.completions.clone();
    let sender = world.sender.clone();
    world.completions.on(first, move |_| {
        completions.on(second, move |completion| sender.send((2, completion)).unwrap());
    });
    store_first();
    world.completions.poll();
    store_second();
    world.completions.poll();
    assert_eq!(world.ran(), [(2, Completion::Done)]);
}

#[test]
fn lost_context_leaves_private_words_unknown_and_timelines_pending() {
    let world = World::new();
    let (reached, store) = private_word();
    let (unknown, _) = private_word();
    let (pending, word) = timeline(1);
    world.on(1, reached);
    world.on(2, unknown);
    world.on(3, pending);
    store();
    world.lose_context();
    world.completions.poll();
    assert_eq!(world.ran(), [(1, Completion::Done), (2, Completion::Unknown)]);
    // The broker ends the timelines of a process whose context is lost.
    word.cell().end(TimelineEnding::OwnerFaulted);
    world.completions.poll();
    assert_eq!(world.ran(), [(3, Completion::Unknown)]);
}

#[test]
fn end_of_the_connection_makes_pending_fences_unknown() {
    let world = World::new();
    let (reached, store) = private_word();
    let (word, _) = private_word();
    let (value, _) = timeline(1);
    world.on(1, reached);
    world.on(2, word);
    world.on(3, value);
    world.on(4, Fence::Condition(Box::new(|| false)));
    store();
    world.end();
    let unknown = Completion::Unknown;
    assert_eq!(world.ran(), [(1, Completion::Done), (2, unknown), (3, unknown), (4, unknown)]);
    let (late, _) = private_word();
    world.on(5, late);
    assert_eq!(world.ran(), [(5, unknown)], "a late fence is not waited for");
}

#[test]
fn timelines_are_owed_until_their_callbacks_have_returned() {
    let world = World::new();
    let (fence, word) = timeline(1);
    let completions = world.completions.clone();
    let sender = world.sender.clone();
    world.completions.on(fence, move |completion| {
        assert!(completions.are_owed());
        sender.send((1, completion)).unwrap();
    });
    world.completions.await_owed(Duration::from_millis(1));
    assert!(world.completions.are_owed(), "that was a timeout");
    word.cell().signal(1).unwrap();
    world.completions.poll();
    assert_eq!(world.ran(), [(1, Completion::Done)]);
    assert!(!world.completions.are_owed());
}

#[test]
fn nothing_runs_or_is_dropped_in_a_forked_child() {
    let child = World::of_process(fork_generation() + 1);
    let (fence, store) = private_word();
    let guard = Arc::new(());
    let kept = guard.clone();
    store();
    child.completions.on(fence, move |_| drop(kept));
    child.completions.poll();
    child.end();
    assert_eq!(Arc::strong_count(&guard), 2);
}
