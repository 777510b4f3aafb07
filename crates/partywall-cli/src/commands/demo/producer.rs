//! The producer: creates the array, shares it by name, and checks the consumer's changes.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use partywall::{Error, Place, Segment, bytes, error::Denied};
use rustix::process::{Signal, getpid, kill_process};
use serde_json::json;

use super::{
    CrashPoint,
    pattern::{self, BYTES, DTYPE, ELEMENTS, FORMULA, TENSOR},
    session::{RUN, Session, address, facts_of, fds_text, host_address, timed},
};
use crate::text::grouped;

use crate::failure::Failure;

/// Runs this role.
pub(super) fn run(session: &Session, corrupt: Option<u64>, crash_at: Option<CrashPoint>) -> Result<(), Failure> {
    let Session { domain, narrator, names, .. } = session;
    let crash = |point| {
        if crash_at == Some(point) {
            die()
        }
    };
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let run = format!("{}-{}", std::process::id(), since_1970.as_nanos());

    // The first round: a frozen array, to be read.
    let data = make(session, &names.data, &run, false, corrupt)?;
    crash(CrashPoint::Committed);
    let read = domain.opener(&names.data_read);
    let data_read = session.wait_for(&read, &names.data_read, Some(&run), None, "consumer")?;
    crash(CrashPoint::Acknowledged);

    // The second round: a mutable one, to be changed by the other process.
    let shared = make(session, &names.shared, &run, true, None)?;
    crash(CrashPoint::Shared);
    let doubled = domain.opener(&names.shared_doubled);
    let shared_doubled = session.wait_for(&doubled, &names.shared_doubled, Some(&run), Some(&data_read), "consumer")?;
    session.verify(&shared, 2)?;
    session.memory("with both segments")?;

    if session.is_supervised {
        return session.await_kill(&data, shared);
    }

    // The names end with their owner's leases. The consumer notices the end and releases its own names.
    let ((), took) = timed(|| shared.release().and_then(|()| data.release()))?;
    let text = format!("{} and {}: the names are gone", names.data, names.shared);
    narrator.step("release", Some(took), &text, json!({ "names": [names.data, names.shared] }));
    session.wait_withdrawn(&shared_doubled, "consumer")?;
    drop((data_read, shared_doubled));
    session.memory("after the consumer has released them, too")
}

/// Allocates, writes and commits the array as `name`.
fn make(session: &Session, name: &str, run: &str, mutable: bool, corrupt: Option<u64>) -> Result<Segment, Failure> {
    let Session { domain, narrator, place, granularity, .. } = session;
    let place = *place;
    let granularity = *granularity;
    let builder = domain.create(name, place).tensor(TENSOR, DTYPE, &[ELEMENTS]).metadata(RUN, run);
    // The demo kills the producer, and the frozen array stays for those that have it open.
    let builder = builder.mutable(mutable).if_absent(true).until_unused(session.is_supervised && !mutable);
    let (mut build, took) = timed(|| {
        let mut build = builder.allocate()?;
        if place == Place::Host {
            // Maps the memory, which on a GPU is part of the allocation.
            build.as_mut_bytes(TENSOR)?;
        }
        Ok(build)
    })?;
    let at = match place.gpu() {
        None => host_address(name),
        Some(_) => Some(build.device(TENSOR)?.device_ptr()),
    };
    // A memfd has an exact length; the kernel allocates whole pages for it.
    let aligned = build.bytes().next_multiple_of(granularity);
    let text = format!(
        "{} for {name}, aligned to {} (granularity {})\nmapped read-write{}; no other process can see it",
        bytes(BYTES),
        bytes(aligned),
        bytes(granularity),
        at.map_or_else(String::new, |at| format!(" at {at:#x}")),
    );
    let fields = json!({
        "name": name, "requested_bytes": BYTES, "aligned_bytes": aligned, "granularity": granularity,
        "address": at.map(|at| format!("{at:#x}")),
    });
    narrator.step("allocate", Some(took), &text, fields);

    let ((), took) = timed(|| pattern::fill(&mut build, place))?;
    let text = format!("{} integers by the {}: {FORMULA}", grouped(ELEMENTS), pattern::worker(place));
    let fields = json!({ "name": name, "elements": ELEMENTS, "by": pattern::worker(place) });
    narrator.step("write", Some(took), &text, fields);
    if let Some(index) = corrupt {
        pattern::corrupt(&mut build, place, index)?;
    }

    let start = Instant::now();
    let segment = build.commit().map_err(|error| match error {
        Error::Denied(Denied::NameExists { .. }) => Failure::new(
            error.kind(),
            format!("{error}: another producer is running, or the name has another use"),
            format!("wait for the producer to end, give both roles another --name, or remove the name with `partywall rm {name}`"),
        ),
        error => error.into(),
    })?;
    let took = start.elapsed();
    let frozen =
        if mutable { "mutable: other processes may write it" } else { "frozen: no process can write it any more" };
    let text = format!(
        "{name}@{}: kind {}, {}{} donated to the broker\n{frozen}; mapped here{}",
        segment.version(),
        segment.kind(),
        if place == Place::Host { "" } else { "exported as POSIX " },
        fds_text(&segment),
        address(&segment).map_or_else(String::new, |at| format!(" at {at:#x}")),
    );
    narrator.step("commit", Some(took), &text, facts_of(&segment));
    Ok(segment)
}

/// Ends this process as a crash does.
fn die() {
    let _ = kill_process(getpid(), Signal::KILL);
}
