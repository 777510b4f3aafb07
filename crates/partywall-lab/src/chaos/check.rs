//! The checker: judges a history, and reads nothing else.
//!
//! A member that is killed between a call and the line about it leaves open whether the call took effect. A promise is
//! therefore checked only where lines on both sides prove it.

use std::collections::{BTreeMap, BTreeSet};

use super::{history::Record, *};

/// The result of a check.
pub(super) struct Check {
    pub(super) id: &'static str,
    pub(super) title: &'static str,
    pub(super) why: &'static str,
    pub(super) belief: Option<Belief>,
    pub(super) counted: String,
    pub(super) violations: Vec<String>,
}

impl Check {
    fn new(id: &'static str, title: &'static str, why: &'static str, belief: Option<Belief>) -> Self {
        Self { id, title, why, belief, counted: String::new(), violations: Vec::new() }
    }

    fn broken(&mut self, violation: String) {
        self.violations.push(violation);
    }
}

/// Runs all checks on a history.
pub(super) fn check(records: &[Record]) -> Vec<Check> {
    let mut records = records.to_vec();
    // Stable: the lines of one member are in order.
    records.sort_by_key(|record| record.at);
    let ends = Ends::of(&records);
    vec![
        versions(&records, &ends),
        messages(&records, &ends),
        views(&records, &ends),
        tasks(&records, &ends),
        holders(&records, &ends),
        hand_overs(&records),
        progress(&records),
        calls(&records, &ends),
        counts(&records, &ends),
    ]
}

/// The ends of members.
struct Ends {
    started: BTreeSet<u32>,
    killed: BTreeMap<u32, Moment>,
    evicted: BTreeMap<u32, Moment>,
    left: BTreeSet<u32>,
}

impl Ends {
    /// Returns whether a message of this number may be one that its publisher had not completed before it was killed.
    fn may_fail(&self, message: u64) -> bool {
        u32::try_from(message >> 32).is_ok_and(|publisher| self.killed.contains_key(&publisher))
    }

    fn of(records: &[Record]) -> Self {
        let with = |wanted: fn(&What) -> bool| records.iter().filter(move |record| wanted(&record.what));
        Self {
            started: with(|what| matches!(what, What::Started { .. })).map(|record| record.member).collect(),
            killed: with(|what| matches!(what, What::Killed)).map(|record| (record.member, record.at)).collect(),
            evicted: with(|what| matches!(what, What::Evicted)).map(|record| (record.member, record.at)).collect(),
            left: with(|what| matches!(what, What::Left)).map(|record| record.member).collect(),
        }
    }
}

fn versions(records: &[Record], ends: &Ends) -> Check {
    let mut check = Check::new(
        "versions",
        "Versions of one kept name",
        "A reader gets all of one version, and none that is older than one whose commit had returned. A watcher that \
         lives sees every commit.",
        Some(MIXED),
    );
    // The number of each version, as its writer or a reader says.
    let mut numbers: BTreeMap<u64, u64> = BTreeMap::new();
    let mut writing = BTreeSet::new();
    // The newest version that was surely committed before each moment.
    let mut committed: Vec<(Moment, u64)> = Vec::new();
    let mut seen: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
    let mut reads = 0;
    for Record { at, member, what } in records {
        let (number, version) = match what {
            What::Writing { number } => {
                writing.insert(*number);
                continue;
            }
            What::Saw { version } => {
                seen.entry(*member).or_default().push(*version);
                continue;
            }
            What::Committed { number, version, .. } => {
                let newest = committed.last().map_or(0, |(_, newest)| *newest);
                committed.push((*at, newest.max(*version)));
                (number, version)
            }
            What::Read { number, version, whole, began } => {
                reads += 1;
                if !whole {
                    check.broken(format!("reader {member} read a mix: version {version}, number {number}"));
                }
                let before = committed.partition_point(|(at, _)| at < began);
                let newest = before.checked_sub(1).map_or(0, |last| committed[last].1);
                if *version < newest {
                    check.broken(format!("reader {member} got version {version} after {newest} was committed"));
                }
                (number, version)
            }
            _ => continue,
        };
        if !writing.contains(number) {
            check.broken(format!("nobody wrote the number {number} of version {version}"));
        }
        if *numbers.entry(*version).or_insert(*number) != *number {
            check.broken(format!("version {version} is {} and {number}", numbers[version]));
        }
    }
    for Record { at, member, what } in records {
        if !matches!(what, What::Watching) || !ends.left.contains(member) {
            continue;
        }
        let gap = |record: &Record| record.member == *member && matches!(record.what, What::Gap);
        let seen = seen.remove(member).unwrap_or_default();
        if !seen.is_sorted_by(|one, next| one < next) {
            check.broken(format!("watcher {member} saw versions twice, or out of order"));
        }
        if records.iter().any(gap) {
            continue;
        }
        for record in records {
            if let What::Committed { version, began, .. } = record.what
                && began > *at
                && seen.binary_search(&version).is_err()
            {
                check.broken(format!("watcher {member} did not see version {version}"));
            }
        }
    }
    check.counted = format!("{} versions, {reads} reads", committed.len());
    check
}

