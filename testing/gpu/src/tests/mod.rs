//! The tests that need a GPU.

mod commands;
mod cudarc;
mod driver;
pub(crate) mod facts;
#[allow(dead_code, reason = "its `main` reads the arguments of a program of its own")]
#[path = "../../../../crates/partywall/examples/frames.rs"]
mod frames;
mod growth;
pub(crate) mod legacy;
mod mps;
mod needs;
mod owners;
pub(crate) mod segments;
pub(crate) mod stage;
mod timelines;
mod troubleshooting;
mod vulkan;
pub(crate) mod world;

use std::time::Duration;

pub(crate) use needs::{FREE_MEMORY, Needs};

/// One test. It runs in its own process, and fails by an error or a panic.
pub(crate) struct Test {
    /// Unique, in lower case with underscores; starts with the subject of its module.
    pub(crate) name: &'static str,
    /// The requirement without which the test is skipped.
    pub(crate) needs: Needs,
    /// The time after which the test's process is killed and the test fails. It is meant for hangs, and is several
    /// times as long as a slow run.
    pub(crate) timeout: Duration,
    /// The function of the test.
    pub(crate) run: fn() -> Result<(), String>,
}

/// Returns all tests in the order in which they run: those that others build on come first.
pub(crate) fn all() -> impl Iterator<Item = &'static Test> {
    facts::FACTS.iter().chain(TESTS).chain(timelines::TESTS)
}

static TESTS: &[Test] = &[
    test("driver_loads", 1, driver::driver_loads),
    test("device_says_what_it_is", 1, owners::device_reports_its_properties),
    test("import_is_the_same_memory", 1, owners::an_import_is_the_same_memory),
    test("memory_comes_back", 1, owners::memory_comes_back),
    test("refusal_says_why", 1, owners::a_refusal_says_why),
    test("any_thread_works", 1, owners::any_thread_works_and_keeps_its_own_context),
    test("copies_and_times", 1, owners::copies_and_times),
    test("driver_errors_are_as_documented", 1, troubleshooting::driver_errors_are_as_documented),
    // Holds 2, 8.
    test("segment_memory_outlives_its_creator", 1, segments::memory_outlives_its_creator),
    test("segment_held_memory_is_not_lost", 1, segments::held_memory_is_not_lost),
    // Holds 4.
    test("segment_readers_keep_their_version", 1, segments::readers_keep_their_version),
    // Holds 101.
    real("segment_uncommitted_memory_comes_back", FREE_MEMORY, segments::uncommitted_memory_comes_back),
    real("segment_removed_memory_comes_back", FREE_MEMORY, segments::removed_memory_comes_back),
    // Holds 9.
    test("segment_owned_names_go_with_their_owner", 1, segments::owned_names_go_with_their_owner),
    // Holds 3.
    test("segment_frozen_memory_is_read_only", 1, segments::frozen_memory_is_read_only),
    test("segment_mutable_memory_is_shared", 1, segments::mutable_memory_is_shared),
    // Holds 7, 52.
    test("segment_growth_is_one_range", 1, growth::kernel_reads_across_a_grown_end),
    // Holds 95.
    test("segment_pinned_is_copied_asynchronously", 1, growth::pinned_segments_are_copied_asynchronously),
    test("segment_dropped_under_running_work", 1, segments::dropped_under_running_work),
    test("segment_dropped_behind_a_wait", 1, segments::dropped_behind_a_wait),
    // Holds 62.
    test("segment_out_of_memory_says_what_is_free", 1, segments::out_of_memory_says_what_is_free),
    // Holds 44.
    test("segment_many_tensors_keep_their_places", 1, segments::many_tensors_keep_their_places),
    // Holds 68.
    test("legacy_goes_with_its_publisher", 1, legacy::published_memory_goes_with_its_publisher),
    // Holds 68.
    test("legacy_race_with_death", 1, legacy::race_with_death_is_named),
    // Holds 66.
    test("legacy_opens_where_it_was_made", 1, legacy::published_memory_opens_where_it_was_made),
    // Holds 69.
    test("legacy_refusals_by_kind", 1, legacy::memory_without_a_handle_is_refused_by_its_kind),
    // Holds 226.
    test("segment_cudarc_works_in_place", 1, cudarc::works_in_place),
    // Holds 61.
    test("segment_another_gpu_needs_permission", 2, segments::another_gpu_needs_permission),
    // Holds 60.
    test("segment_ordinals_may_differ", 2, segments::ordinals_may_differ),
    // Holds 230.
    real("vulkan_reads_a_segment_without_cuda", Needs::Vulkan(1), vulkan::segment_is_read_without_cuda),
    // Holds 230.
    real("vulkan_writes_are_read_by_kernels", Needs::Vulkan(1), vulkan::writes_are_read_by_kernels),
    real("vulkan_uses_blocks_of_a_pool_in_place", Needs::Vulkan(1), vulkan::blocks_of_a_pool_are_used_in_place),
    // Holds 230.
    real("vulkan_takes_turns_with_kernels", Needs::Vulkan(1), vulkan::takes_turns_with_kernels),
    // Holds 230.
    real("vulkan_of_another_gpu_is_refused", Needs::Vulkan(2), vulkan::another_gpu_is_refused),
    real("vulkan_shares_host_memory", Needs::VulkanOnHost, vulkan::host_memory_is_shared),
    real("vulkan_waits_end_with_their_writer", Needs::VulkanOnHost, vulkan::waits_end_with_their_writer),
    test("command_demo_passes", 1, commands::the_demo_passes),
    // Holds 307.
    test("command_doctor_is_content", 1, commands::the_doctor_is_content),
    // Holds 64.
    real("command_hidden_nodes_leave_host_memory", Needs::HiddenNodes, commands::hidden_nodes_leave_host_memory),
    // Holds 36.
    real("command_put_for_another_user", Needs::OtherUser, commands::put_for_another_user),
    test("command_lab_errors", 1, commands::lab_errors),
    test("command_lab_handle_file", 1, commands::lab_handle_file),
    test("command_lab_fork", 1, commands::lab_fork),
    test("command_lab_vmm", 1, commands::lab_vmm),
    test("command_lab_p2p", 2, commands::lab_p2p),
    test("command_lab_coherency", 1, commands::lab_coherency),
    real("command_lab_coherency_under_mps", Needs::Mps, commands::lab_coherency_under_mps),
    test("command_lab_events", 1, commands::lab_events),
    real("command_lab_events_under_mps", Needs::Mps, commands::lab_events_under_mps),
    test("command_lab_semaphore", 1, commands::lab_semaphore),
    real("command_lab_semaphore_under_mps", Needs::Mps, commands::lab_semaphore_under_mps),
    test("command_lab_crash", 1, commands::lab_crash),
    // Holds 38, 332, 338.
    Test { timeout: Duration::from_secs(480), ..test("command_bench", 1, commands::bench) },
    real("command_bench_under_mps", Needs::Mps, commands::bench_under_mps),
    // Holds 232, 234, 240.
    real("command_mps_serves_clients_and_stops", Needs::Mps, mps::daemon_serves_clients_and_stops),
    // Holds 235.
    real("command_mps_daemon_outlives_its_watcher", Needs::Mps, mps::daemon_outlives_its_watcher),
    // Holds 235.
    real("command_mps_killed_daemon_is_replaced", Needs::Mps, mps::killed_daemon_is_replaced),
    // Holds 234.
    real("command_mps_stop_spares_clients", Needs::Mps, mps::stop_spares_clients),
    // Holds 240.
    real("command_mps_doctor_measures_a_shorter_hand_off", Needs::Mps, mps::doctor_measures_a_shorter_hand_off),
    test("command_lab_work_queue", 1, commands::lab_work_queue),
    real("command_lab_work_queue_under_mps", Needs::Mps, commands::lab_work_queue_under_mps),
    // Holds 48.
    test("command_lab_weights", 1, commands::lab_weights),
    // Holds 48.
    test("command_lab_weights_in_pinned_memory", 1, commands::lab_weights_in_pinned_memory),
    real("command_lab_weights_under_mps", Needs::Mps, commands::lab_weights_under_mps),
    // Holds 10.
    Test { timeout: Duration::from_secs(480), ..test("command_lab_chaos", 1, commands::lab_chaos) },
    // Holds 10.
    Test {
        timeout: Duration::from_secs(480),
        ..test("command_lab_chaos_in_pinned_memory", 1, commands::lab_chaos_in_pinned_memory)
    },
    // Holds 362.
    test("command_lab_render", 1, commands::lab_render),
    // Holds 362.
    real("command_lab_render_under_mps", Needs::Mps, commands::lab_render_under_mps),
    // Holds 329.
    real("command_lab_render_by_vulkan", Needs::Vulkan(1), commands::lab_render_by_vulkan),
    // Holds 328, 362.
    test("command_lab_render_survives_deaths", 1, commands::lab_render_survives_deaths),
    Test { timeout: Duration::from_secs(480), ..test("command_lab_tour", 1, commands::lab_tour) },
    // Holds 8, 300.
    test("command_weights_outlive_their_process", 1, commands::weights_outlive_their_process),
];

