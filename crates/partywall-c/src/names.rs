//! The names of a domain.

use std::ffi::{CString, c_char};

use partywall::{
    Domain, Place,
    info::{Lifetime, NameInfo, Named},
    kind_name,
};

use crate::{
    argument::{c_text, store, store_info, structs},
    domain::pw_domain,
    error::{call, pw_status},
    handle::{self, object},
    segment::beyond,
};

/// A list of names, as they were when it was opened. Any thread may use it.
pub struct pw_names {
    _opaque: (),
}

/// The names, each with the texts that C gets by address.
struct NameList(Vec<(NameInfo, [CString; 4])>);

object!(NameList, pw_names, 23, "list of names");
structs!(pw_name_info);

/// What `pw_names_get` stores. The texts are valid until the list is closed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_name_info {
    /// `sizeof(pw_name_info)`, which the caller sets.
    pub size: usize,
    /// The name.
    pub name: *const c_char,
    /// What it is: "segment", "pool", "topic", "queue".
    pub object: *const c_char,
    /// Where its memory is: "host", "pinned:0" or a GPU's UUID; empty if there is no latest version.
    pub device: *const c_char,
    /// The kind of its memory: "host", "vmm", "pinned", "legacy", "live"; empty if there is no latest version.
    pub kind: *const c_char,
    /// The latest version; 0 for a removed name whose versions are still held.
    pub version: u64,
    /// The bytes of that version.
    pub bytes: u64,
    /// The process that committed it.
    pub committer: u32,
    /// How many leases there are on it.
    pub leases: u32,
    /// How many older versions are still held.
    pub older: u32,
    /// 1 if it may be written.
    pub is_mutable: u8,
    /// 1 if it stays without its users.
    pub is_kept: u8,
    /// 1 if other users may open it.
    pub is_shared: u8,
}

/// Lists the names of segments, pools, topics and queues, and stores how many there are. The caller owns `*names`. Blocks
/// for a few round trips to the broker.
///
/// # Safety
/// No other thread closes `domain`; `names` and `count` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_names_open(
    domain: *const pw_domain,
    names: *mut *mut pw_names,
    count: *mut usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give(names, || {
            let names = handle::get::<Domain>(domain)?.names()?;
            store(count, names.len(), "count")?;
            let texts = |info: NameInfo| {
                let latest = info.latest.as_ref();
                let object = Named::of(latest.and_then(|latest| latest.control.as_ref())).name();
                let device = latest.map(|latest| Place::from(latest.place).to_string()).unwrap_or_default();
                let kind = latest.map_or("", |latest| kind_name(latest.kind));
                let texts = [info.name.as_str(), object, &device, kind].map(c_text);
                (info, texts)
            };
            Ok(NameList(names.into_iter().map(texts).collect()))
        })
    })
}

/// Stores what is known about a name of a list, counted from 0. Does not block.
///
/// # Safety
/// No other thread closes `names`; `info` points to a struct whose size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_names_get(names: *const pw_names, index: usize, info: *mut pw_name_info) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let NameList(names) = handle::get::<NameList>(names)?;
        let (found, [name, object, device, kind]) =
            names.get(index).ok_or_else(|| beyond("name", index, names.len()))?;
        let latest = found.latest.as_ref();
        let known = pw_name_info {
            size: 0,
            name: name.as_ptr(),
            object: object.as_ptr(),
            device: device.as_ptr(),
            kind: kind.as_ptr(),
            version: latest.map_or(0, |latest| latest.version),
            bytes: latest.map_or(0, |latest| latest.bytes),
            committer: latest.map_or(0, |latest| latest.committer),
            leases: latest.map_or(0, |latest| latest.leases),
            older: found.older,
            is_mutable: latest.is_some_and(|latest| latest.mutable).into(),
            is_kept: latest.is_some_and(|latest| latest.lifetime == Lifetime::Kept).into(),
            is_shared: latest.is_some_and(|latest| latest.shared).into(),
        };
        store_info(info, known)
    })
}

/// Closes a list. Null is ignored.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_names_close(names: *mut pw_names) -> pw_status {
    call(|| handle::close::<NameList>(names))
}