fn messages(records: &[Record], ends: &Ends) -> Check {
    let mut check = Check::new(
        "messages",
        "Messages of a topic with `block` subscribers",
        "A `block` subscriber gets the messages of each publisher in order, without a gap and once. If it lives, it gets \
         every message that was published after it had subscribed.",
        Some(MESSAGE),
    );
    let mut publishing: BTreeMap<u64, Moment> = BTreeMap::new();
    let mut published = BTreeSet::new();
    let mut subscribed: BTreeMap<u32, Moment> = BTreeMap::new();
    let mut got: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
    let mut idle: BTreeMap<u32, Moment> = BTreeMap::new();
    for Record { at, member, what } in records {
        match what {
            What::Publishing { message } => drop(publishing.insert(*message, *at)),
            What::Published { message } => drop(published.insert(*message)),
            What::Subscribed => drop(subscribed.insert(*member, *at)),
            What::Idle => drop(idle.entry(*member).or_insert(*at)),
            What::Got { message, whole, failed } => {
                if !(*whole || *failed && ends.may_fail(*message)) {
                    check.broken(format!("subscriber {member} got a mix of messages"));
                }
                got.entry(*member).or_default().push(*message);
            }
            _ => {}
        }
    }
    let total: usize = got.values().map(Vec::len).sum();
    for (member, messages) in &got {
        // The last message of each publisher: messages of one publisher are numbered without gaps.
        let mut last: BTreeMap<u64, u64> = BTreeMap::new();
        for message in messages {
            if !publishing.contains_key(message) {
                check.broken(format!("subscriber {member} got message {message:#x}, which nobody published"));
            }
            match last.insert(message >> 32, *message) {
                Some(before) if *message <= before => {
                    check.broken(format!("subscriber {member} got message {message:#x} after {before:#x}"));
                }
                Some(before) if *message > before + 1 => {
                    check.broken(format!("subscriber {member} lost a message before {message:#x}"));
                }
                _ => {}
            }
        }
    }
    for (member, told) in &idle {
        if let Some((message, _)) = publishing.iter().find(|(_, at)| *at > told) {
            check.broken(format!("subscriber {member} was told that the topic is idle before message {message:#x}"));
        }
    }
    let mut owed = 0;
    for (member, since) in subscribed.iter().filter(|(member, _)| ends.left.contains(member)) {
        if !idle.contains_key(member) {
            check.broken(format!("subscriber {member} was not told that the last publisher had left"));
        }
        let got: BTreeSet<u64> = got.get(member).into_iter().flatten().copied().collect();
        for message in published.iter().filter(|message| publishing.get(message).is_some_and(|at| at > since)) {
            owed += 1;
            if !got.contains(message) {
                check.broken(format!("subscriber {member} lost message {message:#x}"));
            }
        }
    }
    check.counted = format!("{} messages, {total} times received, {owed} of these owed", published.len());
    check
}

fn views(records: &[Record], ends: &Ends) -> Check {
    let mut check = Check::new(
        "views",
        "Messages of a topic with subscribers that may miss some",
        "A subscriber under `drop-oldest` or `latest` gets whole messages in order and once, knows how many it has \
         missed, and none changes while it holds it.",
        Some(MESSAGE),
    );
    let mut publishing = BTreeSet::new();
    // The position of each viewer's last message, and the last message of each publisher.
    let mut last: BTreeMap<u32, (Option<u64>, BTreeMap<u64, u64>)> = BTreeMap::new();
    let mut viewed = 0;
    for Record { member, what, .. } in records {
        match what {
            What::Publishing { message } => drop(publishing.insert(*message)),
            What::Joined => drop(last.remove(member)),
            What::Viewed { message, position, missed, whole, failed } => {
                viewed += 1;
                if !(*whole || *failed && ends.may_fail(*message)) {
                    check.broken(format!("viewer {member} held a mix of messages"));
                }
                if !publishing.contains(message) {
                    check.broken(format!("viewer {member} got message {message:#x}, which nobody published"));
                }
                let (before, messages) = last.entry(*member).or_default();
                if before.is_some_and(|before| before + 1 + missed != *position) {
                    check.broken(format!(
                        "viewer {member} missed {missed} before position {position}, after {before:?}"
                    ));
                }
                *before = Some(*position);
                if messages.insert(message >> 32, *message).is_some_and(|before| before >= *message) {
                    check.broken(format!("viewer {member} got message {message:#x} twice, or out of order"));
                }
            }
            _ => {}
        }
    }
    check.counted = format!("{viewed} messages");
    check
}

