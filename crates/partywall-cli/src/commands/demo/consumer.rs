//! The consumer: opens the array by name, checks it, and changes the mutable one.

use partywall::{DeviceChoice, ErrorKind, OpenOptions, Place, Segment};
use serde_json::json;

use super::{
    pattern::{self, ELEMENTS},
    session::{RUN, Session, run_of, timed},
};
use partywall_labs::text::grouped;

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
    let (_, took) = timed(|| {
        for segment in [data, shared, shared_doubled, data_read] {
            segment.release()?;
        }
        Ok(())
    })?;
    narrator.step("release", Some(took), "everything: unmapped, and the leases returned", json!({}));
    Ok(())
}

/// Returns the GPU that should read, if one was named; it may read another GPU's memory.
fn on(session: &Session, device: DeviceChoice, open: OpenOptions) -> OpenOptions {
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

/// Notifies the producer by committing `name`, which holds one number: how many elements are done.
fn acknowledge(session: &Session, name: &str, of: &Segment) -> Result<Segment, Failure> {
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
