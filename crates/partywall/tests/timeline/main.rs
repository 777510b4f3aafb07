//! Order between real processes over a real broker: on hosts, and on the simulated driver.
#![allow(clippy::unwrap_used)] // tests, their helpers included

mod ipc_events;
mod world;

/// Not a test: the body of other processes that tests start, see [`world::World::play`].
#[test]
fn role() {
    if let Ok(role) = std::env::var(world::ROLE) {
        match role.split_once(' ').map_or(role.as_str(), |(module, _)| module) {
            "event" => ipc_events::play(),
            other => panic!("no role is called {other:?}"),
        }
    }
}
