//! Waiting for an answer that is a few microseconds away.
//!
//! A thread that sleeps until the broker answers is woken by the kernel, which takes longer than the answer itself.
//! Looking again and again spares that, but only where the broker runs on another processor meanwhile. Whether it does
//! shows in whether looking pays: if it does not, a connection stops, and tries again now and then.

use std::{
    os::fd::AsFd,
    time::{Duration, Instant},
};

use partywall_os::Errno;

use super::inbox::Inbox;

/// For how long to look before sleeping: a few times what an answer takes (6 µs, measured).
const LOOK: Duration = Duration::from_micros(20);

/// Calls in a row for which looking has to be in vain before it stops.
const MOST_CREDIT: u8 = 4;

/// Having stopped, one call in so many looks again.
const RETRY: u32 = 1024;

/// Whether looking pays on a connection.
#[derive(Debug)]
pub(super) struct BusyWait {
    credit: u8,
    calls: u32,
}

impl BusyWait {
    pub(super) fn new() -> Self {
        Self { credit: MOST_CREDIT, calls: 0 }
    }

    /// Reads once from a blocking socket; as [`Inbox::read`].
    pub(super) fn read(&mut self, inbox: &mut Inbox, socket: impl AsFd) -> Result<bool, Errno> {
        if self.is_worth_a_look() {
            let end = Instant::now() + LOOK;
            loop {
                match inbox.read_now(&socket) {
                    Err(Errno::AGAIN) if Instant::now() < end => std::hint::spin_loop(),
                    Err(Errno::AGAIN) => break self.note(false),
                    other => {
                        self.note(true);
                        return other;
                    }
                }
            }
        }
        inbox.read(socket)
    }

    fn is_worth_a_look(&mut self) -> bool {
        self.calls = self.calls.wrapping_add(1);
        self.credit > 0 || self.calls.is_multiple_of(RETRY)
    }

    fn note(&mut self, paid: bool) {
        self.credit = if paid { (self.credit + 1).min(MOST_CREDIT) } else { self.credit.saturating_sub(1) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use partywall_os::socket;

    #[test]
    fn looking_in_vain_stops_and_is_tried_again() {
        let mut busy = BusyWait::new();
        let looks = (0..RETRY * 2).filter(|_| busy.is_worth_a_look().then(|| busy.note(false)).is_some()).count();
        assert_eq!(looks, usize::from(MOST_CREDIT) + 2);
        busy.note(true);
        assert!(busy.is_worth_a_look(), "it paid, so it goes on");
    }

    #[test]
    fn what_comes_later_is_read_all_the_same() {
        let (peer, ours) = socket::pair().unwrap();
        let mut busy = BusyWait::new();
        let mut inbox = Inbox::new();
        for _ in 0..10 {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(2));
                    socket::send(&peer, b"x", &[]).unwrap();
                });
                assert_eq!(busy.read(&mut inbox, &ours), Ok(true));
            });
        }
        assert_eq!(busy.credit, 0, "an answer that takes so long is slept for");
        drop(peer);
        assert_eq!(busy.read(&mut inbox, &ours), Ok(false));
    }
}
