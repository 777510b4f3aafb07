//! The driver facts: the behaviours of the CUDA driver that Partywall relies on, each as a check that can fail.
//!
//! The facts call the driver directly ([`crate::raw`]), not through Partywall. They are the same for the real driver
//! and the simulated one: the simulation must do what a real GPU does. Each fact runs in its own process and prints
//! every answer. If a real GPU disagrees, the fact is wrong: correct the fact, then the simulation, then the code that
//! relied on it.
//!
//! The list below is the table of contents; the checks are in the modules that it names, in its order. A *measured*
//! fact was found by probes on an H200 with driver 580, before Partywall was written; a *documented* fact is in the
//! vendor's documentation; a *found* fact was found by these tests.
//!
//! Time slices, latencies and bandwidths are not here, because they are times and not answers. The benchmarks measure
//! them.

mod behind;
mod checkpoints;
mod deaths;
mod gpus;
mod graphs;
mod host;
mod launches;
mod legacy;
mod memory;
mod mps;
mod namespaces;
mod neighbours;
mod order;
mod pinned;
mod process;
mod streams;
mod vulkan;

use std::time::{Duration, Instant};

pub(crate) use mps::Mps;

use partywall::cuda::CuResult;

use super::stage::{Check, Line};
use super::world::TIMEOUT;
use super::{FREE_MEMORY, Needs, Test};
use crate::raw::{self, Handle};

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
const CONTROL_DEVICE: Needs = Needs::RealGpu("memory of a simulated GPU is a memfd");
const NEIGHBOURS: Needs = Needs::RealGpu("processes on a simulated GPU share nothing that a death could break");
const POLLING: Needs = Needs::RealGpu("a simulated GPU runs no polling kernels");
const QUEUES: Needs = Needs::RealGpu("on a simulated GPU each stream has its own queue");
const CHECKPOINTS: Needs = Needs::RealGpu("the simulated driver takes no checkpoints");
const MPS: Needs = Needs::Mps;
const NAMESPACES: Needs = Needs::Namespaces;
const OTHER_USER: Needs = Needs::OtherUser;
const VULKAN: Needs = Needs::Vulkan(1);
const VULKAN_ON_HOST: Needs = Needs::VulkanOnHost;

/// How long a fact may take.
const LIMIT: Duration = Duration::from_secs(120);

macro_rules! facts {
    ($($module:ident { $($source:ident $needs:ident $fact:ident)* })*) => {
        /// All facts, as tests of the same name behind `fact_`.
        pub(crate) static FACTS: &[Test] = &[$($(Test {
            name: concat!("fact_", stringify!($fact)),
            needs: $needs,
            timeout: LIMIT,
            run: || run($source, $module::$fact),
        },)*)*];
    };
}

