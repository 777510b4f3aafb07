//! Legacy memory handles, and the attributes of pointers.

use std::process::Command;

use partywall::cuda::CuResult;

use super::neighbours::ourselves;
use super::{BYTES, INVALID, MIB, OK};
use crate::raw::{IpcHandle, LAZY_PEER, POSIX_FD};
use crate::tests::stage::{Check, Line, Peer};

pub(super) fn only_memory_of_mem_alloc_has_a_legacy_handle(check: &Check) -> Result<(), String> {
    check.start()?;
    let mut handle = IpcHandle([0; 64]);
    let mut of = |question: &str, address, expected| {
        check.answers(question, check.cuda.ipc_get_mem_handle(&mut handle, address), expected);
    };
    let allocated = check.alloc(BYTES)?;
    of("memory of mem_alloc", allocated, OK);
    of("a place inside it", allocated + 4096, OK);
    of("an odd size", check.alloc(1000)?, OK);
    let host = vec![0_u8; BYTES];
    of("host memory", host.as_ptr() as u64, INVALID);
    of("no address", 0, INVALID);

    let mut freed = 0;
    check.cuda.mem_alloc(&mut freed, 16 * MIB).ok()?;
    check.cuda.mem_free(freed).ok()?;
    of("freed memory", freed, INVALID);

    let mut pinned = 0;
    check.cuda.mem_host_alloc(&mut pinned, BYTES, 0).ok()?;
    of("pinned memory", pinned, INVALID);
    check.cuda.mem_free_host(pinned).ok()?;

    of("registered memory", check.words()?.1, INVALID);
    of("mapped exportable memory", check.mapped(BYTES)?.1, INVALID);

    let mut managed = 0;
    check.cuda.mem_alloc_managed(&mut managed, BYTES, 1).ok()?;
    of("managed memory", managed, INVALID);
    check.cuda.mem_free(managed).ok()?;

    let stream = check.stream()?;
    let mut pooled = 0;
    check.cuda.mem_alloc_async(&mut pooled, BYTES, stream).ok()?;
    check.cuda.stream_synchronize(stream).ok()?;
    of("memory of the stream-ordered pool", pooled, INVALID);
    check.cuda.mem_free_async(pooled, stream).ok()?;
    check.cuda.stream_synchronize(stream).ok()
}

/// Allocates memory with the test pattern, sends its handle and that of an address inside it, and follows commands.
pub(super) fn owner_of_legacy_memory(check: &Check, line: &Line) -> Result<(), String> {
    check.start()?;
    let address = check.alloc(BYTES)?;
    check.fill(address, BYTES)?;
    line.send(check.legacy_handle(address)?.0)?;
    line.send(check.legacy_handle(address + BYTES as u64 / 2)?.0)?;
    // Two allocations that share a block, with their distance.
    let small = check.alloc(1024)?;
    let neighbour = check.alloc(1024)?;
    check.fill(neighbour, 1024)?;
    line.send(check.legacy_handle(small)?.0)?;
    line.send(neighbour.wrapping_sub(small).to_ne_bytes())?;
    while let Some(order) = line.hear()? {
        match order.text().as_str() {
            "double" => check.double(address, BYTES)?.ok()?,
            "verify" => check.same("the owner's bytes", check.holds_pattern(address, BYTES, 1)?, true),
            other => return Err(format!("unknown command {other:?}")),
        }
        line.send("done")?;
    }
    Ok(())
}

/// An owner of legacy memory, with the handles that it has sent.
pub(super) struct Legacy {
    pub(super) owner: Peer,
    pub(super) whole: IpcHandle,
    inside: IpcHandle,
    small: IpcHandle,
    neighbour: u64,
}

impl Legacy {
    pub(super) fn start() -> Result<Self, String> {
        Self::start_with(ourselves())
    }

    /// Starts an owner as [`Legacy::start`] does, by a command that starts this program.
    pub(super) fn start_with(command: Command) -> Result<Self, String> {
        let mut owner = Peer::start_with("owner_of_legacy_memory", command)?;
        let whole = owner.hear()?.handle()?;
        let inside = owner.hear()?.handle()?;
        let small = owner.hear()?.handle()?;
        let distance = owner.hear()?.bytes.try_into().map_err(|_| "no distance")?;
        Ok(Self { owner, whole, inside, small, neighbour: u64::from_ne_bytes(distance) })
    }
}

