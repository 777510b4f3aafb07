//! The ways to order the work of two processes: events, values, the host.

use partywall::cuda::CuResult;

use super::neighbours::{self, ourselves};
use super::{BYTES, INVALID, OK, query_twice, wait_for};
use crate::raw::{GEQ, INTERPROCESS, IpcHandle, NO_TIMING, READ_WRITE, Words};
use crate::tests::stage::{Check, Line, Peer};

/// Fills the given memory on command, and signals this in the given way: by a value that its stream writes behind the
/// work, to GPU memory or to host memory, or by a store of the host after it has waited.
pub(super) fn producer(check: &Check, line: &Line) -> Result<(), String> {
    let words = Words::map(line.hear()?.ok_or("the test sent nothing")?.descriptor()?, true)?;
    let memory = line.hear()?.ok_or("the test sent nothing")?.descriptor()?;
    check.start()?;
    check.load_kernels()?;
    let stream = check.stream()?;
    let word = check.register(&words)?;
    let address = check.map(check.import(memory)?, 2 * BYTES, READ_WRITE)?;
    while let Some(way) = line.hear()? {
        check.enqueue_fill(stream, address, BYTES)?;
        match way.text().as_str() {
            "GPU memory" => check.cuda.stream_write_value64(stream, address + BYTES as u64, 1, 0).ok()?,
            "host memory" => check.cuda.stream_write_value64(stream, word, 1, 0).ok()?,
            _ => {
                check.cuda.stream_synchronize(stream).ok()?;
                words.store(0, 1);
            }
        }
        line.send("done")?;
    }
    Ok(())
}

/// Checks that a kernel behind a wait sees what a kernel of another process wrote before its signal.
fn orders_two_processes(check: &Check, ways: &[&str]) -> Result<(), String> {
    let file = Words::file(4096)?;
    let words = Words::map(&file, true)?;
    let mut producer = Peer::start("producer")?;
    check.start()?;
    check.load_kernels()?;
    let stream = check.stream()?;
    let word = check.register(&words)?;
    let (memory, address) = check.mapped(2 * BYTES)?;
    producer.give("words", &file)?;
    producer.give("memory", check.export(memory)?)?;
    for way in ways {
        words.store(0, 0);
        check.cuda.memset_d8_async(address, 0, 2 * BYTES, stream).ok()?;
        check.cuda.stream_synchronize(stream).ok()?;
        let flag = if *way == "GPU memory" { address + BYTES as u64 } else { word };
        check.cuda.stream_wait_value64(stream, flag, 1, GEQ).ok()?;
        check.enqueue_double(stream, address, BYTES)?;
        check.answers(&format!("{way}: before it"), query_twice(check, stream)?, CuResult::NOT_READY);
        producer.order(way)?;
        check.answers(&format!("{way}: the stream goes on"), wait_for(check, stream)?, OK);
        check.same(&format!("{way}: after the other's work"), check.holds_pattern(address, BYTES, 2)?, true);
    }
    producer.finish()
}

pub(super) fn a_stream_write_orders_two_processes(check: &Check) -> Result<(), String> {
    orders_two_processes(check, &["GPU memory", "host memory"])
}

pub(super) fn the_host_orders_two_processes(check: &Check) -> Result<(), String> {
    orders_two_processes(check, &["a store of the host"])
}

/// Records an event behind work that waits for the given word, and sends the event's handle.
pub(super) fn recorder(check: &Check, line: &Line) -> Result<(), String> {
    let words = Words::map(line.hear()?.ok_or("the test sent nothing")?.descriptor()?, true)?;
    let memory = line.hear()?.ok_or("the test sent nothing")?.descriptor()?;
    check.start()?;
    check.load_kernels()?;
    let stream = check.stream()?;
    let word = check.register(&words)?;
    let address = check.map(check.import(memory)?, BYTES, READ_WRITE)?;
    let event = check.event(INTERPROCESS | NO_TIMING)?;
    let mut handle = IpcHandle([0; 64]);
    check.cuda.ipc_get_event_handle(&mut handle, event).ok()?;
    check.cuda.stream_wait_value64(stream, word, 1, GEQ).ok()?;
    check.enqueue_fill(stream, address, BYTES)?;
    check.cuda.event_record(event, stream).ok()?;
    line.send(handle.0)?;
    line.hear().map(drop)
}

