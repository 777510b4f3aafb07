//! What is said of members.

use partywall_wire as wire;

use crate::registry::{
    MemberId,
    effect::{Doubt, MemberRow, MemberState, Parted},
    types::Whom,
};

pub(super) fn row(row: &MemberRow) -> wire::MemberInfo {
    wire::MemberInfo {
        member: row.member.0,
        pid: row.pid,
        uid: row.uid,
        command: row.command.to_string(),
        state: state(row.state),
        doubt: row.doubt.map(|doubt| match doubt {
            Doubt::Mps => wire::Doubt::Mps,
            Doubt::NoPidfd => wire::Doubt::NoPidfd,
        }),
        leases: row.leases,
        bytes: row.bytes,
        since: row.since,
        simulated: row.simulated,
    }
}

pub(super) fn state(state: MemberState) -> wire::MemberState {
    match state {
        MemberState::Alive => wire::MemberState::Alive,
        MemberState::LostContext => wire::MemberState::LostContext,
        MemberState::Suspect => wire::MemberState::Suspect,
        MemberState::Evicted => wire::MemberState::Evicted,
        MemberState::HeldByChild => wire::MemberState::HeldByChild,
        MemberState::Unproven => wire::MemberState::Unproven,
        MemberState::Dead => wire::MemberState::Dead,
    }
}

/// Before a signal is sent, if one is.
pub(super) fn evicted(parted: &Parted) -> wire::Evicted {
    let Parted { member, pid, command, leases, bytes } = parted;
    wire::Evicted {
        member: member.0,
        pid: *pid,
        command: command.to_string(),
        leases: *leases,
        bytes: *bytes,
        kill: wire::Kill::NotAsked,
    }
}

pub(super) fn freed(parted: &Parted) -> wire::Freed {
    let Parted { member, pid, command, leases, bytes } = parted;
    wire::Freed { member: member.0, pid: *pid, command: command.to_string(), leases: *leases, bytes: *bytes }
}

pub(super) fn whom(whom: wire::Whom) -> Whom {
    match whom {
        wire::Whom::Pid(pid) => Whom::Pid(pid),
        wire::Whom::Member(member) => Whom::Member(MemberId(member)),
    }
}

pub(super) fn whom_of(whom: Whom) -> wire::Whom {
    match whom {
        Whom::Pid(pid) => wire::Whom::Pid(pid),
        Whom::Member(member) => wire::Whom::Member(member.0),
    }
}
