// Holds 16, 18, 177.
//! Timelines between streams, on the simulated driver.

use partywall::{Domain, cuda::Stream};

use super::{
    blocks, graphs, permits,
    scenes::{self, Stage},
    tasks,
    world::{World, eventually, gpu, next_order, say, simulated},
};

/// Runs each scene in a process of its own.
macro_rules! tests {
    ($($module:ident::{$($scene:ident),* $(,)?})*) => {
        $($(
            #[test]
            fn $scene() {
                simulated(concat!("gpus::", stringify!($scene)), $module::$scene);
            }
        )*)*
    };
}

tests! {
    scenes::{
        kernels_of_two_processes_come_one_after_the_other,
        a_wait_may_come_before_its_writer,
        kernels_run_while_a_stream_waits_if_they_were_loaded_before,
        launch_blocking_is_found_before_a_wait_is_enqueued,
        a_thread_that_is_held_up_in_the_driver_holds_up_no_signal,
        a_second_stream_waits_for_what_the_first_one_owes,
        whichever_device_is_current,
        streams_compare_the_largest_values,
        a_killed_waiter_harms_no_other_process,
        a_killed_writer_with_signals_under_way_ends_every_wait,
        a_writer_that_closes_keeps_what_its_streams_promised,
        the_end_of_a_connection_waits_for_what_its_streams_promised,
        a_lost_context_is_found_and_reported,
        dead_stage_taints_values_down_the_chain,
        an_input_counts_though_its_handle_is_gone,
        a_failed_input_that_nothing_rests_on_yet_only_refuses,
        a_limited_wait_ends_by_the_value_or_by_the_clock,
        waits_of_streams_are_listed,
        a_sleeping_host_is_woken_by_a_stream,
        a_kernel_signals_what_its_host_promises,
        a_lease_is_kept_until_streams_have_passed_their_waits,
        a_domain_that_is_dropped_lives_on_for_streams_that_wait,
        two_domains_of_one_process_use_one_gpu,
        a_forked_child_enqueues_nothing,
    }
    graphs::{
        two_processes_replay_graphs_and_no_host_waits,
        a_writer_killed_during_a_launch_ends_the_waits_of_graphs,
        a_launch_without_values_neither_waits_nor_signals,
        a_launch_that_is_refused_launches_nothing,
        a_wait_before_the_only_signal_that_could_end_it_is_refused,
        a_launch_that_fails_promises_nothing,
        nodes_are_captured_in_a_capture_alone,
        one_graph_signals_several_times_and_from_two_streams,
        launches_with_the_same_writers_in_another_order_do_not_block_each_other,
        values_of_a_graph_rest_on_its_waits,
        a_graph_keeps_the_leases_of_its_waits_until_it_has_passed_them,
    }
    permits::{
        a_permit_goes_back_behind_the_work_of_its_stream,
        a_permit_of_a_stream_comes_back_when_its_process_is_killed,
        a_connection_that_ends_keeps_the_permits_of_streams,
        a_permit_of_a_lost_context_comes_back_with_the_end_of_its_process,
        a_forked_child_gives_no_permit_to_a_stream,
    }
    blocks::{
        a_dropped_block_comes_back_when_the_gpu_is_done_with_it,
        many_dropped_blocks_come_back_together,
        a_dropped_block_of_a_pinned_pool_comes_back_when_all_gpus_are_done_with_it,
        a_block_goes_back_behind_the_work_of_its_stream,
        blocks_of_the_gpu_come_back_when_their_process_is_killed,
        a_connection_that_ends_keeps_the_blocks_of_the_gpu,
        blocks_of_a_lost_context_come_back_with_the_end_of_their_process,
        a_block_is_handed_over_while_a_kernel_is_still_to_fill_it,
        a_block_is_zeroed_on_a_stream,
        a_zeroed_block_has_no_data_of_earlier_holders,
        a_forked_child_gives_no_block_back,
    }
    tasks::{
        task_goes_from_stream_to_stream,
        task_of_a_worker_killed_with_its_stream_standing_goes_to_another,
        task_of_a_submitter_killed_with_its_stream_standing_has_failed,
        task_completed_on_a_stream_without_its_inputs_has_failed,
        task_whose_inputs_are_complete_outlives_its_submitter,
        input_of_a_dropped_task_is_kept_until_the_gpu_is_done,
        streams_of_one_process_do_not_wait_for_each_other,
        result_is_read_behind_the_stream_of_its_worker,
        result_of_a_worker_killed_with_its_stream_standing_is_not_valid,
        result_that_another_reader_has_taken_is_gone,
        part_of_a_segment_is_read_after_the_process_that_attached_it_was_killed,
    }
    alone::{
        failed_registration_of_words_is_retried,
        // Holds 346.
        wait_and_signal_make_three_extra_driver_calls,
        // Holds 387.
        checks_of_a_context_neither_query_nor_wait,
    }
}

