//! Tests of the order on a stream and between streams, in one process.

use std::ffi::c_void;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use super::peer::in_a_process;
use super::{
    SharedWords, answer, begin, context_handle, device_memory, function, is_done, launch, load, make_current, must,
    never, new_stream, pinned, synchronize,
};
use crate::abi::{Code, Handle};
use crate::capture::cuThreadExchangeStreamCaptureMode;
use crate::capture::{cuStreamBeginCapture_v2, cuStreamEndCapture, cuStreamIsCapturing};
use crate::context::cuCtxGetDevice;
use crate::copy::{cuMemcpyDtoHAsync_v2, cuMemcpyHtoDAsync_v2, cuMemsetD8Async, cuMemsetD32_v2};
use crate::event::{
    cuEventCreate, cuEventElapsedTime, cuEventQuery, cuEventRecord, cuEventSynchronize, cuStreamWaitEvent,
};
use crate::graph::cuGraphDestroy;
use crate::memop::{cuStreamWaitValue32, cuStreamWaitValue64_v2, cuStreamWriteValue64_v2};
use crate::module::cuLaunchHostFunc;
use crate::primary::cuCtxSynchronize;
use crate::stream::{cuStreamCreate, cuStreamDestroy_v2};

/// One stream writes a byte and another copies it out. Returns how often the copy was too early.
fn stale_copies(rounds: u8, writer: Handle, reader: Handle, event: Option<Handle>) -> u32 {
    let memory = device_memory(64);
    let copy = pinned(64);
    (1..=rounds).fold(0, |stale, round| {
        must!(cuMemsetD8Async(memory, round, 64, writer));
        if let Some(event) = event {
            must!(cuEventRecord(event, writer));
            must!(cuStreamWaitEvent(reader, event, 0));
        }
        must!(cuMemcpyDtoHAsync_v2(copy.cast(), memory, 64, reader));
        synchronize(reader);
        synchronize(writer);
        // SAFETY: allocated above, and no stream works on it now.
        stale + u32::from(unsafe { copy.read() } != round)
    })
}

fn new_event(flags: u32) -> Handle {
    let mut event = 0;
    must!(cuEventCreate(&mut event, flags));
    event
}

fn with_delays(test: &str) -> bool {
    in_a_process(test, &[("SIMCUDA_DELAY", "2000"), ("SIMCUDA_SEED", "7")])
}

#[test]
fn streams_without_an_event_overtake_each_other() {
    if !with_delays("tests::streams::streams_without_an_event_overtake_each_other") {
        return;
    }
    begin();
    assert!(stale_copies(60, new_stream(), new_stream(), None) > 0);
}

#[test]
fn streams_with_an_event_never_overtake_each_other() {
    if !with_delays("tests::streams::streams_with_an_event_never_overtake_each_other") {
        return;
    }
    begin();
    assert_eq!(stale_copies(60, new_stream(), new_stream(), Some(new_event(2))), 0);
}

#[test]
fn the_legacy_default_stream_and_blocking_streams_wait_for_each_other() {
    if !with_delays("tests::streams::the_legacy_default_stream_and_blocking_streams_wait_for_each_other") {
        return;
    }
    begin();
    let mut blocking = 0;
    must!(cuStreamCreate(&mut blocking, 0));
    assert_eq!(stale_copies(30, 0, blocking, None), 0);
    assert_eq!(stale_copies(30, blocking, 1, None), 0);
    assert_eq!(stale_copies(30, 2, 0, None), 0, "the default stream of a thread is a blocking one");
    assert!(stale_copies(60, 0, new_stream(), None) > 0, "a non-blocking stream does not wait");
}

#[test]
fn event_means_the_record_at_the_time_of_the_call() {
    begin();
    let words = SharedWords::new(4096);
    let slow = new_stream();
    let fast = new_stream();
    let event = new_event(0);
    must!(cuEventQuery(event));
    must!(cuStreamWaitValue64_v2(slow, words.device, 1, 0));
    must!(cuEventRecord(event, slow));
    assert_eq!(answer!(cuEventQuery(event)), Code::NOT_READY);
    must!(cuStreamWaitEvent(fast, event, 0));
    // A later record elsewhere does not affect existing waits.
    must!(cuEventRecord(event, new_stream()));
    must!(cuEventSynchronize(event));
    assert!(!is_done(fast));
    words.store(0, 1);
    synchronize(fast);
}

