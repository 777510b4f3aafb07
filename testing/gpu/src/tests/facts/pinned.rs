//! Host memory that the driver makes on a NUMA node, pinned from the start, and exports as it exports memory of a GPU.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use partywall::cuda::CuResult;
use partywall_os::fd::{FdKind, classify};

use super::memory::read;
use super::mps::Mps;
use super::{BYTES, MIB, OK, query_twice, wait_for};
use crate::raw::{self, AccessRule, Address, GEQ, Handle, Location, Properties, READ, READ_WRITE, Words};
use crate::tests::stage::{Check, Line, Peer, pattern};
use crate::tests::world::{ensure, error_text};

/// `CU_MEM_LOCATION_TYPE_HOST_NUMA`.
const ON_NODE: u32 = 3;
/// `CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID`.
const NODE_OF_DEVICE: u32 = 134;
/// `CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`.
const IS_SUPPORTED: u32 = 141;

/// Returns the NUMA node of the first device, or 0 where the driver names none.
fn node(check: &Check) -> Result<i32, String> {
    Ok(check.attribute(NODE_OF_DEVICE)?.max(0))
}

fn on(node: i32) -> Properties {
    Properties { location: Location { kind: ON_NODE, id: node }, ..Properties::exportable(0) }
}

/// Returns the rule that gives the CPU access.
fn cpu(check: &Check, flags: u32) -> Result<AccessRule, String> {
    Ok(AccessRule { location: Location { kind: ON_NODE, id: node(check)? }, flags })
}

fn create(check: &Check, bytes: usize) -> Result<Handle, String> {
    let mut handle = 0;
    check.cuda.mem_create(&mut handle, bytes, &on(node(check)?), 0).ok()?;
    check.undo(move |cuda| cuda.mem_release(handle));
    Ok(handle)
}

/// Maps memory for those that the rules name.
fn map(check: &Check, handle: Handle, bytes: usize, rules: &[AccessRule]) -> Result<Address, String> {
    let address = check.reserve(bytes)?;
    check.map_at(address, handle, bytes)?;
    check.cuda.mem_set_access(address, bytes, &rules[0], rules.len()).ok()?;
    Ok(address)
}

/// Maps new memory for the first device and the CPU.
pub(super) fn map_new(check: &Check) -> Result<(), String> {
    map_for_both(check, create(check, BYTES)?, BYTES).map(drop)
}

/// Maps memory for the first device and the CPU.
fn map_for_both(check: &Check, handle: Handle, bytes: usize) -> Result<(Address, Words), String> {
    let address = map(check, handle, bytes, &[AccessRule::of(0, READ_WRITE), cpu(check, READ_WRITE)?])?;
    Ok((address, Words::at(address, bytes)))
}

/// Returns whether the words are the test pattern, each `factor` times.
fn holds_pattern(words: &Words, factor: u32) -> bool {
    let half = |index: usize| u64::from(pattern(index as u64).wrapping_mul(factor));
    (0..words.bytes() / 8).all(|index| words.load(index) == half(2 * index) | half(2 * index + 1) << 32)
}

/// Makes memory with the test pattern, sends its descriptor, and follows commands.
pub(super) fn owner_of_pinned_memory(check: &Check, line: &Line) -> Result<(), String> {
    check.start()?;
    let handle = create(check, BYTES)?;
    let (address, words) = map_for_both(check, handle, BYTES)?;
    check.fill(address, BYTES)?;
    check.same("the CPU finds what a kernel wrote", holds_pattern(&words, 1), true);
    line.give("memory", check.export(handle)?)?;
    while let Some(order) = line.hear()? {
        match order.text().as_str() {
            "double" => check.double(address, BYTES)?.ok()?,
            "verify" => check.same("a kernel finds zeros", words_are(check, address, 0)?, true),
            other => return Err(format!("unknown command {other:?}")),
        }
        line.send("done")?;
    }
    Ok(())
}

/// Returns whether the first bytes, copied by the driver, are `value`.
fn words_are(check: &Check, address: Address, value: u64) -> Result<bool, String> {
    Ok(check.bytes(address)? == value.to_ne_bytes())
}

