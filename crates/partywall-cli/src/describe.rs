//! Objects of the domain as JSON and as text. The JSON keys are stable; the documentation of each command's module
//! lists them. Where this module has no function for it, the JSON of an object is that of its type in
//! [`partywall::info`]:
//!
//! - a [`TimelineInfo`]: `name`, `incarnation` (the number of its writer, from 1), `value` (the last signalled value),
//!   `announced` (the highest promised value), `writer` (a pid or null), `ending` (null, `owner_died`, `owner_faulted`,
//!   `closed`, `abandoned`, `broker_gone` or `evicted`), `leases`;
//! - a [`SemaphoreInfo`]: `name`, `maximum` (permits), `held` (permits), `waiting` (acquirers), `leases`;
//! - a [`QueueHolder`], a queue that holds a segment: `name`, `version`, `attachment` (the number by which its tasks
//!   name the segment);
//! - a [`HolderInfo`]: `pid`, `command`, `leases`, `blocks` (if a pool, topic or queue is shown), `tasks` (if a queue
//!   is shown: the tasks that it works on), `waiting` (its threads that wait for a block or permit), `unproven`
//!   (whether it is dead and what it holds is in quarantine);
//! - a [`MemberInfo`]: `member`, `pid`, `uid`, `command`, `state` (`alive`, `hung`, `lost_context`, `suspect`,
//!   `evicted`, `held_by_child`, `unproven`, `dead`), `doubt` (why its death does not prove that its work has ended:
//!   `mps`, `no_pidfd` or null), `mps` (the directory of the MPS daemon whose client it is, or null), `quiet_ms` (since
//!   its last heartbeat; null if none is expected), `leases`, `timelines` (that it writes), `permits` (of semaphores)
//!   and `blocks` (of pools and topics; each null if there are too many to count), `bytes`, `since_ms` (since 1970),
//!   `waits` (for names, at most four, and the longest for a timeline once it has lasted for about half a second: a
//!   list of `on`, `commit`, `withdrawal`, `growth` or `timeline`; `name`; `target`, the version or null, or the value;
//!   `by`, the pid of the process that can end it or null; `ms`, for how long or null), `simulated` (whether it runs on
//!   the simulated CUDA driver).

pub(crate) mod control;

use partywall::{
    Domain, Limit, Place, Then, TimelineEnding, bytes,
    info::{
        Awaited, Enforcement, HolderInfo, Kind, MemberInfo, MemberState, NameInfo, Named, Notice, ObjectHolder,
        ObjectInfo, Promises, QueueHolder, SegmentInfo, SemaphoreInfo, StatusInfo, TimelineInfo, VersionInfo, WaitInfo,
    },
};
use serde_json::{Value, json};

use crate::text::{self, count};

/// Returns a version: `version`, `kind`, `place`, `bytes`, `tensors`, `mutable`, `reserved` (bytes that it may grow to,
/// 0 if it cannot grow), `growths` (how often it has grown), `lifetime` (`kept`, `owned` or `shared`), `committer` (a
/// pid), `uid` (of the user to which it belongs), `shared` (whether other users may open it), `leases`,
/// `committed_at_ms` (since 1970), `notice` (of its withdrawal, if that has a deadline: `pid` of the process that
/// withdrew it, `at_ms`, `until_ms`, `then`: `wait`, `stale` or `evict`; else null), `lost` (whether its memory is
/// lost), `control` (of a pool, topic or queue [`control::shape`], else null).
pub(crate) fn version(version: &VersionInfo) -> Value {
    let mut value = json!(version);
    value["place"] = json!(place(version.place.into()));
    value["control"] = version.control.as_ref().map_or(Value::Null, control::shape);
    value
}

/// Returns what a version's kind of memory promises: `read_only` (enforced by `kernel`, `hardware`, or only by
/// `convention`; null for a mutable version), `outlives_publisher`, `hides_neighbours`.
pub(crate) fn promises_value(kind: Kind, mutable: bool) -> Value {
    let Promises { read_only, outlives_publisher, hides_neighbours, .. } = Promises::of(kind);
    let read_only = match read_only {
        Enforcement::Kernel => "kernel",
        Enforcement::Hardware => "hardware",
        Enforcement::Convention => "convention",
    };
    json!({
        "read_only": (!mutable).then_some(read_only),
        "outlives_publisher": outlives_publisher,
        "hides_neighbours": hides_neighbours,
    })
}