facts! {
    process {
        Documented ONE nothing_works_before_init
        Documented ONE a_forked_child_has_no_driver
        Documented ONE the_environment_chooses_the_devices
        Documented ONE devices_are_found_by_ordinal
        Measured ONE the_attributes_that_partywall_asks_for
        Documented ONE results_have_names
        Documented ONE a_primary_context_is_shared_and_counted
        Documented ONE a_context_is_current_on_one_thread
    }
    memory {
        Measured ONE exportable_memory_comes_in_whole_granules
        Documented ONE too_much_memory_is_out_of_memory
        Documented ONE freed_memory_is_free_at_once
        Measured ONE an_import_is_the_same_memory
        Measured ONE an_import_cannot_be_exported_again
        Found ONE an_export_needs_a_free_descriptor
        Found CONTROL_DEVICE other_calls_need_no_free_descriptor
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
    }
    legacy {
        Measured ONE only_memory_of_mem_alloc_has_a_legacy_handle
        Measured ONE a_legacy_handle_names_the_whole_allocation
        Documented ONE neighbours_of_a_small_allocation_are_visible
        Measured ONE a_legacy_handle_does_not_open_where_it_was_made
        Measured ONE a_second_open_returns_the_same_address
        Found ONE legacy_mappings_are_closed_and_not_freed
        Found ONE an_invented_handle_does_not_open
        Found ONE a_handle_of_freed_memory_is_refused_or_opens_later_memory
        Measured ONE a_legacy_mapping_survives_its_exporter
        Found ONE pointer_attributes_tell_the_kinds_apart
        Found ONE attributes_that_are_asked_for_together_have_defaults
    }
    host {
        Found ONE host_memory_is_registered_once
        Found ONE neighbouring_mappings_are_registered_as_one
        Documented ONE pinned_memory_is_freed_once
        Documented ONE registered_memory_is_shared_between_processes
        Found ONE read_only_host_memory_is_registered_as_such
    }
    pinned {
        Measured ONE pinned_memory_is_exported_as_memory_of_a_gpu_is
        Measured CONTROL_DEVICE a_descriptor_of_pinned_memory_is_the_control_device
        Found ONE pinned_memory_of_no_node_is_refused
        Found ONE more_pinned_memory_than_a_node_has_is_out_of_memory
        Found ONE fresh_pinned_memory_reads_zero_after_another_process
        Found ONE a_wrong_size_of_pinned_memory_is_found_when_it_is_mapped
        Measured ONE the_cpu_uses_pinned_memory_without_a_context
        Measured ONE pinned_memory_survives_its_creator
        Documented ONE pinned_memory_survives_the_context_of_its_creator
        Measured ONE pinned_memory_is_read_only_for_the_cpu
        Found ONE pinned_memory_is_read_only_for_kernels
        Found ONE access_is_added_while_a_stream_waits_in_the_memory
        Found ONE access_is_added_while_kernels_use_the_memory
        Found ONE writing_is_taken_away_from_cpu_and_gpu_in_one_call
        Found ONE access_to_several_allocations_is_given_in_one_call
        Found ONE an_importer_adds_the_gpu_at_the_same_address
        Measured TWO several_gpus_are_given_access_in_one_call
        Found ONE pinned_memory_is_copied_as_memory_of_a_gpu_is
        Measured ONE pinned_memory_grows_in_place
        Measured ONE a_forked_child_shares_pinned_memory
        Measured ONE files_are_read_into_pinned_memory_past_the_page_cache
        Measured ONE pinned_memory_is_resident_where_the_cpu_has_access
        Found ONE writes_of_a_killed_process_to_pinned_memory_stop
        Measured MPS under_mps_pinned_memory_is_shared_and_survives
    }
    streams {
        Documented ONE a_stream_works_in_order
        Documented ONE a_wait_compares_signed_differences
        Documented ONE memory_operations_work_on_every_kind_of_memory
        Documented ONE memory_operations_refuse_what_they_cannot_address
        Documented ONE a_written_value_comes_after_the_work_before_it
        Measured ONE a_plain_store_of_another_process_releases_a_stream
        Documented ONE streams_have_identities
        Documented ONE host_functions_run_in_order_and_may_not_call_the_driver
        Documented ONE a_fault_ends_the_context_and_skips_host_functions
        Documented ONE relaxed_calls_leave_a_capture_alone
    }
    graphs {
        Documented ONE memory_operations_of_a_graph_repeat_their_values
        Documented ONE new_values_of_a_graph_count_for_later_launches_alone
        Documented ONE launches_of_one_graph_run_one_after_the_other
        Documented ONE a_memory_operation_of_a_graph_cannot_become_another
        Documented ONE a_graph_says_what_its_nodes_depend_on
    }
    launches {
        Documented ONE modules_refuse_what_they_cannot_read
        Found ONE loading_a_module_behind_a_wait_blocks
        Found ONE a_function_first_asked_for_behind_a_wait_runs_after_it
        Found ONE a_function_got_before_a_wait_runs_at_once
        Found ONE a_launch_behind_a_wait_blocks_if_it_needs_more_local_memory
    }
    behind {
        Found ONE allocating_and_registering_behind_a_wait_do_not_block
        Found ONE freeing_behind_a_wait_blocks
        Found ONE a_call_that_is_held_up_keeps_no_other_thread
        Found QUEUES streams_that_wait_hold_up_those_of_their_queue
    }
    order {
        Measured ONE a_stream_write_orders_two_processes
        Measured ONE the_host_orders_two_processes
        Documented ONE an_event_orders_two_processes
        Documented ONE events_know_what_was_recorded
        Found ONE event_handles_need_the_interprocess_flag
        Measured POLLING polling_kernels_of_two_processes_take_turns
    }
    deaths {
        Measured ONE the_event_of_a_killed_recorder_stays_blocked
        Measured NEIGHBOURS the_event_behind_an_endless_kernel_stays_blocked
        Measured ONE a_process_can_be_killed_while_its_stream_waits
        Measured ONE writes_of_a_killed_process_stop
        Measured NEIGHBOURS a_death_in_an_endless_kernel_ends_its_writes_and_harms_no_other_process
        Measured NEIGHBOURS a_death_outside_of_kernels_harms_no_other_process
        Measured NEIGHBOURS a_death_between_short_kernels_harms_no_other_process
    }
    mps {
        Measured MPS under_mps_a_death_in_an_endless_kernel_faults_the_other_clients
        Found MPS under_mps_a_fault_stays_among_the_clients
        Measured MPS under_mps_a_death_outside_of_kernels_harms_no_other_process
        Measured MPS under_mps_polling_kernels_take_turns
        Measured MPS under_mps_memory_is_shared_between_clients
        Documented MPS under_mps_memory_is_shared_with_other_processes
    }
    checkpoints {
        Measured CHECKPOINTS a_process_that_keeps_addresses_alone_is_restored
        Measured CHECKPOINTS a_process_with_imported_memory_is_not_restored
        Measured CHECKPOINTS a_process_with_an_open_legacy_handle_is_not_restored
        Measured CHECKPOINTS a_process_with_pinned_memory_is_not_restored
        Found CHECKPOINTS an_owner_is_restored_with_a_copy
        Measured CHECKPOINTS registered_host_memory_is_restored
        Found CHECKPOINTS a_thread_that_queries_a_stream_ends_its_process
        Found CHECKPOINTS a_thread_that_asks_for_a_limit_is_held_up
    }
    namespaces {
        Measured NAMESPACES handles_cross_pid_and_ipc_namespaces
        Measured NAMESPACES events_alone_need_the_same_dev_shm
        Measured OTHER_USER events_alone_need_the_same_user
    }
    gpus {
        Documented TWO devices_have_their_own_uuids
        Measured TWO memory_of_another_gpu_can_be_mapped
        Measured TWO memory_of_a_hidden_gpu_can_be_mapped
    }
    vulkan {
        Documented VULKAN vulkan_names_a_gpu_as_cuda_does
        Measured VULKAN vulkan_imports_exported_memory
        Measured VULKAN vulkan_buffers_begin_at_multiples_of_256
        Measured VULKAN vulkan_keeps_the_memory_of_a_killed_creator
        Measured VULKAN vulkan_refuses_more_than_was_exported
        Measured VULKAN vulkan_imports_as_each_type_of_memory
        Measured VULKAN cuda_imports_memory_of_vulkan
        Found VULKAN_ON_HOST vulkan_updates_eight_bytes_at_once
        Found VULKAN a_killed_user_of_vulkan_harms_no_other_process
        Measured VULKAN_ON_HOST vulkan_imports_host_memory_that_cuda_has_registered
        Found VULKAN vulkan_imports_no_frozen_host_memory
    }
}