pub(super) fn pinned_memory_is_exported_as_memory_of_a_gpu_is(check: &Check) -> Result<(), String> {
    check.start()?;
    check.same("the driver says that it can", check.attribute(IS_SUPPORTED)?, 1);
    let mut granularity = 0;
    check.cuda.mem_get_allocation_granularity(&mut granularity, &on(node(check)?), 0).ok()?;
    check.same("granularity", granularity, 2 * MIB);
    // An importer has to ask what it has imported.
    for (question, descriptor, place) in [
        ("imported memory of a node", check.export(create(check, BYTES)?)?, (ON_NODE, node(check)?)),
        ("imported memory of a GPU", check.export(check.create(BYTES)?)?, (1, 0)),
    ] {
        let mut properties = Properties::default();
        check.cuda.mem_get_allocation_properties(&mut properties, check.import(descriptor)?).ok()?;
        check.same(question, (properties.location.kind, properties.location.id), place);
    }
    Ok(())
}

pub(super) fn a_descriptor_of_pinned_memory_is_the_control_device(check: &Check) -> Result<(), String> {
    check.start()?;
    let descriptor = check.export(create(check, BYTES)?)?;
    let kind = classify(&descriptor).map_err(error_text)?;
    check.same("it is the control device", matches!(kind, FdKind::NvidiaControl), true);
    check.same("which nobody maps without the driver", Words::map(&descriptor, true).is_err(), true);
    Ok(())
}

pub(super) fn pinned_memory_of_no_node_is_refused(check: &Check) -> Result<(), String> {
    check.start()?;
    let (mut handle, mut granularity) = (0, 0);
    // The granularity is no way to ask whether a node exists.
    let asked = check.cuda.mem_get_allocation_granularity(&mut granularity, &on(4096), 0);
    check.answers("the granularity of a node that is not there", asked, OK);
    let nowhere = check.cuda.mem_create(&mut handle, BYTES, &on(4096), 0);
    check.answers("a node that is not there", nowhere, CuResult::INVALID_VALUE);
    let odd = check.cuda.mem_create(&mut handle, 4096, &on(node(check)?), 0);
    check.answers("half a granule", odd, CuResult::INVALID_VALUE);
    Ok(())
}

pub(super) fn more_pinned_memory_than_a_node_has_is_out_of_memory(check: &Check) -> Result<(), String> {
    check.cuda.init(0).ok()?;
    let mut handle = 0;
    let too_much = check.cuda.mem_create(&mut handle, 1 << 40, &on(node(check)?), 0);
    check.answers("a terabyte", too_much, CuResult::OUT_OF_MEMORY);
    create(check, BYTES).map(drop)
}

/// Fills memory with ones and leaves it behind.
pub(super) fn writer_of_much_pinned_memory(check: &Check, line: &Line) -> Result<(), String> {
    check.cuda.init(0).ok()?;
    let address = map(check, create(check, 64 * MIB)?, 64 * MIB, &[cpu(check, READ_WRITE)?])?;
    let words = Words::at(address, 64 * MIB);
    (0..words.bytes() / 8).for_each(|index| words.store(index, u64::MAX));
    line.send("written")
}

pub(super) fn fresh_pinned_memory_reads_zero_after_another_process(check: &Check) -> Result<(), String> {
    let mut writer = Peer::start("writer_of_much_pinned_memory")?;
    writer.expect("written")?;
    writer.finish()?;
    check.cuda.init(0).ok()?;
    let address = map(check, create(check, 64 * MIB)?, 64 * MIB, &[cpu(check, READ)?])?;
    let words = Words::at(address, 64 * MIB);
    let others = (0..words.bytes() / 8).filter(|index| words.load(*index) != 0).count();
    check.same("words that are not zero", others, 0);
    Ok(())
}

