//! Timelines, permits released by streams, blocks of pools, tasks of queues and samples of topics, on a GPU.
#![allow(clippy::unwrap_used, reason = "a test fails by an error or a panic")]

mod blocks;
mod graphs;
mod kernels;
mod permits;
mod samples;
mod scenes;
mod tasks;
mod world;

use super::{Needs, Test, test};
use world::World;

/// The prefix of the roles of these tests.
pub(crate) const ROLE: &str = "timeline_";

macro_rules! scenes {
    ($($needs:ident $module:ident::$scene:ident)*) => {
        /// Each scene as a test.
        pub(crate) static TESTS: &[Test] = &[$(Test {
            needs: $needs,
            ..test(concat!("timeline_", stringify!($scene)), 1, || {
                $module::$scene(&World::new());
                Ok(())
            })
        },)*];
    };
}

const ONE: Needs = Needs::Gpu(1);
const TWO: Needs = Needs::Gpu(2);
const KERNELS: Needs = Needs::RealGpu("a simulated GPU runs no kernels of other modules");

scenes! {
    // Holds 16.
    ONE scenes::kernels_of_two_processes_come_one_after_the_other
    ONE scenes::a_wait_may_come_before_its_writer
    ONE scenes::kernels_run_while_a_stream_waits_if_they_were_loaded_before
    ONE scenes::launch_blocking_is_found_before_a_wait_is_enqueued
    ONE scenes::a_thread_that_is_held_up_in_the_driver_holds_up_no_signal
    ONE scenes::a_second_stream_waits_for_what_the_first_one_owes
    TWO scenes::whichever_device_is_current
    ONE scenes::streams_compare_the_largest_values
    ONE scenes::a_killed_waiter_harms_no_other_process
    ONE scenes::a_killed_writer_with_signals_under_way_ends_every_wait
    ONE scenes::a_writer_that_closes_keeps_what_its_streams_promised
    ONE scenes::the_end_of_a_connection_waits_for_what_its_streams_promised
    // Holds 171.
    ONE scenes::a_lost_context_is_found_and_reported
    ONE scenes::dead_stage_taints_values_down_the_chain
    ONE scenes::an_input_counts_though_its_handle_is_gone
    ONE scenes::a_failed_input_that_nothing_rests_on_yet_only_refuses
    ONE scenes::a_limited_wait_ends_by_the_value_or_by_the_clock
    // Holds 318.
    ONE scenes::waits_of_streams_are_listed
    ONE scenes::a_sleeping_host_is_woken_by_a_stream
    ONE scenes::a_kernel_signals_what_its_host_promises
    ONE scenes::a_lease_is_kept_until_streams_have_passed_their_waits
    ONE scenes::a_domain_that_is_dropped_lives_on_for_streams_that_wait
    ONE scenes::two_domains_of_one_process_use_one_gpu
    ONE scenes::a_forked_child_enqueues_nothing
    // Holds 18.
    ONE graphs::two_processes_replay_graphs_and_no_host_waits
    ONE graphs::a_writer_killed_during_a_launch_ends_the_waits_of_graphs
    ONE graphs::a_launch_without_values_neither_waits_nor_signals
    ONE graphs::a_launch_that_is_refused_launches_nothing
    // Holds 177.
    ONE graphs::a_wait_before_the_only_signal_that_could_end_it_is_refused
    ONE graphs::a_launch_that_fails_promises_nothing
    ONE graphs::nodes_are_captured_in_a_capture_alone
    ONE graphs::one_graph_signals_several_times_and_from_two_streams
    ONE graphs::launches_with_the_same_writers_in_another_order_do_not_block_each_other
    ONE graphs::values_of_a_graph_rest_on_its_waits
    ONE graphs::a_graph_keeps_the_leases_of_its_waits_until_it_has_passed_them
    ONE permits::a_permit_goes_back_behind_the_work_of_its_stream
    ONE permits::a_permit_of_a_stream_comes_back_when_its_process_is_killed
    ONE permits::a_connection_that_ends_keeps_the_permits_of_streams
    // Holds 109.
    ONE permits::a_permit_of_a_lost_context_comes_back_with_the_end_of_its_process
    ONE permits::a_forked_child_gives_no_permit_to_a_stream
    ONE blocks::a_dropped_block_comes_back_when_the_gpu_is_done_with_it
    ONE blocks::many_dropped_blocks_come_back_together
    ONE blocks::a_dropped_block_of_a_pinned_pool_comes_back_when_all_gpus_are_done_with_it
    ONE blocks::a_block_goes_back_behind_the_work_of_its_stream
    ONE blocks::blocks_of_the_gpu_come_back_when_their_process_is_killed
    ONE blocks::a_connection_that_ends_keeps_the_blocks_of_the_gpu
    ONE blocks::blocks_of_a_lost_context_come_back_with_the_end_of_their_process
    ONE blocks::a_block_is_handed_over_while_a_kernel_is_still_to_fill_it
    ONE blocks::a_block_is_zeroed_on_a_stream
    // Holds 188.
    ONE blocks::a_zeroed_block_has_no_data_of_earlier_holders
    ONE blocks::a_forked_child_gives_no_block_back
    ONE tasks::task_goes_from_stream_to_stream
    ONE tasks::task_of_a_worker_killed_with_its_stream_standing_goes_to_another
    // Holds 212.
    ONE tasks::task_of_a_submitter_killed_with_its_stream_standing_has_failed
    // Holds 212.
    ONE tasks::task_completed_on_a_stream_without_its_inputs_has_failed
    // Holds 212.
    ONE tasks::task_whose_inputs_are_complete_outlives_its_submitter
    // Holds 210.
    ONE tasks::input_of_a_dropped_task_is_kept_until_the_gpu_is_done
    ONE tasks::streams_of_one_process_do_not_wait_for_each_other
    // Holds 215.
    ONE tasks::result_is_read_behind_the_stream_of_its_worker
    // Holds 215.
    ONE tasks::result_of_a_worker_killed_with_its_stream_standing_is_not_valid
    ONE tasks::result_that_another_reader_has_taken_is_gone
    // Holds 216.
    ONE tasks::part_of_a_segment_is_read_after_the_process_that_attached_it_was_killed
    ONE samples::a_sample_is_received_before_it_is_written_and_read_behind_that
    ONE samples::blocks_that_streams_write_are_not_used_again
    // Holds 363.
    ONE samples::streams_of_one_publisher_do_not_wait_for_each_other
    // Holds 198.
    ONE samples::a_publisher_that_is_ahead_of_its_gpu_leaves_blocks_for_others
    // Holds 198.
    ONE samples::all_publishers_but_one_ahead_of_their_gpus_leave_blocks_for_the_last
    // Holds 192.
    ONE samples::unfinished_samples_of_a_dead_publisher_have_failed_and_taint_derived_ones
    ONE samples::check_waits_for_the_inputs_of_a_sample
    ONE samples::samples_come_back_when_the_gpu_is_done_or_the_process_is_dead
    // Holds 192.
    ONE samples::unfinished_samples_of_a_publisher_with_a_lost_context_have_failed
    ONE samples::a_connection_that_ends_completes_what_it_has_published
    ONE kernels::a_stream_that_is_captured_is_refused
    KERNELS kernels::a_writer_killed_in_an_endless_kernel_ends_every_wait
    // Holds 16.
    KERNELS kernels::kernels_wait_and_signal_by_themselves
}

/// Plays a role of these tests.
pub(crate) fn play(role: &str) -> Result<(), String> {
    match role.strip_prefix(ROLE) {
        Some("gpu") => scenes::play(true),
        Some("kernels") => kernels::play(),
        Some("graph") => graphs::play(),
        Some("permit") => permits::play(),
        Some("block") => blocks::play(),
        Some("sample") => samples::play(),
        Some("task") => tasks::play(),
        _ => return Err(format!("unknown role {role:?}")),
    }
    Ok(())
}
