//! Left versions by their names, and one watch of all these names.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    sync::atomic::AtomicBool,
    thread,
    time::Duration,
};

use super::{
    RETRY,
    version::{Fate, LeftVersion},
};
use crate::{
    domain::{Watch, WatchEvent},
    error::{Error, Result},
    wait::Wait,
};

/// The pause between two answers of the watch. Without it, names of other processes that match the pattern would cost
/// the broker an answer for each of their events.
const REST: Duration = Duration::from_millis(5);

/// The versions that the thread of a connection keeps.
#[derive(Default)]
pub(super) struct WatchedVersions {
    versions: BTreeMap<String, Vec<LeftVersion>>,
    /// Names of versions about which to ask.
    unsettled: BTreeSet<String>,
    /// A watch, and its pattern.
    watch: Option<(String, Watch)>,
    /// True if the last wait has ended by an event.
    had_event: bool,
}

impl WatchedVersions {
    pub(super) fn is_empty(&self) -> bool {
        self.versions.is_empty()
    }

    pub(super) fn extend(&mut self, added: Vec<LeftVersion>) {
        for left in added {
            let name = left.version.name.clone();
            self.unsettled.insert(name.clone());
            self.versions.entry(name).or_default().push(left);
        }
    }

    /// Lets go of the versions that have ended, and waits for the next event, or until `added` is set.
    pub(super) fn step(&mut self, added: &AtomicBool) {
        // The watch begins before the questions, so that no change is missed.
        let watching = self.watch();
        self.settle();
        if self.is_empty() {
            return;
        }
        let has_next = self.watch.as_ref().is_some_and(|(_, watch)| watch.has_next());
        if mem::take(&mut self.had_event) && !has_next {
            thread::sleep(REST);
        }
        let pause = if self.unsettled.is_empty() { Duration::MAX } else { RETRY };
        let waited = match (watching, &mut self.watch) {
            (Ok(()), Some((_, watch))) => watch.next(Wait::from(pause).cancelled_by(added)),
            (watching, _) => watching.map(|()| None),
        };
        self.had_event = matches!(waited, Ok(Some(_)));
        match waited {
            Ok(Some(WatchEvent::Name(event))) if self.versions.contains_key(&event.name) => {
                self.unsettled.insert(event.name);
            }
            Ok(Some(WatchEvent::Name(_)) | None) | Err(Error::Cancelled { .. }) => {}
            Ok(Some(WatchEvent::Missed { .. })) => self.unsettle(),
            // The process has as many waits as it may have. The watch continues from its point.
            Err(Error::LimitReached(_)) => thread::sleep(RETRY),
            // For instance the broker does not answer, or has evicted this member.
            Err(error) => {
                tracing::debug!(%error, "cannot wait for the ends of left versions");
                self.unsettle();
                thread::sleep(RETRY);
            }
        }
    }

    /// Watches all names, and continues where an earlier watch was.
    fn watch(&mut self) -> Result<()> {
        let (Some((first, versions)), Some((last, _))) =
            (self.versions.first_key_value(), self.versions.last_key_value())
        else {
            return Ok(());
        };
        let Some(LeftVersion { version, .. }) = versions.first() else { return Ok(()) };
        let pattern = covering(first, last);
        let watch = match &self.watch {
            Some((watched, _)) if *watched == pattern => return Ok(()),
            Some((_, watch)) => version.domain.watch_after(&pattern, watch.point())?,
            None => version.domain.watch(&pattern)?,
        };
        self.watch = Some((pattern, watch));
        Ok(())
    }

    fn unsettle(&mut self) {
        self.unsettled.extend(self.versions.keys().cloned());
    }

    /// Asks about the unsettled versions, and lets go of those that have ended. Those about which the broker does not
    /// answer stay unsettled.
    fn settle(&mut self) {
        let mut unsettled = mem::take(&mut self.unsettled);
        while let Some(name) = unsettled.pop_first() {
            let Some(versions) = self.versions.remove(&name) else { continue };
            let mut needed = Vec::new();
            let mut versions = versions.into_iter();
            let mut is_silent = false;
            for mut left in versions.by_ref() {
                match left.fate() {
                    Ok(Fate::Needed) => needed.push(left),
                    Ok(Fate::Over) => left.let_go(),
                    Ok(Fate::Unknown) => left.stay(),
                    Err(error) => {
                        tracing::debug!(name, %error, "cannot ask for the leases on published memory");
                        self.unsettled.insert(name.clone());
                        needed.push(left);
                        // Other questions would each wait for an answer that does not come.
                        is_silent = matches!(error, Error::Unreachable(_));
                        if is_silent {
                            break;
                        }
                    }
                }
            }
            needed.extend(versions);
            if !needed.is_empty() {
                self.versions.insert(name, needed);
            }
            if is_silent {
                break;
            }
        }
        self.unsettled.append(&mut unsettled);
    }
}

/// Returns the narrowest pattern of all names from `first` to `last` in alphabetical order: they begin with what these
/// two have in common.
fn covering(first: &str, last: &str) -> String {
    if first == last {
        return first.to_owned();
    }
    let common = first.chars().zip(last.chars()).take_while(|(one, other)| one == other);
    common.map(|(one, _)| one).chain(['*']).collect()
}

#[cfg(test)]
mod tests {
    use partywall_wire::{Pattern, limits::MAX_NAME};

    use super::*;

    #[test]
    fn pattern_covers_all_names_and_no_more_than_it_must() {
        for (names, wanted) in [
            (&["torch/1"][..], "torch/1"),
            (&["torch/1", "torch/10", "torch/9"], "torch/*"),
            (&["a", "a/b", "a/b/c"], "a*"),
            (&["llm/weights", "torch/1"], "*"),
        ] {
            let names = BTreeSet::from_iter(names);
            let pattern = covering(names.first().unwrap(), names.last().unwrap());
            assert_eq!(pattern, wanted);
            let pattern = Pattern::new(&pattern).unwrap();
            assert!(names.iter().all(|name| pattern.matches(name)));
        }
        let long = "a".repeat(MAX_NAME);
        assert!(Pattern::new(&covering(&long[1..], &long)).is_ok(), "two names have a pattern, however long they are");
    }
}