pub(super) fn a_wrong_size_of_pinned_memory_is_found_when_it_is_mapped(check: &Check) -> Result<(), String> {
    let mut owner = Peer::start("owner_of_pinned_memory")?;
    let descriptor = owner.hear()?.descriptor()?;
    check.cuda.init(0).ok()?;
    // The importer is told no size.
    let imported = check.import(descriptor)?;
    let address = check.reserve(2 * BYTES)?;
    let more = check.cuda.mem_map(address, 2 * BYTES, 0, imported, 0);
    check.answers("more than there is", more, CuResult::NOT_SUPPORTED);
    let half = check.cuda.mem_map(address, BYTES / 2, 0, imported, 0);
    check.answers("half of it", half, CuResult::NOT_SUPPORTED);
    check.map_at(address, imported, BYTES)?;
    owner.finish()
}

pub(super) fn the_cpu_uses_pinned_memory_without_a_context(check: &Check) -> Result<(), String> {
    let mut owner = Peer::start("owner_of_pinned_memory")?;
    let descriptor = owner.hear()?.descriptor()?;
    check.cuda.init(0).ok()?;
    let address = map(check, check.import(descriptor)?, BYTES, &[cpu(check, READ_WRITE)?])?;
    let words = Words::at(address, BYTES);
    check.same("what a kernel wrote", holds_pattern(&words, 1), true);
    owner.order("double")?;
    check.same("what a kernel changed", holds_pattern(&words, 2), true);
    words.store(0, 0);
    owner.order("verify")?;
    let (mut device, mut active) = (0, 0);
    check.cuda.primary_ctx_get_state(0, &mut device, &mut active).ok()?;
    check.same("no context was made", active, 0);
    owner.finish()
}

pub(super) fn pinned_memory_survives_its_creator(check: &Check) -> Result<(), String> {
    let mut owner = Peer::start("owner_of_pinned_memory")?;
    let descriptor = owner.hear()?.descriptor()?;
    owner.kill()?;
    check.start()?;
    let (address, words) = map_for_both(check, check.import(descriptor)?, BYTES)?;
    check.same("for the CPU", holds_pattern(&words, 1), true);
    check.same("for a kernel", check.holds_pattern(address, BYTES, 1)?, true);
    Ok(())
}

/// Makes memory with the test pattern, sends its descriptor, and loses its context by a kernel.
pub(super) fn owner_that_loses_its_context(check: &Check, line: &Line) -> Result<(), String> {
    check.start()?;
    let handle = create(check, BYTES)?;
    let (address, words) = map_for_both(check, handle, BYTES)?;
    check.fill(address, BYTES)?;
    line.give("memory", check.export(handle)?)?;
    let read_only = map(check, create(check, BYTES)?, BYTES, &[AccessRule::of(0, READ)])?;
    check.answers("a kernel that writes", check.double(read_only, BYTES)?, CuResult::ILLEGAL_ADDRESS);
    check.give_nothing_back();
    check.same("its CPU still reads", holds_pattern(&words, 1), true);
    line.send("lost")?;
    line.hear().map(drop)
}

pub(super) fn pinned_memory_survives_the_context_of_its_creator(check: &Check) -> Result<(), String> {
    let mut owner = Peer::start("owner_that_loses_its_context")?;
    let descriptor = owner.hear()?.descriptor()?;
    owner.expect("lost")?;
    check.start()?;
    let (address, words) = map_for_both(check, check.import(descriptor)?, BYTES)?;
    check.same("for the CPU", holds_pattern(&words, 1), true);
    check.same("for a kernel", check.holds_pattern(address, BYTES, 1)?, true);
    owner.finish()
}

pub(super) fn pinned_memory_is_read_only_for_the_cpu(check: &Check) -> Result<(), String> {
    let mut owner = Peer::start("owner_of_pinned_memory")?;
    let descriptor = owner.hear()?.descriptor()?;
    check.cuda.init(0).ok()?;
    let address = map(check, check.import(descriptor)?, BYTES, &[cpu(check, READ)?])?;
    let words = Words::at(address, BYTES);
    check.same("reading is allowed", holds_pattern(&words, 1), true);
    let stored = raw::in_fork(|| {
        words.store(0, 0);
        0
    });
    check.same("a store ends the process", stored.is_err(), true);
    check.same("and changes nothing", holds_pattern(&words, 1), true);
    owner.finish()
}