pub(super) fn a_legacy_handle_names_the_whole_allocation(check: &Check) -> Result<(), String> {
    let Legacy { mut owner, whole, inside, .. } = Legacy::start()?;
    check.start()?;
    let address = check.open_legacy(inside)?;
    check.same("the handle of a place inside opens at the base", check.holds_pattern(address, BYTES, 1)?, true);
    check.same("so that the whole's opens at the same address", check.open_legacy(whole)?, address);
    owner.order("double")?;
    check.same("what the owner changes is seen", check.holds_pattern(address, BYTES, 2)?, true);
    check.fill(address, BYTES)?;
    owner.order("verify")?;
    owner.finish()
}

pub(super) fn neighbours_of_a_small_allocation_are_visible(check: &Check) -> Result<(), String> {
    let Legacy { owner, small, neighbour, .. } = Legacy::start()?;
    check.start()?;
    let address = check.open_legacy(small)?;
    check.same("the neighbour is in the same 2 MiB", neighbour < 2 * MIB as u64, true);
    let seen = check.holds_pattern(address.wrapping_add(neighbour), 1024, 1)?;
    check.same("a process that opens one sees the other", seen, true);
    owner.finish()
}

pub(super) fn a_legacy_handle_does_not_open_where_it_was_made(check: &Check) -> Result<(), String> {
    check.start()?;
    let handle = check.legacy_handle(check.alloc(BYTES)?)?;
    let mut address = 0;
    let opened = check.cuda.ipc_open_mem_handle(&mut address, handle, LAZY_PEER);
    check.answers("the process that made it", opened, CuResult::INVALID_CONTEXT);
    Ok(())
}

pub(super) fn a_second_open_returns_the_same_address(check: &Check) -> Result<(), String> {
    let Legacy { owner, whole, .. } = Legacy::start()?;
    check.start()?;
    let mut first = 0;
    let mut second = 0;
    check.answers("the first open", check.cuda.ipc_open_mem_handle(&mut first, whole, LAZY_PEER), OK);
    check.answers("the second open", check.cuda.ipc_open_mem_handle(&mut second, whole, LAZY_PEER), OK);
    check.same("gives the same address", second == first, true);
    check.answers("the first close", check.cuda.ipc_close_mem_handle(first), OK);
    check.same("leaves it readable", check.holds_pattern(first, BYTES, 1)?, true);
    check.answers("the second close", check.cuda.ipc_close_mem_handle(first), OK);
    check.answers("ends it", check.cuda.read(&mut [0; 8], first), INVALID);
    check.answers("a third close", check.cuda.ipc_close_mem_handle(first), INVALID);
    owner.finish()
}

pub(super) fn legacy_mappings_are_closed_and_not_freed(check: &Check) -> Result<(), String> {
    let Legacy { owner, whole, .. } = Legacy::start()?;
    check.start()?;
    let address = check.open_legacy(whole)?;
    let mut handle = IpcHandle([0; 64]);
    check.answers("freeing a mapping", check.cuda.mem_free(address), INVALID);
    check.answers("a handle of a mapping", check.cuda.ipc_get_mem_handle(&mut handle, address), INVALID);
    let ours = check.alloc(BYTES)?;
    check.answers("closing what was allocated here", check.cuda.ipc_close_mem_handle(ours), INVALID);
    let inside = check.cuda.ipc_close_mem_handle(address + 4096);
    check.answers("closing a place inside", inside, INVALID);
    check.same("the mapping works on", check.holds_pattern(address, BYTES, 1)?, true);
    owner.finish()
}

pub(super) fn an_invented_handle_does_not_open(check: &Check) -> Result<(), String> {
    let Legacy { owner, whole, .. } = Legacy::start()?;
    check.start()?;
    let mut address = 0;
    let mut open = |handle, flags| check.cuda.ipc_open_mem_handle(&mut address, handle, flags);
    check.answers("only zeroes", open(IpcHandle([0; 64]), LAZY_PEER), INVALID);
    check.answers("garbage", open(IpcHandle([0xA5; 64]), LAZY_PEER), INVALID);
    check.answers("flags other than lazy peer access", open(whole, 0), INVALID);
    owner.finish()
}

/// Allocates memory with the test pattern and sends its handle. Then frees it, allocates as much again with twice the
/// pattern, and waits.
pub(super) fn owner_of_freed_memory(check: &Check, line: &Line) -> Result<(), String> {
    check.start()?;
    let mut freed = 0;
    check.cuda.mem_alloc(&mut freed, BYTES).ok()?;
    check.fill(freed, BYTES)?;
    line.send(check.legacy_handle(freed)?.0)?;
    check.cuda.mem_free(freed).ok()?;
    let later = check.alloc(BYTES)?;
    check.fill(later, BYTES)?;
    check.double(later, BYTES)?.ok()?;
    line.send("done")?;
    while line.hear()?.is_some() {}
    Ok(())
}

