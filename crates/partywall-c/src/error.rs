//! What functions return, and what is known about the last failure of a thread.

use std::{
    cell::Cell,
    ffi::{CString, c_char},
    panic::{self, AssertUnwindSafe},
    ptr,
};

use partywall::{Error, ErrorKind, Language};

use crate::{argument::c_text, handle::Object};

/// Whether a call succeeded, and if not, what a program can do about it. `pw_last_error` has the sentence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum pw_status {
    /// The call has done what it says.
    PW_OK = 0,
    /// An argument that no call accepts: a name, a number, a range; a handle that is null, closed or of another kind.
    PW_INVALID_ARGUMENT = 1,
    /// No such name, version, tensor or member.
    PW_NOT_FOUND = 2,
    /// The object exists, but has another kind, type or size.
    PW_MISMATCH = 3,
    /// The operation is not allowed on this object, or for this process.
    PW_DENIED = 4,
    /// A limit of the broker, an object, this process or the machine is reached.
    PW_LIMIT_REACHED = 5,
    /// Another process still uses the object; the call may succeed later.
    PW_BUSY = 6,
    /// The event did not happen in time.
    PW_TIMED_OUT = 7,
    /// The object has ended, or the process that it belonged to: `pw_error_pid` is that process if it is known.
    PW_GONE = 8,
    /// The data must not be used: it is damaged, or work that it rests on has failed.
    PW_INVALID_DATA = 9,
    /// There is no broker, or none that this process can use.
    PW_UNREACHABLE = 10,
    /// The GPU, its driver or MPS.
    PW_DEVICE = 11,
    /// The kernel refused a call, or a file is not what it should be.
    PW_SYSTEM = 12,
    /// A mistake in this library. The objects of the call may not be usable any more.
    PW_INTERNAL = 13,
}

/// What is known about a failed call.
pub struct pw_error {
    status: pw_status,
    message: CString,
    advice: CString,
    anchor: CString,
    pid: u32,
}

/// Why a call of this crate fails.
#[derive(Debug)]
pub(crate) enum Failure {
    Library(Box<Error>),
    /// An argument that only C can pass wrongly.
    Argument {
        message: String,
        advice: &'static str,
    },
}

impl Failure {
    /// A handle that is null, closed or of another kind.
    #[cold]
    pub(crate) fn handle<T: Object>(is_null: bool) -> Self {
        let what = if is_null { "null" } else { "closed, or no handle of that kind" };
        Self::Argument {
            message: format!("the handle of a {} is {what}", T::NAME),
            advice: "pass a handle that the function that made it has stored, and that was not closed since",
        }
    }

    #[cold]
    pub(crate) fn null(what: &str) -> Self {
        Self::Argument { message: format!("{what} is null"), advice: "pass the address of a variable or array" }
    }

    #[cold]
    pub(crate) fn argument(message: impl Into<String>, advice: &'static str) -> Self {
        Self::Argument { message: message.into(), advice }
    }

    #[cold]
    pub(crate) fn too_many_handles() -> Self {
        Self::argument("16 million handles of one kind are open", "close handles that are not used any more")
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Library(Box::new(error))
    }
}

thread_local! {
    /// Made by `Box::into_raw`, or null. It has no destructor, because destructors of a program's own objects call the
    /// library after those of this thread: those of static objects, and functions of `atexit`.
    static LAST: Cell<*mut pw_error> = const { Cell::new(ptr::null_mut()) };
    static AT_THE_END: FreesLast = const { FreesLast };
}

/// Frees the last error at the end of its thread.
struct FreesLast;

impl Drop for FreesLast {
    fn drop(&mut self) {
        replace_last(ptr::null_mut());
    }
}

fn replace_last(error: *mut pw_error) {
    let before = LAST.replace(error);
    if !before.is_null() {
        // SAFETY: it is of `Box::into_raw`, and no longer in `LAST`, which alone owned it. Callers keep no error that long.
        drop(unsafe { Box::from_raw(before) });
    }
}

/// Runs the body of an exported function. Nothing unwinds into the caller.
#[inline]
pub(crate) fn call(body: impl FnOnce() -> Result<(), Failure>) -> pw_status {
    match panic::catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => pw_status::PW_OK,
        Ok(Err(failure)) => keep(failure),
        Err(panic) => panicked(&*panic),
    }
}

/// Keeps the failure for `pw_last_error`.
#[cold]
fn keep(failure: Failure) -> pw_status {
    store(match failure {
        Failure::Library(error) => pw_error {
            status: status(&error),
            message: c_text(&error.to_string()),
            advice: c_text(&error.advice_in(Language::C)),
            anchor: c_text(error.anchor()),
            pid: error.pid().unwrap_or_default(),
        },
        Failure::Argument { message, advice } => pw_error {
            status: pw_status::PW_INVALID_ARGUMENT,
            message: c_text(&message),
            advice: c_text(advice),
            anchor: c"c-argument".to_owned(),
            pid: 0,
        },
    })
}

