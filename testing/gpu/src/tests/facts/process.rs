//! Processes, devices and contexts.

use partywall::cuda::CuResult;

use super::neighbours::ourselves;
use super::{BYTES, INVALID, OK};
use crate::raw;
use crate::tests::stage::{Check, Line, Peer};

pub(super) fn nothing_works_before_init(check: &Check) -> Result<(), String> {
    let mut number = 0;
    let mut context = 0;
    check.answers("before init", check.cuda.device_get_count(&mut number), CuResult::NOT_INITIALIZED);
    check.answers("before init", check.cuda.primary_ctx_retain(&mut context, 0), CuResult::NOT_INITIALIZED);
    check.answers("flags that must be 0", check.cuda.init(1), INVALID);
    check.answers("init", check.cuda.init(0), OK);
    check.answers("a second init", check.cuda.init(0), OK);
    check.answers("after init", check.cuda.device_get_count(&mut number), OK);
    Ok(())
}

pub(super) fn a_forked_child_has_no_driver(check: &Check) -> Result<(), String> {
    check.start()?;
    let mut address = check.alloc(BYTES)?;
    let code = |code: CuResult| u8::try_from(code.0).unwrap_or(u8::MAX);
    let mut number = 0;
    for (question, answer) in [
        ("init in a forked child", raw::in_fork(|| code(check.cuda.init(0).code))?),
        ("counting devices there", raw::in_fork(|| code(check.cuda.device_get_count(&mut number).code))?),
        ("allocating there", raw::in_fork(|| code(check.cuda.mem_alloc(&mut address, BYTES).code))?),
    ] {
        check.same(question, CuResult(answer.into()), CuResult::NOT_INITIALIZED);
    }
    check.fill(address, BYTES)?;
    check.same("the parent works on", check.holds_pattern(address, BYTES, 1)?, true);
    Ok(())
}

pub(super) fn the_environment_chooses_the_devices(check: &Check) -> Result<(), String> {
    check.cuda.init(0).ok()?;
    let mut uuid = [0; 16];
    check.cuda.device_get_uuid(&mut uuid, 0).ok()?;
    let hex = |range: std::ops::Range<usize>| uuid[range].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let name = format!("GPU-{}-{}-{}-{}-{}", hex(0..4), hex(4..6), hex(6..8), hex(8..10), hex(10..16));
    for (question, visible, expected) in [
        ("nothing visible", "", "CUDA_ERROR_NO_DEVICE (100)".to_owned()),
        ("an ordinal", "0", format!("1 {uuid:?}")),
        ("a UUID", name.as_str(), format!("1 {uuid:?}")),
        ("what is no device", "4096", "CUDA_ERROR_NO_DEVICE (100)".to_owned()),
    ] {
        let mut command = ourselves();
        command.env("CUDA_VISIBLE_DEVICES", visible);
        let mut counter = Peer::start_with("counter_of_devices", command)?;
        check.same(question, counter.hear()?.text(), expected);
        counter.finish()?;
    }
    Ok(())
}

pub(super) fn counter_of_devices(check: &Check, line: &Line) -> Result<(), String> {
    let init = check.cuda.init(0);
    if !init.code.is_success() {
        return line.send(init.code.to_string());
    }
    let mut number = 0;
    let mut uuid = [0; 16];
    check.cuda.device_get_count(&mut number).ok()?;
    check.cuda.device_get_uuid(&mut uuid, 0).ok()?;
    line.send(format!("{number} {uuid:?}"))
}

pub(super) fn devices_are_found_by_ordinal(check: &Check) -> Result<(), String> {
    check.cuda.init(0).ok()?;
    let mut count = 0;
    let mut device = -1;
    check.cuda.device_get_count(&mut count).ok()?;
    for ordinal in 0..count {
        check.answers("an ordinal below the count", check.cuda.device_get(&mut device, ordinal), OK);
        check.same("a device is its ordinal", device, ordinal);
    }
    check.answers("the count as ordinal", check.cuda.device_get(&mut device, count), CuResult::INVALID_DEVICE);
    check.answers("ordinal -1", check.cuda.device_get(&mut device, -1), CuResult::INVALID_DEVICE);
    let mut value = 0;
    let mut context = 0;
    check.answers(
        "an attribute of no device",
        check.cuda.device_get_attribute(&mut value, 102, count),
        CuResult::INVALID_DEVICE,
    );
    check.answers(
        "a context on no device",
        check.cuda.primary_ctx_retain(&mut context, count),
        CuResult::INVALID_DEVICE,
    );
    Ok(())
}

