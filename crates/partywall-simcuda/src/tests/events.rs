//! Events between processes.

use std::sync::atomic::Ordering;

use super::peer::start;
use super::{SharedWords, answer, begin, is_done, must, never, new_stream, role, synchronize};
use crate::abi::{Code, Handle, IpcHandle};
use crate::event::{
    cuEventCreate, cuEventDestroy_v2, cuEventQuery, cuEventRecord, cuIpcGetEventHandle, cuIpcOpenEventHandle,
    cuStreamWaitEvent,
};
use crate::memop::cuStreamWaitValue64_v2;

/// Flags of an interprocess event, without timing.
const SHARED: u32 = 4 | 2;

/// The index of the words with the handle of an event.
const HANDLE: usize = 8;

fn new_event() -> Handle {
    let mut event = 0;
    must!(cuEventCreate(&mut event, SHARED));
    event
}

fn export(event: Handle) -> IpcHandle {
    let mut handle = IpcHandle([0; 64]);
    must!(cuIpcGetEventHandle(&mut handle, event));
    handle
}

/// Records an event behind a wait for word 0, and reports that in word 1, with its handle behind [`HANDLE`]. Destroys
/// the event when word 2 is set, reports that in word 3, and ends when word 4 is set.
fn record_behind_a_wait() {
    begin();
    let words = SharedWords::inherited(4096);
    let stream = new_stream();
    let event = new_event();
    must!(cuStreamWaitValue64_v2(stream, words.device, 1, 0));
    must!(cuEventRecord(event, stream));
    for (index, bytes) in export(event).0.chunks(8).enumerate() {
        words.store(HANDLE + index, u64::from_ne_bytes(bytes.try_into().unwrap()));
    }
    words.store(1, 1);
    words.wait(2);
    must!(cuEventDestroy_v2(event));
    words.store(3, 1);
    words.wait(4);
}

/// Returns the handle that the other process reported.
fn handle_in(words: &SharedWords) -> IpcHandle {
    let mut handle = [0; 64];
    for (index, bytes) in handle.chunks_mut(8).enumerate() {
        bytes.copy_from_slice(&words.word(HANDLE + index).load(Ordering::Acquire).to_ne_bytes());
    }
    IpcHandle(handle)
}

/// Returns the event of another process in the role [`record_behind_a_wait`], and a stream that waits for it.
fn wait_for_it(words: &SharedWords) -> (Handle, Handle) {
    words.wait(1);
    let stream = new_stream();
    let mut event = 0;
    must!(cuIpcOpenEventHandle(&mut event, handle_in(words)));
    must!(cuStreamWaitEvent(stream, event, 0));
    (event, stream)
}

#[test]
fn stream_waits_for_the_record_of_another_process() {
    const TEST: &str = "tests::events::stream_waits_for_the_record_of_another_process";
    if role().is_some() {
        return record_behind_a_wait();
    }
    begin();
    let words = SharedWords::new(4096);
    let recorder = start(TEST, "recorder", &[("WORDS", &words.descriptor())]);
    let (event, stream) = wait_for_it(&words);
    assert_eq!(answer!(cuEventQuery(event)), Code::NOT_READY);
    assert!(!is_done(stream));
    words.store(0, 1);
    synchronize(stream);
    must!(cuEventQuery(event));
    assert_eq!(answer!(cuIpcGetEventHandle(&mut IpcHandle([0; 64]), event)), Code::INVALID_HANDLE, "not its maker");
    words.store(2, 1);
    words.wait(3);
    assert_eq!(answer!(cuIpcOpenEventHandle(&mut 0, handle_in(&words))), Code::INVALID_VALUE, "destroyed");
    words.store(4, 1);
    recorder.finish();
}

#[test]
fn wait_for_the_event_of_a_killed_process_never_ends() {
    const TEST: &str = "tests::events::wait_for_the_event_of_a_killed_process_never_ends";
    match role().as_deref() {
        None => start(TEST, "waiter", &[]).finish(),
        // Runs in a process of its own, because its stream waits forever.
        Some("waiter") => {
            begin();
            let words = SharedWords::new(4096);
            let mut recorder = start(TEST, "recorder", &[("WORDS", &words.descriptor())]);
            let (event, stream) = wait_for_it(&words);
            recorder.kill();
            words.store(0, 1);
            never(|| is_done(stream));
            assert_eq!(answer!(cuEventQuery(event)), Code::NOT_READY);
        }
        Some(_) => record_behind_a_wait(),
    }
}

#[test]
fn handles_are_for_other_processes_and_for_as_long_as_the_event_lives() {
    begin();
    let event = new_event();
    let handle = export(event);
    assert_eq!(export(event), handle);
    assert_eq!(answer!(cuIpcOpenEventHandle(&mut 0, handle)), Code::INVALID_CONTEXT);
    assert_eq!(answer!(cuIpcOpenEventHandle(&mut 0, IpcHandle([0xA5; 64]))), Code::MAP_FAILED);
    must!(cuEventDestroy_v2(event));
    assert_eq!(answer!(cuEventQuery(event)), Code::INVALID_HANDLE);
    let mut private = 0;
    must!(cuEventCreate(&mut private, 2));
    assert_eq!(answer!(cuIpcGetEventHandle(&mut IpcHandle([0; 64]), private)), Code::INVALID_HANDLE);
}