#[test]
fn events_have_times_unless_they_were_made_without() {
    begin();
    let stream = new_stream();
    let start = new_event(0);
    let end = new_event(0);
    let timeless = new_event(2);
    let mut milliseconds = -1.0;
    assert_eq!(answer!(cuEventElapsedTime(&mut milliseconds, start, end)), Code::INVALID_HANDLE);
    for event in [start, end, timeless] {
        must!(cuEventRecord(event, stream));
    }
    synchronize(stream);
    must!(cuEventElapsedTime(&mut milliseconds, start, end));
    assert!(milliseconds >= 0.0);
    must!(cuEventElapsedTime(&mut milliseconds, end, start));
    assert!(milliseconds <= 0.0);
    assert_eq!(answer!(cuEventElapsedTime(&mut milliseconds, start, timeless)), Code::INVALID_HANDLE);
    assert_eq!(answer!(cuEventCreate(&mut 0, 4)), Code::INVALID_VALUE, "between processes there is no time");
}

/// Sends the thread's name, and the driver's answer to a call on this thread.
unsafe extern "C" fn report(data: *mut c_void) {
    // SAFETY: leaked by the test for this call.
    let request = unsafe { Box::from_raw(data.cast::<(u32, Sender<(u32, Code)>)>()) };
    request.1.send((request.0, answer!(cuCtxGetDevice(&mut 0)))).unwrap();
}

fn enqueue_report(stream: Handle, name: u32, sender: &Sender<(u32, Code)>) {
    must!(cuLaunchHostFunc(stream, Some(report), Box::into_raw(Box::new((name, sender.clone()))).cast()));
}

#[test]
fn host_functions_run_in_order_and_may_not_call_the_driver() {
    begin();
    let (sender, receiver): (_, Receiver<(u32, Code)>) = channel();
    let stream = new_stream();
    let words = SharedWords::new(4096);
    must!(cuStreamWaitValue64_v2(stream, words.device, 1, 0));
    for name in 0..10 {
        enqueue_report(stream, name, &sender);
    }
    assert!(receiver.try_recv().is_err(), "the stream waits");
    words.store(0, 1);
    let expected: Vec<_> = (0..10).map(|name| (name, Code::NOT_PERMITTED)).collect();
    assert_eq!(receiver.iter().take(10).collect::<Vec<_>>(), expected);
}

#[test]
fn destroyed_stream_finishes_its_work() {
    begin();
    let (sender, receiver) = channel();
    let stream = new_stream();
    let words = SharedWords::new(4096);
    must!(cuStreamWaitValue64_v2(stream, words.device, 1, 0));
    enqueue_report(stream, 0, &sender);
    must!(cuStreamDestroy_v2(stream));
    assert_eq!(answer!(cuStreamDestroy_v2(stream)), Code::INVALID_HANDLE);
    assert!(receiver.try_recv().is_err());
    words.store(0, 1);
    receiver.recv().unwrap();
}

#[test]
fn pinned_memory_is_read_by_the_stream_and_small_pageable_memory_by_the_call() {
    begin();
    let stream = new_stream();
    let words = SharedWords::new(4096);
    let memory = device_memory(2);
    let copy = pinned(2);
    let page_locked = pinned(1);
    let mut pageable = [1_u8];
    must!(cuStreamWaitValue64_v2(stream, words.device, 1, 0));
    must!(cuMemcpyHtoDAsync_v2(memory, pageable.as_ptr().cast(), 1, stream));
    must!(cuMemcpyHtoDAsync_v2(memory + 1, page_locked.cast(), 1, stream));
    must!(cuMemcpyDtoHAsync_v2(copy.cast(), memory, 2, stream));
    pageable[0] = 2;
    // SAFETY: allocated above; that the stream has yet to read it is what is tested.
    unsafe { page_locked.write(2) };
    words.store(0, 1);
    synchronize(stream);
    // SAFETY: allocated above, and the stream is done.
    assert_eq!(unsafe { copy.cast::<[u8; 2]>().read() }, [1, 2]);
    assert_eq!(pageable, [2]);
}

