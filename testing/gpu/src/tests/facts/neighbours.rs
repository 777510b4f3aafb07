//! Processes that share a GPU: by time slices, or as clients of the MPS server that their environment names.

use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::process::Command;
use std::time::Duration;

use partywall::cuda::CuResult;
use partywall_harness::mps;

use super::{BYTES, OK, outlived, wait_for};
use crate::raw::{GEQ, Handle, INTERPROCESS, IpcHandle, NO_TIMING, READ_WRITE, Words};
use crate::tests::stage::{Check, Line, PTX, Peer};
use crate::tests::world::{error_text, eventually};

/// Returns a command that starts this program.
pub(super) fn ourselves() -> Command {
    Command::new("/proc/self/exe")
}

/// The work of a process at the moment when it is killed.
#[derive(Clone, Copy, Debug)]
pub(super) enum At {
    Nothing,
    AWait,
    ShortKernels,
    AnEndlessKernel,
}

/// A process with such work.
pub(super) struct Victim {
    pub(super) peer: Peer,
    /// The event behind its work.
    pub(super) event: IpcHandle,
    /// The memory in which its endless kernel counts.
    pub(super) memory: OwnedFd,
}

impl Victim {
    pub(super) fn start(at: At, command: Command) -> Result<Self, String> {
        let mut peer = Peer::start_with("victim", command)?;
        peer.give(format!("{at:?}"), Words::file(4096)?)?;
        let message = peer.hear()?;
        Ok(Self { peer, event: message.handle()?, memory: message.descriptor()? })
    }
}

/// Starts the given work, sends the event behind it and the memory, and is killed.
pub(super) fn victim(check: &Check, line: &Line) -> Result<(), String> {
    let message = line.hear()?.ok_or("the test sent nothing")?;
    let at = message.text();
    let words = Words::map(message.descriptor()?, true)?;
    check.start()?;
    check.load_kernels()?;
    let stream = check.stream()?;
    let word = check.register(&words)?;
    let (memory, address) = check.mapped(BYTES)?;
    let event = check.event(INTERPROCESS | NO_TIMING)?;
    let mut handle = IpcHandle([0; 64]);
    check.cuda.ipc_get_event_handle(&mut handle, event).ok()?;
    let memory = check.export(memory)?;
    check.cuda.memset_d8_async(address, 0, BYTES, stream).ok()?;
    check.cuda.stream_synchronize(stream).ok()?;
    let short_kernels = || (0..16).try_for_each(|_| check.enqueue_double(stream, address, BYTES));
    match at.as_str() {
        "AWait" => {
            check.cuda.stream_wait_value64(stream, word, 1, GEQ).ok()?;
            check.enqueue_fill(stream, address, BYTES)?;
        }
        "ShortKernels" => short_kernels()?,
        "AnEndlessKernel" => {
            let kernel = polling_kernel(check)?;
            check.cuda.launch(kernel, stream, &[address, address, word, u64::MAX]).ok()?;
            eventually("counting", || Ok(check.bytes(address)? != [0; 8]))?;
        }
        _ => {}
    }
    check.cuda.event_record(event, stream).ok()?;
    line.give(handle.0, memory)?;
    while at == "ShortKernels" && !line.speaks_within(Duration::ZERO)? {
        short_kernels()?;
        check.cuda.stream_synchronize(stream).ok()?;
    }
    let heard = line.hear();
    // Ends the kernel even after an error.
    words.store(0, 1);
    check.cuda.stream_synchronize(stream).ok()?;
    heard?;
    outlived()
}

/// Starts a process that launches one kernel after the other until [`enough`], or until the driver refuses.
pub(super) fn start(command: Command) -> Result<Peer, String> {
    let mut neighbour = Peer::start_with("neighbour", command)?;
    neighbour.expect("working")?;
    Ok(neighbour)
}

/// Ends a neighbour's work. Returns the driver's last answer.
pub(super) fn enough(neighbour: &mut Peer) -> Result<CuResult, String> {
    neighbour.send("enough")?;
    last_answer(neighbour)
}

/// Returns the driver's answer to a neighbour's last work, which arrives after [`enough`] or after a failure.
pub(super) fn last_answer(neighbour: &mut Peer) -> Result<CuResult, String> {
    neighbour.hear()?.text().parse().map(CuResult).map_err(error_text)
}

