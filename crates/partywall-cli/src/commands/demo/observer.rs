//! The observer: opens the array by name after the death of the process that created it.

use partywall::DeviceChoice;

use super::{consumer, session::Session};
use crate::failure::Failure;

/// Runs this role.
pub(super) fn run(session: &Session, device: DeviceChoice) -> Result<(), Failure> {
    let Session { domain, names, .. } = session;
    let open = consumer::on(session, device, domain.opener(&names.data));
    let data = session.wait_for(&open, &names.data, None, None, "consumer")?;
    let data = session.open_again(&open, data)?;
    session.verify(&data, 1)?;
    let held = session.wait_for(&domain.opener(&names.data_held), &names.data_held, None, None, "consumer")?;
    let reopened = consumer::acknowledge(session, &names.data_reopened, &data)?;
    // The acknowledgement remains while the consumer may still wait for it.
    session.wait_withdrawn(&held, "consumer")?;
    drop((reopened, data));
    Ok(())
}
