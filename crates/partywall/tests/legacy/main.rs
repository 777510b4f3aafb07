//! Memory that other code allocated, published between real processes with a real broker, on the simulated driver.
#![allow(clippy::unwrap_used)] // tests, their helpers included

mod copies;
mod deaths;
mod handles;
mod heaps;
mod left;
mod pools;
mod publish;
mod world;

/// Runs the other processes that tests start. It is no test itself; see [`world::World::play`].
#[test]
fn role() {
    if let Ok(role) = std::env::var(world::ROLE) {
        match role.split_once(": ") {
            Some(("handle", role)) => handles::play(role),
            Some(("pool", role)) => pools::play(role),
            Some(("heap", role)) => heaps::play(role),
            Some(("left", role)) => left::play(role),
            _ => deaths::play(&role),
        }
    }
}
