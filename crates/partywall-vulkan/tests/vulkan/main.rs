//! Segments and timelines in Vulkan, on a CPU's Vulkan driver (lavapipe) under the validation layer. Each test fails if
//! the layer reports anything that the test does not expect.
#![allow(clippy::unwrap_used)] // tests, their helpers included
#![allow(unsafe_code)] // calls of Vulkan

mod device;
mod memory;
mod timelines;

use partywall::{DType, Domain};
use partywall_harness::{ROLE, next_order, say};

/// Runs the other processes that tests start. It is no test itself; see [`partywall_harness::World::play`].
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    if role == "without a driver" {
        let error = partywall_vulkan::Gpu::open(None).unwrap_err();
        let said = error.to_string();
        assert!(matches!(error, partywall_vulkan::Error::NoLoader(_)) && said.contains("apt-get install"), "{said}");
        say("ready");
        return;
    }
    let domain = Domain::options().start(false).connect().unwrap();
    match role.as_str() {
        "committer" => {
            let mut build = domain.create("mesh", partywall::Place::Host).kept(true).tensor("x", DType::U8, &[4096]);
            build = build.tensor("y", DType::U8, &[300]);
            let mut build = build.allocate().unwrap();
            build.as_mut_bytes("x").unwrap().fill(7);
            build.as_mut_bytes("y").unwrap().fill(9);
            let _segment = build.commit().unwrap();
            say("ready");
            next_order();
        }
        "writer" => {
            let writer = domain.timeline_writer("frames").unwrap();
            say("ready");
            while let Some(order) = next_order() {
                writer.signal(order.parse().unwrap()).unwrap();
                say("done");
            }
        }
        other => panic!("no role is called {other:?}"),
    }
}