/// The value of `--role` for [`ROLES`].
pub(crate) const ROLE: &str = "fact";

type Play = fn(&Check, &Line) -> Result<(), String>;

macro_rules! roles {
    ($($module:ident { $($role:ident)* })*) => {
        /// The roles of other processes in facts.
        const ROLES: &[(&str, Play)] = &[$($((stringify!($role), $module::$role),)*)*];
    };
}

roles! {
    process { counter_of_devices }
    memory { owner_of_exported_memory reader_of_exported_memory writer_of_much_memory faulting_writer }
    legacy { owner_of_legacy_memory owner_of_freed_memory reader_of_legacy_memory }
    host { writer_into_host_memory }
    pinned { owner_of_pinned_memory owner_that_loses_its_context writer_of_much_pinned_memory }
    streams { waiter_for_a_store }
    launches { launcher_behind_a_wait }
    behind { caller_behind_a_wait crowd_behind_a_wait }
    order { producer recorder }
    deaths { waiter_for_an_event endless_writer writer_behind_a_wait }
    checkpoints { checkpointed }
    neighbours { neighbour victim turn_taker }
    mps { keeper }
    namespaces { foreigner }
    vulkan { user_of_vulkan }
}

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
    let (_, play) = ROLES.iter().find(|(name, _)| *name == role).ok_or(format!("unknown role {role:?}"))?;
    let check = Check::new()?;
    let outcome = play(&check, &Line::of_role()?);
    check.finish(outcome)
}

/// Waits until a stream has no work left, with a timeout, unlike `cuStreamSynchronize`.
fn wait_for(check: &Check, stream: Handle) -> Result<raw::Answer, String> {
    let deadline = Instant::now() + TIMEOUT / 4;
    loop {
        let answer = check.cuda.stream_query(stream);
        if answer.code != CuResult::NOT_READY || Instant::now() > deadline {
            return Ok(answer);
        }
        std::thread::yield_now();
    }
}

/// Queries a stream after another stream had time to do its work. A blocked stream is always found blocked; a stream
/// that is not blocked is found so unless it is very slow.
fn query_twice(check: &Check, stream: Handle) -> Result<raw::Answer, String> {
    let other = check.stream()?;
    let scratch = check.alloc(BYTES)?;
    for _ in 0..3 {
        check.cuda.memset_d8_async(scratch, 1, BYTES, other).ok()?;
        check.cuda.stream_synchronize(other).ok()?;
    }
    Ok(check.cuda.stream_query(stream))
}

/// Returns the error of a role that should have been killed.
fn outlived<T>() -> Result<T, String> {
    Err("this process was not killed".to_owned())
}

const MIB: usize = 1 << 20;
/// Two granules, so that a part can be requested.
const BYTES: usize = 4 * MIB;

const OK: CuResult = CuResult::SUCCESS;
const INVALID: CuResult = CuResult::INVALID_VALUE;
