//! Memory that can be exported.

use std::fs::File;
use std::os::fd::AsFd;
use std::process::Command;

use partywall::cuda::CuResult;
use partywall_os::fd::{FdKind, classify};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::neighbours::ourselves;
use super::{BYTES, INVALID, MIB, OK};
use crate::raw::{self, AccessRule, POSIX_FD, Properties, READ, READ_WRITE, Words};
use crate::tests::stage::{Check, Line, Peer, pattern};
use crate::tests::world::{ensure, error_text, eventually};

pub(super) fn exportable_memory_comes_in_whole_granules(check: &Check) -> Result<(), String> {
    check.start()?;
    let cuda = &check.cuda;
    let exportable = Properties::exportable(0);
    let mut granularity = 0;
    let mut handle = 0;
    check.answers("granularity", cuda.mem_get_allocation_granularity(&mut granularity, &exportable, 0), OK);
    check.same("granularity", granularity, 2 * MIB);
    check.answers("half a granule", cuda.mem_create(&mut handle, MIB, &exportable, 0), INVALID);
    check.answers("4 KiB", cuda.mem_create(&mut handle, 4096, &exportable, 0), INVALID);
    check.answers("nothing", cuda.mem_create(&mut handle, 0, &exportable, 0), INVALID);
    check.answers("a byte more than a granule", cuda.mem_create(&mut handle, 2 * MIB + 1, &exportable, 0), INVALID);
    let nowhere = Properties::exportable(4096);
    check.answers(
        "a device that is not there",
        cuda.mem_create(&mut handle, BYTES, &nowhere, 0),
        CuResult::INVALID_DEVICE,
    );
    let handle = check.create(BYTES)?;
    let mut properties = Properties::default();
    check.answers("its properties", cuda.mem_get_allocation_properties(&mut properties, handle), OK);
    check.same("its device", properties.location.id, 0);

    let mut private = 0;
    let properties = Properties { handle_types: 0, ..exportable };
    cuda.mem_create(&mut private, BYTES, &properties, 0).ok()?;
    check.undo(move |cuda| cuda.mem_release(private));
    let mut descriptor = -1;
    let exported = cuda.mem_export(&mut descriptor, private, POSIX_FD, 0);
    check.answers("exporting memory that was not made for it", exported, INVALID);
    Ok(())
}

pub(super) fn too_much_memory_is_out_of_memory(check: &Check) -> Result<(), String> {
    check.start()?;
    let mut handle = 0;
    let mut address = 0;
    let exportable = Properties::exportable(0);
    check.answers(
        "32 TiB to export",
        check.cuda.mem_create(&mut handle, 1 << 45, &exportable, 0),
        CuResult::OUT_OF_MEMORY,
    );
    check.answers("32 TiB", check.cuda.mem_alloc(&mut address, 1 << 45), CuResult::OUT_OF_MEMORY);
    check.answers("nothing", check.cuda.mem_alloc(&mut address, 0), INVALID);
    check.same("the context lives on", check.alloc(BYTES).is_ok(), true);
    Ok(())
}

pub(super) fn freed_memory_is_free_at_once(check: &Check) -> Result<(), String> {
    check.start()?;
    let free = || -> Result<usize, String> {
        let mut free = 0;
        let mut total = 0;
        check.cuda.mem_get_info(&mut free, &mut total).ok()?;
        ensure(free > 0 && free <= total, || format!("{free} of {total}"))?;
        Ok(free)
    };
    let before = free()?;
    let mut handle = 0;
    let size = 64 * MIB;
    check.cuda.mem_create(&mut handle, size, &Properties::exportable(0), 0).ok()?;
    check.same("an allocation takes its size", free()? + size, before);
    check.cuda.mem_release(handle).ok()?;
    check.same("its release returns it", free()?, before);
    let mut address = 0;
    check.cuda.mem_alloc(&mut address, size).ok()?;
    check.same("so does an ordinary allocation", free()? + size, before);
    check.cuda.mem_free(address).ok()?;
    check.same("and its end", free()?, before);
    check.answers("a second end", check.cuda.mem_free(address), INVALID);
    check.answers("an address that never was", check.cuda.mem_free(12345), INVALID);
    Ok(())
}