fn tasks(records: &[Record], ends: &Ends) -> Check {
    let mut check = Check::new(
        "tasks",
        "Tasks of a queue",
        "Each task of a submitter that lives has one result, and it is right, however many workers were killed.",
        Some(TASK),
    );
    let mut submitting = BTreeSet::new();
    let mut submitted: BTreeMap<u64, u32> = BTreeMap::new();
    let mut results = BTreeSet::new();
    for Record { member, what, .. } in records {
        match what {
            What::Submitting { task } => drop(submitting.insert(*task)),
            What::Submitted { task } => drop(submitted.insert(*task, *member)),
            What::Result { task, right } => {
                if !right {
                    check.broken(format!("the result of task {task:#x} is wrong"));
                }
                if !submitting.contains(task) {
                    check.broken(format!("nobody submitted task {task:#x}, which has a result"));
                }
                if !results.insert(*task) {
                    check.broken(format!("task {task:#x} has two results"));
                }
            }
            _ => {}
        }
    }
    for (task, member) in &submitted {
        if ends.left.contains(member) && !results.contains(task) {
            check.broken(format!("task {task:#x} of submitter {member} is lost"));
        }
    }
    check.counted = format!("{} tasks, {} results", submitted.len(), results.len());
    check
}

/// Checks permits, blocks and claims. A member surely had one from the line after taking it to the line before giving
/// it back, or to its kill.
fn holders(records: &[Record], ends: &Ends) -> Check {
    let mut check = Check::new(
        "holders",
        "Permits of a semaphore, blocks of a pool, the claim to build a name",
        "No more members have a permit than there are permits, only one has a block and writes it, and only one builds \
         an owned name. A process that opens it gets all of it.",
        Some(PERMIT),
    );
    let mut permits: BTreeSet<u32> = BTreeSet::new();
    let mut blocks: BTreeMap<u32, u32> = BTreeMap::new();
    let mut builder: Option<(u32, Moment)> = None;
    // An allocation that fails gives the claim back before there is a line about it.
    let given_back = |Record { member, what, .. }: &Record| match what {
        What::Lacked { call, began, .. } if call == "allocate" => Some((*member, *began)),
        _ => None,
    };
    let given_back: BTreeSet<(u32, Moment)> = records.iter().filter_map(given_back).collect();
    let mut built = BTreeSet::new();
    let mut acquired = 0;
    let mut took = 0;
    let mut claimed = 0;
    for Record { at, member, what } in records {
        let is_dead = ends.killed.get(member).is_some_and(|killed| killed <= at);
        match what {
            What::Killed => {
                permits.remove(member);
                blocks.retain(|_, holder| holder != member);
                builder = builder.filter(|(builder, _)| builder != member);
            }
            // Its claim ends at once, its memory only when it is dead.
            What::Evicted => builder = builder.filter(|(builder, _)| builder != member),
            What::Acquired if !is_dead => {
                acquired += 1;
                permits.insert(*member);
                if permits.len() > PERMITS_MOST as usize {
                    check.broken(format!("{} members had one of {PERMITS_MOST} permits: {permits:?}", permits.len()));
                }
            }
            What::Releasing => drop(permits.remove(member)),
            What::Took { block } if !is_dead => {
                took += 1;
                if let Some(other) = blocks.insert(*block, *member) {
                    check.broken(format!("members {other} and {member} had block {block}"));
                }
            }
            What::Claimed if !is_dead && ends.evicted.get(member).is_none_or(|evicted| evicted > at) => {
                claimed += 1;
                if let Some((other, since)) = builder.replace((*member, *at))
                    && given_back.range((other, since)..=(other, *at)).next().is_none()
                {
                    check.broken(format!("members {other} and {member} built the same name"));
                }
            }
            What::Ending { number } => {
                builder = builder.filter(|(builder, _)| builder != member);
                built.insert(*number);
            }
            What::Opened { number, whole } if !whole || !built.contains(number) => {
                check.broken(format!("member {member} opened {number}, which nobody built, or a part of it"));
            }
            What::Giving { block, whole } => {
                blocks.remove(block);
                if !whole {
                    check.broken(format!("block {block} changed while member {member} had it"));
                }
            }
            _ => {}
        }
    }
    check.counted = format!("{acquired} permits acquired, {took} blocks taken, {claimed} claims");
    check
}

