//! Texts for messages.

use std::{
    borrow::Cow,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use partywall_cuda::PointerKind;
use partywall_wire::{
    Ending, FdFault, Limit, LimitHolder, MemberState, Named, NoGrowth, NoReplacement, ObjectKind, OtherUsers,
    TimelineEnding, Whom,
};

use super::{Ended, Error, Held, NotFound};
use crate::place::Place;

pub(super) fn near_names(near: &[String]) -> String {
    if near.is_empty() { String::new() } else { format!("; there is {}", near.join(", ")) }
}

/// Says how a name ended, after the sentence that nothing has it.
pub(super) fn ended_text(name: &str, ended: &Option<Box<Ended>>) -> String {
    let Some(ended) = ended else { return String::new() };
    let Ended { version, ending, pid, program, ago } = &**ended;
    let how = match ending {
        Ending::Withdrawn | Ending::OwnerDied => "ended with its owner",
        Ending::Removed => "was removed by",
        Ending::Unused => "ended with its last user",
        _ => "ended for a reason newer than this library, by",
    };
    let comma = if how.ends_with(" by") { "" } else { "," };
    format!(": {name}@{version} {how}{comma} pid {pid} ({program}), {} ago", seconds(*ago))
}

/// Says which objects of other kinds have the name.
pub(super) fn other_kinds(is: &[Named]) -> String {
    let kinds: Vec<_> = is.iter().map(|named| format!("a {}", named.name())).collect();
    if kinds.is_empty() { String::new() } else { format!("; there is {} of that name", kinds.join(" and ")) }
}

/// Says why an open timed out, from the refusal of a last call without waiting.
pub(crate) fn nothing_came(refusal: &Error) -> String {
    match refusal {
        Error::NotFound(NotFound::Name { name, ended: ended @ Some(_), .. }) => {
            format!("{}, and no process committed it again", ended_text(name, ended).trim_start_matches(": "))
        }
        Error::NotFound(NotFound::Name { is, .. }) if !is.is_empty() => {
            format!("{}, and no process committed a segment", other_kinds(is).trim_start_matches("; "))
        }
        _ => "no process committed it".into(),
    }
}

/// Lists differences, and says how many more there are than a message has room for.
pub(super) fn listed(differences: &[String]) -> String {
    const SHOWN: usize = 8;
    let shown = differences[..differences.len().min(SHOWN)].join("; ");
    match differences.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown}; and {more} more"),
    }
}

pub(super) fn near_pids(near: &[u32]) -> String {
    let near: Vec<_> = near.iter().map(u32::to_string).collect();
    if near.is_empty() { String::new() } else { format!("; there is pid {}", near.join(", ")) }
}

pub(super) fn which_member(whom: Whom) -> String {
    match whom {
        Whom::Pid(pid) => format!("pid {pid}"),
        Whom::Member(member) => format!("the number {member}"),
    }
}

pub(super) fn no_replacement(why: &NoReplacement) -> String {
    match why {
        NoReplacement::Unsupervised => {
            "it has no supervisor that could execute another program, or no memory for its journal".into()
        }
        NoReplacement::InProgress => "another process is replacing it at this moment".into(),
        NoReplacement::Elsewhere { found } => {
            format!("it executes no program of a process that may be in another container: {found}")
        }
        NoReplacement::Program { said } => format!("the new program cannot continue: {said}"),
        _ => "for a reason newer than this library".into(),
    }
}

pub(super) fn member_state(state: MemberState) -> &'static str {
    match state {
        MemberState::Alive => "is alive",
        MemberState::Hung => "is alive and does not respond",
        MemberState::LostContext => "has lost its CUDA context and is alive",
        MemberState::Suspect => "has hung up, and may come back",
        MemberState::Evicted => "was evicted and is alive",
        MemberState::HeldByChild => "has exited, but a child that it forked is alive",
        MemberState::Dead => "is proved dead, and its memory is being given back",
        MemberState::Unproven => "is not known to be dead",
        _ => "is not known to be dead",
    }
}

/// Names a subscriber of a topic, with its process if it is known.
pub(super) fn subscriber_text(pid: Option<u32>, state: Option<MemberState>) -> String {
    match (pid, state) {
        (Some(pid), Some(state)) => format!("a subscriber, pid {pid}, which {},", member_state(state)),
        (Some(pid), None) => format!("a subscriber, pid {pid},"),
        (None, _) => "a subscriber".into(),
    }
}

pub(super) fn free_text(free: Option<u64>, total: Option<u64>) -> String {
    match (free, total) {
        (Some(free), Some(total)) => format!(": {} of {} are free", bytes(free), bytes(total)),
        _ => String::new(),
    }
}

pub(super) fn held_text(held: &Option<Box<Held>>) -> String {
    let Some(held) = held else { return String::new() };
    let names: Vec<_> = held.largest.iter().map(|(name, n)| format!("{name} {}", bytes(*n))).collect();
    let names = if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) };
    format!("; Partywall holds {} there{names}", bytes(held.bytes))
}

