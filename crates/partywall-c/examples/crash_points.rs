//! `libpartywall` with crash points, for `tests/kills.rs`: the library for C, and three functions by which a program
//! in C says where it may be killed.
#![allow(unsafe_code)] // exported functions

use std::ffi::{CStr, c_char};

use partywall_harness::crash;
// Its functions are exported, too.
use partywall_c as _;

/// Makes the calling thread crash where the test wants it to.
#[unsafe(no_mangle)]
pub extern "C" fn pw_crash_arm() {
    crash::arm();
}

/// Says that the operation is complete.
#[unsafe(no_mangle)]
pub extern "C" fn pw_crash_disarm() {
    crash::disarm();
}

/// Passes a point between two calls.
///
/// # Safety
/// `name` is a text that is never freed.
///
/// # Panics
/// If the name is not UTF-8.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_crash_point(name: *const c_char) {
    // SAFETY: the caller's promise.
    let name = unsafe { CStr::from_ptr(name) };
    partywall_shm::crash::point(name.to_str().expect("the points of the tests have names in ASCII"));
}