#[test]
fn loading_and_late_functions_wait_for_the_whole_context() {
    if !in_a_process("tests::streams::loading_and_late_functions_wait_for_the_whole_context", &[]) {
        return;
    }
    begin();
    let words = SharedWords::new(4096);
    let waiting = new_stream();
    let other = new_stream();
    let late = new_stream();
    let memory = device_memory(64);
    let module = load();
    let known = &mut [memory, 16];
    let early = function(module, c"pw_fill");
    must!(cuStreamWaitValue64_v2(waiting, words.device, 1, 0));
    assert_eq!(launch(early, other, known), Code::SUCCESS);
    synchronize(other);
    assert_eq!(launch(function(module, c"pw_double"), late, known), Code::SUCCESS);
    let context = context_handle();
    let loaded = thread::spawn(move || {
        make_current(context);
        load()
    });
    never(|| loaded.is_finished() || is_done(late));
    words.store(0, 1);
    synchronize(late);
    loaded.join().unwrap();
}

#[test]
fn stream_writes_words_for_another_stream() {
    begin();
    let writer = new_stream();
    let waiter = new_stream();
    let word = device_memory(8);
    must!(cuMemsetD32_v2(word, 0, 2));
    must!(cuCtxSynchronize());
    must!(cuStreamWaitValue64_v2(waiter, word, 1 << 40, 0));
    assert!(!is_done(waiter));
    must!(cuStreamWriteValue64_v2(writer, word, 1 << 40, 0));
    synchronize(waiter);
    assert_eq!(answer!(cuStreamWaitValue64_v2(waiter, word + 4, 0, 0)), Code::INVALID_VALUE, "misaligned");
    assert_eq!(answer!(cuStreamWaitValue64_v2(waiter, 8, 0, 0)), Code::INVALID_VALUE, "no memory");
    assert_eq!(answer!(cuStreamWaitValue32(waiter, word, 0, 0)), Code::NOT_SUPPORTED, "the older interface");
}

#[test]
fn capture_forbids_waiting_and_is_invalidated_by_it() {
    // The capture forbids that to every thread of the process.
    if !in_a_process("tests::streams::capture_forbids_waiting_and_is_invalidated_by_it", &[]) {
        return;
    }
    begin();
    let stream = new_stream();
    let memory = device_memory(1);
    let copy = pinned(1);
    let mut status = 9;
    let mut graph = 0;
    must!(cuStreamBeginCapture_v2(stream, 0));
    must!(cuStreamIsCapturing(stream, &mut status));
    assert_eq!(status, 1);
    must!(cuMemsetD8Async(memory, 1, 1, stream));
    must!(cuStreamEndCapture(stream, &mut graph));
    must!(cuGraphDestroy(graph));
    must!(cuMemcpyDtoHAsync_v2(copy.cast(), memory, 1, stream));
    synchronize(stream);
    // SAFETY: allocated above, and the stream is done.
    assert_eq!(unsafe { copy.read() }, 0, "what is captured is not done");

    must!(cuStreamBeginCapture_v2(stream, 0));
    let mut mode = 2;
    must!(cuThreadExchangeStreamCaptureMode(&mut mode));
    must!(cuCtxSynchronize());
    must!(cuThreadExchangeStreamCaptureMode(&mut mode));
    assert_eq!(answer!(cuCtxSynchronize()), Code::STREAM_CAPTURE_UNSUPPORTED);
    must!(cuStreamIsCapturing(stream, &mut status));
    assert_eq!(status, 2);
    assert_eq!(answer!(cuStreamEndCapture(stream, &mut graph)), Code::STREAM_CAPTURE_INVALIDATED);
    synchronize(stream);
}
