//! Handles in other namespaces than those of the process that made them, and of another user.

use std::process::Command;

use partywall::cuda::CuResult;

use super::{BYTES, OK};
use crate::raw::{INTERPROCESS, IpcHandle, LAZY_PEER, NO_TIMING, READ};
use crate::tests::needs::{other_user, own_namespaces};
use crate::tests::stage::{Check, Line, Peer};
use crate::tests::world::error_text;

/// Checks the test pattern in the memory that it receives, opens the handles of memory and of an event, and reports
/// each result.
pub(super) fn foreigner(check: &Check, line: &Line) -> Result<(), String> {
    let memory = line.hear()?.ok_or("the test sent nothing")?.descriptor()?;
    let legacy = line.hear()?.ok_or("no handle was sent")?.handle()?;
    let handle = line.hear()?.ok_or("no handle was sent")?.handle()?;
    check.start()?;
    let imported = check.map(check.import(memory)?, BYTES, READ)?;
    check.same("the memory of the descriptor", check.holds_pattern(imported, BYTES, 1)?, true);
    let mut address = 0;
    let mut event = 0;
    let opened = check.cuda.ipc_open_mem_handle(&mut address, legacy, LAZY_PEER);
    if opened.code.is_success() {
        check.undo(move |cuda| cuda.ipc_close_mem_handle(address));
        check.same("the memory of the legacy handle", check.holds_pattern(address, BYTES, 1)?, true);
    }
    line.send(opened.code.to_string())?;
    let opened = check.cuda.ipc_open_event_handle(&mut event, handle);
    if opened.code.is_success() {
        check.undo(move |cuda| cuda.event_destroy(event));
    }
    line.send(opened.code.to_string())
}

/// Checks that memory of both kinds opens in a process that `command` starts, and an event as expected.
fn cross(check: &Check, command: Command, event_opens: CuResult) -> Result<(), String> {
    check.start()?;
    let (memory, address) = check.mapped(BYTES)?;
    let legacy = check.alloc(BYTES)?;
    check.fill(address, BYTES)?;
    check.fill(legacy, BYTES)?;
    let event = check.event(INTERPROCESS | NO_TIMING)?;
    let mut handle = IpcHandle([0; 64]);
    check.cuda.ipc_get_event_handle(&mut handle, event).ok()?;
    let mut foreigner = Peer::start_with("foreigner", command)?;
    foreigner.give("memory", check.export(memory)?)?;
    foreigner.send(check.legacy_handle(legacy)?.0)?;
    foreigner.send(handle.0)?;
    check.same("a legacy memory handle", foreigner.hear()?.text(), OK.to_string());
    check.same("an event handle", foreigner.hear()?.text(), event_opens.to_string());
    foreigner.finish()
}

pub(super) fn handles_cross_pid_and_ipc_namespaces(check: &Check) -> Result<(), String> {
    let mut command = own_namespaces().ok_or("no namespaces")?;
    command.arg(std::env::current_exe().map_err(error_text)?);
    cross(check, command, OK)
}

pub(super) fn events_alone_need_the_same_dev_shm(check: &Check) -> Result<(), String> {
    let mut command = own_namespaces().ok_or("no namespaces")?;
    command.args(["sh", "-c", "mount -t tmpfs tmpfs /dev/shm && exec \"$@\"", "sh"]);
    command.arg(std::env::current_exe().map_err(error_text)?);
    cross(check, command, CuResult::MAP_FAILED)
}

pub(super) fn events_alone_need_the_same_user(check: &Check) -> Result<(), String> {
    cross(check, other_user(), CuResult::MAP_FAILED)
}