/// Plays a role of a test, in its own process.
pub(crate) fn play(role: &str, arguments: &[String]) -> Result<(), String> {
    match arguments {
        [fact_role] if role == facts::ROLE => facts::play(fact_role),
        _ if role == cudarc::ROLE => cudarc::play(),
        _ if role == "frames" => frames(arguments),
        _ if role.starts_with("legacy_") => legacy::play(role),
        _ if role.starts_with("vulkan_") => vulkan::play(role, arguments),
        _ if role.starts_with(timelines::ROLE) => timelines::play(role),
        _ => segments::play(role, arguments),
    }
}

/// Plays the example's roles beside those in other languages, for the script that runs them on a GPU.
fn frames(arguments: &[String]) -> Result<(), String> {
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    frames::run(&arguments).map_err(|error| error.to_string())
}

const fn test(name: &'static str, gpus: usize, run: fn() -> Result<(), String>) -> Test {
    Test { name, needs: Needs::Gpu(gpus), timeout: Duration::from_secs(120), run }
}

const fn real(name: &'static str, needs: Needs, run: fn() -> Result<(), String>) -> Test {
    Test { needs, ..test(name, 1, run) }
}

#[cfg(test)]
mod unit {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_unique_and_plain() {
        let names: BTreeSet<_> = all().map(|test| test.name).collect();
        assert_eq!(names.len(), all().count());
        for name in names {
            let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            assert!(name.chars().all(plain), "{name}");
        }
    }
}
