//! Effects of other processes on a stream, and what a killed process leaves.

use super::peer::{in_a_process, start};
use super::{SharedWords, begin, is_done, must, new_stream, pinned, role, synchronize};
use crate::copy::{PIECE, cuMemcpyAsync};
use crate::memop::cuStreamWaitValue64_v2;

#[test]
fn plain_store_of_another_process_ends_a_wait() {
    const TEST: &str = "tests::other_processes::plain_store_of_another_process_ends_a_wait";
    if role().is_some() {
        begin();
        SharedWords::inherited(4096).store(0, 5 + (1 << 62) + 1);
        return;
    }
    begin();
    let stream = new_stream();
    let words = SharedWords::new(4096);
    words.store(0, 5);
    must!(cuStreamWaitValue64_v2(stream, words.device, 6, 0));
    assert!(!is_done(stream));
    let storer = start(TEST, "store", &[("WORDS", &words.descriptor())]);
    synchronize(stream);
    storer.finish();
}

#[test]
fn process_exits_while_a_stream_waits() {
    const TEST: &str = "tests::other_processes::process_exits_while_a_stream_waits";
    if !in_a_process(TEST, &[]) {
        return;
    }
    begin();
    let stream = new_stream();
    let words = SharedWords::new(4096);
    must!(cuStreamWaitValue64_v2(stream, words.device, 1, 0));
    assert!(!is_done(stream));
}

#[test]
fn kill_during_a_copy_leaves_a_prefix() {
    const TEST: &str = "tests::other_processes::kill_during_a_copy_leaves_a_prefix";
    const BYTES: usize = 1024 * PIECE;
    if role().is_some() {
        begin();
        let words = SharedWords::inherited(BYTES);
        let source = pinned(BYTES);
        let stream = new_stream();
        // SAFETY: allocated above.
        unsafe { source.write_bytes(0xAB, BYTES) };
        must!(cuMemcpyAsync(words.device, source as u64, BYTES, stream));
        synchronize(stream);
        panic!("killed by then");
    }
    begin();
    let words = SharedWords::new(BYTES);
    // The whole copy would take 10 s on average.
    let mut copier = start(TEST, "copy", &[("SIMCUDA_DELAY", "20000"), ("WORDS", &words.descriptor())]);
    words.wait(0);
    copier.kill();
    // SAFETY: mapped by this process, and no process writes any more.
    let bytes = unsafe { std::slice::from_raw_parts(words.map, BYTES) };
    let written = bytes.iter().take_while(|byte| **byte == 0xAB).count();
    assert!((1..BYTES).contains(&written), "{written}");
    assert!(bytes[written..].iter().all(|byte| *byte == 0));
}
