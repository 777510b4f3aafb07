//! Taking permits of semaphores and blocks of pools, and waiting for them in order.

#[cfg(feature = "tokio")]
use std::sync::Arc;
use std::{
    ops::Deref,
    time::{Duration, Instant},
};

#[cfg(feature = "tokio")]
use partywall_os::process::fork_generation;
#[cfg(feature = "tokio")]
use partywall_shm::MAX_SLEEP;
use partywall_shm::slots::{Attempt, HeldSlot, Polled, Slots, Waiter};
use partywall_wire::Call;

#[cfg(feature = "tokio")]
use crate::domain::blocking;
use crate::{
    adaptive_spin::AdaptiveSpin,
    domain::Domain,
    error::Result,
    wait::{Wait, Waiting},
};

/// Slots in shared memory that threads take, wait for and give back.
pub(crate) trait SlotSource {
    /// Takes a slot if one is free and no thread waits for one.
    fn try_take(&self, row: u16) -> Option<HeldSlot>;

    /// Takes a slot, or queues for one.
    fn take(&self, row: u16) -> Attempt<'_>;

    /// Revokes slots that were handed to a stopped process. Callers that find no free slot call this from time to time.
    fn rescue(&self);
}

/// A semaphore, or a pool.
impl<T: Deref<Target = Slots>> SlotSource for T {
    fn try_take(&self, row: u16) -> Option<HeldSlot> {
        (**self).try_take(row)
    }

    fn take(&self, row: u16) -> Attempt<'_> {
        (**self).take(row)
    }

    fn rescue(&self) {
        self.revoke_overdue();
    }
}

/// Takes a slot if one is free and no thread waits for one.
pub(crate) fn try_take(slots: &impl SlotSource, domain: &Domain) -> Result<Option<HeldSlot>> {
    let link = domain.link();
    link.require_ours()?;
    let held = take_free(slots, domain);
    if held.is_none() {
        slots.rescue();
    }
    Ok(held)
}

/// Takes a free slot. If none is free, first polls for slots that streams have just finished with.
fn take_free(slots: &impl SlotSource, domain: &Domain) -> Option<HeldSlot> {
    let row = domain.link().row();
    slots.try_take(row).or_else(|| {
        domain.completions().poll();
        slots.try_take(row)
    })
}

/// Takes a slot, and waits if none is free. The waiter keeps its place in the queue until the wait is over. `live`
/// fails once waiting makes no sense any more; `what` is the message of the timeout.
pub(crate) fn take(
    slots: &impl SlotSource,
    domain: &Domain,
    spin: &AdaptiveSpin,
    wait: Wait<'_>,
    live: impl Fn() -> Result<()>,
    what: impl FnOnce() -> String,
) -> Result<HeldSlot> {
    let link = domain.link();
    link.require_ours()?;
    if let Some(held) = take_free(slots, domain) {
        return Ok(held);
    }
    let waiting = wait.begin();
    loop {
        match slots.take(link.row()) {
            Attempt::Held(held) => return Ok(held),
            Attempt::Waiting(waiter) => {
                if let Some(held) = await_turn(slots, domain, spin, waiter, &waiting, &live)? {
                    return Ok(held);
                }
            }
            Attempt::Crowded => {
                live()?;
                std::thread::sleep(CROWDED.min(waiting.left(Instant::now()).unwrap_or_default()));
            }
        }
        if waiting.left(Instant::now()).is_none() {
            slots.rescue();
            return Err(waiting.error(what()));
        }
    }
}

/// As [`take`], without blocking a thread. A future that is dropped leaves the queue. Returns `None` after `limit`.
#[cfg(feature = "tokio")]
pub(crate) async fn take_async<T>(
    slots: &Arc<T>,
    domain: &Domain,
    live: impl Fn() -> Result<()>,
    limit: Option<Duration>,
) -> Result<Option<HeldSlot>>
where
    T: Deref<Target = Slots> + Send + Sync + 'static,
{
    let link = domain.link();
    link.require_ours()?;
    if let Some(held) = take_free(&**slots, domain) {
        return Ok(Some(held));
    }
    let end = limit.map(|limit| Instant::now() + limit);
    let is_over = move |now| end.is_some_and(|end| now >= end);
    let mut serve = Instant::now() + MAX_SLEEP;
    while !is_over(Instant::now()) {
        link.require_ours()?;
        let mut waiting = match slots.take(link.row()) {
            Attempt::Held(held) => return Ok(Some(held)),
            Attempt::Waiting(waiter) => OwnWaiter { waiter: Some(waiter), generation: fork_generation() },
            Attempt::Crowded => {
                live()?;
                domain.pause(CROWDED).await;
                continue;
            }
        };
        while let Some(waiter) = &mut waiting.waiter {
            match waiter.poll() {
                Polled::Held(held) => return Ok(Some(held)),
                Polled::Waiting => {}
                // As in `await_turn`: the broker has the reason, if it was not a pause of this task.
                Polled::Lost => {
                    let domain = domain.clone();
                    blocking(move || domain.ping()).await?;
                    break;
                }
            }
            let now = Instant::now();
            if is_over(now) {
                return Ok(waiting.cancel());
            }
            // What a waiting thread does after each sleep.
            if now >= serve {
                slots.serve_all();
                slots.rescue();
                serve = now + MAX_SLEEP;
            }
            if let Err(gone) = live() {
                return waiting.cancel().map(Some).ok_or(gone);
            }
            let turn = waiter.turn();
            let slots = slots.clone();
            domain.until(move |now| slots.has_come(turn) || is_over(now)).await;
            link.require_ours()?;
        }
    }
    slots.rescue();
    Ok(None)
}

/// A waiter of a future. Its copy in a forked child belongs to the parent.
#[cfg(feature = "tokio")]
struct OwnWaiter<'a> {
    /// `None` once it has left the queue.
    waiter: Option<Waiter<'a>>,
    generation: u64,
}

#[cfg(feature = "tokio")]
impl OwnWaiter<'_> {
    /// Leaves the queue. Returns the slot if its turn has come meanwhile.
    fn cancel(&mut self) -> Option<HeldSlot> {
        self.waiter.take().and_then(Waiter::cancel)
    }
}

#[cfg(feature = "tokio")]
impl Drop for OwnWaiter<'_> {
    fn drop(&mut self) {
        if self.generation != fork_generation() {
            std::mem::forget(self.waiter.take());
        }
    }
}

/// Waits for a turn. Returns `None` if the wait is over or the turn was lost.
fn await_turn(
    slots: &impl SlotSource,
    domain: &Domain,
    spin: &AdaptiveSpin,
    mut waiter: Waiter<'_>,
    waiting: &Waiting<'_>,
    live: impl Fn() -> Result<()>,
) -> Result<Option<HeldSlot>> {
    let mut now = spin.spin(waiting.start(), waiting.timeout(), || !waiter.is_waiting());
    loop {
        match waiter.poll() {
            Polled::Held(held) => return Ok(Some(held)),
            Polled::Waiting => {}
            // This process was stopped for a while, or the broker revoked the slot and then returns the reason.
            Polled::Lost => return domain.link().call(Call::Ping).map(|_| None),
        }
        let Some(left) = waiting.left(now.take().unwrap_or_else(Instant::now)) else {
            return Ok(waiter.cancel());
        };
        if let Err(gone) = live() {
            return waiter.cancel().map(Some).ok_or(gone);
        }
        waiter.sleep(left);
        slots.rescue();
    }
}

/// Pause between attempts if there is no room for another waiter.
const CROWDED: Duration = Duration::from_millis(1);