#[cold]
fn panicked(panic: &(dyn std::any::Any + Send)) -> pw_status {
    let what = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    let message = format!("a mistake in Partywall: {}", what.unwrap_or("a panic"));
    store(pw_error {
        status: pw_status::PW_INTERNAL,
        message: c_text(&message),
        advice: c"report it with the message, and with a backtrace (RUST_BACKTRACE=1) if there is one".to_owned(),
        anchor: c"c-internal".to_owned(),
        pid: 0,
    })
}

fn store(error: pw_error) -> pw_status {
    let status = error.status;
    // If the thread has ended already, the last of its errors is never freed.
    let _ = AT_THE_END.try_with(|_| ());
    replace_last(Box::into_raw(Box::new(error)));
    status
}

fn status(error: &Error) -> pw_status {
    match error {
        Error::InvalidArgument(_) => pw_status::PW_INVALID_ARGUMENT,
        Error::NotFound(_) => pw_status::PW_NOT_FOUND,
        Error::Mismatch(_) => pw_status::PW_MISMATCH,
        Error::Denied(_) => pw_status::PW_DENIED,
        Error::LimitReached(_) => pw_status::PW_LIMIT_REACHED,
        Error::Busy(_) => pw_status::PW_BUSY,
        Error::Timeout { .. } | Error::Cancelled { .. } => pw_status::PW_TIMED_OUT,
        Error::Gone(_) => pw_status::PW_GONE,
        Error::InvalidData(_) => pw_status::PW_INVALID_DATA,
        Error::Unreachable(_) => pw_status::PW_UNREACHABLE,
        Error::DeviceFault(_) | Error::Mps(_) => pw_status::PW_DEVICE,
        Error::System { .. } | Error::File(_) => pw_status::PW_SYSTEM,
        // A variant of a later release of the library.
        _ => match error.kind() {
            ErrorKind::Usage => pw_status::PW_INVALID_ARGUMENT,
            ErrorKind::NotFound => pw_status::PW_NOT_FOUND,
            ErrorKind::Unreachable => pw_status::PW_UNREACHABLE,
            ErrorKind::Device => pw_status::PW_DEVICE,
            ErrorKind::TimedOut => pw_status::PW_TIMED_OUT,
            _ => pw_status::PW_DENIED,
        },
    }
}

/// Returns what is known about the last call of this thread that failed; null if none has. It stays until the next call
/// of this thread that fails, and the thread ends; copy what is needed longer. Never blocks.
#[unsafe(no_mangle)]
pub extern "C" fn pw_last_error() -> *const pw_error {
    LAST.get()
}

/// Returns the class of an error; `PW_OK` for null.
///
/// # Safety
/// `error` is null or what `pw_last_error` has returned, still valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_error_status(error: *const pw_error) -> pw_status {
    // SAFETY: the caller's promise.
    unsafe { error.as_ref() }.map_or(pw_status::PW_OK, |error| error.status)
}

/// Returns what happened and why, in one sentence without a full stop; empty for null. Valid as long as the error.
///
/// # Safety
/// As `pw_error_status`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_error_message(error: *const pw_error) -> *const c_char {
    // SAFETY: the caller's promise.
    unsafe { error.as_ref() }.map_or(c"", |error| &error.message).as_ptr()
}

/// Returns what to do about it, as a sentence in the imperative; empty for null. Valid as long as the error.
///
/// # Safety
/// As `pw_error_status`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_error_advice(error: *const pw_error) -> *const c_char {
    // SAFETY: the caller's promise.
    unsafe { error.as_ref() }.map_or(c"", |error| &error.advice).as_ptr()
}

/// Returns the name of the entry of docs/troubleshooting.md about it; empty for null. Valid as long as the error.
///
/// # Safety
/// As `pw_error_status`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_error_anchor(error: *const pw_error) -> *const c_char {
    // SAFETY: the caller's promise.
    unsafe { error.as_ref() }.map_or(c"", |error| &error.anchor).as_ptr()
}

/// Returns the process that the error is about, such as the one that died; 0 if there is none.
///
/// # Safety
/// As `pw_error_status`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_error_pid(error: *const pw_error) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { error.as_ref() }.map_or(0, |error| error.pid)
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    // Holds 370.
    #[test]
    fn panic_is_an_error_of_the_library() {
        assert_eq!(call(|| panic!("a {} reason", "formatted")), pw_status::PW_INTERNAL);
        // SAFETY: it is the last error of this thread, and stays until the next.
        let message = unsafe { CStr::from_ptr(pw_error_message(pw_last_error())) };
        assert_eq!(message.to_str(), Ok("a mistake in Partywall: a formatted reason"));
    }
}
