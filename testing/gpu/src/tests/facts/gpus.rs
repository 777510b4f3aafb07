//! Several GPUs.

use super::legacy::{Legacy, open};
use super::memory::read;
use super::neighbours::ourselves;
use super::{BYTES, OK};
use crate::tests::stage::{Check, Peer};

pub(super) fn devices_have_their_own_uuids(check: &Check) -> Result<(), String> {
    check.cuda.init(0).ok()?;
    let mut first = [0; 16];
    let mut second = [0; 16];
    let mut can = 0;
    check.cuda.device_get_uuid(&mut first, 0).ok()?;
    check.cuda.device_get_uuid(&mut second, 1).ok()?;
    check.same("they differ", first != second, true);
    check.answers("one reaches the other", check.cuda.device_can_access_peer(&mut can, 0, 1), OK);
    check.same("over a link", can, 1);
    check.answers("and itself", check.cuda.device_can_access_peer(&mut can, 0, 0), OK);
    check.same("not as a peer", can, 0);
    Ok(())
}

pub(super) fn memory_of_another_gpu_can_be_mapped(check: &Check) -> Result<(), String> {
    let mut owner = Peer::start("owner_of_exported_memory")?;
    let descriptor = owner.hear()?.descriptor()?;
    read(ourselves(), "1", descriptor)?;
    owner.finish()?;

    let Legacy { owner, whole, .. } = Legacy::start()?;
    check.start_on(1)?;
    let address = check.open_legacy(whole)?;
    check.same("a legacy handle as well", check.holds_pattern(address, BYTES, 1)?, true);
    owner.finish()
}

pub(super) fn memory_of_a_hidden_gpu_can_be_mapped(check: &Check) -> Result<(), String> {
    let mut owner = Peer::start("owner_of_exported_memory")?;
    let descriptor = owner.hear()?.descriptor()?;
    let Legacy { owner: legacy_owner, whole, .. } = Legacy::start()?;
    let other = || {
        let mut command = ourselves();
        command.env("CUDA_VISIBLE_DEVICES", "1");
        command
    };
    read(other(), "0", descriptor)?;
    check.same("a legacy handle opens as well", open(other(), whole)?, OK.to_string());
    owner.finish()?;
    legacy_owner.finish()
}