/// Says why the memory at a place is lost.
pub(super) fn lost_text(place: Place) -> String {
    match place {
        Place::Gpu(gpu) => format!("GPU {gpu} was reset or has failed, and its memory is gone"),
        Place::Pinned(node) => {
            format!("the driver was reset or reloaded, and its pinned memory on NUMA node {node} is gone")
        }
        Place::Host => "its memory is gone".into(),
    }
}

pub(super) fn unread_text(unread: u64, allowed: u64, pids: &[u32]) -> String {
    let who = match pids {
        [] => "this process has".to_owned(),
        pids => {
            let pids: Vec<_> = pids.iter().map(u32::to_string).collect();
            format!("processes that do not read (first pid {}) have", pids.join(", "))
        }
    };
    format!("{who} {unread} unread file descriptors from the broker, of at most {allowed}")
}

pub(super) fn limit_name(limit: Limit) -> Cow<'static, str> {
    let name = match limit {
        Limit::Bytes => "bytes",
        Limit::Pinned(Some(node)) => return format!("bytes of pinned memory on NUMA node {node}").into(),
        Limit::Pinned(None) => "bytes of pinned memory on a NUMA node",
        Limit::Names => "names",
        Limit::Fds => "file descriptors",
        Limit::Clients => "members",
        Limit::ClientsOfProcess => "members of one process",
        Limit::HungUp => "members that one process has hung up on",
        Limit::Operators => "connections that are not members",
        Limit::Handshakes => "new connections of other users",
        Limit::Message => "message bytes",
        Limit::Waits => "waiting requests",
        Limit::WaitsOfMember => "waiting requests of one member",
        Limit::Leases => "leases",
        Limit::LeasesOfMember => "leases of one member",
        Limit::Chunks => "chunks of one version",
        Limit::Growths => "growths of one version",
        Limit::Timelines => "timelines",
        Limit::Semaphores => "semaphores",
        Limit::Attachments => "segments attached to one queue",
        _ => "something newer than this library",
    };
    name.into()
}

/// Says which processes hold most of what a limit counts.
pub(super) fn holders_text(limit: Limit, holders: &[LimitHolder]) -> String {
    let amount = |held: u64| match limit {
        Limit::Bytes | Limit::Pinned(_) => bytes(held),
        Limit::Leases => counted(held, "lease"),
        Limit::Names => counted(held, "name"),
        Limit::Fds => counted(held, "file descriptor"),
        Limit::Clients => counted(held, "member"),
        Limit::Timelines => counted(held, "timeline"),
        Limit::Semaphores => counted(held, "semaphore"),
        Limit::Waits => counted(held, "waiting request"),
        _ => counted(held, "connection"),
    };
    let holders: Vec<_> = holders
        .iter()
        .map(|LimitHolder { pid, uid, held }| format!("pid {pid} of user {uid} ({})", amount(*held)))
        .collect();
    if holders.is_empty() { String::new() } else { format!("; the largest holders are {}", holders.join(", ")) }
}

/// Returns what cannot be done, and what belongs to another user.
pub(super) fn other_users(what: &OtherUsers) -> (String, String) {
    match what {
        OtherUsers::Open { name } => (format!("open {name:?}"), "it is not shared, and".into()),
        OtherUsers::Create { name } => ("create the name".into(), format!("{name:?}")),
        OtherUsers::Remove { name } => (format!("remove {name:?}"), "it".into()),
        OtherUsers::Abandon { name } => (format!("abandon timeline {name:?}"), "it".into()),
        OtherUsers::Tasks { name } => (format!("retry or purge tasks of queue {name:?}"), "it".into()),
        OtherUsers::Inspect { name } => (format!("show {name:?}"), "it is not shared, and".into()),
        OtherUsers::Evict { pid } => (format!("evict pid {pid}"), "it".into()),
        OtherUsers::Free { pid } => (format!("free what pid {pid} held"), "it".into()),
        OtherUsers::Stop => ("end the broker".into(), "it".into()),
        OtherUsers::Replace => ("replace the broker".into(), "it".into()),
        _ => ("do this".into(), "it".into()),
    }
}

/// Returns the option of `partywall serve` that sets each user's share of a limit.
pub(super) fn user_option(limit: Limit) -> &'static str {
    match limit {
        Limit::Bytes => "--max-bytes-per-uid",
        Limit::Pinned(_) => "--max-pinned-bytes-per-uid",
        Limit::Names => "--max-names-per-uid",
        Limit::Fds => "--max-fds-per-uid",
        Limit::Leases => "--max-leases-per-uid",
        Limit::Timelines => "--max-timelines-per-uid",
        Limit::Semaphores => "--max-semaphores-per-uid",
        Limit::Waits => "--max-waits-per-uid",
        Limit::Operators => "--max-seats-per-uid",
        _ => "--max-clients-per-uid",
    }
}

pub(super) fn driver_name(simulated: bool) -> &'static str {
    if simulated { "simulated" } else { "real" }
}

