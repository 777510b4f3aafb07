//! Waiting for one's turn at a permit of a semaphore or a block of a pool.

use std::time::{Duration, Instant};

use partywall_shm::{
    pool,
    semaphore::{self, Attempt, Held, Polled, Waiter},
};
use partywall_wire::Call;

use crate::{
    adaptive_spin::AdaptiveSpin,
    domain::Domain,
    error::{Error, Result},
};

/// What is taken, waited for and given back in shared memory.
pub(crate) trait Slots {
    /// Takes one if one is free and nobody waits.
    fn try_take(&self, row: u16) -> Option<Held>;

    /// Takes one, or begins to wait for one.
    fn take(&self, row: u16) -> Attempt<'_>;

    /// To be called now and then by those who find none: whatever somebody who is stopped keeps others from.
    fn look_after(&self);
}

impl Slots for semaphore::Semaphore {
    fn try_take(&self, row: u16) -> Option<Held> {
        self.try_acquire(row)
    }

    fn take(&self, row: u16) -> Attempt<'_> {
        self.acquire(row)
    }

    fn look_after(&self) {
        self.look_after_granted();
    }
}

impl Slots for pool::Pool {
    fn try_take(&self, row: u16) -> Option<Held> {
        self.try_alloc(row)
    }

    fn take(&self, row: u16) -> Attempt<'_> {
        self.alloc(row)
    }

    fn look_after(&self) {
        self.look_after_granted();
    }
}

/// Takes one if one is free and nobody waits for it.
pub(crate) fn try_take(slots: &impl Slots, domain: &Domain) -> Result<Option<Held>> {
    let link = domain.link();
    link.require_ours()?;
    let held = take_free(slots, domain);
    if held.is_none() {
        slots.look_after();
    }
    Ok(held)
}

/// Takes one if one is free, also one that a stream has let go of and nobody has looked since.
fn take_free(slots: &impl Slots, domain: &Domain) -> Option<Held> {
    let row = domain.link().row();
    slots.try_take(row).or_else(|| {
        domain.completions().look();
        slots.try_take(row)
    })
}

/// Takes one, and waits for it up to `timeout`, or until `stop` says so: then it is `None`. While it waits `stop` is asked
/// every 100 ms at least, and the place among those who wait is kept. `late` is the error of not getting one in time.
pub(crate) fn take_unless(
    slots: &impl Slots,
    domain: &Domain,
    spin: &AdaptiveSpin,
    timeout: Duration,
    mut stop: impl FnMut() -> bool,
    late: impl FnOnce() -> Error,
) -> Result<Option<Held>> {
    let link = domain.link();
    link.require_ours()?;
    if let Some(held) = take_free(slots, domain) {
        return Ok(Some(held));
    }
    let start = Instant::now();
    let mut stopped = false;
    loop {
        match slots.take(link.row()) {
            Attempt::Held(held) => return Ok(Some(held)),
            Attempt::Waiting(waiter) => {
                let is_stopped = || {
                    stopped = stop();
                    stopped
                };
                if let Some(held) = wait(slots, domain, spin, waiter, (start, timeout), is_stopped)? {
                    return Ok(Some(held));
                }
            }
            Attempt::Crowded => {
                link.require_broker()?;
                std::thread::sleep(CROWDED.min(timeout.saturating_sub(start.elapsed())));
                stopped = stop();
            }
        }
        let is_late = start.elapsed() >= timeout;
        if is_late || stopped {
            slots.look_after();
            return if stopped { Ok(None) } else { Err(late()) };
        }
    }
}

/// Waits for a turn until a time after a start. Nothing if the time is over, it is stopped, or the turn was lost.
fn wait(
    slots: &impl Slots,
    domain: &Domain,
    spin: &AdaptiveSpin,
    mut waiter: Waiter<'_>,
    (start, timeout): (Instant, Duration),
    mut is_stopped: impl FnMut() -> bool,
) -> Result<Option<Held>> {
    let mut now = spin.spin(start, timeout, || !waiter.is_waiting());
    loop {
        match waiter.poll() {
            Polled::Held(held) => return Ok(Some(held)),
            Polled::Waiting => {}
            // This process was stopped for a while, or the broker took it back: then it knows why.
            Polled::Lost => return domain.link().call(Call::Ping).map(|_| None),
        }
        let left = timeout.saturating_sub(now.take().unwrap_or_else(Instant::now) - start);
        if left.is_zero() || is_stopped() {
            return Ok(waiter.cancel());
        }
        if let Err(gone) = domain.link().require_broker() {
            return waiter.cancel().map(Some).ok_or(gone);
        }
        waiter.sleep(left);
        slots.look_after();
    }
}

/// How long to wait where there is no room among those who wait.
const CROWDED: Duration = Duration::from_millis(1);
