//! Streams, memory operations, host functions, captures.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use partywall::cuda::CuResult;

use super::legacy::Legacy;
use super::{BYTES, INVALID, MIB, OK, query_twice, wait_for};
use crate::raw::{CAPTURE_GLOBAL, CAPTURE_RELAXED, Cuda, GEQ, NO_TIMING, NON_BLOCKING, READ_WRITE, Words};
use crate::tests::stage::{Check, Line, Peer, pattern};
use crate::tests::world::{TIMEOUT, ensure};

pub(super) fn a_stream_works_in_order(check: &Check) -> Result<(), String> {
    check.start()?;
    check.load_kernels()?;
    let stream = check.stream()?;
    let address = check.alloc(16 * MIB)?;
    let (words, word) = check.words()?;
    check.cuda.stream_wait_value64(stream, word, 1, GEQ).ok()?;
    check.enqueue_fill(stream, address, 16 * MIB)?;
    check.enqueue_double(stream, address, 16 * MIB)?;
    check.answers("a stream with work", check.cuda.stream_query(stream), CuResult::NOT_READY);
    let other = check.alloc(BYTES)?;
    check.fill(other, BYTES)?;
    check.same("another stream is not kept", check.holds_pattern(other, BYTES, 1)?, true);
    check.answers("and this one still waits", check.cuda.stream_query(stream), CuResult::NOT_READY);
    words.store(0, 1);
    check.answers("waiting for it", check.cuda.stream_synchronize(stream), OK);
    check.answers("a stream without work", check.cuda.stream_query(stream), OK);
    check.same("everything came in order", check.holds_pattern(address, 16 * MIB, 2)?, true);
    Ok(())
}

/// Returns the poison of a timeline whose last value is `last`.
fn poison(last: u64) -> u64 {
    last + (1 << 62) + 1
}

pub(super) fn a_wait_compares_signed_differences(check: &Check) -> Result<(), String> {
    check.start()?;
    let (words, word) = check.words()?;
    for (found, value, passes) in [
        (0, 0, true),
        (0, 1, false),
        (5, 4, true),
        (5, 5, true),
        (5, 6, false),
        (1 << 61, 1 << 61, true),
        (0, 1 << 61, false),
        (poison(0), 0, true),
        (poison(0), 1 << 61, true),
        (poison(1 << 61), 0, true),
        (poison(1 << 61), 1 << 61, true),
        // All ones are not usable as poison, because they compare as -1.
        (u64::MAX, 0, false),
        (u64::MAX, 5, false),
        (1 << 63, 0, false),
        (1 << 63, 1, true),
    ] {
        let stream = check.stream()?;
        words.store(0, found);
        check.cuda.stream_wait_value64(stream, word, value, GEQ).ok()?;
        let question = format!("{found:#x} reaches {value:#x}");
        if passes {
            check.answers(&question, wait_for(check, stream)?, OK);
        } else {
            check.answers(&question, query_twice(check, stream)?, CuResult::NOT_READY);
        }
        words.store(0, value);
        check.answers("the value itself always does", wait_for(check, stream)?, OK);
    }
    for (found, value, passes) in
        [(5_u32, 5_u32, true), (5, 6, false), (u32::MAX, 0, false), (1 << 30, 0, true), (1 << 31, 0, false)]
    {
        let stream = check.stream()?;
        words.store(0, found.into());
        check.cuda.stream_wait_value32(stream, word, value, GEQ).ok()?;
        let answer = if passes { wait_for(check, stream)? } else { query_twice(check, stream)? };
        let expected = if passes { OK } else { CuResult::NOT_READY };
        check.answers(&format!("32 bits: {found:#x} reaches {value:#x}"), answer, expected);
        words.store(0, value.into());
        check.answers("the value itself always does", wait_for(check, stream)?, OK);
    }
    Ok(())
}