pub(super) fn object_kind(kind: ObjectKind) -> &'static str {
    match kind {
        ObjectKind::Timeline => "timeline",
        ObjectKind::Semaphore => "semaphore",
        _ => "object of a kind newer than this library",
    }
}

pub(super) fn timeline_ending(ending: TimelineEnding) -> &'static str {
    match ending {
        TimelineEnding::OwnerDied => "its writer died",
        TimelineEnding::OwnerFaulted => "its writer lost its CUDA context",
        TimelineEnding::Closed => "its writer closed it",
        TimelineEnding::Abandoned => "it was abandoned",
        TimelineEnding::BrokerGone => "the broker is gone",
        TimelineEnding::Evicted => "its writer was evicted",
        _ => "for a reason newer than this library",
    }
}

pub(super) fn publisher_ending(ending: TimelineEnding) -> &'static str {
    match ending {
        TimelineEnding::OwnerDied => "died",
        TimelineEnding::OwnerFaulted => "lost its CUDA context",
        TimelineEnding::Closed => "left",
        TimelineEnding::Abandoned => "was abandoned",
        TimelineEnding::BrokerGone => "may be dead, and the broker that would know is gone",
        TimelineEnding::Evicted => "was evicted",
        _ => "ended for a reason newer than this library",
    }
}

/// Returns a name in quotes, shortened if it is far too long.
pub(super) fn beginning(name: &str) -> String {
    match name.char_indices().nth(MOST_SHOWN) {
        Some((end, _)) => format!("{:?}…", &name[..end]),
        None => format!("{name:?}"),
    }
}

pub(super) fn bad_value(value: u64, last: u64) -> String {
    if value <= last { format!("it must be greater than {last}") } else { "the largest value is 2^61".into() }
}

pub(super) fn no_growth(why: NoGrowth) -> String {
    match why {
        NoGrowth::Fixed => "it is not mutable, or its kind of memory cannot grow".into(),
        NoGrowth::NotCommitter => "only the process that committed it can make it longer".into(),
        NoGrowth::CommitterGone => "its committer has dropped it".into(),
        NoGrowth::Behind => "it has grown since this process last refreshed it".into(),
        NoGrowth::Reserved { reserved, needed } => {
            format!("it would have {}, but only {} are reserved", bytes(needed), bytes(reserved))
        }
        _ => "for a reason newer than this library".into(),
    }
}

pub(super) fn pointer_kind(kind: PointerKind) -> &'static str {
    match kind {
        PointerKind::Device => "device memory for which this driver makes no handles",
        PointerKind::Imported => "memory of another process that was opened here",
        PointerKind::Pool => "memory of a stream-ordered pool (cuMemAllocAsync)",
        PointerKind::Vmm => "mapped by cuMemMap, as torch's expandable segments are",
        PointerKind::Managed => "managed memory (cuMemAllocManaged)",
        PointerKind::Pinned => "page-locked host memory (cuMemHostAlloc)",
        PointerKind::Registered => "registered host memory (cuMemHostRegister)",
        PointerKind::Unknown => UNKNOWN_POINTER,
        _ => UNKNOWN_POINTER,
    }
}

pub(super) fn fd_fault(fault: &FdFault) -> String {
    match fault {
        FdFault::Missing => "it did not arrive".into(),
        FdFault::WrongType { found } => format!("it is {found}"),
        FdFault::NotSealed { seal } => format!("it is not sealed: {seal}"),
        FdFault::WrongSize { said, found } => format!("it has {found} bytes, not {said}"),
        _ => "for a reason newer than this library".into(),
    }
}

/// Returns a duration for people: `2.5 s`, or `50 ms` where tenths of a second would say too little.
pub(crate) fn seconds(duration: Duration) -> String {
    if duration < Duration::from_millis(100) {
        return format!("{} ms", duration.as_millis());
    }
    format!("{:.1} s", duration.as_secs_f64())
}

/// Returns a name with a space before it; nothing for `None`.
pub(super) fn named(name: Option<&str>) -> String {
    name.map_or_else(String::new, |name| format!(" {name}"))
}

/// Returns ` for "NAME"`; nothing for `None`.
pub(super) fn for_name(name: Option<&str>) -> String {
    name.map_or_else(String::new, |name| format!(" for {name:?}"))
}

/// Returns a number of things: `1 name`, `2 names`.
pub(super) fn counted(number: u64, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

/// Returns a number of bytes for people: `1.5 GiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if n < 1024 {
        return format!("{n} bytes");
    }
    let mut value = n as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if value.fract() == 0.0 { format!("{value:.0} {}", UNITS[unit]) } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// Characters of an invalid name that are shown.
const MOST_SHOWN: usize = 80;

const UNKNOWN_POINTER: &str = "nothing that the driver knows: ordinary host memory, freed memory, or no address at all";

/// Returns the time since a moment, which is given in milliseconds since 1970.
pub(crate) fn ago(at: u64) -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH + Duration::from_millis(at)).unwrap_or_default()
}
