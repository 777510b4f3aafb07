//! The members of a domain, and its broker.

use std::ffi::{CStr, CString, c_char, c_int};

use partywall::{
    Domain,
    info::{MemberInfo, Whom},
};

use crate::{
    argument::{c_text, store, store_info, store_optional, structs},
    domain::pw_domain,
    error::{Failure, call, pw_status},
    handle::{self, object},
    segment::beyond,
};

/// A list of members, as they were when it was opened. Any thread may use it.
pub struct pw_members {
    _opaque: (),
}

/// The members, each with its command line and state, which C gets by address.
struct MemberList(Vec<(MemberInfo, [CString; 2])>);

object!(MemberList, pw_members, 24, "list of members");
structs!(pw_member_info, pw_domain_info);

/// What `pw_members_get` stores. The texts are valid until the list is closed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_member_info {
    /// `sizeof(pw_member_info)`, which the caller sets.
    pub size: usize,
    /// Its command line.
    pub command: *const c_char,
    /// Its state: "alive", "hung", "suspect", "evicted" and the others of `partywall ps`.
    pub state: *const c_char,
    /// Its number.
    pub member: u64,
    /// Its process.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// How many leases it holds.
    pub leases: u32,
    /// How many timelines it writes.
    pub timelines: u32,
}

/// Lists all members, this process among them, and stores how many there are. The caller owns `*members`. Blocks for a few
/// round trips to the broker.
///
/// # Safety
/// No other thread closes `domain`; `members` and `count` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_members_open(
    domain: *const pw_domain,
    members: *mut *mut pw_members,
    count: *mut usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give(members, || {
            let members = handle::get::<Domain>(domain)?.members()?;
            store(count, members.len(), "count")?;
            let texts = |info: MemberInfo| {
                let texts = [info.command.as_str(), info.state.name()].map(c_text);
                (info, texts)
            };
            Ok(MemberList(members.into_iter().map(texts).collect()))
        })
    })
}

/// Stores what is known about a member of a list, counted from 0. Does not block.
///
/// # Safety
/// No other thread closes `members`; `info` points to a struct whose size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_members_get(
    members: *const pw_members,
    index: usize,
    info: *mut pw_member_info,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let MemberList(members) = handle::get::<MemberList>(members)?;
        let (found, [command, state]) = members.get(index).ok_or_else(|| beyond("member", index, members.len()))?;
        let MemberInfo { member, pid, uid, leases, timelines, .. } = *found;
        let (command, state) = (CStr::as_ptr(command), CStr::as_ptr(state));
        store_info(info, pw_member_info { size: 0, command, state, member, pid, uid, leases, timelines })
    })
}

/// Closes a list. Null is ignored.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_members_close(members: *mut pw_members) -> pw_status {
    call(|| handle::close::<MemberList>(members))
}

/// Evicts the member with this number, or, if it is 0, all members of the process `pid`: ends their waits and names, and
/// refuses their further calls. If `kill` is not 0 the broker also sends SIGKILL. What they hold is free once they are proved
/// dead. Stores how many were evicted, unless `evicted` is null.
///
/// # Safety
/// No other thread closes `domain`; `evicted` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_domain_evict(
    domain: *const pw_domain,
    member: u64,
    pid: u32,
    kill: c_int,
    evicted: *mut usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let domain = handle::get::<Domain>(domain)?;
        let whom = match (member, pid) {
            (0, 0) => return Err(Failure::argument("neither a member nor a process is named", "name one of them")),
            (0, pid) => Whom::Pid(pid),
            (member, 0) => Whom::Member(member),
            _ => return Err(Failure::argument("a member and a process are named", "name one of them")),
        };
        store_optional(evicted, domain.evict(whom, kill != 0)?.len());
        Ok(())
    })
}

/// What `pw_domain_info_get` stores.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_domain_info {
    /// `sizeof(pw_domain_info)`, which the caller sets.
    pub size: usize,
    /// The number of this process among the members.
    pub member: u64,
    /// How many members there are besides this one.
    pub members: u64,
    /// How many names there are.
    pub names: u64,
    /// How many versions there are, with those that only leases keep.
    pub versions: u64,
    /// How many leases there are.
    pub leases: u64,
    /// How many members died since the broker started.
    pub deaths: u64,
    /// How many dead members' work may not be over, so that what they held stays in quarantine.
    pub unproven: u64,
    /// The process of the broker.
    pub broker_pid: u32,
    /// 1 if the members use the simulated driver.
    pub is_simulated: u8,
}

/// Stores what is known about a domain and its broker. Blocks for a round trip to the broker.
///
/// # Safety
/// No other thread closes `domain`; `info` points to a struct whose size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_domain_info_get(domain: *const pw_domain, info: *mut pw_domain_info) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let domain = handle::get::<Domain>(domain)?;
        let status = domain.status()?;
        let known = pw_domain_info {
            size: 0,
            member: domain.member(),
            members: status.members,
            names: status.names,
            versions: status.versions,
            leases: status.leases,
            deaths: status.deaths,
            unproven: status.unproven,
            broker_pid: status.pid,
            is_simulated: status.simulated.into(),
        };
        store_info(info, known)
    })
}