/// Returns these promises as text for people.
pub(crate) fn promises(kind: Kind, mutable: bool) -> String {
    let Promises { read_only, outlives_publisher, hides_neighbours, .. } = Promises::of(kind);
    let read_only = match read_only {
        _ if mutable => "",
        Enforcement::Kernel => "frozen by the kernel; ",
        Enforcement::Hardware if kind == Kind::Pinned => "frozen by the CPU and the GPU, for each reader; ",
        Enforcement::Hardware => "frozen by the GPU, for each reader; ",
        Enforcement::Convention => "read-only by convention; ",
    };
    let life = if outlives_publisher { "outlives its publisher" } else { "goes with its publisher" };
    let neighbours =
        if hides_neighbours { "" } else { "; readers can also reach other memory in the same allocations" };
    format!("{read_only}{life}{neighbours}")
}

/// Returns a name in a listing: `name`, `latest` (a version, or null for a removed name whose versions are still held),
/// `older_versions`, `older_bytes`, `notice` and `lost` (as of a version), `usage` (of a pool, topic or queue
/// [`control::usage`], else null).
pub(crate) fn name(name: &NameInfo) -> Value {
    json!({
        "name": name.name,
        "latest": name.latest.as_ref().map(version),
        "older_versions": name.older,
        "older_bytes": name.older_bytes,
        "notice": name.notice,
        "lost": name.lost,
        "usage": name.usage.as_ref().map(control::usage),
    })
}

/// Returns the version of another host that a version is a copy of, and the root of its content, as `pull` writes them.
pub(crate) fn origin(info: &SegmentInfo) -> Option<(String, String)> {
    let value = |key| info.table.metadata().find(|(found, _)| *found == key).map(|(_, value)| value);
    Some((shorten(value("origin")?, 200), shorten(value("root")?, 64)))
}

/// Returns how a name has ended that has no latest version.
pub(crate) fn gone(name: &NameInfo) -> &'static str {
    if name.lost { "lost" } else { "removed" }
}

/// Returns a withdrawal with a deadline: `its readers have 9 s to drop it, then they are evicted`.
pub(crate) fn notice(notice: &Notice) -> String {
    let left = text::until(notice.until);
    match (notice.then, left.is_zero()) {
        (then, false) => {
            let then = match then {
                Then::Wait => "its memory stays until the last of them does",
                Then::Stale => "they get no new view of it",
                Then::Evict => "they are evicted",
            };
            format!("its readers have {} to drop it, then {then}", text::duration(left))
        }
        (Then::Wait, true) => "its readers had to drop it by now".into(),
        (Then::Stale, true) => "its readers get no new view of it".into(),
        (Then::Evict, true) => "its readers were evicted".into(),
    }
}

/// Returns the writer of a timeline, or why it has none.
pub(crate) fn writer(timeline: &TimelineInfo) -> String {
    match (timeline.ending, timeline.writer) {
        (Some(ending), _) => format!("none: {}", why_none(ending)),
        (None, Some(pid)) => format!("pid {pid}"),
        (None, None) => "none yet".into(),
    }
}

/// Returns a timeline in one line: `grads, writer: pid 123`.
pub(crate) fn timeline_line(timeline: &TimelineInfo) -> String {
    format!("{}, writer: {}", timeline.name, writer(timeline))
}

fn why_none(ending: TimelineEnding) -> &'static str {
    match ending {
        TimelineEnding::OwnerDied => "it died",
        TimelineEnding::OwnerFaulted => "its writer lost its CUDA context",
        TimelineEnding::Closed => "it has closed",
        TimelineEnding::Abandoned => "abandoned",
        TimelineEnding::BrokerGone => "a broker was gone",
        TimelineEnding::Evicted => "it was evicted",
        _ => "for a reason that this version does not know",
    }
}