pub(super) fn pinned_memory_is_read_only_for_kernels(check: &Check) -> Result<(), String> {
    let mut owner = Peer::start("owner_of_pinned_memory")?;
    let descriptor = owner.hear()?.descriptor()?;
    let mut writer = Peer::start("faulting_writer")?;
    writer.give("memory", &descriptor)?;
    writer.expect("faulted")?;
    writer.finish()?;
    check.cuda.init(0).ok()?;
    let words = Words::at(map(check, check.import(descriptor)?, BYTES, &[cpu(check, READ)?])?, BYTES);
    check.same("the bytes are as before", holds_pattern(&words, 1), true);
    owner.finish()
}

pub(super) fn access_is_added_while_a_stream_waits_in_the_memory(check: &Check) -> Result<(), String> {
    check.start()?;
    let handle = create(check, BYTES)?;
    let address = map(check, handle, BYTES, &[AccessRule::of(0, READ_WRITE)])?;
    let stream = check.stream()?;
    check.cuda.memset_d8_async(address, 0, BYTES, stream).ok()?;
    check.cuda.stream_synchronize(stream).ok()?;
    check.cuda.stream_wait_value64(stream, address, 1, GEQ).ok()?;
    check.cuda.stream_write_value64(stream, address + 8, 7, 0).ok()?;
    check.answers("the stream waits", query_twice(check, stream)?, CuResult::NOT_READY);
    let added = check.cuda.mem_set_access(address, BYTES, &cpu(check, READ_WRITE)?, 1);
    check.answers("access for the CPU beside it", added, OK);
    check.answers("the stream still waits", query_twice(check, stream)?, CuResult::NOT_READY);
    let words = Words::at(address, BYTES);
    words.store(0, 1);
    check.answers("a store of the CPU ends the wait", wait_for(check, stream)?, OK);
    check.same("what the stream wrote behind it", words.load(1), 7);
    Ok(())
}

pub(super) fn access_is_added_while_kernels_use_the_memory(check: &Check) -> Result<(), String> {
    const SIZE: usize = 32 * MIB;
    const TIMES: u32 = 8;
    check.start()?;
    check.load_kernels()?;
    let address = map(check, create(check, SIZE)?, SIZE, &[AccessRule::of(0, READ_WRITE)])?;
    check.fill(address, SIZE)?;
    let stream = check.stream()?;
    for _ in 0..TIMES {
        check.enqueue_double(stream, address, SIZE)?;
    }
    let added = check.cuda.mem_set_access(address, SIZE, &cpu(check, READ_WRITE)?, 1);
    check.answers("access for the CPU beside them", added, OK);
    check.answers("the kernels end well", check.cuda.stream_synchronize(stream), OK);
    let words = Words::at(address, SIZE);
    check.same("the CPU finds what they wrote", holds_pattern(&words, 1 << TIMES), true);
    Ok(())
}

pub(super) fn writing_is_taken_away_from_cpu_and_gpu_in_one_call(check: &Check) -> Result<(), String> {
    check.start()?;
    let (address, words) = map_for_both(check, create(check, BYTES)?, BYTES)?;
    check.fill(address, BYTES)?;
    let frozen = [AccessRule::of(0, READ), cpu(check, READ)?];
    let taken = check.cuda.mem_set_access(address, BYTES, &frozen[0], frozen.len());
    check.answers("writing is taken away in place", taken, OK);
    check.same("the CPU reads", holds_pattern(&words, 1), true);
    check.same("a kernel reads", check.holds_pattern(address, BYTES, 1)?, true);
    let stored = raw::in_fork(|| {
        words.store(0, 0);
        0
    });
    check.same("a store ends the process", stored.is_err(), true);
    check.answers("a kernel that writes", check.double(address, BYTES)?, CuResult::ILLEGAL_ADDRESS);
    check.give_nothing_back();
    check.same("the bytes are as before", holds_pattern(&words, 1), true);
    Ok(())
}

pub(super) fn access_to_several_allocations_is_given_in_one_call(check: &Check) -> Result<(), String> {
    check.start()?;
    let address = check.reserve(2 * BYTES)?;
    for place in [address, address + BYTES as u64] {
        check.map_at(place, create(check, BYTES)?, BYTES)?;
    }
    let both = [AccessRule::of(0, READ_WRITE), cpu(check, READ_WRITE)?];
    let given = check.cuda.mem_set_access(address, 2 * BYTES, &both[0], both.len());
    check.answers("access across the seam", given, OK);
    check.fill(address, 2 * BYTES)?;
    check.same("the CPU reads both", holds_pattern(&Words::at(address, 2 * BYTES), 1), true);
    Ok(())
}

