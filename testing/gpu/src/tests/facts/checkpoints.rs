//! Checkpoints of a process (`cuCheckpointProcess*`): what it may share when it is to be restored.

use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use partywall::cuda::CuResult;
use rustix::process::Signal;

use super::pinned;
use super::{BYTES, OK};
use crate::raw::{self, AccessRule, Answer, Cuda, LAZY_PEER, POSIX_FD, READ_WRITE};
use crate::tests::stage::{Check, Line, Peer};

/// `CU_PROCESS_STATE_CHECKPOINTED`.
const CHECKPOINTED: u32 = 2;
/// `CU_LIMIT_STACK_SIZE`.
const STACK_SIZE: u32 = 0;

/// What a process has when it is checkpointed.
pub(super) fn checkpointed(check: &Check, line: &Line) -> Result<(), String> {
    check.start()?;
    check.load_kernels()?;
    let mut order = line.hear()?.ok_or("the test sent nothing")?;
    let what = order.text();
    match what.as_str() {
        "addresses" => {
            let address = check.reserve(BYTES)?;
            let descriptor = order.descriptor()?;
            let mut memory = 0;
            check.cuda.mem_import(&mut memory, raw::number(descriptor.as_fd()), POSIX_FD).ok()?;
            check.cuda.mem_map(address, BYTES, 0, memory, 0).ok()?;
            check.cuda.mem_set_access(address, BYTES, &AccessRule::of(0, READ_WRITE), 1).ok()?;
            check.same("the bytes before", check.holds_pattern(address, BYTES, 1)?, true);
            check.cuda.mem_unmap(address, BYTES).ok()?;
            check.cuda.mem_release(memory).ok()?;
            line.send("ready")?;
            order = line.hear()?.ok_or("the test sent nothing")?;
            let memory = check.import(order.descriptor()?)?;
            check.map_at(address, memory, BYTES)?;
            check.cuda.mem_set_access(address, BYTES, &AccessRule::of(0, READ_WRITE), 1).ok()?;
            check.same("the bytes afterwards, at the same address", check.holds_pattern(address, BYTES, 1)?, true);
        }
        "import" => {
            check.map(check.import(order.descriptor()?)?, BYTES, READ_WRITE)?;
            line.send("ready")?;
        }
        "legacy" => {
            order = line.hear()?.ok_or("the test sent nothing")?;
            check.cuda.ipc_open_mem_handle(&mut 0, order.handle()?, LAZY_PEER).ok()?;
            line.send("ready")?;
        }
        "pinned" => {
            pinned::map_new(check)?;
            line.send("ready")?;
        }
        "owner" => {
            let (handle, address) = check.mapped(BYTES)?;
            check.fill(address, BYTES)?;
            line.give("ready", check.export(handle)?)?;
            line.hear()?;
            check.same("the owner's bytes afterwards", check.holds_pattern(address, BYTES, 1)?, true);
            check.double(address, BYTES)?.ok()?;
        }
        "registered" => {
            let (words, address) = check.words()?;
            words.store(0, 7);
            line.send("ready")?;
            line.hear()?;
            words.store(1, 8);
            let seen = [address, address + 8].map(|word| check.bytes(word).map(u64::from_ne_bytes));
            check.same("the words afterwards", seen, [Ok(7), Ok(8)]);
        }
        "query" => {
            let stream = check.stream()?;
            return while_asking(check, line, move |cuda| cuda.stream_query(stream));
        }
        "limit" => return while_asking(check, line, |cuda| cuda.ctx_get_limit(&mut 0, STACK_SIZE)),
        other => return Err(format!("unknown command {other:?}")),
    }
    line.send("done")?;
    line.hear().map(drop)
}

/// Asks the driver again and again on a thread of its own until the test has spoken, and checks that it always answered.
fn while_asking(check: &Check, line: &Line, ask: impl Fn(&Cuda) -> Answer + Sync) -> Result<(), String> {
    let mut context = 0;
    check.cuda.ctx_get_current(&mut context).ok()?;
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let cuda = Cuda::load()?;
            cuda.ctx_set_current(context).ok()?;
            while !stop.load(Ordering::Acquire) {
                ask(&cuda).ok()?;
            }
            Ok(())
        });
        let heard = line.send("ready").and_then(|()| line.hear().map(drop));
        stop.store(true, Ordering::Release);
        heard.and(asking.join().map_err(|_| "the thread panicked")?)
    })?;
    line.send("done")?;
    line.hear().map(drop)
}

