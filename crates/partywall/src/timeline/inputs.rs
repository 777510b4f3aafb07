//! What a writer's values rest on, and which of them rest on something that has failed.

use std::{collections::VecDeque, sync::Arc};

use super::{At, Timeline};
use crate::domain::{LeaseGuard, Word};

/// A timeline that the values of another one are made from.
#[derive(Debug)]
pub(super) struct Input {
    /// So that the word stays the input's.
    _keep: Arc<LeaseGuard>,
    at: Arc<At>,
    /// The incarnation that values rest on.
    word: Arc<Word>,
    /// A value of the writer's, and the highest value that this input had been waited for until that was signalled. Both
    /// grow: a value is here only if more had been waited for than for the one before.
    history: VecDeque<(u64, u64)>,
}

/// What is known of an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// It has not failed, or after all that was waited for.
    Sound,
    /// It has failed before something that was waited for. No value rests on that yet; the next one would.
    Suspect,
    /// It has failed, and values from this one on rest on that.
    Failed(u64),
}

impl Input {
    pub(super) fn new(input: &Timeline) -> Self {
        let (word, keep) = input.at.now();
        Self { _keep: keep, word, at: input.at.clone(), history: VecDeque::new() }
    }

    /// A value of the writer's was signalled.
    pub(super) fn signalled(&mut self, v: u64) {
        let waited = self.word.waited();
        if self.history.back().is_none_or(|(_, before)| *before < waited) {
            if self.history.len() == HISTORY {
                self.history.pop_front();
            }
            self.history.push_back((v, waited));
        }
    }

    pub(super) fn look(&mut self) -> Fate {
        let fate = self.fate();
        let (present, keep) = self.at.now();
        if matches!(fate, Fate::Failed(_)) || Arc::ptr_eq(&present, &self.word) {
            return fate;
        }
        // The handle has gone over to another writer, with nothing that rests on what failed before.
        (self.word, self._keep, self.history) = (present, keep, VecDeque::new());
        self.fate()
    }

    fn fate(&self) -> Fate {
        let cell = self.word.cell();
        let ended = self.word.ending().map(|_| cell.value() + 1);
        let Some(failed) = ended.into_iter().chain(cell.tainted()).min() else { return Fate::Sound };
        match self.history.iter().find(|(_, waited)| *waited >= failed) {
            Some((first, _)) => Fate::Failed(*first),
            None if self.word.waited() >= failed => Fate::Suspect,
            None => Fate::Sound,
        }
    }
}

/// Waits that are remembered. A taint that is found after so many more marks the values since then.
const HISTORY: usize = 1024;