fn hand_overs(records: &[Record]) -> Check {
    let mut check = Check::new(
        "hand-overs",
        "Blocks that members offer each other",
        "An offered block is accepted at most once, with the words that were in it.",
        Some(PERMIT),
    );
    let mut offered: BTreeMap<(u32, u64), u64> = BTreeMap::new();
    let mut accepted = BTreeSet::new();
    for Record { member, what, .. } in records {
        match what {
            What::Offered { block, generation, mark } => drop(offered.insert((*block, *generation), *mark)),
            What::Accepted { block, generation, mark } => {
                let offer = (*block, *generation);
                if offered.get(&offer) != Some(mark) {
                    check
                        .broken(format!("member {member} accepted block {block} with {mark:#x}, which nobody offered"));
                }
                if !accepted.insert(offer) {
                    check.broken(format!("block {block} was accepted twice"));
                }
            }
            _ => {}
        }
    }
    check.counted = format!("{} blocks offered, {} accepted", offered.len(), accepted.len());
    check
}

fn progress(records: &[Record]) -> Check {
    let mut check = Check::new(
        "progress",
        "What the others do while a member is stopped",
        "A stopped member holds up nobody who does not wait for it: others publish, read, do tasks, and take permits and \
         blocks.",
        Some(STOPPED),
    );
    let mut outlasted = 0;
    for (index, stop) in records.iter().enumerate() {
        let What::Stopped { until: Some(until) } = stop.what else { continue };
        let after = &records[index + 1..];
        let ends =
            |record: &Record| record.member == stop.member && matches!(record.what, What::Continued | What::Killed);
        let Some(end) = after.iter().position(ends) else { continue };
        outlasted += 1;
        if !after[..end].iter().any(|record| until.is_shown_by(record, stop.member)) {
            check.broken(format!("no other member {until:?} while member {} was stopped", stop.member));
        }
    }
    check.counted = format!("{outlasted} members were stopped until others had gone on");
    check
}

fn calls(records: &[Record], ends: &Ends) -> Check {
    let mut check = Check::new(
        "calls",
        "Calls of members",
        "Each call returns within its time-out and the time that its process was stopped. None fails because of what \
         happened to another process, or to a connection, except those of an evicted member. A process that gets no further descriptors or memory is told \
         so, and only then.",
        None,
    );
    // For each member and resource: whether it is limited, and when the last limit ended.
    let mut limits: Vec<(u32, Resource, Option<Moment>)> = Vec::new();
    let mut lacked = 0;
    for Record { at, member, what } in records {
        let is_evicted = ends.evicted.get(member).is_some_and(|evicted| evicted <= at);
        match what {
            What::Failed { .. } if is_evicted => {}
            What::Late { call, ms } => check.broken(format!("`{call}` of member {member} took {ms} ms")),
            What::Failed { call, why } => check.broken(format!("`{call}` of member {member} failed: {why}")),
            What::Limited { of } => limits.push((*member, *of, None)),
            What::Lifted { of } => {
                let theirs = limits.iter_mut().filter(|limit| (limit.0, limit.1) == (*member, *of));
                theirs.filter(|limit| limit.2.is_none()).for_each(|limit| limit.2 = Some(*at));
            }
            What::Lacked { call, of, began } => {
                lacked += 1;
                let limit = |limit: &&(u32, Resource, Option<Moment>)| (limit.0, limit.1) == (*member, *of);
                if !limits.iter().filter(limit).any(|(_, _, ended)| ended.is_none_or(|ended| ended >= *began)) {
                    check.broken(format!("`{call}` of member {member} had no {of:?}, which it was not left without"));
                }
            }
            _ => {}
        }
    }
    check.counted = format!("{} lines, {lacked} calls that lacked something", records.len());
    check
}

fn counts(records: &[Record], ends: &Ends) -> Check {
    let mut check = Check::new(
        "counts",
        "What is left when all members have left",
        "After all members have left, permits, blocks and tasks are all there, and the broker has as many descriptors as \
         before the first member.",
        Some(RESOURCES),
    );
    for member in &ends.started {
        if !ends.killed.contains_key(member) && !ends.left.contains(member) {
            check.broken(format!("member {member} did not come to its end"));
        }
    }
    let mut counted = 0;
    for record in records {
        match &record.what {
            What::Counted { of, least, most, found } => {
                counted += 1;
                if !(least..=most).contains(&found) {
                    check.broken(format!("{of}: {found}, not {least} to {most}"));
                }
            }
            What::End { kills } if *kills != ends.killed.len() as u64 => {
                check.broken(format!("{} of {kills} kills are in the history", ends.killed.len()));
            }
            _ => {}
        }
    }
    if counted == 0 {
        check.broken("nothing was counted at the end".to_owned());
    }
    check.counted = format!("{} members, {counted} counts at the end", ends.started.len());
    check
}

#[cfg(test)]
mod tests;
