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
    let descriptor = check.export(create(check, BYTES)?)?;
    let kind = classify(&descriptor).map_err(error_text)?;
    check.same("its descriptor is the control device", matches!(kind, FdKind::NvidiaControl), true);
    check.same("which nobody maps without the driver", Words::map(&descriptor, true).is_err(), true);
    // So an importer has to ask what it has imported.
    for (question, descriptor, place) in [
        ("imported memory of a node", descriptor, (ON_NODE, node(check)?)),
        ("imported memory of a GPU", check.export(check.create(BYTES)?)?, (1, 0)),
    ] {
        let mut properties = Properties::default();
        check.cuda.mem_get_allocation_properties(&mut properties, check.import(descriptor)?).ok()?;
        check.same(question, (properties.location.kind, properties.location.id), place);
    }
    Ok(())
}

pub(super) fn pinned_memory_of_no_node_is_refused(check: &Check) -> Result<(), String> {
    check.start()?;
    let mut handle = 0;
    let nowhere = check.cuda.mem_create(&mut handle, BYTES, &on(4096), 0);
    check.answers("a node that is not there", nowhere, CuResult::INVALID_VALUE);
    let odd = check.cuda.mem_create(&mut handle, 4096, &on(node(check)?), 0);
    check.answers("half a granule", odd, CuResult::INVALID_VALUE);
    Ok(())
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
