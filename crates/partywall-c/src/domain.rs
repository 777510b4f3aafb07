//! Connections to a broker.

use std::ffi::c_char;

use partywall::{Domain, DomainOptions};

use crate::{
    argument::{self, optional_text, structs, text},
    error::{Failure, call, pw_status},
    handle::{self, object},
};

/// A connection to a broker. It stays until it and everything opened through it are closed. Any thread may use it.
pub struct pw_domain {
    _opaque: (),
}

object!(Domain, pw_domain, 1, "domain");
structs!(pw_domain_options);

/// How `pw_domain_connect` connects. What is zero has its default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_domain_options {
    /// `sizeof(pw_domain_options)`.
    pub size: usize,
    /// The name of the domain; null for `PARTYWALL_DOMAIN`, or `default`.
    pub domain: *const c_char,
    /// The path of the broker's socket, which takes precedence over the domain; null for `PARTYWALL_SOCKET`.
    pub socket: *const c_char,
    /// The path of the program `partywall`, which is started as the broker; null to search for it.
    pub program: *const c_char,
    /// Nonzero: fail if no broker runs, in place of starting one.
    pub no_start: u8,
    /// Nonzero: connect as an operator, who may connect when the broker has as many members as it admits.
    pub is_operator: u8,
    /// Nonzero: join the domain's MPS daemon, if it runs.
    pub mps: u8,
}

/// Connects to the broker of a domain, and starts the broker if none runs. `options` may be null.
///
/// The caller owns `*domain` and closes it with `pw_domain_close`. Blocks until the broker answers, a few milliseconds
/// if it runs. Any thread may call it, also before `main`.
///
/// # Safety
/// `options` is null or valid; `domain` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_domain_connect(
    options: *const pw_domain_options,
    domain: *mut *mut pw_domain,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe { handle::give(domain, || Ok(options_of(options)?.connect()?)) })
}

/// Returns the options as the library has them.
///
/// # Safety
/// `options` is null or valid.
pub(crate) unsafe fn options_of(options: *const pw_domain_options) -> Result<DomainOptions, Failure> {
    // SAFETY: the caller's promise.
    let options = unsafe { argument::options(options) }?;
    let mut known = Domain::options().start(options.no_start == 0).operator(options.is_operator != 0);
    known = known.mps(options.mps != 0);
    // SAFETY: the caller's promise.
    unsafe {
        if let Some(domain) = optional_text(options.domain, "domain")? {
            known = known.domain(domain);
        }
        if let Some(socket) = optional_text(options.socket, "socket")? {
            known = known.socket(socket);
        }
        if let Some(program) = optional_text(options.program, "program")? {
            known = known.program(program);
        }
    }
    Ok(known)
}

/// Closes a connection. What was opened through it stays usable until it is closed, too. Null is ignored.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_domain_close(domain: *mut pw_domain) -> pw_status {
    call(|| handle::close::<Domain>(domain))
}

/// Asks the broker for an answer, to see that it serves this connection. Blocks for one round trip.
///
/// # Safety
/// No other thread closes the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_domain_ping(domain: *const pw_domain) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| Ok(unsafe { handle::get::<Domain>(domain) }?.ping()?))
}

/// Removes a name. Processes that have it open keep it. Blocks for a round trip to the broker.
///
/// # Safety
/// No other thread closes `domain`; `name` ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_domain_remove(domain: *const pw_domain, name: *const c_char) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::get::<Domain>(domain)?.remove(text(name, "name")?)?;
        Ok(())
    })
}

/// Returns the release of the library, such as "0.1.0". Never blocks, never fails.
#[unsafe(no_mangle)]
pub extern "C" fn pw_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