pub(super) fn an_event_orders_two_processes(check: &Check) -> Result<(), String> {
    let file = Words::file(4096)?;
    let words = Words::map(&file, true)?;
    let mut recorder = Peer::start("recorder")?;
    check.start()?;
    check.load_kernels()?;
    let (memory, address) = check.mapped(BYTES)?;
    let stream = check.stream()?;
    let mut event = 0;
    recorder.give("words", &file)?;
    recorder.give("memory", check.export(memory)?)?;
    let handle = recorder.hear()?.handle()?;
    check.answers("opening the other's event", check.cuda.ipc_open_event_handle(&mut event, handle), OK);
    check.undo(move |cuda| cuda.event_destroy(event));
    check.answers("it has not happened", check.cuda.event_query(event), CuResult::NOT_READY);
    check.answers("a stream waits for it", check.cuda.stream_wait_event(stream, event, 0), OK);
    check.enqueue_double(stream, address, BYTES)?;
    check.answers("and is blocked", query_twice(check, stream)?, CuResult::NOT_READY);
    words.store(0, 1);
    check.answers("until it happens", wait_for(check, stream)?, OK);
    check.same("after the other's work", check.holds_pattern(address, BYTES, 2)?, true);
    recorder.finish()
}

pub(super) fn events_know_what_was_recorded(check: &Check) -> Result<(), String> {
    check.start()?;
    let cuda = &check.cuda;
    let stream = check.stream()?;
    let (words, word) = check.words()?;
    let start = check.event(0)?;
    let end = check.event(0)?;
    let untimed = check.event(NO_TIMING)?;
    check.answers("an event never recorded", cuda.event_query(end), OK);
    check.answers("and waiting for it", cuda.event_synchronize(end), OK);
    let mut time = -1.0;
    let never = cuda.event_elapsed_time(&mut time, start, end);
    check.answers("the time between events never recorded", never, CuResult::INVALID_HANDLE);
    cuda.event_record(start, stream).ok()?;
    cuda.stream_wait_value64(stream, word, 1, GEQ).ok()?;
    cuda.event_record(end, stream).ok()?;
    cuda.event_record(untimed, stream).ok()?;
    check.answers("an event behind a wait", cuda.event_query(end), CuResult::NOT_READY);
    let early = cuda.event_elapsed_time(&mut time, start, end);
    check.answers("the time to it", early, CuResult::NOT_READY);
    words.store(0, 1);
    check.answers("waiting for it", cuda.event_synchronize(end), OK);
    check.answers("the time to it", cuda.event_elapsed_time(&mut time, start, end), OK);
    check.same("is no less than nothing", time >= 0.0, true);
    cuda.stream_synchronize(stream).ok()?;
    let untimed = cuda.event_elapsed_time(&mut time, start, untimed);
    check.answers("the time to an event without", untimed, CuResult::INVALID_HANDLE);
    Ok(())
}

pub(super) fn event_handles_need_the_interprocess_flag(check: &Check) -> Result<(), String> {
    check.start()?;
    let cuda = &check.cuda;
    let mut event = 0;
    let mut handle = IpcHandle([0; 64]);
    check.answers("interprocess with timing", cuda.event_create(&mut event, INTERPROCESS), INVALID);
    let plain = check.event(NO_TIMING)?;
    check.answers("a plain event", cuda.ipc_get_event_handle(&mut handle, plain), CuResult::INVALID_HANDLE);
    let shared = check.event(INTERPROCESS | NO_TIMING)?;
    check.answers("an interprocess event", cuda.ipc_get_event_handle(&mut handle, shared), OK);
    let here = cuda.ipc_open_event_handle(&mut event, handle);
    check.answers("opening it where it was made", here, CuResult::INVALID_CONTEXT);
    let garbage = cuda.ipc_open_event_handle(&mut event, IpcHandle([0xA5; 64]));
    check.answers("opening garbage", garbage, CuResult::MAP_FAILED);
    Ok(())
}

pub(super) fn polling_kernels_of_two_processes_take_turns(_: &Check) -> Result<(), String> {
    neighbours::take_turns(ourselves)
}