/// Checkpoints a process that is ready, and returns the driver's answer.
fn checkpoint(check: &Check, peer: &Peer) -> Result<CuResult, String> {
    check.cuda.checkpoint_lock(peer.pid(), &[5000, 0, 0, 0, 0, 0, 0, 0]).ok()?;
    Ok(check.cuda.checkpoint_checkpoint(peer.pid(), 0).code)
}

/// Checkpoints a process that is ready, and returns the driver's answer to its restoration.
fn restore(check: &Check, peer: &Peer) -> Result<CuResult, String> {
    let pid = peer.pid();
    check.same("it is checkpointed", checkpoint(check, peer)?, OK);
    let mut state = 0;
    check.cuda.checkpoint_get_state(pid, &mut state).ok()?;
    check.same("its state", state, CHECKPOINTED);
    let restored = check.cuda.checkpoint_restore(pid, 0);
    if restored.code == OK {
        check.cuda.checkpoint_unlock(pid, 0).ok()?;
    }
    Ok(restored.code)
}

/// Starts a process that has something, in the state for its checkpoint.
fn start(send: impl FnOnce(&Peer) -> Result<(), String>) -> Result<Peer, String> {
    let mut peer = Peer::start("checkpointed")?;
    send(&peer)?;
    peer.expect("ready")?;
    Ok(peer)
}

pub(super) fn a_process_that_keeps_addresses_alone_is_restored(check: &Check) -> Result<(), String> {
    check.start()?;
    let (handle, address) = check.mapped(BYTES)?;
    check.fill(address, BYTES)?;
    let descriptor = check.export(handle)?;
    let mut peer = start(|peer| peer.give("addresses", &descriptor))?;
    check.same("it is restored", restore(check, &peer)?, OK);
    peer.give("again", &descriptor)?;
    peer.expect("done")?;
    peer.finish()
}

pub(super) fn a_process_with_imported_memory_is_not_restored(check: &Check) -> Result<(), String> {
    check.start()?;
    let (handle, _) = check.mapped(BYTES)?;
    let descriptor = check.export(handle)?;
    let mut peer = start(|peer| peer.give("import", &descriptor))?;
    peer.expect("done")?;
    check.same("with a mapped import", restore(check, &peer)?, CuResult::NOT_SUPPORTED);
    peer.kill()
}

pub(super) fn a_process_with_an_open_legacy_handle_is_not_restored(check: &Check) -> Result<(), String> {
    check.start()?;
    let handle = check.legacy_handle(check.alloc(BYTES)?)?;
    let mut peer = Peer::start("checkpointed")?;
    peer.send("legacy")?;
    peer.send(handle.0)?;
    peer.expect("ready")?;
    peer.expect("done")?;
    check.same("with an open handle", restore(check, &peer)?, CuResult::INVALID_VALUE);
    peer.kill()
}

pub(super) fn a_process_with_pinned_memory_is_not_restored(check: &Check) -> Result<(), String> {
    check.start()?;
    let mut peer = start(|peer| peer.send("pinned"))?;
    peer.expect("done")?;
    check.same("with memory of a NUMA node", restore(check, &peer)?, CuResult::UNKNOWN);
    peer.kill()
}

pub(super) fn an_owner_is_restored_with_a_copy(check: &Check) -> Result<(), String> {
    check.start()?;
    let mut peer = Peer::start("checkpointed")?;
    peer.send("owner")?;
    let address = check.map(check.import(peer.hear()?.descriptor()?)?, BYTES, READ_WRITE)?;
    check.same("it is restored", restore(check, &peer)?, OK);
    peer.send("go")?;
    peer.expect("done")?;
    check.same("what it writes then is not seen here", check.holds_pattern(address, BYTES, 1)?, true);
    peer.finish()
}

pub(super) fn registered_host_memory_is_restored(check: &Check) -> Result<(), String> {
    check.start()?;
    let mut peer = start(|peer| peer.send("registered"))?;
    check.same("it is restored", restore(check, &peer)?, OK);
    peer.send("go")?;
    peer.expect("done")?;
    peer.finish()
}

pub(super) fn a_thread_that_queries_a_stream_ends_its_process(check: &Check) -> Result<(), String> {
    check.start()?;
    let mut peer = start(|peer| peer.send("query"))?;
    check.same("the checkpoint", checkpoint(check, &peer)?, CuResult::OPERATING_SYSTEM);
    check.same("the signal that ended it", peer.end()?.signal(), Some(Signal::SEGV.as_raw()));
    Ok(())
}

pub(super) fn a_thread_that_asks_for_a_limit_is_held_up(check: &Check) -> Result<(), String> {
    check.start()?;
    let mut peer = start(|peer| peer.send("limit"))?;
    check.same("it is restored", restore(check, &peer)?, OK);
    peer.send("go")?;
    peer.expect("done")?;
    peer.finish()
}