pub(super) fn memory_operations_work_on_every_kind_of_memory(check: &Check) -> Result<(), String> {
    let mut owner = Peer::start("owner_of_exported_memory")?;
    let descriptor = owner.hear()?.descriptor()?;
    let Legacy { owner: legacy_owner, whole, .. } = Legacy::start()?;
    check.start()?;
    let writer = check.stream()?;
    let waiter = check.stream()?;
    let imported = check.map(check.import(descriptor)?, BYTES, READ_WRITE)?;
    let mut pinned = 0;
    check.cuda.mem_host_alloc(&mut pinned, 4096, 1).ok()?;
    check.undo(move |cuda| cuda.mem_free_host(pinned));
    for (kind, address) in [
        ("allocated", check.alloc(4096)?),
        ("mapped", check.mapped(BYTES)?.1),
        ("imported", imported),
        ("legacy", check.open_legacy(whole)?),
        ("registered", check.words()?.1),
        ("pinned", pinned),
    ] {
        check.cuda.memset_d8_async(address, 0, 64, writer).ok()?;
        check.cuda.stream_synchronize(writer).ok()?;
        check.answers(kind, check.cuda.stream_wait_value64(waiter, address, 7, GEQ), OK);
        check.answers(kind, check.cuda.stream_wait_value32(waiter, address + 16, 9, GEQ), OK);
        check.answers(kind, check.cuda.stream_write_value64(writer, address, 7 + (1 << 40), 0), OK);
        check.answers(kind, check.cuda.stream_write_value32(writer, address + 16, 9, 0), OK);
        check.answers(kind, wait_for(check, waiter)?, OK);
    }
    owner.finish()?;
    legacy_owner.finish()
}

pub(super) fn memory_operations_refuse_what_they_cannot_address(check: &Check) -> Result<(), String> {
    check.start()?;
    let stream = check.stream()?;
    let address = check.alloc(4096)?;
    let host = vec![0_u64; 64];
    check.answers("8 bytes at 4", check.cuda.stream_wait_value64(stream, address + 4, 0, GEQ), INVALID);
    check.answers("8 bytes at 4", check.cuda.stream_write_value64(stream, address + 4, 0, 0), INVALID);
    check.answers("4 bytes at 2", check.cuda.stream_wait_value32(stream, address + 2, 0, GEQ), INVALID);
    let host = host.as_ptr() as u64;
    check.answers("host memory", check.cuda.stream_write_value64(stream, host, 0, 0), INVALID);
    check.answers("host memory", check.cuda.stream_wait_value64(stream, host, 0, GEQ), INVALID);
    check.answers("no address", check.cuda.stream_wait_value64(stream, 0, 0, GEQ), INVALID);
    check.answers("the stream works on", check.cuda.stream_synchronize(stream), OK);
    Ok(())
}

pub(super) fn a_written_value_comes_after_the_work_before_it(check: &Check) -> Result<(), String> {
    check.start()?;
    check.load_kernels()?;
    let stream = check.stream()?;
    let (words, word) = check.words()?;
    let memory = Words::map(Words::file(16 * MIB)?, true)?;
    let device = check.register(&memory)?;
    let count = memory.bytes() as u64 / 4;
    let expected = |index: u64| u64::from(pattern(2 * index + 1)) << 32 | u64::from(pattern(2 * index));
    for round in 1..=8 {
        check.cuda.memset_d8_async(device, 0, memory.bytes(), stream).ok()?;
        check.cuda.stream_synchronize(stream).ok()?;
        check.enqueue_fill(stream, device, memory.bytes())?;
        check.cuda.stream_write_value64(stream, word, round, 0).ok()?;
        let deadline = Instant::now() + TIMEOUT / 4;
        while words.load(0) < round {
            ensure(Instant::now() < deadline, || "the value did not come".into())?;
        }
        let wrong = (0..count / 2).filter(|index| memory.load(*index as usize) != expected(*index)).count();
        check.same("words that came after the value", wrong, 0);
    }
    Ok(())
}

