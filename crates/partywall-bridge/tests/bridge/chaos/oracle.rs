//! The oracle: judges what arrived by what was published, and by what was struck meanwhile.

use std::collections::BTreeMap;

/// What happened, in the order in which this process learned of it.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Record {
    /// A subscriber at the origin, which misses nothing, has received a sample.
    Published { origin: usize, number: u64 },
    /// A subscriber at another host, which misses nothing there, has received it.
    Arrived { origin: usize, at: usize, arrival: Arrival },
    /// A bridge was killed. What its publisher of the samples of each origin has published has a lower id than this one.
    Killed { host: usize, ids: BTreeMap<usize, u64> },
    /// When the bridge of an origin was killed, so many samples were published there.
    KilledAt { origin: usize, published: u64 },
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Arrival {
    /// The publisher of the bridge.
    pub(super) publisher: u64,
    pub(super) sequence: u64,
    pub(super) number: u64,
    /// Whether type, shape and bytes are right.
    pub(super) is_right: bool,
}

/// What a judged stream has seen.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub(super) struct Counts {
    pub(super) arrived: u64,
    pub(super) missed: u64,
}

/// How far the sender's window and the ring reach: a bridge that is killed may lose what is so old.
const REACH: u64 = 512;

/// Judges the samples of an origin at another host. `blocks` says that nothing may be missed unless the bridge of the
/// origin was killed.
///
/// # Errors
/// Says what is lost, doubled, out of order or wrong.
pub(super) fn judge(records: &[Record], origin: usize, at: usize, blocks: bool) -> Result<Counts, String> {
    let mut counts = Counts::default();
    let mut next_published = 0;
    for record in records {
        if let Record::Published { origin: of, number } = record
            && *of == origin
        {
            if *number != next_published {
                return Err(format!("sample {number} comes where {next_published} is expected at its origin"));
            }
            next_published += 1;
        }
    }
    let kills: Vec<u64> = records
        .iter()
        .filter_map(|record| match record {
            Record::KilledAt { origin: of, published } if *of == origin => Some(*published),
            _ => None,
        })
        .collect();
    // The lives of the importing bridge.
    let lives: Vec<u64> = records
        .iter()
        .filter_map(|record| match record {
            Record::Killed { host, ids } if *host == at => ids.get(&origin).copied(),
            _ => None,
        })
        .collect();
    let life = |publisher: u64| lives.partition_point(|id| *id <= publisher);
    let mut previous: Option<Arrival> = None;
    for record in records {
        let Record::Arrived { origin: of, at: to, arrival } = record else { continue };
        if (*of, *to) != (origin, at) {
            continue;
        }
        counts.arrived += 1;
        if !arrival.is_right {
            return Err(format!("{arrival:?} is not what was published"));
        }
        if arrival.number >= next_published {
            return Err(format!("{arrival:?} was not published"));
        }
        if let Some(before) = previous.replace(*arrival) {
            if arrival.number <= before.number {
                return Err(format!("{arrival:?} comes after {before:?}"));
            }
            let missed = arrival.number - before.number - 1;
            let said = match arrival.publisher == before.publisher {
                true => arrival.sequence.checked_sub(before.sequence + 1),
                false => Some(arrival.sequence),
            };
            // Another life of the bridge knows nothing of the one before.
            if life(before.publisher) != life(arrival.publisher) {
                continue;
            }
            counts.missed += missed;
            if said != Some(missed) {
                return Err(format!("{missed} samples are missing between {before:?} and {arrival:?}, not {said:?}"));
            }
            let is_lost_by_a_kill = || kills.iter().any(|at| before.number <= *at && *at <= arrival.number + REACH);
            if blocks && missed > 0 && !is_lost_by_a_kill() {
                return Err(format!("{missed} samples are lost between {before:?} and {arrival:?}"));
            }
        }
    }
    let last = previous.map(|arrival| arrival.number + 1);
    if last != Some(next_published) {
        return Err(format!("{next_published} samples were published, and the last one that arrived was {previous:?}"));
    }
    Ok(counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrived(publisher: u64, sequence: u64, number: u64) -> Record {
        Record::Arrived { origin: 0, at: 1, arrival: Arrival { publisher, sequence, number, is_right: true } }
    }

    /// Ten samples, of which 4 and 5 are lost with the origin's bridge, and 8 with that of the other host.
    fn history() -> Vec<Record> {
        let mut records: Vec<_> = (0..10).map(|number| Record::Published { origin: 0, number }).collect();
        records.extend([0, 1, 2, 3].map(|number| arrived(7, number, number)));
        records.push(Record::KilledAt { origin: 0, published: 5 });
        records.extend([arrived(8, 2, 6), arrived(8, 3, 7)]);
        records.push(Record::Killed { host: 1, ids: BTreeMap::from([(0, 20)]) });
        records.push(arrived(21, 0, 9));
        records
    }

    #[test]
    fn what_a_kill_explains_is_accepted_and_counted() {
        assert_eq!(judge(&history(), 0, 1, true), Ok(Counts { arrived: 7, missed: 2 }));
        assert!(judge(&history(), 0, 2, true).unwrap_err().contains("None"), "nothing has arrived at the third host");
    }

    #[test]
    fn each_damage_is_found() {
        let damaged = |change: fn(&mut Vec<Record>)| {
            let mut records = history();
            change(&mut records);
            judge(&records, 0, 1, true).unwrap_err()
        };
        // Places: 10 samples are published, 0 to 3 arrive, a kill, 6 and 7 arrive, a kill, 9 arrives.
        assert!(
            damaged(|records| drop(records.splice(11..13, [arrived(7, 1, 2)]))).contains("not Some(0)"),
            "one is lost"
        );
        assert!(damaged(|records| records[11] = arrived(7, 1, 0)).contains("comes after"), "one comes twice");
        assert!(damaged(|records| records.swap(11, 12)).contains("comes after"), "two are swapped");
        assert!(damaged(|records| records[15] = arrived(8, 1, 6)).contains("not Some(1)"), "a gap is miscounted");
        assert!(damaged(|records| drop(records.remove(14))).contains("are lost"), "nothing explains the gap");
        assert!(damaged(|records| drop(records.remove(17))).contains("not Some(0)"), "nobody was killed");
        assert!(damaged(|records| drop(records.pop())).contains("the last one"), "the end is lost");
        assert!(damaged(|records| drop(records.remove(4))).contains("at its origin"), "one is lost at the origin");
        let wrong = |records: &mut Vec<Record>| {
            let Record::Arrived { arrival, .. } = &mut records[12] else { panic!() };
            arrival.is_right = false;
        };
        assert!(damaged(wrong).contains("not what was published"));
    }
}
