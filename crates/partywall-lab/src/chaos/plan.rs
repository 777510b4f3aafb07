//! The plan: what happens to which member after which pause. It follows from the seed alone.

use super::*;

/// The state of SplitMix64, a generator of pseudorandom numbers.
#[derive(Debug, Clone)]
pub(super) struct SplitMix(u64);

/// One line of the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Strike {
    /// The longest wait before it.
    pub(super) pause: Duration,
    /// The index of the member in the population.
    pub(super) member: usize,
    pub(super) action: Action,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// SIGKILL, whatever the member does.
    Kill,
    /// SIGSTOP, and SIGCONT after this time. A kill may come before.
    Stop(Duration),
    /// SIGSTOP, until another member has gone on, and then SIGCONT or SIGKILL.
    Outlast { killed: bool },
    /// The member is evicted, with or without a signal by the broker, and then SIGKILL.
    Evict { kill: bool },
    /// SIGKILL for the broker, whichever member it is the turn of.
    KillBroker,
    /// The member's connections are shut down.
    CloseSockets,
    /// The member gets no further descriptor for this time.
    FillDescriptors(Duration),
    /// The member gets no further memory for this time. It may abort.
    TakeMemory(Duration),
}

impl SplitMix {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next strike against a population of this size.
    pub(super) fn next(&mut self, population: usize) -> Strike {
        let pause = Duration::from_micros(self.below(10_000));
        let member = self.below(population as u64) as usize;
        let action = match self.below(100) {
            0..3 => Action::KillBroker,
            3..9 => Action::Stop(self.while_it_lasts()),
            9..14 => Action::Outlast { killed: self.below(2) == 0 },
            14..18 => Action::CloseSockets,
            18..22 => Action::FillDescriptors(self.while_it_lasts()),
            22..26 => Action::TakeMemory(self.while_it_lasts()),
            26..30 => Action::Evict { kill: self.below(2) == 0 },
            _ => Action::Kill,
        };
        Strike { pause, member, action }
    }

    /// Returns how long a member is stopped, or lacks something.
    fn while_it_lasts(&mut self) -> Duration {
        Duration::from_millis(self.below(200))
    }

    /// Returns the next number below a limit.
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strikes(seed: u64) -> Vec<Strike> {
        let mut plan = SplitMix::new(seed);
        (0..1000).map(|_| plan.next(16)).collect()
    }

    #[test]
    fn same_seed_gives_the_same_plan() {
        assert_eq!(strikes(7), strikes(7));
        assert_ne!(strikes(7), strikes(8));
        let count = |is: fn(&Action) -> bool| strikes(7).iter().filter(|strike| is(&strike.action)).count();
        let kills = count(|action| *action == Action::Kill);
        assert!((600..800).contains(&kills), "{kills}");
        assert!(count(|action| *action == Action::KillBroker) > 0);
        assert!(count(|action| *action == Action::CloseSockets) > 0);
        assert!(count(|action| matches!(action, Action::Stop(_))) > 0);
        assert!(count(|action| matches!(action, Action::Outlast { .. })) > 0);
        assert!(count(|action| matches!(action, Action::Evict { .. })) > 0);
        assert!(count(|action| matches!(action, Action::FillDescriptors(_))) > 0);
        assert!(count(|action| matches!(action, Action::TakeMemory(_))) > 0);
        assert!((0..16).all(|member| strikes(7).iter().any(|strike| strike.member == member)));
    }
}