/// Returns the timelines and the semaphores separately.
pub(crate) fn apart(objects: &[ObjectInfo]) -> (Vec<&TimelineInfo>, Vec<&SemaphoreInfo>) {
    let mut timelines = Vec::new();
    let mut semaphores = Vec::new();
    for object in objects {
        match object {
            ObjectInfo::Timeline(timeline) => timelines.push(timeline),
            ObjectInfo::Semaphore(semaphore) => semaphores.push(semaphore),
            _ => {}
        }
    }
    (timelines, semaphores)
}

/// Returns the kind of a name: `segment`, `pool`, `topic`, `queue`, `timeline` or `semaphore`; `None` if the name does
/// not exist.
pub(crate) fn kind_of(domain: &Domain, name: &str) -> Option<&'static str> {
    let names = domain.names().unwrap_or_default();
    if let Some(latest) = names.iter().find(|info| info.name == name).and_then(|info| info.latest.as_ref()) {
        return Some(Named::of(latest.control.as_ref()).name());
    }
    let objects = domain.objects().unwrap_or_default();
    match objects.iter().find(|object| object.name() == name)? {
        ObjectInfo::Timeline(_) => Some("timeline"),
        ObjectInfo::Semaphore(_) => Some("semaphore"),
        _ => None,
    }
}

/// Returns a holder of a timeline or semaphore: the keys of a [`HolderInfo`], and `permits` (of a semaphore).
pub(crate) fn object_holder(held: &ObjectHolder) -> Value {
    let mut value = json!(held.holder);
    value["permits"] = json!(held.permits);
    value
}

/// Returns a place: `host`, `pinned:N` on NUMA node N, or a GPU's UUID.
pub(crate) fn place(place: Place) -> String {
    place.to_string()
}

/// Returns what the broker holds at a place, in bytes; on a NUMA node with the limit, if it has one of its own.
pub(crate) fn held(status: &StatusInfo, place: Place, held: u64) -> String {
    let limit = |wanted| status.limits.iter().find(|(limit, _)| *limit == wanted).map_or(u64::MAX, |(_, value)| *value);
    match (place, limit(Limit::Pinned(None))) {
        (Place::Pinned(_), allowed) if allowed < limit(Limit::Bytes) => {
            format!("{} of {}", bytes(held), bytes(allowed))
        }
        _ => bytes(held),
    }
}

/// Returns what the broker holds at each place, for JSON.
pub(crate) fn ledger(status: &StatusInfo) -> Vec<Value> {
    let rows = status.bytes.iter().map(|(at, bytes)| json!({ "place": place((*at).into()), "bytes": bytes }));
    rows.collect()
}

/// Returns the key of a limit in JSON.
pub(crate) fn limit(limit: Limit) -> &'static str {
    match limit {
        Limit::Bytes => "bytes",
        Limit::Pinned(_) => "pinned_bytes",
        Limit::Names => "names",
        Limit::Fds => "fds",
        Limit::Clients => "clients",
        Limit::Message => "message",
        Limit::Waits => "waits",
        Limit::WaitsOfMember => "waits_per_member",
        Limit::Leases => "leases",
        Limit::LeasesOfMember => "leases_per_member",
        Limit::Timelines => "timelines",
        Limit::Semaphores => "semaphores",
        _ => "unknown",
    }
}

/// Returns a member's state in a word or two.
pub(crate) fn state(state: MemberState) -> String {
    state.name().replace('_', " ")
}

/// Returns the meaning of a state other than alive.
pub(crate) fn meaning(state: MemberState) -> Option<&'static str> {
    Some(match state {
        MemberState::Alive => return None,
        MemberState::Hung => "it has sent no heartbeat for two seconds; it is stopped, or gets no CPU time",
        MemberState::LostContext => "its CUDA context is broken; the broker reclaims its memory when its process ends",
        MemberState::Suspect => "its connection has ended, but its process still runs; it may reconnect",
        MemberState::Evicted => "the broker refuses its requests; the broker reclaims its memory when its process ends",
        MemberState::HeldByChild => "it has exited, but a forked child holds its connection and perhaps its memory",
        MemberState::Unproven => {
            "it is dead, but its GPU work may still run, so its memory stays in quarantine; `partywall rm --unproven PID` frees it"
        }
        MemberState::Dead => "it is dead, and the broker is reclaiming its memory",
        _ => "a state that this version does not know",
    })
}

