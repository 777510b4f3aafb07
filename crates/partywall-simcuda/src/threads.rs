//! Threads of the simulation: the program's signals do not reach them, and their panics end the process.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Starts a thread. It ends with its body or with the process.
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) {
    let body = move || {
        if catch_unwind(AssertUnwindSafe(body)).is_err() {
            eprintln!("a thread of the simulated CUDA driver panicked");
            std::process::abort();
        }
    };
    partywall_os::thread::spawn(name, body).expect("the simulated CUDA driver can start a thread");
}
