//! The members of a domain, and what they are notified of.

use partywall::info::{self, Doubt};

use crate::value::{Tuple, value};

value! {
    /// A member.
    Member, "partywall._members", "Member", {
        member: u64, pid: u32, uid: u32, command: String, state: &'static str, doubt: Option<&'static str>,
        mps: Option<String>, quiet: Option<f64>, leases: u32, timelines: u32, permits: Option<u32>,
        blocks: Option<u32>, tasks: Option<u32>, nbytes: u64, since: f64, waits: Tuple<MemberWait>,
        simulated: bool,
    }
}

value! {
    /// A wait of a member.
    MemberWait, "partywall._members", "MemberWait", {
        on: &'static str, name: String, target: Option<u64>, by: Option<u32>, seconds: Option<f64>,
    }
}

impl From<info::MemberInfo> for Member {
    fn from(info: info::MemberInfo) -> Self {
        Self {
            member: info.member,
            pid: info.pid,
            uid: info.uid,
            command: info.command,
            state: info.state.name(),
            doubt: info.doubt.map(Doubt::name),
            mps: info.mps,
            quiet: info.quiet.map(seconds),
            leases: info.leases,
            timelines: info.timelines,
            permits: info.permits,
            blocks: info.blocks,
            tasks: info.tasks,
            nbytes: info.bytes,
            since: seconds(info.since),
            waits: Tuple(info.waits.into_iter().map(MemberWait::from).collect()),
            simulated: info.simulated,
        }
    }
}

impl From<info::WaitInfo> for MemberWait {
    fn from(wait: info::WaitInfo) -> Self {
        let info::WaitInfo { on, name, target, by, ms } = wait;
        Self { on: on.name(), name, target, by, seconds: ms.map(seconds) }
    }
}

value! {
    /// A member that was evicted.
    Evicted, "partywall._members", "EvictedMember", {
        member: u64, pid: u32, command: String, leases: u32, nbytes: u64, kill: &'static str,
        errno: Option<i32>,
    }
}

impl From<info::Evicted> for Evicted {
    fn from(evicted: info::Evicted) -> Self {
        let info::Evicted { member, pid, command, leases, bytes, kill } = evicted;
        Self { member, pid, command, leases, nbytes: bytes, kill: kill.name(), errno: kill.errno() }
    }
}

value! {
    /// A withdrawal with a deadline.
    Withdrawal, "partywall._members", "Withdrawal", {
        pid: u32, at: f64, until: f64, then: &'static str,
    }
}

impl From<info::Notice> for Withdrawal {
    fn from(notice: info::Notice) -> Self {
        Self { pid: notice.pid, at: seconds(notice.at), until: seconds(notice.until), then: notice.then.name() }
    }
}

/// Converts milliseconds to Python's seconds.
fn seconds(milliseconds: u64) -> f64 {
    milliseconds as f64 / 1e3
}