/// Returns what keeps the memory of a removed name: `14 GiB stay until pid 123 (python train.py) drops it`; `None` if
/// no memory stays.
pub(crate) fn what_stays(left: u64, holders: &[HolderInfo], queues: &[QueueHolder]) -> Option<String> {
    if left == 0 && holders.is_empty() && queues.is_empty() {
        return None;
    }
    let stay = format!("{} {}", bytes(left), if left == 1 { "stays" } else { "stay" });
    let (dead, living): (Vec<_>, Vec<_>) = holders.iter().partition(|holder| holder.unproven);
    let until: Vec<_> =
        [(!living.is_empty()).then(|| drops_it(&living)), detaches_it(queues)].into_iter().flatten().collect();
    Some(match (&until[..], &dead[..]) {
        ([], []) => format!("{stay} for a moment, until the dead are reclaimed"),
        ([], dead) => format!("{stay} in quarantine: {}", without_proof(dead)),
        (until, []) => format!("{stay} until {}", until.join(" and ")),
        (until, dead) => format!("{stay} until {}; {}", until.join(" and "), without_proof(dead)),
    })
}

/// Returns which queues keep the memory: `queue work@1 ends or detaches it`.
fn detaches_it(queues: &[QueueHolder]) -> Option<String> {
    let mut names: Vec<_> = queues.iter().map(|queue| with_version(&queue.name, queue.version)).collect();
    // A queue may hold several versions of one name.
    names.sort();
    names.dedup();
    if let [name] = &names[..] {
        return Some(format!("queue {name} ends or detaches it"));
    }
    let rest = names.split_off(names.len().min(NAMED)).len();
    let rest = if rest > 0 { format!(" and {rest} more") } else { String::new() };
    (!names.is_empty()).then(|| format!("queues {}{rest} end or detach it", names.join(", ")))
}

/// Returns `NAME@VERSION`.
pub(crate) fn with_version(name: &str, version: u64) -> String {
    format!("{name}@{version}")
}

fn drops_it(holders: &[&HolderInfo]) -> String {
    format!("{} {}", people(holders), if holders.len() == 1 { "drops it" } else { "drop it" })
}

fn without_proof(holders: &[&HolderInfo]) -> String {
    let (are, rest) = if let [one] = holders { ("is", format!(" {}", one.pid)) } else { ("are", String::new()) };
    format!("{} {are} dead without proof (`partywall rm --unproven{rest}`)", people(holders))
}

/// Returns the first holders and the number of the others: `pid 123 (python train.py), pid 5 (x) and 2 more`.
fn people(holders: &[&HolderInfo]) -> String {
    let mut who: Vec<_> = holders.iter().take(NAMED).map(|h| process(h.pid, &h.command, SHORT)).collect();
    if holders.len() > NAMED {
        who.push(format!("{} more", holders.len() - NAMED));
    }
    match who.split_last() {
        None => String::new(),
        Some((last, [])) => last.clone(),
        Some((last, first)) => format!("{} and {last}", first.join(", ")),
    }
}

/// Returns a process with its command: `pid 123 (python train.py)`.
pub(crate) fn process(pid: u32, command: &str, width: usize) -> String {
    let command = self::command(command, width);
    if command.is_empty() { format!("pid {pid}") } else { format!("pid {pid} ({command})") }
}

/// Returns a command line in at most `width` characters, without the path of the program, which would leave too little
/// room for the arguments.
pub(crate) fn command(command: &str, width: usize) -> String {
    let program = command.split(' ').next().unwrap_or_default();
    shorten(&command[program.rfind('/').map_or(0, |slash| slash + 1)..], width)
}

