//! Modules, and launches behind a wait.

use std::ffi::CStr;
use std::time::Duration;

use partywall::cuda::CuResult;

use super::neighbours::ourselves;
use crate::raw::{GEQ, Words};
use crate::tests::stage::{Check, Line, PTX, Peer};
use crate::tests::world::{TIMEOUT, error_text};

/// The step of a first launch that is made only after a stream of the context has begun to wait.
#[derive(Clone, Copy, Debug)]
enum Late {
    Load,
    GetFunction,
    Launch,
    /// The launch of a kernel that needs more local memory than any before it.
    LaunchWithLocalMemory,
}

/// A kernel that uses an array in local memory, and stores 7 in a word if its argument is 0.
const LOCAL_MEMORY: &CStr = c"
.version 8.4
.target sm_70
.address_size 64
.visible .entry through_local_memory(.param .u64 p, .param .u64 offset)
{
    .reg .b64 %rd<6>;
    .reg .b32 %r<3>;
    .local .align 16 .b8 array[200000];
    ld.param.u64 %rd1, [p];
    ld.param.u64 %rd2, [offset];
    mov.u64 %rd3, array;
    cvta.local.u64 %rd4, %rd3;
    add.u64 %rd5, %rd4, %rd2;
    mov.u32 %r1, 7;
    st.u32 [%rd5], %r1;
    ld.u32 %r2, [%rd4];
    st.global.u32 [%rd1], %r2;
    ret;
}
";

/// Launches a kernel on one stream while another stream waits, with one step made only behind the wait. Reports whether
/// that step, and then the kernel, ended before the wait was released.
pub(super) fn launcher_behind_a_wait(check: &Check, line: &Line) -> Result<(), String> {
    let message = line.hear()?.ok_or("the test sent nothing")?;
    let late = message.text();
    let words = Words::map(message.descriptor()?, true)?;
    check.start()?;
    let waiting = check.stream()?;
    let other = check.stream()?;
    let word = check.register(&words)?;
    let address = check.alloc(8)?;
    let wait = || {
        check.cuda.stream_wait_value64(waiting, word, 1, GEQ).ok()?;
        line.send("waiting")
    };
    let answer = || line.send(if words.load(0) == 0 { "before" } else { "after" });
    let launch = |function, stream| check.cuda.launch(function, stream, &[address, 0]).ok();
    let fill = |module| check.function(module, c"pw_fill");
    match late.as_str() {
        "Load" => {
            wait()?;
            let module = check.module(PTX)?;
            answer()?;
            launch(fill(module)?, other)?;
        }
        "GetFunction" => {
            let module = check.module(PTX)?;
            wait()?;
            launch(fill(module)?, other)?;
            answer()?;
        }
        "Launch" => {
            let function = fill(check.module(PTX)?)?;
            wait()?;
            launch(function, waiting)?;
            launch(function, other)?;
            answer()?;
        }
        _ => {
            let function = check.function(check.module(LOCAL_MEMORY)?, c"through_local_memory")?;
            wait()?;
            launch(function, other)?;
            answer()?;
        }
    }
    check.cuda.stream_synchronize(other).ok()?;
    answer()?;
    line.hear()?;
    check.cuda.stream_synchronize(waiting).ok()
}

/// Checks whether the late step, and the kernel, end `before` or `after` the release of the wait.
///
/// The length of the pause does not matter. A step that waits for the release is found waiting after any pause, and the
/// test waits for a step that does not.
fn behind_a_wait(check: &Check, late: Late, lazy: [&str; 2], eager: [&str; 2]) -> Result<(), String> {
    for (loading, expected) in [("LAZY", lazy), ("EAGER", eager)] {
        let file = Words::file(4096)?;
        let words = Words::map(&file, true)?;
        let mut command = ourselves();
        command.env("CUDA_MODULE_LOADING", loading);
        let mut launcher = Peer::start_with("launcher_behind_a_wait", command)?;
        launcher.give(format!("{late:?}"), &file)?;
        launcher.expect("waiting")?;
        for (what, expected) in ["the step", "the kernel"].into_iter().zip(expected) {
            let pause = if expected == "before" { TIMEOUT / 4 } else { Duration::from_secs(1) };
            if !launcher.speaks_within(pause)? {
                words.store(0, 1);
            }
            check.same(&format!("{loading}: {what}"), launcher.hear()?.text(), expected.to_owned());
        }
        words.store(0, 1);
        launcher.finish()?;
    }
    Ok(())
}

pub(super) fn loading_a_module_behind_a_wait_blocks(check: &Check) -> Result<(), String> {
    behind_a_wait(check, Late::Load, ["after", "after"], ["after", "after"])
}

pub(super) fn a_function_first_asked_for_behind_a_wait_runs_after_it(check: &Check) -> Result<(), String> {
    behind_a_wait(check, Late::GetFunction, ["before", "after"], ["before", "before"])
}

pub(super) fn a_function_got_before_a_wait_runs_at_once(check: &Check) -> Result<(), String> {
    behind_a_wait(check, Late::Launch, ["before", "before"], ["before", "before"])
}

pub(super) fn a_launch_behind_a_wait_blocks_if_it_needs_more_local_memory(check: &Check) -> Result<(), String> {
    behind_a_wait(check, Late::LaunchWithLocalMemory, ["after", "after"], ["after", "after"])
}

pub(super) fn modules_refuse_what_they_cannot_read(check: &Check) -> Result<(), String> {
    check.start()?;
    let mut module = 0;
    let mut function = 0;
    check.answers("no code at all", check.cuda.load_module(&mut module, c"no code at all"), CuResult::INVALID_IMAGE);
    let new = PTX.to_str().map_err(error_text)?.replacen(".version 8.4", ".version 99.9", 1);
    let new = std::ffi::CString::new(new).map_err(error_text)?;
    let loaded = check.cuda.load_module(&mut module, &new);
    check.answers("PTX of a version to come", loaded, CuResult::UNSUPPORTED_PTX_VERSION);
    let broken = c".version 8.4\n.target sm_70\n.address_size 64\nnonsense";
    check.answers("PTX with an error in it", check.cuda.load_module(&mut module, broken), CuResult::INVALID_PTX);
    let module = check.module(PTX)?;
    let missing = check.cuda.function(&mut function, module, c"pw_missing");
    check.answers("a kernel that is not in it", missing, CuResult::NOT_FOUND);
    Ok(())
}
