//! The driver facts: what the CUDA driver does, as far as Partywall relies on it, each as a check that can fail.
//!
//! They call the driver bare ([`crate::raw`]), not through Partywall, and are the same for the real driver and for the
//! simulated one: what they say of a real GPU is what the simulation must do. Each runs in a process of its own, and
//! says every answer that it got. Where a fact differs on a real GPU, the fact is wrong and is corrected here, then in
//! the simulation, then in what relied on it.
//!
//! The list below is the table of contents; the checks follow in its order. *Measured* was found on an H200 with
//! driver 580 by the probes that came before the first line of Partywall; *documented* is what the vendor's
//! documentation says; *found* was found by this file.
//!
//! Not here, because they are times and no answers: time slices, MPS, latencies and bandwidths. The benchmarks measure
//! them. What MPS does to its clients' faults can only be seen with an MPS server, which no test starts.

use std::ffi::CStr;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use partywall::cuda::CuResult;
use partywall_os::fd::{FdKind, classify};

use super::stage::{Check, Line, Message, PTX, Peer, pattern};
use super::world::{PATIENCE, ensure, eventually, tell};
use super::{FREE_MEMORY, Needs, Test};
use crate::raw::{
    self, AccessRule, CAPTURE_GLOBAL, CAPTURE_RELAXED, GEQ, Handle, INTERPROCESS, IpcHandle, LAZY_PEER, NO_TIMING,
    PORTABLE_MAPPED, POSIX_FD, Properties, READ, READ_WRITE, REGISTER_READ_ONLY, Words,
};

/// Where a fact comes from.
#[derive(Clone, Copy)]
enum Source {
    Measured,
    Documented,
    Found,
}
use Source::{Documented, Found, Measured};

const ONE: Needs = Needs::Gpu(1);
const TWO: Needs = Needs::Gpu(2);
const CONTROL_DEVICE: Needs = Needs::RealGpu("the memory of a simulated one is a memfd");
const NAMESPACES: Needs = Needs::Namespaces;

macro_rules! facts {
    ($($source:ident $needs:ident $fact:ident)*) => {
        /// All facts, as tests of the same name behind `fact_`.
        pub(crate) static FACTS: &[Test] = &[$(Test {
            name: concat!("fact_", stringify!($fact)),
            needs: $needs,
            timeout: Duration::from_secs(60),
            run: || run($source, $fact),
        }),*];
    };
}

facts! {
    // Processes, devices, contexts.
    Documented ONE nothing_works_before_init
    Documented ONE a_forked_child_has_no_driver
    Documented ONE the_environment_chooses_the_devices
    Documented ONE devices_are_found_by_ordinal
    Measured ONE the_attributes_that_partywall_asks_for
    Documented ONE results_have_names
    Documented ONE a_primary_context_is_shared_and_counted
    Documented ONE a_context_is_current_on_one_thread

    // Memory that can be exported.
    Measured ONE exportable_memory_comes_in_whole_granules
    Documented ONE too_much_memory_is_out_of_memory
    Documented ONE freed_memory_is_free_at_once
    Measured ONE an_import_is_the_same_memory
    Measured ONE an_import_cannot_be_exported_again
    Documented ONE an_import_leaves_the_descriptor_open
    Found ONE only_exported_descriptors_can_be_imported
    Measured CONTROL_DEVICE an_exported_descriptor_is_the_control_device
    Measured ONE a_holder_without_cuda_keeps_the_memory_of_a_killed_creator
    Measured FREE_MEMORY the_last_descriptor_returns_the_memory
    Measured ONE fresh_memory_reads_zero_after_another_process
    Measured ONE only_whole_allocations_can_be_mapped
    Documented ONE one_allocation_can_be_mapped_twice
    Documented ONE mapped_memory_outlives_its_handle
    Documented ONE allocations_mapped_side_by_side_are_one_range
    Found ONE many_more_addresses_than_memory_can_be_reserved
    Documented ONE a_range_is_mapped_once
    Found ONE mappings_end_as_a_whole
    Measured ONE mapped_memory_is_not_freed_by_mem_free
    Measured ONE a_write_through_a_read_only_mapping_ends_the_writer_alone
    Documented ONE without_set_access_a_mapping_faults

    // Legacy memory handles.
    Measured ONE only_memory_of_mem_alloc_has_a_legacy_handle
    Measured ONE a_legacy_handle_names_the_whole_allocation
    Documented ONE neighbours_of_a_small_allocation_are_visible
    Measured ONE a_legacy_handle_does_not_open_where_it_was_made
    Measured ONE a_second_open_returns_the_same_address
    Found ONE legacy_mappings_are_closed_and_not_freed
    Found ONE a_handle_that_nobody_made_does_not_open
    Measured ONE a_legacy_mapping_survives_its_exporter
    Found ONE pointer_attributes_tell_the_kinds_apart
    Found ONE attributes_that_are_asked_for_together_have_defaults

    // Host memory.
    Found ONE host_memory_is_registered_once
    Found ONE neighbouring_mappings_are_registered_as_one
    Documented ONE pinned_memory_is_freed_once
    Documented ONE registered_memory_is_shared_between_processes
    Found ONE read_only_host_memory_is_registered_as_such

    // Streams and memory operations.
    Documented ONE a_stream_works_in_order
    Documented ONE a_wait_compares_signed_differences
    Documented ONE memory_operations_work_on_every_kind_of_memory
    Documented ONE memory_operations_refuse_what_they_cannot_address
    Documented ONE a_written_value_comes_after_the_work_before_it
    Measured ONE a_plain_store_of_another_process_releases_a_stream
    Found ONE loading_a_module_behind_a_wait_blocks
    Found ONE a_function_first_asked_for_behind_a_wait_runs_after_it
    Found ONE a_function_got_before_a_wait_runs_at_once
    Found ONE a_launch_behind_a_wait_blocks_if_it_needs_more_local_memory
    Documented ONE host_functions_run_in_order_and_may_not_call_the_driver
    Documented ONE a_fault_ends_the_context_and_skips_host_functions
    Documented ONE relaxed_calls_leave_a_capture_alone

    // Events.
    Documented ONE events_know_what_was_recorded
    Found ONE event_handles_need_the_interprocess_flag
    Documented ONE an_event_orders_two_processes
    Measured ONE the_event_of_a_killed_recorder_stays_blocked

    // Deaths.
    Measured ONE a_process_can_be_killed_while_its_stream_waits
    Measured ONE writes_of_a_killed_process_stop

    // Modules.
    Documented ONE modules_refuse_what_they_cannot_read

    // Namespaces and several GPUs.
    Measured NAMESPACES a_descriptor_crosses_namespaces
    Documented TWO devices_have_their_own_uuids
    Measured TWO memory_of_another_gpu_can_be_mapped
    Measured TWO memory_of_a_hidden_gpu_can_be_mapped
}

/// The word behind `--role` that leads to [`ROLES`].
pub(crate) const ROLE: &str = "fact";

type Play = fn(&Check, &Line) -> Result<(), String>;

/// What other processes do in a fact.
const ROLES: &[(&str, Play)] = &[
    ("owner_of_exported_memory", owner_of_exported_memory),
    ("owner_of_legacy_memory", owner_of_legacy_memory),
    ("reader_of_exported_memory", reader_of_exported_memory),
    ("reader_of_legacy_memory", reader_of_legacy_memory),
    ("counter_of_devices", counter_of_devices),
    ("writer_of_much_memory", writer_of_much_memory),
    ("faulting_writer", faulting_writer),
    ("writer_into_host_memory", writer_into_host_memory),
    ("waiter_for_a_store", waiter_for_a_store),
    ("launcher_behind_a_wait", launcher_behind_a_wait),
    ("recorder", recorder),
    ("blocked_recorder", blocked_recorder),
    ("waiter_for_an_event", waiter_for_an_event),
    ("endless_writer", endless_writer),
    ("writer_behind_a_wait", writer_behind_a_wait),
];

fn run(source: Source, fact: fn(&Check) -> Result<(), String>) -> Result<(), String> {
    super::world::say(match source {
        Measured => "measured by the probes before Partywall; now:",
        Documented => "documented by the vendor; now:",
        Found => "found by this test; now:",
    });
    let check = Check::new()?;
    let outcome = fact(&check);
    check.finish(outcome)
}

/// Plays one of [`ROLES`].
pub(crate) fn play(role: &str) -> Result<(), String> {
    let (_, play) = ROLES.iter().find(|(name, _)| *name == role).ok_or(format!("no role is called {role:?}"))?;
    let check = Check::new()?;
    let outcome = play(&check, &Line::of_role()?);
    check.finish(outcome)
}

