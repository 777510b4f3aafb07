//! Helpers that roles and tests share.

use std::sync::Arc;

use partywall::{Domain, Gpu};

pub(crate) use partywall_harness::{ROLE, WATCHDOG as TIMEOUT, World, eventually, next_order, say, simulated};

/// The first GPU of this process.
pub(crate) fn gpu(domain: &Domain) -> Arc<Gpu> {
    domain.gpu(partywall::gpu::devices().unwrap()[0].uuid().unwrap()).unwrap()
}

/// Returns whether `body` returns true in a forked child, which then ends.
#[allow(unsafe_code)]
pub(crate) fn in_a_child(body: impl FnOnce() -> bool) -> bool {
    // SAFETY: the locks that the child needs are its own; it ends without unwinding into the parent's code.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let good = body();
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    let mut status = 0;
    // SAFETY: the status is a live number.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}