/// Returns a name, its latest version and size in one line: `llm@3, 14 GiB, kept`.
pub(crate) fn name_line(name: &NameInfo) -> String {
    match &name.latest {
        Some(latest) => {
            let version = with_version(&name.name, latest.version);
            let size = bytes(latest.bytes);
            format!("{version}, {size} on {}, {}", place(latest.place.into()), latest.lifetime.name())
        }
        None => {
            let size = bytes(name.older_bytes);
            let versions = count(name.older.into(), "version");
            let notice = name.notice.map_or_else(String::new, |notice| format!("; {}", self::notice(&notice)));
            format!("{} ({}), {size} in {versions} still held{notice}", name.name, gone(name))
        }
    }
}

/// Returns a member in one line: `pid 123 (python train.py), 2 leases`.
pub(crate) fn member_line(member: &MemberInfo) -> String {
    let state = if member.state == MemberState::Alive { String::new() } else { format!(", {}", state(member.state)) };
    let who = process(member.pid, &member.command, LONG);
    format!("{who}, {}{state}", count(member.leases.into(), "lease"))
}

/// Returns the MPS daemons of members, each with the pids of its clients, in the order of the members.
pub(crate) fn mps_daemons<'a>(members: impl IntoIterator<Item = &'a MemberInfo>) -> Vec<(&'a str, Vec<u32>)> {
    let mut daemons: Vec<(&str, Vec<u32>)> = Vec::new();
    for member in members {
        let Some(pipes) = &member.mps else { continue };
        match daemons.iter_mut().find(|(known, _)| known == pipes) {
            Some((_, pids)) if pids.contains(&member.pid) => {}
            Some((_, pids)) => pids.push(member.pid),
            None => daemons.push((pipes, vec![member.pid])),
        }
    }
    daemons
}

/// Returns the sentence about a daemon of [`mps_daemons`].
pub(crate) fn mps_line((pipes, pids): &(&str, Vec<u32>)) -> String {
    let pids = pids.iter().map(|pid| format!("pid {pid}")).collect::<Vec<_>>().join(", ");
    // The path is what a member says.
    format!("under the MPS daemon at {}: {pids}", shorten(pipes, LONG))
}

/// The price of MPS, for those whose members are under a daemon of [`mps_daemons`].
pub(crate) const MPS_PRICE: &str = "under MPS a fault, or a kill in a long kernel, can end CUDA in all clients of a daemon; \
    a client's death does not prove that its GPU work has ended, so what it held goes to quarantine unless it disconnected \
    cleanly (`partywall rm --unproven` frees it)";

/// Returns at most `width` characters of a text, on one line, without characters that would steer a terminal or reorder
/// what follows them.
pub(crate) fn shorten(text: &str, width: usize) -> String {
    let mut text: String = text.chars().map(|c| if c.is_control() || is_invisible(c) { ' ' } else { c }).collect();
    if let Some((end, _)) = text.char_indices().nth(width) {
        text.truncate(end);
        text.push('…');
    }
    text
}

/// Returns whether a character has no width of its own but changes how others are shown: zero-width characters, and
/// those that turn the direction of writing.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// How many holders a sentence names.
const NAMED: usize = 3;

/// The most characters of a command line in a sentence.
pub(crate) const SHORT: usize = 48;

/// The most characters of a command line on a line of its own.
pub(crate) const LONG: usize = 160;

/// Returns what a member waits for, if no process is known that can end the wait.
pub(crate) fn awaited(awaited: Awaited) -> String {
    let whom = if awaited == Awaited::Timeline { "writer" } else { awaited.name() };
    format!("a {whom}")
}

/// Returns the name of an object for which a member waits, with the version or value: `weights@3`, `steps 70`.
pub(crate) fn awaited_object(awaited: Awaited, name: &str, target: Option<u64>) -> String {
    match (awaited, target) {
        (Awaited::Timeline, Some(value)) => format!("{name} {value}"),
        (_, Some(version)) => with_version(name, version),
        (_, None) => name.to_owned(),
    }
}

/// Returns a wait of a member: `4711: steps 70 (1.2 s)`, `a commit: weights`.
pub(crate) fn wait(wait: &WaitInfo) -> String {
    let WaitInfo { on, name, target, by, ms } = wait;
    let whom = by.map_or_else(|| awaited(*on), |pid| pid.to_string());
    let time = ms.map_or_else(String::new, |ms| format!(" ({})", text::seconds(ms)));
    format!("{whom}: {}{time}", awaited_object(*on, name, *target))
}

