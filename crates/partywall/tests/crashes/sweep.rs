//! The sweeps themselves: timing decides how many points a process passes.

use std::{cell::Cell, fs::File, os::fd::OwnedFd};

use partywall_harness::crash::{self, at_each_point};
use partywall_shm::crash::point;

use super::points::assert_passed;

/// Passes two points twice, and between them one more if the role says so.
pub(crate) fn play(role: &str) {
    crash::arm();
    for _ in 0..2 {
        point("sweep: first");
        if role == "with a waiter" {
            point("sweep: waiter woken");
        }
        point("sweep: second");
    }
    crash::disarm();
}

#[test]
fn point_that_is_not_always_passed_hides_no_other() {
    let fd = OwnedFd::from(File::open("/dev/zero").unwrap());
    for with_a_waiter in [0b0010, 0b0101, 0b0110_1100] {
        let runs = Cell::new(0);
        let crashes = Cell::new(0);
        let points = at_each_point(
            || {
                let run = runs.replace(runs.get() + 1);
                let role = if with_a_waiter >> (run % 8) & 1 == 1 { "with a waiter" } else { "alone" };
                (super::role(&format!("sweep {role}"), &fd), ())
            },
            |crashed, ()| {
                crashes.set(crashes.get() + u32::from(crashed.point != "sweep: waiter woken"));
                crashed.is_dead_in_the_end();
            },
        );
        assert_passed(&points, &[&["sweep: first", "sweep: second"]]);
        assert_eq!(crashes.get(), 3 * 4, "each point, both times, with each fate");
    }
}
