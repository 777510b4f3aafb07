//! Calls behind a wait: which of them return only after the wait, and which other threads they block.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use super::neighbours::ourselves;
use super::{BYTES, MIB, OK, wait_for};
use crate::raw::{Cuda, GEQ, READ_WRITE, Words};
use crate::tests::stage::{Check, Line, Peer};
use crate::tests::world::{TIMEOUT, error_text};

/// Makes a call while a stream of the context waits, and reports whether it returned before the wait was released.
pub(super) fn caller_behind_a_wait(check: &Check, line: &Line) -> Result<(), String> {
    let message = line.hear()?.ok_or("the test sent nothing")?;
    let call = message.text();
    let words = Words::map(message.descriptor()?, true)?;
    check.start()?;
    let waiting = check.stream()?;
    let word = check.register(&words)?;
    let more = Words::map(Words::file(MIB)?, true)?;
    let mut allocated = 0;
    check.cuda.mem_alloc(&mut allocated, BYTES).ok()?;
    check.cuda.stream_wait_value64(waiting, word, 1, GEQ).ok()?;
    line.send("waiting")?;
    match call.as_str() {
        "cuMemAlloc" => check.alloc(64 * MIB).map(drop)?,
        "cuMemCreate and cuMemMap" => check.map(check.create(BYTES)?, BYTES, READ_WRITE).map(drop)?,
        "cuMemHostAlloc" => {
            let mut address = 0;
            check.cuda.mem_host_alloc(&mut address, MIB, 0).ok()?;
            check.undo(move |cuda| cuda.mem_free_host(address));
        }
        "cuMemHostRegister" => check.register(&more).map(drop)?,
        "cuStreamCreate" => check.stream().map(drop)?,
        "cuMemFree" => {
            check.cuda.mem_free(allocated).ok()?;
            allocated = 0;
        }
        other => return Err(format!("unknown call {other}")),
    }
    line.send(if words.load(0) == 0 { "before" } else { "after" })?;
    line.hear()?;
    check.cuda.stream_synchronize(waiting).ok()?;
    if allocated == 0 { Ok(()) } else { check.cuda.mem_free(allocated).ok() }
}

/// Checks whether each call returns `before` or `after` the release of the wait. For the pause, see the launches behind
/// a wait.
fn calls_behind_a_wait(check: &Check, calls: &[&str], expected: &str) -> Result<(), String> {
    for call in calls {
        let file = Words::file(4096)?;
        let words = Words::map(&file, true)?;
        let mut caller = Peer::start_with("caller_behind_a_wait", ourselves())?;
        caller.give(call, &file)?;
        caller.expect("waiting")?;
        let pause = if expected == "before" { TIMEOUT / 4 } else { Duration::from_secs(1) };
        if !caller.speaks_within(pause)? {
            words.store(0, 1);
        }
        check.same(call, caller.hear()?.text(), expected.to_owned());
        words.store(0, 1);
        caller.finish()?;
    }
    Ok(())
}

pub(super) fn allocating_and_registering_behind_a_wait_do_not_block(check: &Check) -> Result<(), String> {
    let calls = ["cuMemAlloc", "cuMemCreate and cuMemMap", "cuMemHostAlloc", "cuMemHostRegister", "cuStreamCreate"];
    calls_behind_a_wait(check, &calls, "before")
}

pub(super) fn freeing_behind_a_wait_blocks(check: &Check) -> Result<(), String> {
    calls_behind_a_wait(check, &["cuMemFree"], "after")
}

/// Makes many streams wait for a word, then another stream write it. Reports whether the write happened before the wait
/// was released from outside.
pub(super) fn crowd_behind_a_wait(check: &Check, line: &Line) -> Result<(), String> {
    let message = line.hear()?.ok_or("the test sent nothing")?;
    let waiting: usize = message.text().parse().map_err(error_text)?;
    let words = Words::map(message.descriptor()?, true)?;
    check.start()?;
    let writer = check.stream()?;
    let word = check.register(&words)?;
    let streams = (0..waiting).map(|_| check.stream()).collect::<Result<Vec<_>, _>>()?;
    for stream in &streams {
        check.cuda.stream_wait_value64(*stream, word, 1, GEQ).ok()?;
    }
    check.cuda.stream_write_value64(writer, word + 8, 1, 0).ok()?;
    line.send("waiting")?;
    check.cuda.stream_synchronize(writer).ok()?;
    line.send(if words.load(0) == 0 { "before" } else { "after" })?;
    line.hear()?;
    check.cuda.ctx_synchronize().ok()
}

/// Streams share as many queues as `CUDA_DEVICE_MAX_CONNECTIONS` allows, 8 by default. A waiting stream blocks all
/// streams of its queue.
pub(super) fn streams_that_wait_hold_up_those_of_their_queue(check: &Check) -> Result<(), String> {
    for (queues, waiting, expected) in [("1", 1, "after"), ("8", 4, "before"), ("8", 64, "after"), ("32", 16, "before")]
    {
        let file = Words::file(4096)?;
        let words = Words::map(&file, true)?;
        let mut command = ourselves();
        command.env("CUDA_DEVICE_MAX_CONNECTIONS", queues);
        let mut crowd = Peer::start_with("crowd_behind_a_wait", command)?;
        crowd.give(waiting.to_string(), &file)?;
        crowd.expect("waiting")?;
        let pause = if expected == "before" { TIMEOUT / 4 } else { Duration::from_secs(1) };
        if !crowd.speaks_within(pause)? {
            words.store(0, 1);
        }
        let question = format!("{queues} queues, {waiting} streams that wait: the write of another one");
        check.same(&question, crowd.hear()?.text(), expected.to_owned());
        words.store(0, 1);
        crowd.finish()?;
    }
    Ok(())
}

/// While one thread is blocked in the driver, another thread queries a stream, and makes a stream write the value that
/// ends the wait.
pub(super) fn a_call_that_is_held_up_keeps_no_other_thread(check: &Check) -> Result<(), String> {
    check.start()?;
    let waiting = check.stream()?;
    let other = check.stream()?;
    let (words, word) = check.words()?;
    let mut context = 0;
    let mut allocated = 0;
    check.cuda.ctx_get_current(&mut context).ok()?;
    check.cuda.mem_alloc(&mut allocated, BYTES).ok()?;
    check.cuda.stream_wait_value64(waiting, word, 1, GEQ).ok()?;
    let on_its_way = AtomicBool::new(false);
    thread::scope(|scope| {
        let freeing = scope.spawn(|| {
            let cuda = Cuda::load()?;
            cuda.ctx_set_current(context).ok()?;
            on_its_way.store(true, Ordering::SeqCst);
            cuda.mem_free(allocated).ok()
        });
        while !on_its_way.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        // No measurement: a blocked call stays blocked until the wait ends.
        thread::sleep(Duration::from_millis(200));
        check.answers("a query of another stream", check.cuda.stream_query(other), OK);
        check.same("whether the freeing is over", freeing.is_finished(), false);
        check.cuda.stream_write_value64(other, word, 1, 0).ok()?;
        check.answers("the stream goes on", wait_for(check, waiting)?, OK);
        // Ends the wait if it has not ended, so that the thread returns.
        words.store(0, 1);
        freeing.join().map_err(|_| "the thread panicked")?
    })
}