/// Returns the user to which something belongs, and whether others may open it.
pub(crate) fn user(uid: u32, shared: bool) -> String {
    if shared { format!("{uid}, shared") } else { uid.to_string() }
}

#[cfg(test)]
mod tests {
    use partywall::info::{AttachedInfo, Doubt, Freed, QueueUsage};

    use super::*;

    fn member() -> MemberInfo {
        MemberInfo {
            member: 1,
            pid: 2,
            uid: 3,
            command: "c".into(),
            state: MemberState::Alive,
            doubt: None,
            mps: Some("/m".into()),
            quiet: Some(4),
            leases: 5,
            timelines: 6,
            permits: Some(7),
            blocks: None,
            tasks: Some(12),
            bytes: 8,
            since: 9,
            waits: vec![WaitInfo { on: Awaited::Timeline, name: "t".into(), target: Some(10), by: Some(11), ms: None }],
            simulated: false,
        }
    }

    fn holder(pid: u32, command: &str) -> HolderInfo {
        HolderInfo { pid, command: command.into(), leases: 1, blocks: 0, tasks: 0, waiting: 0, unproven: false }
    }

    #[test]
    fn remaining_memory_names_its_holder() {
        assert_eq!(what_stays(0, &[], &[]), None);
        let one = [holder(123, "/usr/bin/python train.py")];
        assert_eq!(what_stays(14 << 30, &one, &[]).unwrap(), "14 GiB stay until pid 123 (python train.py) drops it");
        let five: Vec<_> = (1..=5).map(|pid| holder(pid, "")).collect();
        let text = what_stays(1 << 20, &five, &[]).unwrap();
        assert_eq!(text, "1 MiB stay until pid 1, pid 2, pid 3 and 2 more drop it");
        assert!(what_stays(1 << 20, &five[..2], &[]).unwrap().contains("pid 1 and pid 2 drop it"));
        let dead = HolderInfo { unproven: true, ..holder(7, "") };
        let text = what_stays(1 << 20, std::slice::from_ref(&dead), &[]).unwrap();
        assert_eq!(text, "1 MiB stay in quarantine: pid 7 is dead without proof (`partywall rm --unproven 7`)");
        let text = what_stays(1 << 20, &[dead.clone(), holder(1, ""), dead], &[]).unwrap();
        assert_eq!(
            text,
            "1 MiB stay until pid 1 drops it; pid 7 and pid 7 are dead without proof (`partywall rm --unproven`)"
        );
        let queue = |name: &str| QueueHolder { name: name.into(), version: 1, attachment: 0 };
        let text = what_stays(1 << 20, &[], &[queue("work")]).unwrap();
        assert_eq!(text, "1 MiB stay until queue work@1 ends or detaches it");
        let text = what_stays(1 << 20, &five[..1], &["a", "b", "c", "d"].map(queue)).unwrap();
        assert_eq!(text, "1 MiB stay until pid 1 drops it and queues a@1, b@1, c@1 and 1 more end or detach it");
    }