/// Attributes by number, as `cuda.h` has them.
pub(super) fn the_attributes_that_partywall_asks_for(check: &Check) -> Result<(), String> {
    check.cuda.init(0).ok()?;
    check.same("virtual memory management (102)", check.attribute(102)?, 1);
    check.same("POSIX file descriptors (103)", check.attribute(103)?, 1);
    check.same("64-bit stream memory operations (122)", check.attribute(122)?, 1);
    check.same("interprocess events (125)", check.attribute(125)?, 1);
    check.same("unified addressing (41)", check.attribute(41)?, 1);
    check.same("not integrated into the chip set (18)", check.attribute(18)?, 0);
    check.same("at least one multiprocessor (16)", check.attribute(16)? > 0, true);
    let mut version = 0;
    check.answers("the version", check.cuda.driver_get_version(&mut version), OK);
    check.same("at least 12.4", version >= 12040, true);
    Ok(())
}

pub(super) fn results_have_names(check: &Check) -> Result<(), String> {
    let mut text = std::ptr::null();
    check.answers("a code", check.cuda.get_error_name(CuResult::ILLEGAL_ADDRESS, &mut text), OK);
    check.same("it has a name", text.is_null(), false);
    check.answers("no code", check.cuda.get_error_name(CuResult(9999), &mut text), INVALID);
    check.same("it has none", text.is_null(), true);
    Ok(())
}

pub(super) fn a_primary_context_is_shared_and_counted(check: &Check) -> Result<(), String> {
    let cuda = &check.cuda;
    cuda.init(0).ok()?;
    let mut first = 0;
    let mut second = 0;
    let mut flags = 0;
    let mut active = -1;
    let mut is_active = |question: &str, expected| {
        check.answers(question, cuda.primary_ctx_get_state(0, &mut flags, &mut active), OK);
        check.same(question, active, expected);
    };
    is_active("before the first retain", 0);
    cuda.primary_ctx_retain(&mut first, 0).ok()?;
    cuda.primary_ctx_retain(&mut second, 0).ok()?;
    check.same("both retains give one context", first == second, true);
    cuda.ctx_set_current(first).ok()?;
    let mut address = 0;
    cuda.mem_alloc(&mut address, BYTES).ok()?;
    check.answers("the first release", cuda.primary_ctx_release(0), OK);
    is_active("after it", 1);
    check.answers("its memory", cuda.mem_free(address), OK);
    check.answers("the last release", cuda.primary_ctx_release(0), OK);
    is_active("after it", 0);
    let allocated = cuda.mem_alloc(&mut address, BYTES);
    check.answers("a thread that still has it current", allocated, CuResult::CONTEXT_IS_DESTROYED);
    Ok(())
}

pub(super) fn a_context_is_current_on_one_thread(check: &Check) -> Result<(), String> {
    check.start()?;
    let ask = |question: &str, there: bool, code| {
        let mut context = 0;
        let mut device = -1;
        let mut stream = 0;
        let mut address = 0;
        check.answers(question, check.cuda.ctx_get_current(&mut context), OK);
        check.same(&format!("{question}: there is one"), context != 0, there);
        check.answers(question, check.cuda.ctx_get_device(&mut device), code);
        if !there {
            check.answers(question, check.cuda.stream_create(&mut stream, 0), code);
            check.answers(question, check.cuda.mem_alloc(&mut address, BYTES), code);
            check.answers(question, check.cuda.ctx_synchronize(), code);
        }
    };
    ask("where it was made current", true, OK);
    check.cuda.ctx_set_current(0).ok()?;
    ask("where none is current", false, CuResult::INVALID_CONTEXT);
    let mut again = 0;
    check.cuda.primary_ctx_retain(&mut again, 0).ok()?;
    check.undo(|cuda| cuda.primary_ctx_release(0));
    check.cuda.ctx_set_current(again).ok()
}
