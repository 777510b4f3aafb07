//! Order between real processes with a real broker: on hosts, and on the simulated driver.
#![allow(clippy::unwrap_used)] // tests, their helpers included

#[path = "../../../../testing/gpu/src/tests/timelines/blocks.rs"]
mod blocks;
mod gpus;
#[path = "../../../../testing/gpu/src/tests/timelines/graphs.rs"]
mod graphs;
mod hosts;
mod ipc_events;
#[path = "../../../../testing/gpu/src/tests/timelines/permits.rs"]
mod permits;
#[path = "../../../../testing/gpu/src/tests/timelines/scenes.rs"]
mod scenes;
#[path = "../../../../testing/gpu/src/tests/timelines/tasks.rs"]
mod tasks;
mod topics;
mod world;

/// Runs the other processes that tests start. It is no test itself; see [`world::World::play`].
#[test]
fn role() {
    if let Ok(role) = std::env::var(world::ROLE) {
        match role.split_once(' ').unwrap_or((&role, "")) {
            ("event", _) => ipc_events::play(),
            ("calls", _) => gpus::report_calls(),
            ("gpu", how) => scenes::play(how != "unprepared"),
            ("graph", _) => graphs::play(),
            ("topic", _) => topics::play(),
            ("permit", _) => permits::play(),
            ("block", _) => blocks::play(),
            ("task", _) => tasks::play(),
            ("host", name) => hosts::play(name),
            (other, _) => panic!("no role is called {other:?}"),
        }
    }
}