/// The role of the process that [`start`] starts.
pub(super) fn neighbour(check: &Check, line: &Line) -> Result<(), String> {
    check.start()?;
    let is_client = check.attribute(MPS_ENABLED)? != 0;
    check.same("a client of an MPS server", is_client, std::env::var_os(mps::PIPES).is_some());
    let stream = check.stream()?;
    let address = check.alloc(BYTES)?;
    let fill = check.function(check.module(PTX)?, c"pw_fill")?;
    let work = || {
        let launched = check.cuda.launch(fill, stream, &[address, BYTES as u64 / 4]);
        if launched.code.is_success() { check.cuda.stream_synchronize(stream) } else { launched }
    };
    work().ok()?;
    line.send("working")?;
    let mut last_rounds = 100;
    let answer = loop {
        let answer = work();
        if !answer.code.is_success() || last_rounds == 0 {
            break answer;
        }
        if line.speaks_within(Duration::ZERO)? {
            last_rounds -= 1;
        }
    };
    if answer.code.is_success() {
        check.same("the neighbour's bytes", check.holds_pattern(address, BYTES, 1)?, true);
    } else {
        check.give_nothing_back();
    }
    line.send(answer.code.0.to_string())
}

/// Checks that two processes are unaffected when a third one is killed. `command` starts all of them.
pub(super) fn harms_nobody(check: &Check, at: At, command: impl Fn() -> Command) -> Result<(), String> {
    let mut neighbours = [start(command())?, start(command())?];
    Victim::start(at, command())?.peer.kill()?;
    for neighbour in &mut neighbours {
        check.same(&format!("a neighbour of one killed at {at:?}"), enough(neighbour)?, OK);
    }
    neighbours.into_iter().try_for_each(Peer::finish)
}

/// Runs two processes whose kernels wait for each other, a hundred times. `command` starts both.
pub(super) fn take_turns(command: impl Fn() -> Command) -> Result<(), String> {
    let mut first = Peer::start_with("turn_taker", command())?;
    first.give("first", Words::file(4096)?)?;
    let memory = first.hear()?.descriptor()?;
    let mut second = Peer::start_with("turn_taker", command())?;
    second.give("second", Words::file(4096)?)?;
    second.give("memory", memory)?;
    second.expect("ready")?;
    first.send("go")?;
    second.send("go")?;
    first.expect("done")?;
    second.expect("done")?;
    first.finish()?;
    second.finish()
}

/// The role of both processes of [`take_turns`]. The first one creates the memory.
pub(super) fn turn_taker(check: &Check, line: &Line) -> Result<(), String> {
    const TURNS: u64 = 100;
    let message = line.hear()?.ok_or("the test sent nothing")?;
    let first = message.text() == "first";
    let words = Words::map(message.descriptor()?, true)?;
    check.start()?;
    let stream = check.stream()?;
    let word = check.register(&words)?;
    let kernel = polling_kernel(check)?;
    let (mine, theirs) = if first {
        let (memory, address) = check.mapped(BYTES)?;
        check.cuda.memset_d8_async(address, 0, BYTES, stream).ok()?;
        check.cuda.stream_synchronize(stream).ok()?;
        line.give("memory", check.export(memory)?)?;
        (address, address + 128)
    } else {
        let memory = line.hear()?.ok_or("the test sent nothing")?.descriptor()?;
        let address = check.map(check.import(memory)?, BYTES, READ_WRITE)?;
        line.send("ready")?;
        (address + 128, address)
    };
    line.hear()?;
    check.cuda.launch(kernel, stream, &[mine, theirs, word, TURNS]).ok()?;
    let answer = wait_for(check, stream)?;
    check.answers("polling", answer, OK);
    if !answer.code.is_success() {
        words.store(0, 1);
        check.cuda.stream_synchronize(stream).ok()?;
    }
    check.same("turns", check.bytes(mine).map(u64::from_ne_bytes)?, TURNS);
    line.send("done")
}

/// Counts in one word up to a limit, each number after another word has reached the previous number. A third word ends
/// the kernel when it is not 0, so that it always ends.
const POLLING: &CStr = c"
.version 8.4
.target sm_70
.address_size 64
.visible .entry take_turns(.param .u64 mine, .param .u64 theirs, .param .u64 stop, .param .u64 last)
{
    .reg .pred %p<2>;
    .reg .b32 %r<3>;
    .reg .b64 %rd<7>;
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    or.b32 %r1, %r1, %r2;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 ret;
    ld.param.u64 %rd1, [mine];
    ld.param.u64 %rd2, [theirs];
    ld.param.u64 %rd3, [stop];
    ld.param.u64 %rd4, [last];
    mov.u64 %rd5, 1;
count:
    st.relaxed.sys.u64 [%rd1], %rd5;
    setp.eq.u64 %p1, %rd5, %rd4;
    @%p1 ret;
look:
    ld.relaxed.sys.u64 %rd6, [%rd3];
    setp.ne.u64 %p1, %rd6, 0;
    @%p1 ret;
    ld.relaxed.sys.u64 %rd6, [%rd2];
    setp.lt.u64 %p1, %rd6, %rd5;
    @%p1 bra look;
    add.u64 %rd5, %rd5, 1;
    bra count;
}
";

fn polling_kernel(check: &Check) -> Result<Handle, String> {
    check.function(check.module(POLLING)?, c"take_turns")
}

/// `CU_DEVICE_ATTRIBUTE_MPS_ENABLED`
const MPS_ENABLED: u32 = 133;
