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
    // A new thread inherits the signal mask of its creator, so signal handlers of the program never run in it.
    let before = set_mask(None);
    let started = std::thread::Builder::new().name(name.to_owned()).spawn(body);
    set_mask(Some(before));
    started.expect("the simulated CUDA driver can start a thread");
}

/// Blocks all signals, or sets the mask that was before. The mask that was before.
fn set_mask(mask: Option<libc::sigset_t>) -> libc::sigset_t {
    let mut before = std::mem::MaybeUninit::uninit();
    let mask = mask.unwrap_or_else(|| {
        let mut all = std::mem::MaybeUninit::uninit();
        // SAFETY: fills the whole set.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            all.assume_init()
        }
    });
    // SAFETY: both point to live sets; the call fails only for an unknown `how` and fills the second otherwise.
    unsafe {
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const mask, before.as_mut_ptr());
        before.assume_init()
    }
}
