//! The timelines that a writer's values rest on, and which values rest on a timeline that has failed.
//!
//! Only the writer's library knows what its values rest on. It remembers after which wait for an input it signalled
//! which value, and marks its cell as tainted if the input turns out to have failed before.

use std::{collections::VecDeque, sync::Arc};

use super::{At, Timeline};
use crate::domain::{LeaseGuard, Word};

/// A timeline that the values of another timeline rest on.
#[derive(Debug)]
pub(super) struct TimelineInput {
    /// The lease, without which the word may become another timeline's.
    _lease: Arc<LeaseGuard>,
    at: Arc<At>,
    /// The incarnation that values rest on.
    word: Arc<Word>,
    /// Pairs of a value of the writer, and the highest value of this input that had been waited for when it was
    /// signalled. Both grow: a signalled value adds a pair only if the input has been waited for further than at the
    /// last pair.
    history: VecDeque<(u64, u64)>,
}

/// The state of an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InputState {
    /// The input has not failed, or only after every value that was waited for.
    Sound,
    /// The input has failed before a value that was waited for. No signalled value rests on it yet; the next one would.
    Suspect,
    /// The input has failed, and the writer's values from this one on rest on it.
    Failed(u64),
}

impl TimelineInput {
    pub(super) fn new(input: &Timeline) -> Self {
        let (word, lease) = input.at.now();
        Self { _lease: lease, word, at: input.at.clone(), history: VecDeque::new() }
    }

    /// Notes that the writer has signalled `v`.
    pub(super) fn signalled(&mut self, v: u64) {
        let waited = self.word.waited();
        if self.history.back().is_none_or(|(_, before)| *before < waited) {
            if self.history.len() == HISTORY {
                self.history.pop_front();
            }
            self.history.push_back((v, waited));
        }
    }

    /// Returns the present state of the input. Moves on to the handle's present incarnation if the former has not
    /// failed.
    pub(super) fn check(&mut self) -> InputState {
        let fate = self.fate();
        let (present, lease) = self.at.now();
        if matches!(fate, InputState::Failed(_)) || Arc::ptr_eq(&present, &self.word) {
            return fate;
        }
        // The handle follows another writer now, and no value rests on the former writer's failure.
        self.word = present;
        self._lease = lease;
        self.history = VecDeque::new();
        self.fate()
    }

    fn fate(&self) -> InputState {
        let cell = self.word.cell();
        let ended = self.word.ending().map(|_| cell.value() + 1);
        let Some(failed) = ended.into_iter().chain(cell.tainted()).min() else { return InputState::Sound };
        match self.history.iter().find(|(_, waited)| *waited >= failed) {
            Some((first, _)) => InputState::Failed(*first),
            None if self.word.waited() >= failed => InputState::Suspect,
            None => InputState::Sound,
        }
    }
}

/// Number of pairs to remember. If a taint is found after more waits than that, it marks all values since the oldest
/// pair.
const HISTORY: usize = 1024;