pub(super) fn an_importer_adds_the_gpu_at_the_same_address(check: &Check) -> Result<(), String> {
    let mut owner = Peer::start("owner_of_pinned_memory")?;
    let descriptor = owner.hear()?.descriptor()?;
    check.cuda.init(0).ok()?;
    let address = map(check, check.import(descriptor)?, BYTES, &[cpu(check, READ_WRITE)?])?;
    let words = Words::at(address, BYTES);
    check.same("the CPU alone", holds_pattern(&words, 1), true);
    let added = check.cuda.mem_set_access(address, BYTES, &AccessRule::of(0, READ_WRITE), 1);
    check.answers("access for a GPU whose context does not exist", added, OK);
    check.start()?;
    check.same("a kernel", check.holds_pattern(address, BYTES, 1)?, true);
    check.double(address, BYTES)?.ok()?;
    check.same("the CPU again", holds_pattern(&words, 2), true);
    owner.finish()
}

pub(super) fn several_gpus_are_given_access_in_one_call(check: &Check) -> Result<(), String> {
    check.start()?;
    let everybody = [AccessRule::of(0, READ_WRITE), AccessRule::of(1, READ_WRITE), cpu(check, READ_WRITE)?];
    let address = map(check, create(check, BYTES)?, BYTES, &everybody)?;
    check.fill(address, BYTES)?;
    check.same("the CPU", holds_pattern(&Words::at(address, BYTES), 1), true);
    let before: [u8; 64] = check.bytes(address)?;
    let mut first = 0;
    check.cuda.ctx_get_current(&mut first).ok()?;
    check.start_on(1)?;
    check.same("the other GPU", check.bytes(address)? == before, true);
    let stream = check.stream()?;
    check.cuda.memset_d8_async(address, 9, BYTES, stream).ok()?;
    check.cuda.stream_synchronize(stream).ok()?;
    check.same("what the other GPU wrote", Words::at(address, BYTES).load(0), 0x0909_0909_0909_0909);
    check.cuda.ctx_set_current(first).ok()
}

pub(super) fn pinned_memory_is_copied_as_memory_of_a_gpu_is(check: &Check) -> Result<(), String> {
    check.start()?;
    // No CPU has access to the pinned memory meanwhile.
    let pinned = map(check, create(check, BYTES)?, BYTES, &[AccessRule::of(0, READ_WRITE)])?;
    let (_, from) = check.mapped(BYTES)?;
    let (_, to) = check.mapped(BYTES)?;
    check.fill(from, BYTES)?;
    let stream = check.stream()?;
    let there = check.cuda.memcpy_dtod_async(pinned, from, BYTES, stream);
    check.answers("a copy from the GPU, as within the GPU", there, OK);
    let back = check.cuda.memcpy_dtod_async(to, pinned, BYTES, stream);
    check.answers("and back", back, OK);
    check.cuda.stream_synchronize(stream).ok()?;
    check.same("a kernel finds the bytes", check.holds_pattern(to, BYTES, 1)?, true);
    check.cuda.mem_set_access(pinned, BYTES, &cpu(check, READ)?, 1).ok()?;
    check.same("and the CPU", holds_pattern(&Words::at(pinned, BYTES), 1), true);
    Ok(())
}

pub(super) fn pinned_memory_grows_in_place(check: &Check) -> Result<(), String> {
    check.start()?;
    let address = check.reserve(2 * BYTES)?;
    let rules = [AccessRule::of(0, READ_WRITE), cpu(check, READ_WRITE)?];
    for place in [address, address + BYTES as u64] {
        check.map_at(place, create(check, BYTES)?, BYTES)?;
        check.cuda.mem_set_access(place, BYTES, &rules[0], rules.len()).ok()?;
    }
    check.fill(address, 2 * BYTES)?;
    check.same("the CPU reads across the seam", holds_pattern(&Words::at(address, 2 * BYTES), 1), true);
    Ok(())
}

