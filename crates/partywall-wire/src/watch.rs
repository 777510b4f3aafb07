//! Events of names in messages.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{
    Control,
    place::Place,
    withdrawal::{Notice, Then},
};

/// A point in a broker's sequence of events: after the event with this number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Point {
    /// The broker, as in its welcome.
    pub instance: u64,
    /// The number of events until then.
    pub sequence: u64,
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}-{}", self.instance, self.sequence)
    }
}

impl FromStr for Point {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = |(instance, sequence): (&str, &str)| {
            let instance = u64::from_str_radix(instance, 16).ok()?;
            Some(Self { instance, sequence: sequence.parse().ok()? })
        };
        let point = text.split_once('-').and_then(parse);
        point.ok_or_else(|| format!("{text:?} is no point to resume from: a point looks like 0123456789abcdef-42"))
    }
}

/// The kind of thing that has a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Named {
    /// A segment.
    Segment,
    /// A timeline.
    Timeline,
    /// A semaphore.
    Semaphore,
    /// A pool.
    Pool,
    /// A topic.
    Topic,
    /// A queue.
    Queue,
}

impl Named {
    /// Returns what a version with this control memory is.
    pub fn of(control: Option<&Control>) -> Self {
        match control {
            None => Self::Segment,
            Some(Control { topic: Some(_), .. }) => Self::Topic,
            Some(Control { queue: Some(_), .. }) => Self::Queue,
            Some(_) => Self::Pool,
        }
    }
}

names!(Named {
    Segment => "segment",
    Timeline => "timeline",
    Semaphore => "semaphore",
    Pool => "pool",
    Topic => "topic",
    Queue => "queue",
});

/// What happened to a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Change {
    /// It now exists, and did not before.
    Created {
        /// The process that created it.
        pid: u32,
    },
    /// The segment has a next version.
    Committed {
        /// The version.
        version: u64,
        /// Bytes of it, as allocated.
        bytes: u64,
        /// The process that committed it.
        pid: u32,
    },
    /// It no longer exists: it was removed, or its owner or last user dropped it.
    Withdrawn {
        /// The process that ended it.
        pid: u32,
    },
    /// Its readers are to drop it by a deadline. Follows [`Change::Withdrawn`].
    DeadlineSet {
        /// The process that withdrew it, the deadline, and what happens then.
        notice: Notice,
    },
    /// The deadline has passed.
    DeadlinePassed {
        /// What happens to the readers.
        then: Then,
        /// Members that still have it open.
        readers: u32,
    },
    /// Its owner is dead. An owned segment no longer exists; a timeline still does, without a writer.
    OwnerDied {
        /// The owner.
        pid: u32,
    },
    /// The writer of the timeline has lost its CUDA context.
    OwnerFaulted {
        /// The writer.
        pid: u32,
    },
    /// It no longer exists: its GPU was reset or has failed, or its driver was reloaded, and its memory is lost.
    DeviceLost {
        /// Where the memory was.
        place: Place,
    },
    /// The memory of a version was freed, because no member holds the version any more.
    Reclaimed {
        /// The version.
        version: u64,
        /// Bytes that the broker held for it.
        bytes: u64,
    },
}

names!(Change {
    Created => "created",
    Committed => "committed",
    Withdrawn => "withdrawn",
    DeadlineSet => "deadline_set",
    DeadlinePassed => "deadline_passed",
    OwnerDied => "owner_died",
    OwnerFaulted => "owner_faulted",
    DeviceLost => "device_lost",
    Reclaimed => "reclaimed",
});

impl Change {
    /// Returns the version that the change is about, and its bytes.
    pub fn version(self) -> Option<(u64, u64)> {
        match self {
            Self::Committed { version, bytes, .. } | Self::Reclaimed { version, bytes } => Some((version, bytes)),
            _ => None,
        }
    }

    /// Returns the process that made the change, or whose end caused it.
    pub fn pid(self) -> Option<u32> {
        match self {
            Self::Created { pid }
            | Self::Committed { pid, .. }
            | Self::Withdrawn { pid }
            | Self::OwnerDied { pid }
            | Self::OwnerFaulted { pid } => Some(pid),
            Self::DeadlineSet { notice } => Some(notice.pid),
            Self::DeadlinePassed { .. } | Self::DeviceLost { .. } | Self::Reclaimed { .. } => None,
        }
    }
}

/// Something that happened to a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NameEvent {
    /// Its number in this broker: events count from 1.
    pub sequence: u64,
    /// When, in milliseconds since 1970.
    pub at: u64,
    /// The kind of the named object.
    pub named: Named,
    /// The name.
    pub name: String,
    /// What happened.
    pub change: Change,
}

/// Why some events are missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Gap {
    /// The broker no longer had them: it keeps the last MiB of events.
    Behind {
        /// The number of missing events, of any name.
        events: u64,
    },
    /// The point belongs to another broker.
    OtherBroker,
}

/// The events since a point.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Happened {
    /// Why events before these are missing, if any are.
    pub gap: Option<Gap>,
    /// Some events, in order.
    pub events: Vec<NameEvent>,
    /// The point after these events.
    pub next: Point,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_are_text() {
        for point in [Point { instance: 0, sequence: 0 }, Point { instance: u64::MAX, sequence: u64::MAX }] {
            assert_eq!(point.to_string().parse(), Ok(point));
        }
        assert_eq!(Point { instance: 0xab, sequence: 7 }.to_string(), "00000000000000ab-7");
        for bad in ["", "7", "-", "x-7", "ab-", "ab-x", "ab-7-", "1ffffffffffffffff-1", "ab--1"] {
            assert!(bad.parse::<Point>().is_err_and(|why| why.contains("no point")), "{bad}");
        }
    }
}