const MIB: usize = 1 << 20;
/// Two granules: enough to ask for a part.
const BYTES: usize = 4 * MIB;

const OK: CuResult = CuResult::SUCCESS;
const INVALID: CuResult = CuResult::INVALID_VALUE;

// ---- processes, devices, contexts

fn nothing_works_before_init(check: &Check) -> Result<(), String> {
    let (mut number, mut context) = (0, 0);
    check.answers("before init", check.cuda.device_get_count(&mut number), CuResult::NOT_INITIALIZED);
    check.answers("before init", check.cuda.primary_ctx_retain(&mut context, 0), CuResult::NOT_INITIALIZED);
    check.answers("flags that must be 0", check.cuda.init(1), INVALID);
    check.answers("init", check.cuda.init(0), OK);
    check.answers("a second init", check.cuda.init(0), OK);
    check.answers("after init", check.cuda.device_get_count(&mut number), OK);
    Ok(())
}

fn a_forked_child_has_no_driver(check: &Check) -> Result<(), String> {
    check.start()?;
    let mut address = check.alloc(BYTES)?;
    let code = |code: CuResult| u8::try_from(code.0).unwrap_or(u8::MAX);
    let mut number = 0;
    for (question, answer) in [
        ("init in a forked child", raw::in_fork(|| code(check.cuda.init(0).code))?),
        ("counting devices there", raw::in_fork(|| code(check.cuda.device_get_count(&mut number).code))?),
        ("allocating there", raw::in_fork(|| code(check.cuda.mem_alloc(&mut address, BYTES).code))?),
    ] {
        check.same(question, CuResult(answer.into()), CuResult::NOT_INITIALIZED);
    }
    check.fill(address, BYTES)?;
    check.same("the parent works on", check.holds_pattern(address, BYTES, 1)?, true);
    Ok(())
}

fn the_environment_chooses_the_devices(check: &Check) -> Result<(), String> {
    check.cuda.init(0).ok()?;
    let mut uuid = [0; 16];
    check.cuda.device_get_uuid(&mut uuid, 0).ok()?;
    let hex = |range: std::ops::Range<usize>| uuid[range].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let name = format!("GPU-{}-{}-{}-{}-{}", hex(0..4), hex(4..6), hex(6..8), hex(8..10), hex(10..16));
    for (question, visible, expected) in [
        ("nothing visible", "", "CUDA_ERROR_NO_DEVICE (100)".to_owned()),
        ("an ordinal", "0", format!("1 {uuid:?}")),
        ("a UUID", name.as_str(), format!("1 {uuid:?}")),
        ("what is no device", "4096", "CUDA_ERROR_NO_DEVICE (100)".to_owned()),
    ] {
        let mut command = Command::new("/proc/self/exe");
        command.env("CUDA_VISIBLE_DEVICES", visible);
        let mut counter = Peer::start_with("counter_of_devices", command)?;
        check.same(question, counter.hear()?.text(), expected);
        counter.finish()?;
    }
    Ok(())
}

fn counter_of_devices(check: &Check, line: &Line) -> Result<(), String> {
    let init = check.cuda.init(0);
    if !init.code.is_success() {
        return line.tell(init.code.to_string());
    }
    let (mut number, mut uuid) = (0, [0; 16]);
    check.cuda.device_get_count(&mut number).ok()?;
    check.cuda.device_get_uuid(&mut uuid, 0).ok()?;
    line.tell(format!("{number} {uuid:?}"))
}

fn devices_are_found_by_ordinal(check: &Check) -> Result<(), String> {
    check.cuda.init(0).ok()?;
    let (mut count, mut device) = (0, -1);
    check.cuda.device_get_count(&mut count).ok()?;
    for ordinal in 0..count {
        check.answers("an ordinal below the count", check.cuda.device_get(&mut device, ordinal), OK);
        check.same("a device is its ordinal", device, ordinal);
    }
    check.answers("the count as ordinal", check.cuda.device_get(&mut device, count), CuResult::INVALID_DEVICE);
    check.answers("ordinal -1", check.cuda.device_get(&mut device, -1), CuResult::INVALID_DEVICE);
    let (mut value, mut context) = (0, 0);
    check.answers(
        "an attribute of no device",
        check.cuda.device_get_attribute(&mut value, 102, count),
        CuResult::INVALID_DEVICE,
    );
    check.answers(
        "a context on no device",
        check.cuda.primary_ctx_retain(&mut context, count),
        CuResult::INVALID_DEVICE,
    );
    Ok(())
}

/// Attributes by number, as `cuda.h` has them.
fn the_attributes_that_partywall_asks_for(check: &Check) -> Result<(), String> {
    check.cuda.init(0).ok()?;
    check.same("virtual memory management (102)", check.attribute(102)?, 1);
    check.same("POSIX file descriptors (103)", check.attribute(103)?, 1);
    check.same("64-bit stream memory operations (122)", check.attribute(122)?, 1);
    check.same("interprocess events (125)", check.attribute(125)?, 1);
    check.same("unified addressing (41)", check.attribute(41)?, 1);
    check.same("not integrated into the chip set (18)", check.attribute(18)?, 0);
    check.same("at least one multiprocessor (16)", check.attribute(16)? > 0, true);
    let mut version = 0;
    check.answers("the version", check.cuda.driver_get_version(&mut version), OK);
    check.same("at least 12.4", version >= 12040, true);
    Ok(())
}

fn results_have_names(check: &Check) -> Result<(), String> {
    let mut text = std::ptr::null();
    check.answers("a code", check.cuda.get_error_name(CuResult::ILLEGAL_ADDRESS, &mut text), OK);
    check.same("it has a name", text.is_null(), false);
    check.answers("no code", check.cuda.get_error_name(CuResult(9999), &mut text), INVALID);
    check.same("it has none", text.is_null(), true);
    Ok(())
}

fn a_primary_context_is_shared_and_counted(check: &Check) -> Result<(), String> {
    let cuda = &check.cuda;
    cuda.init(0).ok()?;
    let (mut first, mut second, mut flags, mut active) = (0, 0, 0, -1);
    let mut is_active = |question: &str, expected| {
        check.answers(question, cuda.primary_ctx_get_state(0, &mut flags, &mut active), OK);
        check.same(question, active, expected);
    };
    is_active("before the first retain", 0);
    cuda.primary_ctx_retain(&mut first, 0).ok()?;
    cuda.primary_ctx_retain(&mut second, 0).ok()?;
    check.same("both retains give one context", first == second, true);
    cuda.ctx_set_current(first).ok()?;
    let mut address = 0;
    cuda.mem_alloc(&mut address, BYTES).ok()?;
    check.answers("the first release", cuda.primary_ctx_release(0), OK);
    is_active("after it", 1);
    check.answers("its memory", cuda.mem_free(address), OK);
    check.answers("the last release", cuda.primary_ctx_release(0), OK);
    is_active("after it", 0);
    let allocated = cuda.mem_alloc(&mut address, BYTES);
    check.answers("a thread that still has it current", allocated, CuResult::CONTEXT_IS_DESTROYED);
    Ok(())
}

fn a_context_is_current_on_one_thread(check: &Check) -> Result<(), String> {
    check.start()?;
    let ask = |question: &str, there: bool, code| {
        let (mut context, mut device, mut stream, mut address) = (0, -1, 0, 0);
        check.answers(question, check.cuda.ctx_get_current(&mut context), OK);
        check.same(&format!("{question}: there is one"), context != 0, there);
        check.answers(question, check.cuda.ctx_get_device(&mut device), code);
        if !there {
            check.answers(question, check.cuda.stream_create(&mut stream, 0), code);
            check.answers(question, check.cuda.mem_alloc(&mut address, BYTES), code);
            check.answers(question, check.cuda.ctx_synchronize(), code);
        }
    };
    ask("where it was made current", true, OK);
    check.cuda.ctx_set_current(0).ok()?;
    ask("where none is current", false, CuResult::INVALID_CONTEXT);
    let mut again = 0;
    check.cuda.primary_ctx_retain(&mut again, 0).ok()?;
    check.undo(|cuda| cuda.primary_ctx_release(0));
    check.cuda.ctx_set_current(again).ok()
}

// ---- memory that can be exported

