//! Runs callbacks once streams have reached a point.
//!
//! A stream says so by a private word, which wakes nobody. All those words are one [poll task](crate::domain::PollTasks) of the service
//! thread, which is woken for the first of them only. Who needs what streams let go of looks himself.

mod stream;
mod worker;

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use partywall_shm::timeline::Progress;

pub(crate) use self::worker::{Worker, contained};
use crate::{
    backoff::Backoff,
    domain::{Lost, PollReason, PollTasks, PrivateWord},
};

/// What became of the work that something was to be done behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Completion {
    /// It is done.
    Done,
    /// Nobody will know: the context is lost, or the connection ends.
    Unknown,
}

/// What is to be done behind the work of a connection's streams.
#[derive(Default)]
pub(crate) struct Completions(Mutex<All>);

#[derive(Default)]
struct All {
    undone: Vec<Undone>,
    /// The service thread looks at them.
    watched: bool,
}

struct Undone {
    word: PrivateWord,
    then: Box<dyn FnOnce(Completion) + Send>,
}

impl Completions {
    /// Has `then` done once a stream has written `word`, or when it is known that nobody will know: by the service thread,
    /// with pauses of up to 1 ms, or by who [looks](Self::look). It must not wait, as any poll task.
    pub(crate) fn add(
        self: &Arc<Self>,
        poll_tasks: &PollTasks,
        lost: Arc<OnceLock<Lost>>,
        word: PrivateWord,
        then: impl FnOnce(Completion) + Send + 'static,
    ) {
        let mut all = self.lock();
        all.undone.push(Undone { word, then: Box::new(then) });
        if std::mem::replace(&mut all.watched, true) {
            return;
        }
        drop(all);
        let completions = self.clone();
        let mut backoff = Backoff::new();
        poll_tasks.add(backoff.next(), move |reason| {
            let mut all = completions.lock();
            let over = all.take_over(lost.get().is_some() || reason == PollReason::Closing);
            all.watched = !all.undone.is_empty();
            let again = all.watched;
            drop(all);
            if !over.is_empty() {
                backoff = Backoff::new();
            }
            over.into_iter().for_each(Undone::end);
            again.then(|| backoff.next())
        });
    }

    /// Does what is to be done by now. Does not wait.
    pub(crate) fn look(&self) {
        let over = self.lock().take_over(false);
        over.into_iter().for_each(Undone::end);
    }

    fn lock(&self) -> MutexGuard<'_, All> {
        // Nothing is done while it is locked.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl All {
    /// Those whose streams have come there, or all.
    fn take_over(&mut self, all: bool) -> Vec<Undone> {
        self.undone.extract_if(.., |undone| all || undone.is_reached()).collect()
    }
}

impl Undone {
    fn is_reached(&self) -> bool {
        self.word.place.cell().progress(self.word.target) == Progress::Reached
    }

    fn end(self) {
        let is_reached = self.is_reached();
        if is_reached {
            self.word.give_back();
        }
        contained(|| (self.then)(if is_reached { Completion::Done } else { Completion::Unknown }));
    }
}

impl fmt::Debug for Completions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completions").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn one_that_panics_keeps_no_other_from_being_done() {
        let completions = Arc::new(Completions::default());
        let poll_tasks = PollTasks::new().unwrap();
        let (sender, receiver) = mpsc::channel();
        for number in 0..4 {
            let word = PrivateWord::of_hosts();
            let sender = sender.clone();
            word.place.cell().signal(word.target).unwrap();
            completions.add(&poll_tasks, Arc::default(), word, move |completion| {
                assert!(number % 2 > 0, "as it is meant");
                sender.send((number, completion)).unwrap();
            });
        }
        completions.look();
        let done: Vec<_> = receiver.try_iter().collect();
        assert_eq!(done, [(1, Completion::Done), (3, Completion::Done)]);
    }
}