/// Either answer is right: H200s with driver 580.159.04 have given both, and the vendor's manual says nothing about the
/// handle of freed memory. Partywall relies on neither: its publishers withdraw memory before they free it.
pub(super) fn a_handle_of_freed_memory_is_refused_or_opens_later_memory(check: &Check) -> Result<(), String> {
    let mut owner = Peer::start("owner_of_freed_memory")?;
    let handle = owner.hear()?.handle()?;
    owner.expect("done")?;
    check.start()?;
    let mut address = 0;
    let opened = check.cuda.ipc_open_mem_handle(&mut address, handle, LAZY_PEER);
    if opened.code == OK {
        check.answers("the handle of freed memory", opened, OK);
        check.same("opens what was allocated later", check.holds_pattern(address, BYTES, 2)?, true);
        check.cuda.ipc_close_mem_handle(address).ok()?;
    } else {
        // INVALID_HANDLE is the answer to a handle whose exporter has gone. Here the exporter lives and only the
        // allocation is gone, and an H200 with driver 580.159.04 answered NOT_PERMITTED (2026-11-28).
        let known = [CuResult::INVALID_HANDLE, CuResult::NOT_PERMITTED].contains(&opened.code);
        check.same(&format!("the handle of freed memory is refused: {}", opened.code), known, true);
    }
    owner.finish()
}

pub(super) fn a_legacy_mapping_survives_its_exporter(check: &Check) -> Result<(), String> {
    let Legacy { mut owner, whole, .. } = Legacy::start()?;
    check.start()?;
    let address = check.open_legacy(whole)?;
    owner.kill()?;
    check.same("the bytes are still there", check.holds_pattern(address, BYTES, 1)?, true);
    check.same("another process", open(ourselves(), whole)?, CuResult::INVALID_HANDLE.to_string());
    check.fill(address, BYTES)?;
    check.same("the mapping can be written,", check.holds_pattern(address, BYTES, 1)?, true);
    Ok(())
}

/// Makes a process that `command` starts open a handle, and returns the result.
pub(super) fn open(command: Command, handle: IpcHandle) -> Result<String, String> {
    let mut reader = Peer::start_with("reader_of_legacy_memory", command)?;
    reader.send(handle.0)?;
    let opened = reader.hear()?.text();
    reader.finish()?;
    Ok(opened)
}

/// Opens a handle, reports the result, and checks the test pattern.
pub(super) fn reader_of_legacy_memory(check: &Check, line: &Line) -> Result<(), String> {
    let handle = line.hear()?.ok_or("no handle was sent")?.handle()?;
    check.start()?;
    let mut address = 0;
    let answer = check.cuda.ipc_open_mem_handle(&mut address, handle, LAZY_PEER);
    if answer.code.is_success() {
        check.undo(move |cuda| cuda.ipc_close_mem_handle(address));
        check.same("the reader finds the bytes", check.holds_pattern(address, BYTES, 1)?, true);
    }
    line.send(answer.code.to_string())
}