    #[test]
    fn info_types_have_the_keys_of_the_documentation() {
        let holder = HolderInfo { blocks: 2, tasks: 3, unproven: true, ..holder(1, "a") };
        let expected =
            json!({ "pid": 1, "command": "a", "leases": 1, "blocks": 2, "tasks": 3, "waiting": 0, "unproven": true });
        assert_eq!(json!(holder), expected);
        let queue = QueueHolder { name: "q".into(), version: 2, attachment: 3 };
        assert_eq!(json!(queue), json!({ "name": "q", "version": 2, "attachment": 3 }));
        let held = AttachedInfo { attachment: 1, name: "w".into(), version: 2, bytes: 3, tasks: 4 };
        let expected = json!({ "name": "w", "version": 2, "bytes": 3, "attachment": 1, "tasks": 4 });
        assert_eq!(json!(held), expected);
        let freed = Freed { member: 1, pid: 2, command: "c".into(), leases: 3, bytes: 4 };
        assert_eq!(json!(freed), json!({ "member": 1, "pid": 2, "command": "c", "leases": 3, "bytes": 4 }));
        let usage = QueueUsage {
            pending: 1,
            claimed: 2,
            enqueued: 3,
            done: 4,
            dead: 5,
            ending: 6,
            free: 7,
            completed: 8,
            returned: 9,
        };
        let expected = json!({
            "pending": 1, "claimed": 2, "enqueued": 3, "done": 4, "dead": 5, "ending": 6, "free": 7, "completed": 8,
            "returned": 9,
        });
        assert_eq!(json!(usage), expected);
        let semaphore =
            SemaphoreInfo { name: "s".into(), maximum: 4, held: 3, waiting: 2, leases: 1, uid: 1000, shared: false };
        let expected = json!({
            "name": "s", "maximum": 4, "held": 3, "waiting": 2, "leases": 1, "uid": 1000, "shared": false,
        });
        assert_eq!(json!(semaphore), expected);
        let mut timeline = TimelineInfo {
            name: "t".into(),
            incarnation: 1,
            writer: None,
            value: 2,
            announced: 3,
            ending: None,
            leases: 4,
            uid: 1000,
            shared: false,
        };
        let mut expected = json!({
            "name": "t", "incarnation": 1, "value": 2, "announced": 3, "writer": null, "ending": null, "leases": 4,
            "uid": 1000, "shared": false,
        });
        assert_eq!(json!(timeline), expected);
        use TimelineEnding::{Abandoned, BrokerGone, Closed, Evicted, OwnerDied, OwnerFaulted};
        for ending in [OwnerDied, OwnerFaulted, Closed, Abandoned, BrokerGone, Evicted] {
            timeline.ending = Some(ending);
            expected["ending"] = json!(ending.name());
            assert_eq!(json!(timeline), expected);
        }
        let mut member = member();
        let mut expected = json!({
            "member": 1, "pid": 2, "uid": 3, "command": "c", "state": "alive", "doubt": null, "mps": "/m", "quiet_ms": 4,
            "leases": 5, "timelines": 6, "permits": 7, "blocks": null, "tasks": 12, "bytes": 8, "since_ms": 9, "simulated": false,
            "waits": [{ "on": "timeline", "name": "t", "target": 10, "by": 11, "ms": null }],
        });
        assert_eq!(json!(member), expected);
        for awaited in [Awaited::Commit, Awaited::Withdrawal, Awaited::Growth, Awaited::Timeline] {
            member.waits[0].on = awaited;
            expected["waits"][0]["on"] = json!(awaited.name());
            assert_eq!(json!(member), expected);
        }
        use MemberState::{Alive, Dead, HeldByChild, Hung, LostContext, Suspect, Unproven};
        for state in [Alive, Hung, LostContext, Suspect, MemberState::Evicted, HeldByChild, Unproven, Dead] {
            member.state = state;
            expected["state"] = json!(state.name());
            assert_eq!(json!(member), expected);
        }
        for doubt in [Doubt::Mps, Doubt::NoPidfd] {
            member.doubt = Some(doubt);
            expected["doubt"] = json!(doubt.name());
            assert_eq!(json!(member), expected);
        }
    }

    #[test]
    fn daemons_are_listed_with_each_process_once() {
        let member = |pid, mps: Option<&str>| MemberInfo { pid, mps: mps.map(str::to_owned), ..member() };
        let members = [
            member(1, Some("/a")),
            member(2, None),
            member(3, Some("/b")),
            member(1, Some("/a")),
            member(4, Some("/a")),
        ];
        let daemons = mps_daemons(&members);
        assert_eq!(daemons, [("/a", vec![1, 4]), ("/b", vec![3])]);
        assert_eq!(mps_line(&daemons[0]), "under the MPS daemon at /a: pid 1, pid 4");
    }

    #[test]
    fn long_commands_are_shortened() {
        assert_eq!(shorten("a\nb", 5), "a b");
        assert_eq!(shorten("\u{1b}[2J\u{202e}\u{200b}x", 9), " [2J  x", "nothing steers a terminal or turns its line");
        assert_eq!(shorten("äöüß", 2), "äö…");
        assert_eq!(command("/usr/bin/python /srv/train.py", 12), "python /srv/…");
    }
}
