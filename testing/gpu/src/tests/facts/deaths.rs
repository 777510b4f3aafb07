//! Deaths, and their effects on other processes.

use partywall::cuda::CuResult;

use super::neighbours::{self, At, Victim, ourselves};
use super::{BYTES, OK, outlived, query_twice};
use crate::raw::{GEQ, READ, READ_WRITE, Words};
use crate::tests::stage::{Check, Line, Peer};
use crate::tests::world::eventually;

/// Makes a stream wait for the event of the given handle, and reports the state of the stream on request. The process
/// is killed in the end, because its stream may stay blocked.
pub(super) fn waiter_for_an_event(check: &Check, line: &Line) -> Result<(), String> {
    let handle = line.hear()?.ok_or("the test sent no handle")?.handle()?;
    check.start()?;
    let stream = check.stream()?;
    let mut event = 0;
    check.cuda.ipc_open_event_handle(&mut event, handle).ok()?;
    check.cuda.stream_wait_event(stream, event, 0).ok()?;
    line.send("waiting")?;
    while line.hear()?.is_some() {
        line.send(query_twice(check, stream)?.code.to_string())?;
    }
    outlived()
}

/// A stream that waits for the event of a killed process stays blocked.
fn stays_blocked(check: &Check, at: At) -> Result<(), String> {
    let mut recorder = Victim::start(at, ourselves())?;
    let mut waiter = Peer::start("waiter_for_an_event")?;
    waiter.send(recorder.event.0)?;
    waiter.expect("waiting")?;
    let mut ask = |question: &str| -> Result<(), String> {
        waiter.send("how is it?")?;
        check.same(question, waiter.hear()?.text(), CuResult::NOT_READY.to_string());
        Ok(())
    };
    ask("before the recorder is killed")?;
    recorder.peer.kill()?;
    for _ in 0..10 {
        ask("after that")?;
    }
    waiter.kill()
}

pub(super) fn the_event_of_a_killed_recorder_stays_blocked(check: &Check) -> Result<(), String> {
    stays_blocked(check, At::AWait)
}

pub(super) fn the_event_behind_an_endless_kernel_stays_blocked(check: &Check) -> Result<(), String> {
    stays_blocked(check, At::AnEndlessKernel)
}

pub(super) fn a_process_can_be_killed_while_its_stream_waits(check: &Check) -> Result<(), String> {
    check.start()?;
    let file = Words::file(4096)?;
    let words = Words::map(&file, true)?;
    let (memory, address) = check.mapped(BYTES)?;
    check.fill(address, BYTES)?;
    let mut writer = Peer::start("writer_behind_a_wait")?;
    writer.give("words", &file)?;
    writer.give("memory", check.export(memory)?)?;
    writer.expect("waiting")?;
    writer.kill()?;
    // The process is gone, and its enqueued work is gone with it.
    words.store(0, 1);
    check.answers("a stream here works on", query_twice(check, check.stream()?)?, OK);
    check.same("its work behind the wait", check.holds_pattern(address, BYTES, 1)?, true);
    check.same("its value behind that", words.load(1), 0);
    Ok(())
}

/// Enqueues work and a value behind a wait, and is killed.
pub(super) fn writer_behind_a_wait(check: &Check, line: &Line) -> Result<(), String> {
    let words = Words::map(line.hear()?.ok_or("the test sent nothing")?.descriptor()?, true)?;
    let memory = line.hear()?.ok_or("the test sent nothing")?.descriptor()?;
    check.start()?;
    check.load_kernels()?;
    let stream = check.stream()?;
    let word = check.register(&words)?;
    let address = check.map(check.import(memory)?, BYTES, READ_WRITE)?;
    check.cuda.stream_wait_value64(stream, word, 1, GEQ).ok()?;
    check.enqueue_double(stream, address, BYTES)?;
    check.cuda.stream_write_value64(stream, word + 8, 1, 0).ok()?;
    line.send("waiting")?;
    line.hear().map(drop)?;
    outlived()
}

/// Fills the memory that it receives with one value after the other, until it is killed.
pub(super) fn endless_writer(check: &Check, line: &Line) -> Result<(), String> {
    let memory = line.hear()?.ok_or("the test sent nothing")?.descriptor()?;
    check.start()?;
    let stream = check.stream()?;
    let address = check.map(check.import(memory)?, 4 * BYTES, READ_WRITE)?;
    for round in 0_u64.. {
        check.cuda.memset_d8_async(address, round as u8, 4 * BYTES, stream).ok()?;
        if round % 16 == 15 {
            check.cuda.stream_synchronize(stream).ok()?;
        }
        if round == 31 {
            line.send("writing")?;
        }
    }
    Ok(())
}

pub(super) fn writes_of_a_killed_process_stop(check: &Check) -> Result<(), String> {
    check.start()?;
    let (memory, address) = check.mapped(4 * BYTES)?;
    for _ in 0..5 {
        let mut writer = Peer::start("endless_writer")?;
        writer.give("memory", check.export(memory)?)?;
        writer.expect("writing")?;
        writer.kill()?;
        let after: [u8; 4096] = check.bytes(address)?;
        let mut bytes = vec![0; 4 * BYTES];
        check.cuda.read(&mut bytes, address).ok()?;
        check.same("the bytes change no more", bytes[..4096] == after, true);
        let mut found = [false; 256];
        bytes.iter().for_each(|byte| found[usize::from(*byte)] = true);
        let values: Vec<usize> = (0..256).filter(|value| found[*value]).collect();
        // At most one round may have been interrupted in the middle.
        let in_a_row = match values.as_slice() {
            [_] | [0, 255] => true,
            [low, high] => high - low == 1,
            _ => false,
        };
        check.same(&format!("{values:?} are of one round, or of two in a row"), in_a_row, true);
    }
    Ok(())
}

pub(super) fn a_death_in_an_endless_kernel_ends_its_writes_and_harms_no_other_process(
    check: &Check,
) -> Result<(), String> {
    check.start()?;
    let mut neighbour = neighbours::start(ourselves())?;
    let mut victim = Victim::start(At::AnEndlessKernel, ourselves())?;
    let address = check.map(check.import(&victim.memory)?, BYTES, READ)?;
    let count = || check.bytes(address).map(u64::from_ne_bytes);
    let before = count()?;
    eventually("counting", || Ok(count()? > before))?;
    victim.peer.kill()?;
    let last = count()?;
    check.same("the neighbour", neighbours::enough(&mut neighbour)?, OK);
    check.same("the kernel counts no more", count()?, last);
    neighbour.finish()
}

pub(super) fn a_death_outside_of_kernels_harms_no_other_process(check: &Check) -> Result<(), String> {
    neighbours::harms_nobody(check, At::Nothing, ourselves)?;
    neighbours::harms_nobody(check, At::AWait, ourselves)
}

pub(super) fn a_death_between_short_kernels_harms_no_other_process(check: &Check) -> Result<(), String> {
    for _ in 0..3 {
        neighbours::harms_nobody(check, At::ShortKernels, ourselves)?;
    }
    Ok(())
}