pub(super) fn a_forked_child_shares_pinned_memory(check: &Check) -> Result<(), String> {
    check.start()?;
    let (_, words) = map_for_both(check, create(check, BYTES)?, BYTES)?;
    words.store(0, 1);
    let seen = raw::in_fork(|| {
        let seen = words.load(0);
        words.store(0, 2);
        seen as u8
    })?;
    check.same("what the child saw", seen, 1);
    check.same("what it stored", words.load(0), 2);
    Ok(())
}

pub(super) fn files_are_read_into_pinned_memory_past_the_page_cache(check: &Check) -> Result<(), String> {
    /// `O_DIRECT`.
    const DIRECT: i32 = 0o40000;
    check.start()?;
    let path = std::env::temp_dir().join(format!("partywall-fact-{}", std::process::id()));
    let bytes: Vec<u8> = (0..BYTES as u64 / 4).flat_map(|index| pattern(index).to_ne_bytes()).collect();
    let written = File::create(&path).and_then(|mut file| file.write_all(&bytes).and_then(|()| file.sync_all()));
    let opened = written.and_then(|()| File::options().read(true).custom_flags(DIRECT).open(&path));
    let _ = fs::remove_file(&path);
    let (address, words) = map_for_both(check, create(check, BYTES)?, BYTES)?;
    check.same("bytes read", words.read_from(&opened.map_err(error_text)?)?, BYTES);
    check.same("a kernel finds them", check.holds_pattern(address, BYTES, 1)?, true);
    Ok(())
}

/// Returns the resident memory of this process.
fn resident() -> Result<u64, String> {
    let status = fs::read_to_string("/proc/self/status").map_err(error_text)?;
    let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse().ok());
    kib.map(|kib: u64| kib << 10).ok_or_else(|| "the kernel tells no resident memory".to_owned())
}

pub(super) fn pinned_memory_is_resident_where_the_cpu_has_access(check: &Check) -> Result<(), String> {
    const SIZE: usize = 256 * MIB;
    check.start()?;
    let before = resident()?;
    let handle = create(check, SIZE)?;
    let address = map(check, handle, SIZE, &[AccessRule::of(0, READ_WRITE)])?;
    check.same("without access for the CPU", resident()? < before + SIZE as u64 / 2, true);
    check.cuda.mem_set_access(address, SIZE, &cpu(check, READ_WRITE)?, 1).ok()?;
    check.same("with it, untouched", resident()? >= before + SIZE as u64 / 2, true);
    Ok(())
}

pub(super) fn writes_of_a_killed_process_to_pinned_memory_stop(check: &Check) -> Result<(), String> {
    check.start()?;
    let handle = create(check, 4 * BYTES)?;
    let (address, words) = map_for_both(check, handle, 4 * BYTES)?;
    let mut writer = Peer::start("endless_writer")?;
    writer.give("memory", check.export(handle)?)?;
    writer.expect("writing")?;
    writer.kill()?;
    let all = || (0..words.bytes() / 8).map(|index| words.load(index)).collect::<Vec<_>>();
    let after = all();
    query_twice(check, check.stream()?)?.ok()?;
    check.same("the bytes change no more", all() == after, true);
    check.fill(address, BYTES)?;
    check.same("and can be written by others", check.holds_pattern(address, BYTES, 1)?, true);
    Ok(())
}

pub(super) fn under_mps_pinned_memory_is_shared_and_survives(check: &Check) -> Result<(), String> {
    let mps = Mps::start()?;
    let mut owner = Peer::start_with("owner_of_pinned_memory", mps.client())?;
    let descriptor: OwnedFd = owner.hear()?.descriptor()?;
    read(mps.client(), "0", descriptor.as_fd())?;
    owner.kill()?;
    read(mps.client(), "0", descriptor.as_fd())?;
    check.cuda.init(0).ok()?;
    let words = Words::at(map(check, check.import(descriptor)?, BYTES, &[cpu(check, READ)?])?, BYTES);
    ensure(holds_pattern(&words, 1), || "the CPU of a process that is no client finds other bytes".to_owned())
}
