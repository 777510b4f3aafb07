//! Connections that end after their last handle was dropped.
//!
//! A dropped block that the GPU may still use keeps its connection until the GPU is idle. The connection then ends on a
//! helper thread of the library, and gives the context back there. If the process returned from `main` before that, the
//! [ledger](crate::ledger) would report everything as left behind.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

/// The threads of a connection.
const HELPERS: [&str; 6] =
    ["partywall", "partywall-call", "partywall-idle", "partywall-user", "partywall-gpu", "partywall-name"];

/// How long to wait for these threads. A connection whose GPU never becomes idle keeps them until the process ends.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Waits until no connection of this process has a thread any more. The ledger reports what is left after the timeout.
pub(crate) fn await_connections() {
    let deadline = Instant::now() + TIMEOUT;
    while (has_any(&HELPERS) || has_nameless()) && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(2));
    }
}

/// Returns whether a thread of this process has one of these names.
fn has_any(names: &[&str]) -> bool {
    threads().any(|(_, name)| names.contains(&name.as_str()))
}

/// Returns whether a thread still has the name of the thread that started it, because it has not set its own name yet.
fn has_nameless() -> bool {
    let main = std::process::id();
    let name = threads().find(|(id, _)| *id == main).map(|(_, name)| name);
    threads().any(|(id, other)| id != main && Some(other) == name)
}

/// Returns the threads of this process with their names.
fn threads() -> impl Iterator<Item = (u32, String)> {
    fs::read_dir("/proc/self/task").into_iter().flatten().flatten().filter_map(|entry| {
        let id = entry.file_name().to_str()?.parse().ok()?;
        // A thread that has just ended has no name.
        let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        Some((id, name.trim_end().to_owned()))
    })
}

#[cfg(test)]
mod unit {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn thread_is_found_by_its_whole_name_until_it_ends() {
        let (end, ended) = mpsc::channel::<()>();
        let (start, started) = mpsc::channel();
        let named = thread::Builder::new().name("partywall-find".into());
        let thread = named.spawn(move || (start.send(()), ended.recv())).unwrap();
        started.recv().unwrap();
        assert!(has_any(&["partywall-find"]));
        assert!(!has_any(&["partywall-fin"]));
        drop(end);
        thread.join().unwrap().1.unwrap_err();
        partywall_harness::eventually("its name is gone", || !has_any(&["partywall-find"]));
    }
}