fn exportable_memory_comes_in_whole_granules(check: &Check) -> Result<(), String> {
    check.start()?;
    let (cuda, exportable) = (&check.cuda, Properties::exportable(0));
    let (mut granularity, mut handle) = (0, 0);
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

fn too_much_memory_is_out_of_memory(check: &Check) -> Result<(), String> {
    check.start()?;
    let (mut handle, mut address) = (0, 0);
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

fn freed_memory_is_free_at_once(check: &Check) -> Result<(), String> {
    check.start()?;
    let free = || -> Result<usize, String> {
        let (mut free, mut total) = (0, 0);
        check.cuda.mem_get_info(&mut free, &mut total).ok()?;
        ensure(free > 0 && free <= total, || format!("{free} of {total}"))?;
        Ok(free)
    };
    let before = free()?;
    let (mut handle, size) = (0, 64 * MIB);
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

/// Makes memory with the test pattern, gives its descriptor away, and does as it is told.
fn owner_of_exported_memory(check: &Check, line: &Line) -> Result<(), String> {
    check.start()?;
    let (handle, address) = check.mapped(BYTES)?;
    check.fill(address, BYTES)?;
    line.give("memory", check.export(handle)?)?;
    while let Some(order) = line.hear()? {
        match order.text().as_str() {
            "double" => check.double(address, BYTES)?.ok()?,
            "verify" => check.same("the owner's bytes", check.holds_pattern(address, BYTES, 1)?, true),
            other => return Err(format!("no order is called {other:?}")),
        }
        line.tell("done")?;
    }
    Ok(())
}

/// Maps the memory whose descriptor it is given, on the device that it is told, and finds the test pattern.
fn reader_of_exported_memory(check: &Check, line: &Line) -> Result<(), String> {
    let message = line.hear()?.ok_or("nobody gave anything")?;
    check.start_on(message.text().parse().map_err(tell)?)?;
    let handle = check.import(message.descriptor()?)?;
    let address = check.map(handle, BYTES, READ_WRITE)?;
    check.same("the reader finds the bytes", check.holds_pattern(address, BYTES, 1)?, true);
    line.tell("read")
}

fn an_import_is_the_same_memory(check: &Check) -> Result<(), String> {
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

fn an_import_cannot_be_exported_again(check: &Check) -> Result<(), String> {
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

fn an_import_leaves_the_descriptor_open(check: &Check) -> Result<(), String> {
    check.start()?;
    let (handle, address) = check.mapped(BYTES)?;
    check.fill(address, BYTES)?;
    let descriptor = check.export(handle)?;
    let copy = descriptor.try_clone().map_err(tell)?;
    check.import(&descriptor)?;
    check.import(&descriptor)?;
    drop(descriptor);
    let imported = check.import(&copy)?;
    drop(copy);
    let address = check.map(imported, BYTES, READ)?;
    check.same("a copy is as good, and may be closed", check.holds_pattern(address, BYTES, 1)?, true);
    Ok(())
}

fn only_exported_descriptors_can_be_imported(check: &Check) -> Result<(), String> {
    check.start()?;
    let mut handle = 0;
    let mut import = |descriptor| check.cuda.mem_import(&mut handle, descriptor, POSIX_FD);
    let null = File::open("/dev/null").map_err(tell)?;
    check.answers("/dev/null", import(raw::number(null.as_fd())), CuResult::UNKNOWN);
    let memfd = Words::file(BYTES)?;
    check.answers("a memfd", import(raw::number(memfd.as_fd())), CuResult::UNKNOWN);
    check.answers("a closed descriptor", import(1000), CuResult::UNKNOWN);
    check.answers("-1", import(u64::from(u32::MAX)), CuResult::UNKNOWN);
    Ok(())
}

fn an_exported_descriptor_is_the_control_device(check: &Check) -> Result<(), String> {
    check.start()?;
    let descriptor = check.export(check.create(BYTES)?)?;
    let kind = classify(&descriptor).map_err(tell)?;
    check.same("the descriptor is the control device's", kind == FdKind::NvidiaControl, true);
    Ok(())
}

fn a_holder_without_cuda_keeps_the_memory_of_a_killed_creator(check: &Check) -> Result<(), String> {
    let mut owner = Peer::start("owner_of_exported_memory")?;
    let descriptor = owner.hear()?.descriptor()?;
    owner.kill()?;
    for _ in 0..2 {
        let mut reader = Peer::start("reader_of_exported_memory")?;
        reader.give("0", &descriptor)?;
        reader.expect("read")?;
        reader.finish()?;
    }
    check.start()?;
    let address = check.map(check.import(&descriptor)?, BYTES, READ)?;
    check.same("the bytes are there", check.holds_pattern(address, BYTES, 1)?, true);
    drop(descriptor);
    check.same("a mapping keeps them as well", check.holds_pattern(address, BYTES, 1)?, true);
    Ok(())
}

fn the_last_descriptor_returns_the_memory(check: &Check) -> Result<(), String> {
    check.start()?;
    let free = || -> Result<usize, String> {
        let (mut free, mut total) = (0, 0);
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

/// Leaves memory behind that is full of ones.
fn writer_of_much_memory(check: &Check, line: &Line) -> Result<(), String> {
    check.start()?;
    let (_, address) = check.mapped(64 * MIB)?;
    let stream = check.stream()?;
    check.cuda.memset_d8_async(address, 0xFF, 64 * MIB, stream).ok()?;
    check.cuda.stream_synchronize(stream).ok()?;
    line.tell("written")
}

fn fresh_memory_reads_zero_after_another_process(check: &Check) -> Result<(), String> {
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

fn only_whole_allocations_can_be_mapped(check: &Check) -> Result<(), String> {
    check.start()?;
    let (cuda, created) = (&check.cuda, check.create(BYTES)?);
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

fn one_allocation_can_be_mapped_twice(check: &Check) -> Result<(), String> {
    check.start()?;
    let (handle, first) = check.mapped(BYTES)?;
    let second = check.map(handle, BYTES, READ)?;
    check.same("at two addresses", first != second, true);
    check.fill(first, BYTES)?;
    check.same("what one writes the other reads", check.holds_pattern(second, BYTES, 1)?, true);
    Ok(())
}

fn mapped_memory_outlives_its_handle(check: &Check) -> Result<(), String> {
    check.start()?;
    let mut handle = 0;
    check.cuda.mem_create(&mut handle, BYTES, &Properties::exportable(0), 0).ok()?;
    let address = check.map(handle, BYTES, READ_WRITE)?;
    check.answers("release while mapped", check.cuda.mem_release(handle), OK);
    check.fill(address, BYTES)?;
    check.same("the mapping works on", check.holds_pattern(address, BYTES, 1)?, true);
    Ok(())
}

fn allocations_mapped_side_by_side_are_one_range(check: &Check) -> Result<(), String> {
    check.start()?;
    let address = check.reserve(4 * BYTES)?;
    let (first, second) = (check.create(BYTES)?, check.create(BYTES)?);
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

fn many_more_addresses_than_memory_can_be_reserved(check: &Check) -> Result<(), String> {
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

fn a_range_is_mapped_once(check: &Check) -> Result<(), String> {
    check.start()?;
    let (first, second) = (check.create(BYTES)?, check.create(BYTES)?);
    let address = check.map(first, BYTES, READ_WRITE)?;
    check.answers("a range that is in use", check.cuda.mem_map(address, BYTES, 0, second, 0), INVALID);
    let (mut other, hint) = (0, address);
    check.answers("a reservation there", check.cuda.mem_address_reserve(&mut other, BYTES, 0, hint, 0), OK);
    check.undo(move |cuda| cuda.mem_address_free(other, BYTES));
    check.same("is put elsewhere", other != address, true);
    check.answers("half a page", check.cuda.mem_address_reserve(&mut other, MIB, 0, 0, 0), INVALID);
    check.answers("nothing", check.cuda.mem_address_reserve(&mut other, 0, 0, 0, 0), INVALID);
    Ok(())
}

fn mappings_end_as_a_whole(check: &Check) -> Result<(), String> {
    check.start()?;
    let (cuda, handle) = (&check.cuda, check.create(BYTES)?);
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

fn mapped_memory_is_not_freed_by_mem_free(check: &Check) -> Result<(), String> {
    check.start()?;
    let (_, address) = check.mapped(BYTES)?;
    check.answers("memory that is mapped", check.cuda.mem_free(address), INVALID);
    check.answers("and as a legacy mapping", check.cuda.ipc_close_mem_handle(address), INVALID);
    Ok(())
}

/// Writes through a read-only mapping, and says what every later call answers.
fn faulting_writer(check: &Check, line: &Line) -> Result<(), String> {
    let descriptor = line.hear()?.ok_or("nobody gave anything")?.descriptor()?;
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
    line.tell("faulted")
}

fn a_write_through_a_read_only_mapping_ends_the_writer_alone(check: &Check) -> Result<(), String> {
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

fn without_set_access_a_mapping_faults(check: &Check) -> Result<(), String> {
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

// ---- legacy memory handles

fn only_memory_of_mem_alloc_has_a_legacy_handle(check: &Check) -> Result<(), String> {
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

    let (stream, mut pooled) = (check.stream()?, 0);
    check.cuda.mem_alloc_async(&mut pooled, BYTES, stream).ok()?;
    check.cuda.stream_synchronize(stream).ok()?;
    of("memory of the stream-ordered pool", pooled, INVALID);
    check.cuda.mem_free_async(pooled, stream).ok()?;
    check.cuda.stream_synchronize(stream).ok()
}

/// Makes `cuMemAlloc` memory with the test pattern, tells its handle and that of a place inside it, and does as it is
/// told.
fn owner_of_legacy_memory(check: &Check, line: &Line) -> Result<(), String> {
    check.start()?;
    let address = check.alloc(BYTES)?;
    check.fill(address, BYTES)?;
    line.tell(check.legacy_handle(address)?.0)?;
    line.tell(check.legacy_handle(address + BYTES as u64 / 2)?.0)?;
    // Two that share a block, with their distance.
    let (small, neighbour) = (check.alloc(1024)?, check.alloc(1024)?);
    check.fill(neighbour, 1024)?;
    line.tell(check.legacy_handle(small)?.0)?;
    line.tell(neighbour.wrapping_sub(small).to_ne_bytes())?;
    while let Some(order) = line.hear()? {
        match order.text().as_str() {
            "double" => check.double(address, BYTES)?.ok()?,
            "verify" => check.same("the owner's bytes", check.holds_pattern(address, BYTES, 1)?, true),
            other => return Err(format!("no order is called {other:?}")),
        }
        line.tell("done")?;
    }
    Ok(())
}

/// An owner of legacy memory with what it told.
struct Legacy {
    owner: Peer,
    whole: IpcHandle,
    inside: IpcHandle,
    small: IpcHandle,
    neighbour: u64,
}

impl Legacy {
    fn start() -> Result<Self, String> {
        let mut owner = Peer::start("owner_of_legacy_memory")?;
        let (whole, inside, small) = (owner.hear()?.handle()?, owner.hear()?.handle()?, owner.hear()?.handle()?);
        let distance = owner.hear()?.bytes.try_into().map_err(|_| "no distance")?;
        Ok(Self { owner, whole, inside, small, neighbour: u64::from_ne_bytes(distance) })
    }
}

fn a_legacy_handle_names_the_whole_allocation(check: &Check) -> Result<(), String> {
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

fn neighbours_of_a_small_allocation_are_visible(check: &Check) -> Result<(), String> {
    let Legacy { owner, small, neighbour, .. } = Legacy::start()?;
    check.start()?;
    let address = check.open_legacy(small)?;
    check.same("the neighbour is in the same 2 MiB", neighbour < 2 * MIB as u64, true);
    let seen = check.holds_pattern(address.wrapping_add(neighbour), 1024, 1)?;
    check.same("whoever opens one sees the other", seen, true);
    owner.finish()
}

fn a_legacy_handle_does_not_open_where_it_was_made(check: &Check) -> Result<(), String> {
    check.start()?;
    let handle = check.legacy_handle(check.alloc(BYTES)?)?;
    let mut address = 0;
    let opened = check.cuda.ipc_open_mem_handle(&mut address, handle, LAZY_PEER);
    check.answers("the process that made it", opened, CuResult::INVALID_CONTEXT);
    Ok(())
}

fn a_second_open_returns_the_same_address(check: &Check) -> Result<(), String> {
    let Legacy { owner, whole, .. } = Legacy::start()?;
    check.start()?;
    let (mut first, mut second) = (0, 0);
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

fn legacy_mappings_are_closed_and_not_freed(check: &Check) -> Result<(), String> {
    let Legacy { owner, whole, .. } = Legacy::start()?;
    check.start()?;
    let (address, mut handle) = (check.open_legacy(whole)?, IpcHandle([0; 64]));
    check.answers("freeing a mapping", check.cuda.mem_free(address), INVALID);
    check.answers("a handle of a mapping", check.cuda.ipc_get_mem_handle(&mut handle, address), INVALID);
    let ours = check.alloc(BYTES)?;
    check.answers("closing what was allocated here", check.cuda.ipc_close_mem_handle(ours), INVALID);
    let inside = check.cuda.ipc_close_mem_handle(address + 4096);
    check.answers("closing a place inside", inside, INVALID);
    check.same("the mapping works on", check.holds_pattern(address, BYTES, 1)?, true);
    owner.finish()
}

fn a_handle_that_nobody_made_does_not_open(check: &Check) -> Result<(), String> {
    let Legacy { owner, whole, .. } = Legacy::start()?;
    check.start()?;
    let mut address = 0;
    let mut open = |handle, flags| check.cuda.ipc_open_mem_handle(&mut address, handle, flags);
    check.answers("only zeroes", open(IpcHandle([0; 64]), LAZY_PEER), INVALID);
    check.answers("garbage", open(IpcHandle([0xA5; 64]), LAZY_PEER), INVALID);
    check.answers("flags other than lazy peer access", open(whole, 0), INVALID);
    owner.finish()
}

fn a_legacy_mapping_survives_its_exporter(check: &Check) -> Result<(), String> {
    let Legacy { mut owner, whole, .. } = Legacy::start()?;
    check.start()?;
    let address = check.open_legacy(whole)?;
    owner.kill()?;
    check.same("the bytes are still there", check.holds_pattern(address, BYTES, 1)?, true);
    let mut late = Peer::start("reader_of_legacy_memory")?;
    late.tell(whole.0)?;
    check.same("another process", late.hear()?.text(), CuResult::INVALID_HANDLE.to_string());
    late.finish()?;
    check.fill(address, BYTES)?;
    check.same("the mapping can be written,", check.holds_pattern(address, BYTES, 1)?, true);
    Ok(())
}

/// Opens a handle and says what came of it.
fn reader_of_legacy_memory(check: &Check, line: &Line) -> Result<(), String> {
    let handle = line.hear()?.ok_or("nobody told a handle")?.handle()?;
    check.start()?;
    let mut address = 0;
    let answer = check.cuda.ipc_open_mem_handle(&mut address, handle, LAZY_PEER);
    if answer.code.is_success() {
        check.undo(move |cuda| cuda.ipc_close_mem_handle(address));
    }
    line.tell(answer.code.to_string())
}

/// `CUpointer_attribute` by number, as `cuda.h` has them.
fn pointer_attributes_tell_the_kinds_apart(check: &Check) -> Result<(), String> {
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

    let (stream, mut pooled, mut pool) = (check.stream()?, 0, 0);
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

    let (mut freed, mut value) = (0, 0);
    check.cuda.mem_alloc(&mut freed, 16 * MIB).ok()?;
    let (mut first, mut second) = (0, 0);
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

fn attributes_that_are_asked_for_together_have_defaults(check: &Check) -> Result<(), String> {
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

// ---- host memory

fn host_memory_is_registered_once(check: &Check) -> Result<(), String> {
    check.start()?;
    let (cuda, words) = (&check.cuda, Words::map(Words::file(8192)?, true)?);
    let (address, mut device) = (words.address(), 0);
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

fn neighbouring_mappings_are_registered_as_one(check: &Check) -> Result<(), String> {
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

fn pinned_memory_is_freed_once(check: &Check) -> Result<(), String> {
    check.start()?;
    let (mut pinned, mut device) = (0, 0);
    check.answers("allocation", check.cuda.mem_host_alloc(&mut pinned, BYTES, 1), OK);
    check.answers("its device address", check.cuda.mem_host_get_device_pointer(&mut device, pinned, 0), OK);
    check.same("is its own address", device == pinned, true);
    check.answers("not by mem_free", check.cuda.mem_free(pinned), INVALID);
    check.answers("the end", check.cuda.mem_free_host(pinned), OK);
    check.answers("a second end", check.cuda.mem_free_host(pinned), INVALID);
    Ok(())
}

/// Maps and registers the memory that it is given, and fills it by a kernel.
fn writer_into_host_memory(check: &Check, line: &Line) -> Result<(), String> {
    let words = Words::map(line.hear()?.ok_or("nobody gave anything")?.descriptor()?, true)?;
    check.start()?;
    let device = check.register(&words)?;
    check.fill(device, words.bytes())?;
    line.tell("written")
}

fn registered_memory_is_shared_between_processes(check: &Check) -> Result<(), String> {
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

fn read_only_host_memory_is_registered_as_such(check: &Check) -> Result<(), String> {
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

// ---- streams and memory operations

fn a_stream_works_in_order(check: &Check) -> Result<(), String> {
    check.start()?;
    check.load_kernels()?;
    let (stream, address, (words, word)) = (check.stream()?, check.alloc(16 * MIB)?, check.words()?);
    check.cuda.stream_wait_value64(stream, word, 1, GEQ).ok()?;
    check.enqueue_fill(stream, address, 16 * MIB)?;
    check.enqueue_double(stream, address, 16 * MIB)?;
    check.answers("a stream with work", check.cuda.stream_query(stream), CuResult::NOT_READY);
    let other = check.alloc(BYTES)?;
    check.fill(other, BYTES)?;
    check.same("another stream is not kept", check.holds_pattern(other, BYTES, 1)?, true);
    check.answers("and this one still waits", check.cuda.stream_query(stream), CuResult::NOT_READY);
    words.store(0, 1);
    check.answers("waiting for it", check.cuda.stream_synchronize(stream), OK);
    check.answers("a stream without work", check.cuda.stream_query(stream), OK);
    check.same("everything came in order", check.holds_pattern(address, 16 * MIB, 2)?, true);
    Ok(())
}

/// The last value of a timeline before it is poisoned, and the poison.
fn poison(last: u64) -> u64 {
    last + (1 << 62) + 1
}

fn a_wait_compares_signed_differences(check: &Check) -> Result<(), String> {
    check.start()?;
    let (words, word) = check.words()?;
    for (found, value, passes) in [
        (0, 0, true),
        (0, 1, false),
        (5, 4, true),
        (5, 5, true),
        (5, 6, false),
        (1 << 61, 1 << 61, true),
        (0, 1 << 61, false),
        (poison(0), 0, true),
        (poison(0), 1 << 61, true),
        (poison(1 << 61), 0, true),
        (poison(1 << 61), 1 << 61, true),
        // Why all ones are no poison: they are one less than nothing.
        (u64::MAX, 0, false),
        (u64::MAX, 5, false),
        (1 << 63, 0, false),
        (1 << 63, 1, true),
    ] {
        let stream = check.stream()?;
        words.store(0, found);
        check.cuda.stream_wait_value64(stream, word, value, GEQ).ok()?;
        let question = format!("{found:#x} reaches {value:#x}");
        if passes {
            check.answers(&question, wait_for(check, stream)?, OK);
        } else {
            check.answers(&question, look_twice(check, stream)?, CuResult::NOT_READY);
        }
        words.store(0, value);
        check.answers("the value itself always does", wait_for(check, stream)?, OK);
    }
    for (found, value, passes) in
        [(5_u32, 5_u32, true), (5, 6, false), (u32::MAX, 0, false), (1 << 30, 0, true), (1 << 31, 0, false)]
    {
        let stream = check.stream()?;
        words.store(0, found.into());
        check.cuda.stream_wait_value32(stream, word, value, GEQ).ok()?;
        let answer = if passes { wait_for(check, stream)? } else { look_twice(check, stream)? };
        let expected = if passes { OK } else { CuResult::NOT_READY };
        check.answers(&format!("32 bits: {found:#x} reaches {value:#x}"), answer, expected);
        words.store(0, value.into());
        check.answers("the value itself always does", wait_for(check, stream)?, OK);
    }
    Ok(())
}

/// Waits until a stream has nothing left, but not for ever as `cuStreamSynchronize` does.
fn wait_for(check: &Check, stream: Handle) -> Result<raw::Answer, String> {
    let deadline = Instant::now() + PATIENCE / 4;
    loop {
        let answer = check.cuda.stream_query(stream);
        if answer.code != CuResult::NOT_READY || Instant::now() > deadline {
            return Ok(answer);
        }
        std::thread::yield_now();
    }
}

/// Whether a stream still has work after another one had time to do all of its own. A stream that is blocked stays
/// so: this never fails by chance, and finds one that is not blocked unless that was very slow.
fn look_twice(check: &Check, stream: Handle) -> Result<raw::Answer, String> {
    let other = check.stream()?;
    let scratch = check.alloc(BYTES)?;
    for _ in 0..3 {
        check.cuda.memset_d8_async(scratch, 1, BYTES, other).ok()?;
        check.cuda.stream_synchronize(other).ok()?;
    }
    Ok(check.cuda.stream_query(stream))
}

fn memory_operations_work_on_every_kind_of_memory(check: &Check) -> Result<(), String> {
    let mut owner = Peer::start("owner_of_exported_memory")?;
    let descriptor = owner.hear()?.descriptor()?;
    let Legacy { owner: legacy_owner, whole, .. } = Legacy::start()?;
    check.start()?;
    let (writer, waiter) = (check.stream()?, check.stream()?);
    let imported = check.map(check.import(descriptor)?, BYTES, READ_WRITE)?;
    let mut pinned = 0;
    check.cuda.mem_host_alloc(&mut pinned, 4096, 1).ok()?;
    check.undo(move |cuda| cuda.mem_free_host(pinned));
    for (kind, address) in [
        ("allocated", check.alloc(4096)?),
        ("mapped", check.mapped(BYTES)?.1),
        ("imported", imported),
        ("legacy", check.open_legacy(whole)?),
        ("registered", check.words()?.1),
        ("pinned", pinned),
    ] {
        check.cuda.memset_d8_async(address, 0, 64, writer).ok()?;
        check.cuda.stream_synchronize(writer).ok()?;
        check.answers(kind, check.cuda.stream_wait_value64(waiter, address, 7, GEQ), OK);
        check.answers(kind, check.cuda.stream_wait_value32(waiter, address + 16, 9, GEQ), OK);
        check.answers(kind, check.cuda.stream_write_value64(writer, address, 7 + (1 << 40), 0), OK);
        check.answers(kind, check.cuda.stream_write_value32(writer, address + 16, 9, 0), OK);
        check.answers(kind, wait_for(check, waiter)?, OK);
    }
    owner.finish()?;
    legacy_owner.finish()
}

fn memory_operations_refuse_what_they_cannot_address(check: &Check) -> Result<(), String> {
    check.start()?;
    let (stream, address) = (check.stream()?, check.alloc(4096)?);
    let host = vec![0_u64; 64];
    check.answers("8 bytes at 4", check.cuda.stream_wait_value64(stream, address + 4, 0, GEQ), INVALID);
    check.answers("8 bytes at 4", check.cuda.stream_write_value64(stream, address + 4, 0, 0), INVALID);
    check.answers("4 bytes at 2", check.cuda.stream_wait_value32(stream, address + 2, 0, GEQ), INVALID);
    let host = host.as_ptr() as u64;
    check.answers("host memory", check.cuda.stream_write_value64(stream, host, 0, 0), INVALID);
    check.answers("host memory", check.cuda.stream_wait_value64(stream, host, 0, GEQ), INVALID);
    check.answers("no address", check.cuda.stream_wait_value64(stream, 0, 0, GEQ), INVALID);
    check.answers("the stream works on", check.cuda.stream_synchronize(stream), OK);
    Ok(())
}

fn a_written_value_comes_after_the_work_before_it(check: &Check) -> Result<(), String> {
    check.start()?;
    check.load_kernels()?;
    let (stream, (words, word)) = (check.stream()?, check.words()?);
    let memory = Words::map(Words::file(16 * MIB)?, true)?;
    let device = check.register(&memory)?;
    let count = memory.bytes() as u64 / 4;
    let expected = |index: u64| u64::from(pattern(2 * index + 1)) << 32 | u64::from(pattern(2 * index));
    for round in 1..=8 {
        check.cuda.memset_d8_async(device, 0, memory.bytes(), stream).ok()?;
        check.cuda.stream_synchronize(stream).ok()?;
        check.enqueue_fill(stream, device, memory.bytes())?;
        check.cuda.stream_write_value64(stream, word, round, 0).ok()?;
        let deadline = Instant::now() + PATIENCE / 4;
        while words.load(0) < round {
            ensure(Instant::now() < deadline, || "the value did not come".into())?;
        }
        let wrong = (0..count / 2).filter(|index| memory.load(*index as usize) != expected(*index)).count();
        check.same("words that came after the value", wrong, 0);
    }
    Ok(())
}

/// Registers the words that it is given, and lets a stream wait for the first of them.
fn waiter_for_a_store(check: &Check, line: &Line) -> Result<(), String> {
    let words = Words::map(line.hear()?.ok_or("nobody gave anything")?.descriptor()?, true)?;
    check.start()?;
    check.load_kernels()?;
    let (stream, word, address) = (check.stream()?, check.register(&words)?, check.alloc(BYTES)?);
    check.cuda.stream_wait_value64(stream, word, 5, GEQ).ok()?;
    check.enqueue_fill(stream, address, BYTES)?;
    check.answers("before the store", look_twice(check, stream)?, CuResult::NOT_READY);
    line.tell("waiting")?;
    check.answers("after the store", check.cuda.stream_synchronize(stream), OK);
    check.same("what was behind it is done", check.holds_pattern(address, BYTES, 1)?, true);
    line.tell("released")
}

fn a_plain_store_of_another_process_releases_a_stream(_: &Check) -> Result<(), String> {
    let file = Words::file(4096)?;
    let words = Words::map(&file, true)?;
    for value in [5, poison(3)] {
        words.store(0, 0);
        let mut waiter = Peer::start("waiter_for_a_store")?;
        waiter.give("words", &file)?;
        waiter.expect("waiting")?;
        words.store(0, value);
        waiter.expect("released")?;
        waiter.finish()?;
    }
    Ok(())
}

/// A step towards a first launch that comes only after a stream of the context has begun to wait.
#[derive(Clone, Copy, Debug)]
enum Late {
    Load,
    GetFunction,
    Launch,
    /// As `Launch`, of a kernel that needs more local memory than any before it.
    LaunchWithLocalMemory,
}

/// A kernel that leaves 7 in a word if it is given 0, by way of an array in local memory.
const LOCAL_MEMORY: &CStr = c"
.version 8.4
.target sm_70
.address_size 64
.visible .entry through_local_memory(.param .u64 p, .param .u64 offset)
{
    .reg .b64 %rd<6>;
    .reg .b32 %r<3>;
    .local .align 16 .b8 array[200000];
    ld.param.u64 %rd1, [p];
    ld.param.u64 %rd2, [offset];
    mov.u64 %rd3, array;
    cvta.local.u64 %rd4, %rd3;
    add.u64 %rd5, %rd4, %rd2;
    mov.u32 %r1, 7;
    st.u32 [%rd5], %r1;
    ld.u32 %r2, [%rd4];
    st.global.u32 [%rd1], %r2;
    ret;
}
";

/// Launches a kernel on one stream while another waits, with one step of the way made behind the wait, and says of that
/// step and then of the kernel whether it ended before the wait was released.
fn launcher_behind_a_wait(check: &Check, line: &Line) -> Result<(), String> {
    let message = line.hear()?.ok_or("nobody gave anything")?;
    let late = message.text();
    let words = Words::map(message.descriptor()?, true)?;
    check.start()?;
    let (waiting, other, word, address) = (check.stream()?, check.stream()?, check.register(&words)?, check.alloc(8)?);
    let wait = || {
        check.cuda.stream_wait_value64(waiting, word, 1, GEQ).ok()?;
        line.tell("waiting")
    };
    let tell = || line.tell(if words.load(0) == 0 { "before" } else { "after" });
    let launch = |function, stream| check.cuda.launch(function, stream, &[address, 0]).ok();
    let fill = |module| check.function(module, c"pw_fill");
    match late.as_str() {
        "Load" => {
            wait()?;
            let module = check.module(PTX)?;
            tell()?;
            launch(fill(module)?, other)?;
        }
        "GetFunction" => {
            let module = check.module(PTX)?;
            wait()?;
            launch(fill(module)?, other)?;
            tell()?;
        }
        "Launch" => {
            let function = fill(check.module(PTX)?)?;
            wait()?;
            launch(function, waiting)?;
            launch(function, other)?;
            tell()?;
        }
        _ => {
            let function = check.function(check.module(LOCAL_MEMORY)?, c"through_local_memory")?;
            wait()?;
            launch(function, other)?;
            tell()?;
        }
    }
    check.cuda.stream_synchronize(other).ok()?;
    tell()?;
    line.hear()?;
    check.cuda.stream_synchronize(waiting).ok()
}

/// Whether the late step, and the kernel, end `before` or `after` the release of the wait.
///
/// The pause is no measurement: what waits for the release waits for as long as nobody releases, and is found waiting
/// after a pause of any length. What does not wait is waited for.
fn behind_a_wait(check: &Check, late: Late, lazy: [&str; 2], eager: [&str; 2]) -> Result<(), String> {
    for (loading, expected) in [("LAZY", lazy), ("EAGER", eager)] {
        let file = Words::file(4096)?;
        let words = Words::map(&file, true)?;
        let mut command = Command::new("/proc/self/exe");
        command.env("CUDA_MODULE_LOADING", loading);
        let mut launcher = Peer::start_with("launcher_behind_a_wait", command)?;
        launcher.give(format!("{late:?}"), &file)?;
        launcher.expect("waiting")?;
        for (what, expected) in ["the step", "the kernel"].into_iter().zip(expected) {
            let pause = if expected == "before" { PATIENCE / 4 } else { Duration::from_secs(1) };
            if !launcher.speaks_within(pause)? {
                words.store(0, 1);
            }
            check.same(&format!("{loading}: {what}"), launcher.hear()?.text(), expected.to_owned());
        }
        words.store(0, 1);
        launcher.finish()?;
    }
    Ok(())
}

fn loading_a_module_behind_a_wait_blocks(check: &Check) -> Result<(), String> {
    behind_a_wait(check, Late::Load, ["after", "after"], ["after", "after"])
}

fn a_function_first_asked_for_behind_a_wait_runs_after_it(check: &Check) -> Result<(), String> {
    behind_a_wait(check, Late::GetFunction, ["before", "after"], ["before", "before"])
}

fn a_function_got_before_a_wait_runs_at_once(check: &Check) -> Result<(), String> {
    behind_a_wait(check, Late::Launch, ["before", "before"], ["before", "before"])
}

fn a_launch_behind_a_wait_blocks_if_it_needs_more_local_memory(check: &Check) -> Result<(), String> {
    behind_a_wait(check, Late::LaunchWithLocalMemory, ["after", "after"], ["after", "after"])
}

static CALLS: AtomicU64 = AtomicU64::new(0);
static CODE_INSIDE: AtomicU64 = AtomicU64::new(u64::MAX);

extern "C" fn count(calls: &'static AtomicU64) {
    calls.fetch_add(1, Ordering::SeqCst);
}

extern "C" fn call_the_driver(code: &'static AtomicU64) {
    let answer = Check::new().map(|check| check.cuda.stream_query(0).code.0);
    code.store(answer.map_or(u64::MAX, u64::from), Ordering::SeqCst);
}

fn host_functions_run_in_order_and_may_not_call_the_driver(check: &Check) -> Result<(), String> {
    check.start()?;
    let (stream, (words, word)) = (check.stream()?, check.words()?);
    check.cuda.stream_wait_value64(stream, word, 1, GEQ).ok()?;
    check.answers("enqueue", check.cuda.launch_host_function(stream, count, &CALLS), OK);
    check.answers("what is before it is not done", look_twice(check, stream)?, CuResult::NOT_READY);
    check.same("calls before what is before them is done", CALLS.load(Ordering::SeqCst), 0);
    words.store(0, 1);
    check.cuda.stream_synchronize(stream).ok()?;
    check.same("calls after it", CALLS.load(Ordering::SeqCst), 1);
    check.cuda.launch_host_function(stream, call_the_driver, &CODE_INSIDE).ok()?;
    check.cuda.stream_synchronize(stream).ok()?;
    let code = CuResult(CODE_INSIDE.load(Ordering::SeqCst) as u32);
    check.same("a driver call inside", code, CuResult::NOT_PERMITTED);
    Ok(())
}

fn a_fault_ends_the_context_and_skips_host_functions(check: &Check) -> Result<(), String> {
    check.start()?;
    check.load_kernels()?;
    let (stream, other, (words, word)) = (check.stream()?, check.stream()?, check.words()?);
    let event = check.event(NO_TIMING)?;
    check.cuda.stream_wait_value64(stream, word, 1, GEQ).ok()?;
    check.enqueue_fill(stream, 1 << 40, BYTES)?;
    check.cuda.launch_host_function(stream, count, &CALLS).ok()?;
    check.cuda.stream_write_value64(stream, word + 8, 1, 0).ok()?;
    check.cuda.event_record(event, stream).ok()?;
    check.give_nothing_back();
    words.store(0, 1);
    let fault = CuResult::ILLEGAL_ADDRESS;
    check.answers("the stream", check.cuda.stream_synchronize(stream), fault);
    check.answers("another stream", check.cuda.stream_query(other), fault);
    check.answers("an event behind it", check.cuda.event_query(event), fault);
    let (mut address, mut free, mut total) = (0, 0, 0);
    check.answers("an allocation", check.cuda.mem_alloc(&mut address, BYTES), fault);
    check.answers("free memory", check.cuda.mem_get_info(&mut free, &mut total), fault);
    check.answers("a write", check.cuda.stream_write_value64(other, word, 1, 0), fault);
    check.answers("registered memory", check.cuda.mem_host_unregister(words.address()), fault);
    check.same("host functions behind it", CALLS.load(Ordering::SeqCst), 0);
    check.same("values written behind it", words.load(1), 0);
    Ok(())
}

fn relaxed_calls_leave_a_capture_alone(check: &Check) -> Result<(), String> {
    check.start()?;
    let (stream, address) = (check.stream()?, check.alloc(BYTES)?);
    let (mut graph, mut other) = (0, 0);
    let begin = || check.cuda.stream_begin_capture(stream, CAPTURE_GLOBAL);
    begin().ok()?;
    check.answers("memset while capturing", check.cuda.memset_d8_async(address, 1, BYTES, stream), OK);
    let unsafe_call = check.cuda.mem_alloc(&mut other, BYTES);
    check.answers("a call that may not happen then", unsafe_call, CuResult::STREAM_CAPTURE_UNSUPPORTED);
    let ended = check.cuda.stream_end_capture(stream, &mut graph);
    check.answers("spoils the capture", ended, CuResult::STREAM_CAPTURE_INVALIDATED);

    begin().ok()?;
    let waited = check.cuda.stream_synchronize(stream);
    check.answers("waiting for a stream that captures", waited, CuResult::STREAM_CAPTURE_UNSUPPORTED);
    let ended = check.cuda.stream_end_capture(stream, &mut graph);
    check.answers("spoils it as well", ended, CuResult::STREAM_CAPTURE_INVALIDATED);

    begin().ok()?;
    let mut mode = CAPTURE_RELAXED;
    check.answers("the mode of the thread", check.cuda.thread_exchange_capture_mode(&mut mode), OK);
    check.same("was global", mode, CAPTURE_GLOBAL);
    let allocated = check.cuda.mem_alloc(&mut other, BYTES);
    check.answers("the call in relaxed mode", allocated, OK);
    let (_, mapped) = check.mapped(BYTES)?;
    check.same("so are create, map and access", mapped != 0, true);
    check.answers("the mode back", check.cuda.thread_exchange_capture_mode(&mut mode), OK);
    check.same("was relaxed", mode, CAPTURE_RELAXED);
    check.answers("the capture is whole", check.cuda.stream_end_capture(stream, &mut graph), OK);
    check.cuda.graph_destroy(graph).ok()?;
    if allocated.code.is_success() {
        check.cuda.mem_free(other).ok()?;
    }
    Ok(())
}

// ---- events

fn events_know_what_was_recorded(check: &Check) -> Result<(), String> {
    check.start()?;
    let cuda = &check.cuda;
    let (stream, (words, word)) = (check.stream()?, check.words()?);
    let (start, end, untimed) = (check.event(0)?, check.event(0)?, check.event(NO_TIMING)?);
    check.answers("an event never recorded", cuda.event_query(end), OK);
    check.answers("and waiting for it", cuda.event_synchronize(end), OK);
    let mut time = -1.0;
    let never = cuda.event_elapsed_time(&mut time, start, end);
    check.answers("the time between events never recorded", never, CuResult::INVALID_HANDLE);
    cuda.event_record(start, stream).ok()?;
    cuda.stream_wait_value64(stream, word, 1, GEQ).ok()?;
    cuda.event_record(end, stream).ok()?;
    cuda.event_record(untimed, stream).ok()?;
    check.answers("an event behind a wait", cuda.event_query(end), CuResult::NOT_READY);
    let early = cuda.event_elapsed_time(&mut time, start, end);
    check.answers("the time to it", early, CuResult::NOT_READY);
    words.store(0, 1);
    check.answers("waiting for it", cuda.event_synchronize(end), OK);
    check.answers("the time to it", cuda.event_elapsed_time(&mut time, start, end), OK);
    check.same("is no less than nothing", time >= 0.0, true);
    cuda.stream_synchronize(stream).ok()?;
    let untimed = cuda.event_elapsed_time(&mut time, start, untimed);
    check.answers("the time to an event without", untimed, CuResult::INVALID_HANDLE);
    Ok(())
}

fn event_handles_need_the_interprocess_flag(check: &Check) -> Result<(), String> {
    check.start()?;
    let cuda = &check.cuda;
    let (mut event, mut handle) = (0, IpcHandle([0; 64]));
    check.answers("interprocess with timing", cuda.event_create(&mut event, INTERPROCESS), INVALID);
    let plain = check.event(NO_TIMING)?;
    check.answers("a plain event", cuda.ipc_get_event_handle(&mut handle, plain), CuResult::INVALID_HANDLE);
    let shared = check.event(INTERPROCESS | NO_TIMING)?;
    check.answers("an interprocess event", cuda.ipc_get_event_handle(&mut handle, shared), OK);
    let here = cuda.ipc_open_event_handle(&mut event, handle);
    check.answers("opening it where it was made", here, CuResult::INVALID_CONTEXT);
    let garbage = cuda.ipc_open_event_handle(&mut event, IpcHandle([0xA5; 64]));
    check.answers("opening garbage", garbage, CuResult::MAP_FAILED);
    Ok(())
}

/// Records an event behind work that waits for the word that it is given, and tells the event's handle.
fn recorder(check: &Check, line: &Line) -> Result<(), String> {
    let words = Words::map(line.hear()?.ok_or("nobody gave anything")?.descriptor()?, true)?;
    let memory = line.hear()?.ok_or("nobody gave anything")?.descriptor()?;
    check.start()?;
    check.load_kernels()?;
    let (stream, word) = (check.stream()?, check.register(&words)?);
    let address = check.map(check.import(memory)?, BYTES, READ_WRITE)?;
    let (event, mut handle) = (check.event(INTERPROCESS | NO_TIMING)?, IpcHandle([0; 64]));
    check.cuda.ipc_get_event_handle(&mut handle, event).ok()?;
    check.cuda.stream_wait_value64(stream, word, 1, GEQ).ok()?;
    check.enqueue_fill(stream, address, BYTES)?;
    check.cuda.event_record(event, stream).ok()?;
    line.tell(handle.0)?;
    line.hear().map(drop)
}

fn an_event_orders_two_processes(check: &Check) -> Result<(), String> {
    let file = Words::file(4096)?;
    let words = Words::map(&file, true)?;
    let mut recorder = Peer::start("recorder")?;
    check.start()?;
    check.load_kernels()?;
    let (memory, address) = check.mapped(BYTES)?;
    let (stream, mut event) = (check.stream()?, 0);
    recorder.give("words", &file)?;
    recorder.give("memory", check.export(memory)?)?;
    let handle = recorder.hear()?.handle()?;
    check.answers("opening the other's event", check.cuda.ipc_open_event_handle(&mut event, handle), OK);
    check.undo(move |cuda| cuda.event_destroy(event));
    check.answers("it has not happened", check.cuda.event_query(event), CuResult::NOT_READY);
    check.answers("a stream waits for it", check.cuda.stream_wait_event(stream, event, 0), OK);
    check.enqueue_double(stream, address, BYTES)?;
    check.answers("and is blocked", look_twice(check, stream)?, CuResult::NOT_READY);
    words.store(0, 1);
    check.answers("until it happens", wait_for(check, stream)?, OK);
    check.same("after the other's work", check.holds_pattern(address, BYTES, 2)?, true);
    recorder.finish()
}

/// Records an event behind a wait that never ends, tells its handle, and is killed.
fn blocked_recorder(check: &Check, line: &Line) -> Result<(), String> {
    check.start()?;
    let (stream, (_, word)) = (check.stream()?, check.words()?);
    let (event, mut handle) = (check.event(INTERPROCESS | NO_TIMING)?, IpcHandle([0; 64]));
    check.cuda.ipc_get_event_handle(&mut handle, event).ok()?;
    check.cuda.stream_wait_value64(stream, word, 1, GEQ).ok()?;
    check.cuda.event_record(event, stream).ok()?;
    line.tell(handle.0)?;
    line.hear().map(drop)?;
    Err("nobody killed this process".to_owned())
}

/// Lets a stream wait for the event whose handle it is told, and says how the stream is doing whenever it is asked.
/// It is killed in the end: its stream may be blocked for ever.
fn waiter_for_an_event(check: &Check, line: &Line) -> Result<(), String> {
    let handle = line.hear()?.ok_or("nobody told a handle")?.handle()?;
    check.start()?;
    let (stream, mut event) = (check.stream()?, 0);
    check.cuda.ipc_open_event_handle(&mut event, handle).ok()?;
    check.cuda.stream_wait_event(stream, event, 0).ok()?;
    line.tell("waiting")?;
    while line.hear()?.is_some() {
        line.tell(look_twice(check, stream)?.code.to_string())?;
    }
    Err("nobody killed this process".to_owned())
}

fn the_event_of_a_killed_recorder_stays_blocked(check: &Check) -> Result<(), String> {
    let mut recorder = Peer::start("blocked_recorder")?;
    let handle = recorder.hear()?.handle()?;
    let mut waiter = Peer::start("waiter_for_an_event")?;
    waiter.tell(handle.0)?;
    waiter.expect("waiting")?;
    let mut ask = |question: &str| -> Result<(), String> {
        waiter.tell("how is it?")?;
        check.same(question, waiter.hear()?.text(), CuResult::NOT_READY.to_string());
        Ok(())
    };
    ask("before the recorder is killed")?;
    recorder.kill()?;
    for _ in 0..10 {
        ask("after that")?;
    }
    waiter.kill()
}

// ---- deaths

fn a_process_can_be_killed_while_its_stream_waits(check: &Check) -> Result<(), String> {
    check.start()?;
    let file = Words::file(4096)?;
    let words = Words::map(&file, true)?;
    let (memory, address) = check.mapped(BYTES)?;
    check.fill(address, BYTES)?;
    let mut writer = Peer::start("writer_behind_a_wait")?;
    writer.give("words", &file)?;
    writer.give("memory", check.export(memory)?)?;
    writer.expect("waiting")?;
    writer.kill()?;
    // It is gone, and what it had enqueued is gone with it.
    words.store(0, 1);
    check.answers("a stream here works on", look_twice(check, check.stream()?)?, OK);
    check.same("its work behind the wait", check.holds_pattern(address, BYTES, 1)?, true);
    check.same("its value behind that", words.load(1), 0);
    Ok(())
}

/// Enqueues work and a value behind a wait, and is killed.
fn writer_behind_a_wait(check: &Check, line: &Line) -> Result<(), String> {
    let words = Words::map(line.hear()?.ok_or("nobody gave anything")?.descriptor()?, true)?;
    let memory = line.hear()?.ok_or("nobody gave anything")?.descriptor()?;
    check.start()?;
    check.load_kernels()?;
    let (stream, word) = (check.stream()?, check.register(&words)?);
    let address = check.map(check.import(memory)?, BYTES, READ_WRITE)?;
    check.cuda.stream_wait_value64(stream, word, 1, GEQ).ok()?;
    check.enqueue_double(stream, address, BYTES)?;
    check.cuda.stream_write_value64(stream, word + 8, 1, 0).ok()?;
    line.tell("waiting")?;
    line.hear().map(drop)?;
    Err("nobody killed this process".to_owned())
}

/// Writes one value after the other over all of the memory that it is given, until it is killed.
fn endless_writer(check: &Check, line: &Line) -> Result<(), String> {
    let memory = line.hear()?.ok_or("nobody gave anything")?.descriptor()?;
    check.start()?;
    let stream = check.stream()?;
    let address = check.map(check.import(memory)?, 4 * BYTES, READ_WRITE)?;
    for round in 0_u64.. {
        check.cuda.memset_d8_async(address, round as u8, 4 * BYTES, stream).ok()?;
        if round % 16 == 15 {
            check.cuda.stream_synchronize(stream).ok()?;
        }
        if round == 31 {
            line.tell("writing")?;
        }
    }
    Ok(())
}

fn writes_of_a_killed_process_stop(check: &Check) -> Result<(), String> {
    check.start()?;
    let (memory, address) = check.mapped(4 * BYTES)?;
    for _ in 0..5 {
        let mut writer = Peer::start("endless_writer")?;
        writer.give("memory", check.export(memory)?)?;
        writer.expect("writing")?;
        writer.kill()?;
        let after: [u8; 4096] = check.bytes(address)?;
        let mut bytes = vec![0; 4 * BYTES];
        check.cuda.read(&mut bytes, address).ok()?;
        check.same("the bytes change no more", bytes[..4096] == after, true);
        let mut found = [false; 256];
        bytes.iter().for_each(|byte| found[usize::from(*byte)] = true);
        let values: Vec<usize> = (0..256).filter(|value| found[*value]).collect();
        // One round may have been cut off in the middle, and no more than one.
        let in_a_row = match values.as_slice() {
            [_] | [0, 255] => true,
            [low, high] => high - low == 1,
            _ => false,
        };
        check.same(&format!("{values:?} are of one round, or of two in a row"), in_a_row, true);
    }
    Ok(())
}

// ---- modules

fn modules_refuse_what_they_cannot_read(check: &Check) -> Result<(), String> {
    check.start()?;
    let (mut module, mut function) = (0, 0);
    check.answers("no code at all", check.cuda.load_module(&mut module, c"no code at all"), CuResult::INVALID_IMAGE);
    let new = PTX.to_str().map_err(tell)?.replacen(".version 8.4", ".version 99.9", 1);
    let new = std::ffi::CString::new(new).map_err(tell)?;
    let loaded = check.cuda.load_module(&mut module, &new);
    check.answers("PTX of a version to come", loaded, CuResult::UNSUPPORTED_PTX_VERSION);
    let broken = c".version 8.4\n.target sm_70\n.address_size 64\nnonsense";
    check.answers("PTX with an error in it", check.cuda.load_module(&mut module, broken), CuResult::INVALID_PTX);
    let module = check.module(PTX)?;
    let missing = check.cuda.function(&mut function, module, c"pw_missing");
    check.answers("a kernel that is not in it", missing, CuResult::NOT_FOUND);
    Ok(())
}

// ---- namespaces and several GPUs

fn a_descriptor_crosses_namespaces(check: &Check) -> Result<(), String> {
    check.start()?;
    let (memory, address) = check.mapped(BYTES)?;
    check.fill(address, BYTES)?;
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--pid", "--ipc", "--mount", "--mount-proc", "--fork", "--kill-child"]);
    command.arg(std::env::current_exe().map_err(tell)?);
    let mut reader = Peer::start_with("reader_of_exported_memory", command)?;
    reader.give("0", check.export(memory)?)?;
    reader.expect("read")?;
    reader.finish()
}

fn devices_have_their_own_uuids(check: &Check) -> Result<(), String> {
    check.cuda.init(0).ok()?;
    let (mut first, mut second, mut can) = ([0; 16], [0; 16], 0);
    check.cuda.device_get_uuid(&mut first, 0).ok()?;
    check.cuda.device_get_uuid(&mut second, 1).ok()?;
    check.same("they differ", first != second, true);
    check.answers("one reaches the other", check.cuda.device_can_access_peer(&mut can, 0, 1), OK);
    check.same("over a link", can, 1);
    check.answers("and itself", check.cuda.device_can_access_peer(&mut can, 0, 0), OK);
    check.same("not as a peer", can, 0);
    Ok(())
}

fn memory_of_another_gpu_can_be_mapped(check: &Check) -> Result<(), String> {
    let mut owner = Peer::start("owner_of_exported_memory")?;
    let descriptor = owner.hear()?.descriptor()?;
    let mut reader = Peer::start("reader_of_exported_memory")?;
    reader.give("1", descriptor)?;
    reader.expect("read")?;
    reader.finish()?;
    owner.finish()?;

    let Legacy { owner, whole, .. } = Legacy::start()?;
    check.start_on(1)?;
    let address = check.open_legacy(whole)?;
    check.same("a legacy handle as well", check.holds_pattern(address, BYTES, 1)?, true);
    owner.finish()
}

fn memory_of_a_hidden_gpu_can_be_mapped(check: &Check) -> Result<(), String> {
    let mut owner = Peer::start("owner_of_exported_memory")?;
    let descriptor: OwnedFd = owner.hear()?.descriptor()?;
    let Legacy { owner: legacy_owner, whole, .. } = Legacy::start()?;
    let other = || {
        let mut command = Command::new("/proc/self/exe");
        command.env("CUDA_VISIBLE_DEVICES", "1");
        command
    };
    let mut reader = Peer::start_with("reader_of_exported_memory", other())?;
    reader.give("0", descriptor.as_fd())?;
    reader.expect("read")?;
    reader.finish()?;
    let mut reader = Peer::start_with("reader_of_legacy_memory", other())?;
    reader.tell(whole.0)?;
    let opened: Message = reader.hear()?;
    check.same("a legacy handle opens as well", opened.text(), OK.to_string());
    reader.finish()?;
    owner.finish()?;
    legacy_owner.finish()
}