/// Registers the words that it receives, and makes a stream wait for the first of them.
pub(super) fn waiter_for_a_store(check: &Check, line: &Line) -> Result<(), String> {
    let words = Words::map(line.hear()?.ok_or("the test sent nothing")?.descriptor()?, true)?;
    check.start()?;
    check.load_kernels()?;
    let stream = check.stream()?;
    let word = check.register(&words)?;
    let address = check.alloc(BYTES)?;
    check.cuda.stream_wait_value64(stream, word, 5, GEQ).ok()?;
    check.enqueue_fill(stream, address, BYTES)?;
    check.answers("before the store", query_twice(check, stream)?, CuResult::NOT_READY);
    line.send("waiting")?;
    check.answers("after the store", check.cuda.stream_synchronize(stream), OK);
    check.same("what was behind it is done", check.holds_pattern(address, BYTES, 1)?, true);
    line.send("released")
}

pub(super) fn a_plain_store_of_another_process_releases_a_stream(_: &Check) -> Result<(), String> {
    let file = Words::file(4096)?;
    let words = Words::map(&file, true)?;
    for value in [5, poison(3)] {
        words.store(0, 0);
        let mut waiter = Peer::start("waiter_for_a_store")?;
        waiter.give("words", &file)?;
        waiter.expect("waiting")?;
        words.store(0, value);
        waiter.expect("released")?;
        waiter.finish()?;
    }
    Ok(())
}

static CALLS: AtomicU64 = AtomicU64::new(0);
static CODE_INSIDE: AtomicU64 = AtomicU64::new(u64::MAX);

extern "C" fn count(calls: &'static AtomicU64) {
    calls.fetch_add(1, Ordering::SeqCst);
}

extern "C" fn call_the_driver(code: &'static AtomicU64) {
    let answer = Check::new().map(|check| check.cuda.stream_query(0).code.0);
    code.store(answer.map_or(u64::MAX, u64::from), Ordering::SeqCst);
}

pub(super) fn host_functions_run_in_order_and_may_not_call_the_driver(check: &Check) -> Result<(), String> {
    check.start()?;
    let stream = check.stream()?;
    let (words, word) = check.words()?;
    check.cuda.stream_wait_value64(stream, word, 1, GEQ).ok()?;
    check.answers("enqueue", check.cuda.launch_host_function(stream, count, &CALLS), OK);
    check.answers("what is before it is not done", query_twice(check, stream)?, CuResult::NOT_READY);
    check.same("calls before what is before them is done", CALLS.load(Ordering::SeqCst), 0);
    words.store(0, 1);
    check.cuda.stream_synchronize(stream).ok()?;
    check.same("calls after it", CALLS.load(Ordering::SeqCst), 1);
    check.cuda.launch_host_function(stream, call_the_driver, &CODE_INSIDE).ok()?;
    check.cuda.stream_synchronize(stream).ok()?;
    let code = CuResult(CODE_INSIDE.load(Ordering::SeqCst) as u32);
    check.same("a driver call inside", code, CuResult::NOT_PERMITTED);
    Ok(())
}

pub(super) fn streams_have_identities(check: &Check) -> Result<(), String> {
    check.start()?;
    let one = check.stream()?;
    let other = check.stream()?;
    let mut context = 0;
    check.cuda.ctx_get_current(&mut context).ok()?;
    let id = |cuda: &Cuda, stream| {
        let mut id = 0;
        cuda.stream_get_id(stream, &mut id).ok().map(|()| id)
    };
    let own = |stream| id(&check.cuda, stream);
    check.same("a stream is itself", own(one)? == own(one)?, true);
    check.same("a stream is another one", own(one)? == own(other)?, false);
    check.same("the null stream is the legacy one", own(0)? == own(1)?, true);
    let of_another_thread = std::thread::scope(|scope| {
        let asked = scope.spawn(|| -> Result<_, String> {
            let cuda = Cuda::load()?;
            cuda.ctx_set_current(context).ok()?;
            Ok((id(&cuda, one)?, id(&cuda, 2)?))
        });
        asked.join().map_err(|_| "the thread panicked".to_owned())?
    })?;
    check.same("a stream is itself on another thread", of_another_thread.0 == own(one)?, true);
    check.same("a thread's default stream is that of another", of_another_thread.1 == own(2)?, false);
    // The driver reuses the handle of a destroyed stream.
    let mut ids = Vec::new();
    for _ in 0..4 {
        let mut stream = 0;
        check.cuda.stream_create(&mut stream, NON_BLOCKING).ok()?;
        ids.push(own(stream)?);
        check.cuda.stream_destroy(stream).ok()?;
    }
    ids.sort_unstable();
    ids.dedup();
    check.same("streams one after the other", ids.len(), 4);
    Ok(())
}

