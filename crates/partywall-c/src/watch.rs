//! Events of names.

use std::{
    ffi::{CString, c_char},
    ptr,
};

use partywall::{Domain, Watch, WatchEvent, info::Point};

use crate::{
    argument::{c_text, check_info, store, store_info, structs, text, timeout},
    domain::pw_domain,
    error::{call, pw_status},
    handle::{self, object},
};

/// The events of names that match a pattern. One thread may use it at a time.
pub struct pw_watch {
    _opaque: (),
}

/// A watch, and the texts of its last event, which C gets by address.
struct Watching {
    watch: Watch,
    texts: [CString; 3],
}

object!(Watching, pw_watch, 25, "watch");
structs!(pw_event_info);

/// What `pw_watch_next` stores. The texts are valid until the next call, or until the watch is closed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_event_info {
    /// `sizeof(pw_event_info)`, which the caller sets.
    pub size: usize,
    /// What happened: "created", "committed", "withdrawn", "owner_died", "reclaimed" and the others of `partywall watch`;
    /// "missed" if events are lost, so that a list of names is to be made anew; null if no event came in time.
    pub change: *const c_char,
    /// The name; empty for "missed".
    pub name: *const c_char,
    /// What it is: "segment", "timeline", "semaphore", "pool", "topic", "queue"; empty for "missed".
    pub object: *const c_char,
    /// The version that the event is about; 0 if none.
    pub version: u64,
    /// The bytes of that version; for "missed" how many events are lost, 0 if that is not known.
    pub bytes: u64,
    /// When it happened, in milliseconds since 1970.
    pub at_ms: u64,
    /// The process that made the change, or whose end caused it; 0 if none.
    pub pid: u32,
}

/// Watches names that match a pattern, in which `*` stands for any characters and `?` for one. Begins with the next event,
/// or, unless both numbers are 0, behind the point that `pw_watch_point` of another watch stored. The caller owns
/// `*watch`. Blocks for a round trip to the broker.
///
/// # Safety
/// No other thread closes `domain`; `pattern` ends with a zero byte; `watch` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_watch_open(
    domain: *const pw_domain,
    pattern: *const c_char,
    instance: u64,
    sequence: u64,
    watch: *mut *mut pw_watch,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give(watch, || {
            let (domain, pattern) = (handle::get::<Domain>(domain)?, text(pattern, "pattern")?);
            let watch = match (instance, sequence) {
                (0, 0) => domain.watch(pattern)?,
                _ => domain.watch_after(pattern, Point { instance, sequence })?,
            };
            Ok(Watching { watch, texts: Default::default() })
        })
    })
}

/// Waits for the next event, up to `timeout_ns`; negative means without end. If none comes in time, `change` is null,
/// which is no failure.
///
/// # Safety
/// No other thread uses `watch`; `info` points to a struct whose size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_watch_next(watch: *mut pw_watch, timeout_ns: i64, info: *mut pw_event_info) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        check_info(info)?;
        let Watching { watch, texts } = handle::get_mut::<Watching>(watch)?;
        let event = watch.next(timeout(timeout_ns))?;
        let mut known = std::mem::zeroed::<pw_event_info>();
        *texts = match &event {
            Some(WatchEvent::Name(event)) => {
                (known.version, known.bytes) = event.change.version().unwrap_or_default();
                known.at_ms = event.at;
                known.pid = event.change.pid().unwrap_or_default();
                [event.change.name(), event.name.as_str(), event.named.name()].map(c_text)
            }
            Some(WatchEvent::Missed { events }) => {
                known.bytes = events.unwrap_or_default();
                ["missed", "", ""].map(c_text)
            }
            _ => Default::default(),
        };
        known.change = if event.is_some() { texts[0].as_ptr() } else { ptr::null() };
        known.name = texts[1].as_ptr();
        known.object = texts[2].as_ptr();
        store_info(info, known)
    })
}

/// Stores the point behind the events that this watch has returned, for `pw_watch_open`. Does not block.
///
/// # Safety
/// No other thread uses `watch`; `instance` and `sequence` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_watch_point(watch: *const pw_watch, instance: *mut u64, sequence: *mut u64) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let point = handle::get::<Watching>(watch)?.watch.point();
        store(instance, point.instance, "instance")?;
        store(sequence, point.sequence, "sequence")
    })
}

/// Closes a watch. Null is ignored.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_watch_close(watch: *mut pw_watch) -> pw_status {
    call(|| handle::close::<Watching>(watch))
}
