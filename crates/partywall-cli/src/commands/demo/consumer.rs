//! The consumer: opens the array by name, checks it, changes the mutable one, and reads on after the producer's death.

use std::time::{Duration, Instant};

use partywall::{DeviceChoice, Error, ErrorKind, OpenOptions, Place, Segment};
use serde_json::json;

use super::{
    pattern::{self, ELEMENTS},
    session::{RUN, Session, run_of, timed},
};
use crate::text::{count, grouped};

use crate::failure::Failure;

/// Runs this role.
pub(super) fn run(session: &Session, device: DeviceChoice) -> Result<(), Failure> {
    let Session { domain, narrator, names, .. } = session;

    // The first round: a frozen array, to be read.
    let open = on(session, device, domain.opener(&names.data));
    let data = session.wait_for(&open, &names.data, None, None, "producer")?;
    agree(&data, device)?;
    let data = session.open_again(&open, data)?;
    let producer = domain.inspect(&names.data)?.version.committer;
    session.verify(&data, 1)?;
    let data_read = acknowledge(session, &names.data_read, &data)?;

    // The second round: a mutable one, to be changed.
    let open = on(session, device, domain.opener(&names.shared).read_write());
    let shared = session.wait_for(&open, &names.shared, run_of(&data), Some(&data), "producer")?;
    let shared = session.open_again(&open, shared)?;
    let ((), took) = timed(|| pattern::double(&shared))?;
    let text = format!("{} integers in place, by the {}", grouped(ELEMENTS), pattern::worker(shared.place()));
    narrator.step("double", Some(took), &text, json!({ "name": names.shared, "elements": ELEMENTS }));
    let shared_doubled = acknowledge(session, &names.shared_doubled, &shared)?;

    // Acknowledgements are owned names: they remain while the producer may still wait for them.
    session.wait_withdrawn(&shared, "producer")?;
    if !domain.members()?.iter().any(|member| member.pid == producer) {
        // The producer waits for the release.
        let message = format!("the producer (process {producer}) died before it had checked the doubled integers");
        let advice = "see what the producer printed, then start both again";
        return Err(Failure::new(ErrorKind::CheckFailed, message, advice));
    }
    let mut left = vec![shared, shared_doubled, data_read];
    if session.is_supervised {
        left.extend(outlive(session, &data)?);
    }
    left.push(data);
    let (_, took) = timed(|| left.into_iter().try_for_each(Segment::release))?;
    narrator.step("release", Some(took), "everything: unmapped, and the leases returned", json!({}));
    Ok(())
}

/// Reads the array on and on while the demo kills the producer, and after its death. Returns the segments to release.
fn outlive(session: &Session, data: &Segment) -> Result<[Segment; 3], Failure> {
    let Session { domain, narrator, names, .. } = session;
    let held = acknowledge(session, &names.data_held, data)?;
    let killed = domain.opener(&names.producer_killed).timeout(Duration::ZERO);
    let start = Instant::now();
    let mut rounds = 0;
    let killed = loop {
        session.require(data, 1)?;
        rounds += 1;
        match killed.clone().open() {
            Err(Error::NotFound(_)) if start.elapsed() < session.timeout => {}
            answer => break answer?,
        }
    };
    let text =
        format!("{} in place while the producer was killed: all integers were right each time", count(rounds, "time"));
    narrator.step("read-on", Some(start.elapsed()), &text, json!({ "name": names.data, "rounds": rounds }));
    session.verify(data, 1)?;
    let reopened = domain.opener(&names.data_reopened);
    let reopened = session.wait_for(&reopened, &names.data_reopened, None, None, "observer")?;
    Ok([held, killed, reopened])
}

/// Returns the GPU that should read, if one was named; it may read another GPU's memory.
pub(super) fn on(session: &Session, device: DeviceChoice, open: OpenOptions) -> OpenOptions {
    match (device, session.place) {
        (DeviceChoice::Cuda(_) | DeviceChoice::Uuid(_), Place::Gpu(uuid)) => open.device(uuid).allow_peer(true),
        _ => open,
    }
}

/// Checks that the memory is in the place that the user asked for.
fn agree(data: &Segment, device: DeviceChoice) -> Result<(), Failure> {
    let wants_gpu = matches!(device, DeviceChoice::Cuda(_) | DeviceChoice::Uuid(_));
    let (has, kind) = match data.place() {
        Place::Host if wants_gpu => ("host memory", ErrorKind::Device),
        Place::Gpu(_) if device == DeviceChoice::Host => ("GPU memory", ErrorKind::Refused),
        _ => return Ok(()),
    };
    let message = format!("{} is {has}, and --device {device} was asked for", data.name());
    Err(Failure::new(kind, message, "give both roles the same --device"))
}

/// Notifies the other roles by committing `name`, which holds one number: how many elements are done.
pub(super) fn acknowledge(session: &Session, name: &str, of: &Segment) -> Result<Segment, Failure> {
    let builder = session.domain.create(name, Place::Host).tensor("elements", partywall::DType::U64, &[1]);
    let builder = builder.metadata(RUN, run_of(of).unwrap_or_default()).if_absent(true);
    let (segment, took) = timed(|| {
        let mut build = builder.allocate()?;
        build.as_mut_slice::<u64>("elements")?[0] = ELEMENTS;
        build.commit()
    })?;
    let text = format!("{}@{} by committing {name}@{}", of.name(), of.version(), segment.version());
    session.narrator.step("acknowledge", Some(took), &text, json!({ "name": name, "version": segment.version() }));
    Ok(segment)
}