pub(super) fn a_fault_ends_the_context_and_skips_host_functions(check: &Check) -> Result<(), String> {
    check.start()?;
    check.load_kernels()?;
    let stream = check.stream()?;
    let other = check.stream()?;
    let (words, word) = check.words()?;
    let event = check.event(NO_TIMING)?;
    check.cuda.stream_wait_value64(stream, word, 1, GEQ).ok()?;
    check.enqueue_fill(stream, 1 << 40, BYTES)?;
    check.cuda.launch_host_function(stream, count, &CALLS).ok()?;
    check.cuda.stream_write_value64(stream, word + 8, 1, 0).ok()?;
    check.cuda.event_record(event, stream).ok()?;
    check.give_nothing_back();
    words.store(0, 1);
    let fault = CuResult::ILLEGAL_ADDRESS;
    check.answers("the stream", check.cuda.stream_synchronize(stream), fault);
    check.answers("another stream", check.cuda.stream_query(other), fault);
    check.answers("an event behind it", check.cuda.event_query(event), fault);
    let mut address = 0;
    let mut free = 0;
    let mut total = 0;
    check.answers("an allocation", check.cuda.mem_alloc(&mut address, BYTES), fault);
    check.answers("free memory", check.cuda.mem_get_info(&mut free, &mut total), fault);
    check.answers("a write", check.cuda.stream_write_value64(other, word, 1, 0), fault);
    check.answers("registered memory", check.cuda.mem_host_unregister(words.address()), fault);
    check.same("host functions behind it", CALLS.load(Ordering::SeqCst), 0);
    check.same("values written behind it", words.load(1), 0);
    Ok(())
}

pub(super) fn relaxed_calls_leave_a_capture_alone(check: &Check) -> Result<(), String> {
    check.start()?;
    let stream = check.stream()?;
    let address = check.alloc(BYTES)?;
    let mut graph = 0;
    let mut other = 0;
    let begin = || check.cuda.stream_begin_capture(stream, CAPTURE_GLOBAL);
    begin().ok()?;
    check.answers("memset while capturing", check.cuda.memset_d8_async(address, 1, BYTES, stream), OK);
    let unsafe_call = check.cuda.mem_alloc(&mut other, BYTES);
    check.answers("a call that may not happen then", unsafe_call, CuResult::STREAM_CAPTURE_UNSUPPORTED);
    let ended = check.cuda.stream_end_capture(stream, &mut graph);
    check.answers("spoils the capture", ended, CuResult::STREAM_CAPTURE_INVALIDATED);

    begin().ok()?;
    let waited = check.cuda.stream_synchronize(stream);
    check.answers("waiting for a stream that captures", waited, CuResult::STREAM_CAPTURE_UNSUPPORTED);
    let ended = check.cuda.stream_end_capture(stream, &mut graph);
    check.answers("spoils it as well", ended, CuResult::STREAM_CAPTURE_INVALIDATED);

    begin().ok()?;
    let mut mode = CAPTURE_RELAXED;
    check.answers("the mode of the thread", check.cuda.thread_exchange_capture_mode(&mut mode), OK);
    check.same("was global", mode, CAPTURE_GLOBAL);
    let allocated = check.cuda.mem_alloc(&mut other, BYTES);
    check.answers("the call in relaxed mode", allocated, OK);
    let (_, mapped) = check.mapped(BYTES)?;
    check.same("so are create, map and access", mapped != 0, true);
    check.answers("the mode back", check.cuda.thread_exchange_capture_mode(&mut mode), OK);
    check.same("was relaxed", mode, CAPTURE_RELAXED);
    check.answers("the capture is whole", check.cuda.stream_end_capture(stream, &mut graph), OK);
    check.cuda.graph_destroy(graph).ok()?;
    if allocated.code.is_success() {
        check.cuda.mem_free(other).ok()?;
    }
    Ok(())
}
