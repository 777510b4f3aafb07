//! What only programs in C can do wrong has its entry in `docs/troubleshooting.md`, and the entry quotes the message.
#![allow(unsafe_code, clippy::unwrap_used)] // calls as C makes them

use std::{
    ffi::{CStr, c_char},
    ptr,
};

use partywall_c::{
    domain::{pw_domain, pw_domain_close, pw_domain_ping},
    error::{pw_error_anchor, pw_error_message, pw_error_status, pw_last_error, pw_status},
};

const DOCUMENT: &str = include_str!("../../../docs/troubleshooting.md");

/// Returns the line that an entry quotes.
fn quoted(anchor: &str) -> &'static str {
    let (_, entry) = DOCUMENT.split_once(&format!("\n### {anchor}\n")).unwrap();
    entry.lines().find_map(|line| line.strip_prefix("    ")).unwrap()
}

fn text(text: *const c_char) -> String {
    // SAFETY: a text of the last error of this thread, which makes no call meanwhile.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned()
}

#[test]
fn handle_that_is_none_is_quoted() {
    let stale: *const pw_domain = ptr::without_provenance(1 << 56 | 1 << 24);
    let says = [(ptr::null(), "null"), (stale, "closed, or no handle of that kind")];
    for (handle, why) in says {
        // SAFETY: the library reads no memory by such a handle.
        assert_eq!(unsafe { pw_domain_ping(handle) }, pw_status::PW_INVALID_ARGUMENT);
        let error = pw_last_error();
        // SAFETY: it is the last error of this thread.
        let (message, anchor) = unsafe { (text(pw_error_message(error)), text(pw_error_anchor(error))) };
        assert_eq!(message, format!("the handle of a domain is {why}"));
        assert_eq!(quoted(&anchor), "the handle of a … is …");
        assert!(DOCUMENT.contains(&format!("`{why}`")), "{why}");
    }
    // SAFETY: null is no handle.
    unsafe {
        assert_eq!(pw_domain_close(ptr::null_mut()), pw_status::PW_OK);
        assert_eq!(pw_error_status(ptr::null()), pw_status::PW_OK);
    }
}

#[test]
fn mistake_of_the_library_is_quoted() {
    let source = include_str!("../src/error.rs");
    let message = quoted("c-internal").strip_suffix('…').unwrap();
    assert!(source.contains(&format!("format!(\"{message}{{}}\"")) && source.contains("c\"c-internal\""));
}