/// Cases that only a simulated driver can produce.
mod alone {
    use super::*;

    pub(super) fn failed_registration_of_words_is_retried(world: &World) {
        let stage = Stage::new(world);
        for (faults, anchor) in [
            ("cuMemHostRegister:1=2", "cannot-page-lock"),
            ("cuMemHostGetDevicePointer:1=999", "driver-error"),
            ("cuStreamWriteValue64:1=801", "stream-waits-refused"),
            ("cuStreamWaitValue64:1=801", "stream-waits-refused"),
            // The call does nothing, and reports success.
            ("cuStreamWaitValue64:2=0", "stream-waits-refused"),
        ] {
            let mut refused = world.play_with("gpu unprepared", |command| {
                command.env("SIMCUDA_FAULTS", faults);
            });
            assert_eq!(refused.request("try-wait 1"), anchor, "{faults}");
            assert_eq!(refused.request("try-wait 1"), "enqueued", "{faults}");
        }
        stage.domain.timeline("in").unwrap().abandon().unwrap();
    }
    pub(super) fn wait_and_signal_make_three_extra_driver_calls(world: &World) {
        let log = tempfile::NamedTempFile::new().unwrap();
        let mut role = world.play_with("calls", |command| {
            command.env(CALLS, log.path()).env("SIMCUDA_APART", "partywall-gpu");
        });
        let asked = "cuCtxGetCurrent cuStreamIsCapturing cuStreamGetId";
        assert_eq!(role.request("signal"), format!("{asked} cuStreamWriteValue64"));
        assert_eq!(role.request("wait"), format!("{asked} cuStreamWaitValue64"));
        assert_eq!(role.request("wait for what is there"), "");
        // Changed, then changed back.
        let asked = "cuCtxGetCurrent cuCtxPushCurrent cuStreamIsCapturing cuStreamGetId";
        role.request("another device");
        assert_eq!(role.request("signal"), format!("{asked} cuStreamWriteValue64 cuCtxPopCurrent"));
        assert_eq!(role.request("wait"), format!("{asked} cuStreamWaitValue64 cuCtxPopCurrent"));
    }

    /// A query or a synchronization would end a process that is being checkpointed.
    pub(super) fn checks_of_a_context_neither_query_nor_wait(world: &World) {
        let log = tempfile::NamedTempFile::new().unwrap();
        let _role = world.play_with("calls", |command| {
            command.env(CALLS, log.path());
        });
        let calls = || std::fs::read_to_string(log.path()).unwrap();
        let before = calls().len();
        eventually("two checks", || calls()[before..].matches("cuCtxGetLimit").count() >= 2);
        let later = calls().split_off(before);
        assert!(!later.contains("Query") && !later.contains("Synchronize"), "{later}");
    }
}

const CALLS: &str = "SIMCUDA_CALLS";

/// The body of a process that reports which driver calls an operation made.
pub(super) fn report_calls() {
    let domain = Domain::options().start(false).connect().unwrap();
    let gpu = gpu(&domain);
    let stream = Stream::new(gpu.context()).unwrap();
    let writer = domain.timeline_writer("ours").unwrap();
    let timeline = domain.timeline("theirs").unwrap();
    let second = domain.gpu(partywall::gpu::devices().unwrap()[1].uuid().unwrap()).unwrap();
    gpu.context().make_current().unwrap();
    // The first call with a stream prepares all others.
    let mut v = 1;
    writer.signal_on(stream.as_ref(), v).unwrap();
    say("ready");
    let log = || std::fs::read_to_string(std::env::var_os(CALLS).unwrap()).unwrap();
    while let Some(order) = next_order() {
        v += 1;
        let before = log().len();
        match order.as_str() {
            "signal" => writer.signal_on(stream.as_ref(), v).unwrap(),
            "wait" => timeline.wait_on(stream.as_ref(), v).unwrap(),
            "wait for what is there" => timeline.wait_on(stream.as_ref(), 0).unwrap(),
            "another device" => second.context().make_current().unwrap(),
            other => panic!("nobody knows how to {other}"),
        }
        let calls: Vec<_> = log()[before..].lines().map(|line| line.split(' ').nth(2).unwrap().to_owned()).collect();
        say(&format!("done {}", calls.join(" ")));
    }
}