/// Creates memory with the test pattern, sends its descriptor, and follows commands.
pub(super) fn owner_of_exported_memory(check: &Check, line: &Line) -> Result<(), String> {
    check.start()?;
    let (handle, address) = check.mapped(BYTES)?;
    check.fill(address, BYTES)?;
    line.give("memory", check.export(handle)?)?;
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

/// Maps the memory whose descriptor it receives, on the given device, and checks the test pattern.
pub(super) fn reader_of_exported_memory(check: &Check, line: &Line) -> Result<(), String> {
    let message = line.hear()?.ok_or("the test sent nothing")?;
    check.start_on(message.text().parse().map_err(error_text)?)?;
    let handle = check.import(message.descriptor()?)?;
    let address = check.map(handle, BYTES, READ_WRITE)?;
    check.same("the reader finds the bytes", check.holds_pattern(address, BYTES, 1)?, true);
    line.send("read")
}

/// Makes a process that `command` starts read exported memory on its device with this ordinal.
pub(super) fn read(command: Command, ordinal: &str, descriptor: impl AsFd) -> Result<(), String> {
    let mut reader = Peer::start_with("reader_of_exported_memory", command)?;
    reader.give(ordinal, descriptor)?;
    reader.expect("read")?;
    reader.finish()
}

pub(super) fn an_import_is_the_same_memory(check: &Check) -> Result<(), String> {
    let mut owner = Peer::start("owner_of_exported_memory")?;
    let descriptor = owner.hear()?.descriptor()?;
    check.start()?;
    let address = check.map(check.import(&descriptor)?, BYTES, READ_WRITE)?;
    check.same("the owner's bytes are here", check.holds_pattern(address, BYTES, 1)?, true);
    owner.order("double")?;
    check.same("so is what it changes", check.holds_pattern(address, BYTES, 2)?, true);
    check.fill(address, BYTES)?;
    owner.order("verify")?;
    owner.finish()
}

pub(super) fn an_import_cannot_be_exported_again(check: &Check) -> Result<(), String> {
    check.start()?;
    let descriptor = check.export(check.create(BYTES)?)?;
    let imported = check.import(&descriptor)?;
    let mut again = -1;
    let exported = check.cuda.mem_export(&mut again, imported, POSIX_FD, 0);
    check.answers("exporting an import", exported, INVALID);
    let mut properties = Properties::default();
    check.answers("its properties", check.cuda.mem_get_allocation_properties(&mut properties, imported), OK);
    check.same("its device", properties.location.id, 0);
    Ok(())
}

/// Takes all file descriptors that this process may have.
fn take_all_descriptors() -> Result<Vec<File>, String> {
    let limit = Rlimit { current: Some(256), maximum: getrlimit(Resource::Nofile).maximum };
    setrlimit(Resource::Nofile, limit).map_err(error_text)?;
    Ok(std::iter::from_fn(|| File::open("/dev/null").ok()).collect())
}

pub(super) fn an_export_needs_a_free_descriptor(check: &Check) -> Result<(), String> {
    check.start()?;
    let handle = check.create(BYTES)?;
    let mut files = take_all_descriptors()?;
    let mut descriptor = -1;
    let full = check.cuda.mem_export(&mut descriptor, handle, POSIX_FD, 0);
    check.answers("without a free descriptor", full, CuResult::OPERATING_SYSTEM);
    files.pop();
    check.same("with one", check.export(handle).is_ok(), true);
    Ok(())
}

pub(super) fn other_calls_need_no_free_descriptor(check: &Check) -> Result<(), String> {
    check.start()?;
    check.load_kernels()?;
    let descriptor = check.export(check.create(BYTES)?)?;
    let _files = take_all_descriptors()?;
    let (_, created) = check.mapped(BYTES)?;
    let imported = check.map(check.import(&descriptor)?, BYTES, READ_WRITE)?;
    check.stream()?;
    check.event(raw::NO_TIMING)?;
    let shared = check.cuda.event_create(&mut 0, raw::NO_TIMING | raw::INTERPROCESS);
    check.answers("an event that other processes open", shared, CuResult::MAP_FAILED);
    for address in [created, imported, check.alloc(BYTES)?] {
        check.fill(address, BYTES)?;
        check.same("memory works", check.holds_pattern(address, BYTES, 1)?, true);
    }
    Ok(())
}

pub(super) fn an_import_leaves_the_descriptor_open(check: &Check) -> Result<(), String> {
    check.start()?;
    let (handle, address) = check.mapped(BYTES)?;
    check.fill(address, BYTES)?;
    let descriptor = check.export(handle)?;
    let copy = descriptor.try_clone().map_err(error_text)?;
    check.import(&descriptor)?;
    check.import(&descriptor)?;
    drop(descriptor);
    let imported = check.import(&copy)?;
    drop(copy);
    let address = check.map(imported, BYTES, READ)?;
    check.same("a copy is as good, and may be closed", check.holds_pattern(address, BYTES, 1)?, true);
    Ok(())
}

pub(super) fn only_exported_descriptors_can_be_imported(check: &Check) -> Result<(), String> {
    check.start()?;
    let mut handle = 0;
    let mut import = |descriptor| check.cuda.mem_import(&mut handle, descriptor, POSIX_FD);
    let null = File::open("/dev/null").map_err(error_text)?;
    check.answers("/dev/null", import(raw::number(null.as_fd())), CuResult::UNKNOWN);
    let memfd = Words::file(BYTES)?;
    check.answers("a memfd", import(raw::number(memfd.as_fd())), CuResult::UNKNOWN);
    check.answers("a closed descriptor", import(1000), CuResult::UNKNOWN);
    check.answers("-1", import(u64::from(u32::MAX)), CuResult::UNKNOWN);
    Ok(())
}

pub(super) fn an_exported_descriptor_is_the_control_device(check: &Check) -> Result<(), String> {
    check.start()?;
    let descriptor = check.export(check.create(BYTES)?)?;
    let kind = classify(&descriptor).map_err(error_text)?;
    check.same("the descriptor is the control device's", kind == FdKind::NvidiaControl, true);
    Ok(())
}

pub(super) fn a_holder_without_cuda_keeps_the_memory_of_a_killed_creator(check: &Check) -> Result<(), String> {
    let mut owner = Peer::start("owner_of_exported_memory")?;
    let descriptor = owner.hear()?.descriptor()?;
    owner.kill()?;
    for _ in 0..2 {
        read(ourselves(), "0", &descriptor)?;
    }
    check.start()?;
    let address = check.map(check.import(&descriptor)?, BYTES, READ)?;
    check.same("the bytes are there", check.holds_pattern(address, BYTES, 1)?, true);
    drop(descriptor);
    check.same("a mapping keeps them as well", check.holds_pattern(address, BYTES, 1)?, true);
    Ok(())
}

pub(super) fn the_last_descriptor_returns_the_memory(check: &Check) -> Result<(), String> {
    check.start()?;
    let free = || -> Result<usize, String> {
        let mut free = 0;
        let mut total = 0;
        check.cuda.mem_get_info(&mut free, &mut total).ok()?;
        Ok(free)
    };
    let size = 1024 * MIB;
    let mut handle = 0;
    check.cuda.mem_create(&mut handle, size, &Properties::exportable(0), 0).ok()?;
    let descriptor = check.export(handle)?;
    let held = free()?;
    check.cuda.mem_release(handle).ok()?;
    check.same("a descriptor keeps the memory", free()? < held + size / 2, true);
    drop(descriptor);
    eventually("the return of the memory", || Ok(free()? >= held + size / 2))
}

/// Fills memory with ones and leaves it behind.
pub(super) fn writer_of_much_memory(check: &Check, line: &Line) -> Result<(), String> {
    check.start()?;
    let (_, address) = check.mapped(64 * MIB)?;
    let stream = check.stream()?;
    check.cuda.memset_d8_async(address, 0xFF, 64 * MIB, stream).ok()?;
    check.cuda.stream_synchronize(stream).ok()?;
    line.send("written")
}

pub(super) fn fresh_memory_reads_zero_after_another_process(check: &Check) -> Result<(), String> {
    let mut writer = Peer::start("writer_of_much_memory")?;
    writer.expect("written")?;
    writer.finish()?;
    check.start()?;
    let (_, address) = check.mapped(64 * MIB)?;
    let mut bytes = vec![1; 64 * MIB];
    check.cuda.read(&mut bytes, address).ok()?;
    check.same("bytes that are not zero", bytes.iter().filter(|byte| **byte != 0).count(), 0);
    Ok(())
}

pub(super) fn only_whole_allocations_can_be_mapped(check: &Check) -> Result<(), String> {
    check.start()?;
    let cuda = &check.cuda;
    let created = check.create(BYTES)?;
    let imported = check.import(check.export(created)?)?;
    let address = check.reserve(4 * BYTES)?;
    for (whose, handle) in [("created", created), ("imported", imported)] {
        let part = cuda.mem_map(address, BYTES / 2, 0, handle, 0);
        check.answers(&format!("the first half of {whose} memory"), part, CuResult::NOT_SUPPORTED);
        let part = cuda.mem_map(address, BYTES / 2, BYTES / 2, handle, 0);
        check.answers(&format!("the second half of {whose} memory"), part, CuResult::NOT_SUPPORTED);
        let more = cuda.mem_map(address, 2 * BYTES, 0, handle, 0);
        check.answers(&format!("more than there is of {whose} memory"), more, CuResult::NOT_SUPPORTED);
        let odd = cuda.mem_map(address, BYTES - 1, 0, handle, 0);
        check.answers(&format!("an odd size of {whose} memory"), odd, CuResult::NOT_SUPPORTED);
    }
    let odd = cuda.mem_map(address + 4096, BYTES, 0, created, 0);
    check.answers("an address that is not aligned", odd, INVALID);
    check.answers("an address that was not reserved", cuda.mem_map(1 << 30, BYTES, 0, created, 0), INVALID);
    check.map_at(address, created, BYTES)?;
    check.map_at(address + BYTES as u64, imported, BYTES)
}

pub(super) fn one_allocation_can_be_mapped_twice(check: &Check) -> Result<(), String> {
    check.start()?;
    let (handle, first) = check.mapped(BYTES)?;
    let second = check.map(handle, BYTES, READ)?;
    check.same("at two addresses", first != second, true);
    check.fill(first, BYTES)?;
    check.same("what one writes the other reads", check.holds_pattern(second, BYTES, 1)?, true);
    Ok(())
}

pub(super) fn mapped_memory_outlives_its_handle(check: &Check) -> Result<(), String> {
    check.start()?;
    let mut handle = 0;
    check.cuda.mem_create(&mut handle, BYTES, &Properties::exportable(0), 0).ok()?;
    let address = check.map(handle, BYTES, READ_WRITE)?;
    check.answers("release while mapped", check.cuda.mem_release(handle), OK);
    check.fill(address, BYTES)?;
    check.same("the mapping works on", check.holds_pattern(address, BYTES, 1)?, true);
    Ok(())
}

pub(super) fn allocations_mapped_side_by_side_are_one_range(check: &Check) -> Result<(), String> {
    check.start()?;
    let address = check.reserve(4 * BYTES)?;
    let first = check.create(BYTES)?;
    let second = check.create(BYTES)?;
    let rule = AccessRule::of(0, READ_WRITE);
    check.map_at(address, first, BYTES)?;
    let too_far = check.cuda.mem_set_access(address, 2 * BYTES, &rule, 1);
    check.answers("access to a range that is mapped in part", too_far, INVALID);
    check.cuda.mem_set_access(address, BYTES, &rule, 1).ok()?;
    check.fill(address, BYTES)?;
    check.map_at(address + BYTES as u64, second, BYTES)?;
    check.answers("access to both", check.cuda.mem_set_access(address, 2 * BYTES, &rule, 1), OK);
    check.same("the first keeps its bytes", check.holds_pattern(address, BYTES, 1)?, true);
    check.fill(address, 2 * BYTES)?;
    check.same("a kernel crosses the border", check.holds_pattern(address, 2 * BYTES, 1)?, true);
    let copied: [u8; 8] = check.bytes(address + BYTES as u64 - 4)?;
    let index = BYTES as u64 / 4;
    let expected = [pattern(index - 1).to_ne_bytes(), pattern(index).to_ne_bytes()].concat();
    check.same("so does a copy", copied.to_vec(), expected);
    Ok(())
}

pub(super) fn many_more_addresses_than_memory_can_be_reserved(check: &Check) -> Result<(), String> {
    check.start()?;
    let mut address = 0;
    let bytes = 256 * 1024 * MIB;
    check.answers("256 GiB", check.cuda.mem_address_reserve(&mut address, bytes, 0, 0, 0), OK);
    check.undo(move |cuda| cuda.mem_address_free(address, bytes));
    let end = address + (bytes - BYTES) as u64;
    check.map_at(end, check.create(BYTES)?, BYTES)?;
    check.cuda.mem_set_access(end, BYTES, &AccessRule::of(0, READ_WRITE), 1).ok()?;
    check.fill(end, BYTES)?;
    check.same("memory at their end", check.holds_pattern(end, BYTES, 1)?, true);
    Ok(())
}

pub(super) fn a_range_is_mapped_once(check: &Check) -> Result<(), String> {
    check.start()?;
    let first = check.create(BYTES)?;
    let second = check.create(BYTES)?;
    let address = check.map(first, BYTES, READ_WRITE)?;
    check.answers("a range that is in use", check.cuda.mem_map(address, BYTES, 0, second, 0), INVALID);
    let mut other = 0;
    let hint = address;
    check.answers("a reservation there", check.cuda.mem_address_reserve(&mut other, BYTES, 0, hint, 0), OK);
    check.undo(move |cuda| cuda.mem_address_free(other, BYTES));
    check.same("is put elsewhere", other != address, true);
    check.answers("half a page", check.cuda.mem_address_reserve(&mut other, MIB, 0, 0, 0), INVALID);
    check.answers("nothing", check.cuda.mem_address_reserve(&mut other, 0, 0, 0, 0), INVALID);
    Ok(())
}

pub(super) fn mappings_end_as_a_whole(check: &Check) -> Result<(), String> {
    check.start()?;
    let cuda = &check.cuda;
    let handle = check.create(BYTES)?;
    let mut address = 0;
    cuda.mem_address_reserve(&mut address, BYTES, 0, 0, 0).ok()?;
    check.answers("unmapping what was never mapped", cuda.mem_unmap(address, BYTES), OK);
    cuda.mem_map(address, BYTES, 0, handle, 0).ok()?;
    check.answers("unmapping a half", cuda.mem_unmap(address, BYTES / 2), INVALID);
    check.answers("unmapping the other half", cuda.mem_unmap(address + BYTES as u64 / 2, BYTES / 2), INVALID);
    check.answers("freeing addresses that are mapped", cuda.mem_address_free(address, BYTES), INVALID);
    check.answers("unmapping the whole", cuda.mem_unmap(address, BYTES), OK);
    check.answers("unmapping it again", cuda.mem_unmap(address, BYTES), OK);
    check.answers("freeing half of the addresses", cuda.mem_address_free(address, BYTES / 2), INVALID);
    check.answers("mapping again at the same address", cuda.mem_map(address, BYTES, 0, handle, 0), OK);
    check.answers("unmapping that", cuda.mem_unmap(address, BYTES), OK);
    check.answers("freeing the addresses", cuda.mem_address_free(address, BYTES), OK);
    Ok(())
}

pub(super) fn mapped_memory_is_not_freed_by_mem_free(check: &Check) -> Result<(), String> {
    check.start()?;
    let (_, address) = check.mapped(BYTES)?;
    check.answers("memory that is mapped", check.cuda.mem_free(address), INVALID);
    check.answers("and as a legacy mapping", check.cuda.ipc_close_mem_handle(address), INVALID);
    Ok(())
}

/// Writes through a read-only mapping, and reports the result of every later call.
pub(super) fn faulting_writer(check: &Check, line: &Line) -> Result<(), String> {
    let descriptor = line.hear()?.ok_or("the test sent nothing")?.descriptor()?;
    check.start()?;
    let handle = check.import(descriptor)?;
    let address = check.map(handle, BYTES, READ)?;
    check.same("reading is allowed", check.holds_pattern(address, BYTES, 1)?, true);
    let fault = CuResult::ILLEGAL_ADDRESS;
    check.answers("a kernel that writes", check.double(address, BYTES)?, fault);
    check.give_nothing_back();
    let mut other = 0;
    check.answers("an allocation after that", check.cuda.mem_alloc(&mut other, BYTES), fault);
    check.answers("waiting after that", check.cuda.ctx_synchronize(), fault);
    check.answers("unmapping after that", check.cuda.mem_unmap(address, BYTES), OK);
    line.send("faulted")
}

pub(super) fn a_write_through_a_read_only_mapping_ends_the_writer_alone(check: &Check) -> Result<(), String> {
    check.start()?;
    let (handle, address) = check.mapped(BYTES)?;
    check.fill(address, BYTES)?;
    let mut writer = Peer::start("faulting_writer")?;
    writer.give("memory", check.export(handle)?)?;
    writer.expect("faulted")?;
    check.same("the bytes are as before", check.holds_pattern(address, BYTES, 1)?, true);
    writer.finish()?;
    check.double(address, BYTES)?.ok()?;
    check.same("the neighbour works on", check.holds_pattern(address, BYTES, 2)?, true);
    Ok(())
}

pub(super) fn without_set_access_a_mapping_faults(check: &Check) -> Result<(), String> {
    check.start()?;
    check.load_kernels()?;
    let handle = check.create(BYTES)?;
    let address = check.reserve(BYTES)?;
    check.map_at(address, handle, BYTES)?;
    check.answers("a copy", check.cuda.read(&mut [0; 8], address), INVALID);
    let stream = check.stream()?;
    check.enqueue_fill(stream, address, BYTES)?;
    check.answers("a kernel", check.cuda.stream_synchronize(stream), CuResult::ILLEGAL_ADDRESS);
    check.give_nothing_back();
    Ok(())
}
