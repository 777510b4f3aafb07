//! Host memory.

use partywall::cuda::CuResult;

use super::{BYTES, INVALID, OK};
use crate::raw::{PORTABLE_MAPPED, REGISTER_READ_ONLY, Words};
use crate::tests::stage::{Check, Line, Peer, pattern};

pub(super) fn host_memory_is_registered_once(check: &Check) -> Result<(), String> {
    check.start()?;
    let cuda = &check.cuda;
    let words = Words::map(Words::file(8192)?, true)?;
    let address = words.address();
    let mut device = 0;
    let already = CuResult::HOST_MEMORY_ALREADY_REGISTERED;
    let unknown = CuResult::HOST_MEMORY_NOT_REGISTERED;
    check.answers("unregister before register", cuda.mem_host_unregister(address), unknown);
    check.answers("its device address", cuda.mem_host_get_device_pointer(&mut device, address, 0), INVALID);
    check.answers("nothing", cuda.mem_host_register(address, 0, PORTABLE_MAPPED), INVALID);
    check.answers("register", cuda.mem_host_register(address, 8192, PORTABLE_MAPPED), OK);
    check.answers("again", cuda.mem_host_register(address, 8192, PORTABLE_MAPPED), already);
    check.answers("a part of it", cuda.mem_host_register(address + 4096, 4096, PORTABLE_MAPPED), already);
    check.answers("its device address", cuda.mem_host_get_device_pointer(&mut device, address, 0), OK);
    check.answers("unregister a place inside", cuda.mem_host_unregister(address + 4096), INVALID);
    check.answers("unregister", cuda.mem_host_unregister(address), OK);
    check.answers("unregister again", cuda.mem_host_unregister(address), unknown);
    check.answers("register once more", cuda.mem_host_register(address, 8192, PORTABLE_MAPPED), OK);
    check.answers("unregister", cuda.mem_host_unregister(address), OK);
    Ok(())
}

pub(super) fn neighbouring_mappings_are_registered_as_one(check: &Check) -> Result<(), String> {
    check.start()?;
    let words = Words::map_side_by_side(&[Words::file(BYTES)?, Words::file(BYTES)?])?;
    let address = words.address();
    let registered = check.cuda.mem_host_register(address, 2 * BYTES, PORTABLE_MAPPED);
    check.answers("two files that are mapped side by side", registered, OK);
    if registered.code.is_success() {
        check.undo(move |cuda| cuda.mem_host_unregister(address));
        let mut device = 0;
        check.cuda.mem_host_get_device_pointer(&mut device, address, 0).ok()?;
        check.fill(device, 2 * BYTES)?;
        check.same("a kernel crosses the border", check.holds_pattern(device, 2 * BYTES, 1)?, true);
    }
    Ok(())
}

pub(super) fn pinned_memory_is_freed_once(check: &Check) -> Result<(), String> {
    check.start()?;
    let mut pinned = 0;
    let mut device = 0;
    check.answers("allocation", check.cuda.mem_host_alloc(&mut pinned, BYTES, 1), OK);
    check.answers("its device address", check.cuda.mem_host_get_device_pointer(&mut device, pinned, 0), OK);
    check.same("is its own address", device == pinned, true);
    check.answers("not by mem_free", check.cuda.mem_free(pinned), INVALID);
    check.answers("the end", check.cuda.mem_free_host(pinned), OK);
    check.answers("a second end", check.cuda.mem_free_host(pinned), INVALID);
    Ok(())
}

/// Maps and registers the memory that it receives, and fills it by a kernel.
pub(super) fn writer_into_host_memory(check: &Check, line: &Line) -> Result<(), String> {
    let words = Words::map(line.hear()?.ok_or("the test sent nothing")?.descriptor()?, true)?;
    check.start()?;
    let device = check.register(&words)?;
    check.fill(device, words.bytes())?;
    line.send("written")
}

pub(super) fn registered_memory_is_shared_between_processes(check: &Check) -> Result<(), String> {
    let file = Words::file(BYTES)?;
    let mut writer = Peer::start("writer_into_host_memory")?;
    writer.give("memory", &file)?;
    check.start()?;
    let words = Words::map(&file, true)?;
    let device = check.register(&words)?;
    writer.expect("written")?;
    check.same("the host reads the last word", words.load(words.bytes() / 8 - 1), {
        let index = words.bytes() as u64 / 4;
        u64::from(pattern(index - 1)) << 32 | u64::from(pattern(index - 2))
    });
    check.same("a kernel here reads all", check.holds_pattern(device, BYTES, 1)?, true);
    writer.finish()
}

pub(super) fn read_only_host_memory_is_registered_as_such(check: &Check) -> Result<(), String> {
    check.start()?;
    let words = Words::map(Words::file(BYTES)?, false)?;
    let address = words.address();
    let plain = check.cuda.mem_host_register(address, BYTES, PORTABLE_MAPPED);
    check.answers("as if it could be written", plain, INVALID);
    // CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
    let supported = check.attribute(113)? != 0;
    let expected = if supported { OK } else { CuResult::NOT_SUPPORTED };
    let read_only = check.cuda.mem_host_register(address, BYTES, PORTABLE_MAPPED | REGISTER_READ_ONLY);
    check.answers("as read-only", read_only, expected);
    if read_only.code.is_success() {
        check.cuda.mem_host_unregister(address).ok()?;
    }
    Ok(())
}