/// `CUpointer_attribute` by number, as `cuda.h` has them.
pub(super) fn pointer_attributes_tell_the_kinds_apart(check: &Check) -> Result<(), String> {
    let Legacy { owner, whole, .. } = Legacy::start()?;
    check.start()?;
    const HOST: u64 = 1;
    const DEVICE: u64 = 2;
    let ask = |kind: &str, address: u64, expected: &[(&str, u32, u64)]| {
        for (name, attribute, value) in expected {
            let mut found = 0;
            let answer = check.cuda.pointer_get_attribute(&mut found, *attribute, address);
            if answer.code.is_success() {
                check.same(&format!("{kind}: {name}"), found, *value);
            } else {
                check.answers(&format!("{kind}: {name}"), answer, OK);
            }
        }
    };
    let allocated = check.alloc(BYTES)?;
    for (kind, address) in [("allocated", allocated), ("inside allocated", allocated + 4099)] {
        ask(
            kind,
            address,
            &[
                ("memory type", 2, DEVICE),
                ("is managed", 8, 0),
                ("device", 9, 0),
                ("has a legacy handle", 10, 1),
                ("start", 11, allocated),
                ("size", 12, BYTES as u64),
                ("is mapped", 13, 1),
                ("exportable as", 14, 0),
                ("pool", 17, 0),
            ],
        );
    }
    let odd = check.alloc(1000)?;
    ask("odd size", odd, &[("start", 11, odd), ("size", 12, 1000), ("has a legacy handle", 10, 1)]);
    let (_, mapped) = check.mapped(BYTES)?;
    for (kind, address) in [("mapped", mapped), ("inside mapped", mapped + 4099)] {
        ask(
            kind,
            address,
            &[
                ("memory type", 2, DEVICE),
                ("is managed", 8, 0),
                ("device", 9, 0),
                ("has a legacy handle", 10, 0),
                ("start", 11, mapped),
                ("size", 12, BYTES as u64),
                ("is mapped", 13, 1),
                ("exportable as", 14, u64::from(POSIX_FD)),
                ("pool", 17, 0),
            ],
        );
    }
    let opened = check.open_legacy(whole)?;
    ask(
        "opened",
        opened + 4099,
        &[
            ("memory type", 2, DEVICE),
            ("device", 9, 0),
            ("has a legacy handle", 10, 0),
            ("start", 11, opened),
            ("size", 12, BYTES as u64),
            ("pool", 17, 0),
        ],
    );
    let mut pinned = 0;
    check.cuda.mem_host_alloc(&mut pinned, BYTES, 0).ok()?;
    ask(
        "pinned",
        pinned + 4099,
        &[
            ("memory type", 2, HOST),
            ("is managed", 8, 0),
            ("has a legacy handle", 10, 0),
            ("start", 11, pinned),
            ("size", 12, BYTES as u64),
            ("pool", 17, 0),
        ],
    );
    check.cuda.mem_free_host(pinned).ok()?;
    let (words, registered) = check.words()?;
    ask(
        "registered",
        registered,
        &[
            ("memory type", 2, HOST),
            ("has a legacy handle", 10, 0),
            ("start", 11, words.address()),
            ("size", 12, words.bytes() as u64),
        ],
    );
    let mut managed = 0;
    check.cuda.mem_alloc_managed(&mut managed, BYTES, 1).ok()?;
    ask("managed", managed + 4099, &[("is managed", 8, 1), ("has a legacy handle", 10, 0), ("start", 11, managed)]);
    check.cuda.mem_free(managed).ok()?;

    let stream = check.stream()?;
    let mut pooled = 0;
    let mut pool = 0;
    check.cuda.mem_alloc_async(&mut pooled, BYTES, stream).ok()?;
    check.cuda.stream_synchronize(stream).ok()?;
    ask(
        "pooled",
        pooled + 4099,
        &[
            ("memory type", 2, DEVICE),
            ("is managed", 8, 0),
            ("has a legacy handle", 10, 0),
            ("start", 11, pooled),
            ("size", 12, BYTES as u64),
            ("exportable as", 14, 0),
        ],
    );
    check.answers("pooled", check.cuda.pointer_get_attribute(&mut pool, 17, pooled), OK);
    check.same("pooled: it has a pool", pool != 0, true);
    check.cuda.mem_free_async(pooled, stream).ok()?;
    check.cuda.stream_synchronize(stream).ok()?;

    let mut freed = 0;
    let mut value = 0;
    check.cuda.mem_alloc(&mut freed, 16 * MIB).ok()?;
    let mut first = 0;
    let mut second = 0;
    check.answers("buffer id", check.cuda.pointer_get_attribute(&mut first, 7, freed), OK);
    check.cuda.mem_free(freed).ok()?;
    let host = vec![0_u8; BYTES];
    for (kind, address) in [("freed", freed), ("host", host.as_ptr() as u64), ("none", 0), ("made up", 12345)] {
        for attribute in [2, 10, 11] {
            let answer = check.cuda.pointer_get_attribute(&mut value, attribute, address);
            check.answers(&format!("{kind}, attribute {attribute}"), answer, INVALID);
        }
    }
    check.cuda.mem_alloc(&mut freed, 16 * MIB).ok()?;
    check.answers("buffer id", check.cuda.pointer_get_attribute(&mut second, 7, freed), OK);
    check.same("the next allocation has another buffer id", first != second, true);
    check.cuda.mem_free(freed).ok()?;
    owner.finish()
}

pub(super) fn attributes_that_are_asked_for_together_have_defaults(check: &Check) -> Result<(), String> {
    check.start()?;
    let (_, mapped) = check.mapped(BYTES)?;
    let host = vec![0_u8; BYTES];
    let of_mapping = [2, mapped, BYTES as u64];
    for (kind, address, expected) in [
        ("mapped", mapped, of_mapping),
        ("inside mapped", mapped + 4099, of_mapping),
        ("host", host.as_ptr() as u64, [0; 3]),
        ("none", 0, [0; 3]),
        ("made up", 12345, [0; 3]),
    ] {
        let mut values = [0; 3];
        check.answers(kind, check.cuda.pointer_attributes(&mut values, [2, 11, 12], address), OK);
        check.same(&format!("{kind}: memory type, start, size"), values, expected);
    }
    Ok(())
}
