//! The plan: what happens to which host after which pause. It follows from the seed alone.

use std::time::Duration;

/// The state of SplitMix64, a generator of pseudorandom numbers.
#[derive(Debug)]
pub(super) struct Plan(u64);

/// One line of the plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Strike {
    pub(super) pause: Duration,
    pub(super) host: usize,
    pub(super) fault: Fault,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Fault {
    /// SIGKILL, and a new process at once.
    Kill(Victim),
    /// SIGSTOP, and SIGCONT after this time.
    Stop(Victim, Duration),
    /// The cable of the host is pulled, and plugged in after this time.
    PullCable(Duration),
    /// For a time, the cable is slow, packets wait, and those that would wait for longer than `most` are lost.
    Congest { megabits: u32, most: Duration, time: Duration },
    /// A new version of the host's segment replaces the one before.
    Commit,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Victim {
    Bridge,
    Publisher,
    Subscriber,
    /// A process that pulls from this other host. It runs for this time before it is struck.
    Puller {
        from: usize,
        after: Duration,
    },
}

impl Plan {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next strike against as many hosts.
    pub(super) fn next(&mut self, hosts: u64) -> Strike {
        let pause = self.milliseconds(300);
        let host = self.below(hosts) as usize;
        let other = (host + 1 + self.below(hosts - 1) as usize) % hosts as usize;
        let puller = Victim::Puller { from: other, after: self.milliseconds(1500) };
        let fault = match self.below(100) {
            0..14 => Fault::Kill(Victim::Bridge),
            14..24 => Fault::Stop(Victim::Bridge, self.while_it_lasts()),
            24..32 => Fault::Kill(Victim::Publisher),
            32..38 => Fault::Stop(Victim::Publisher, self.milliseconds(1000)),
            38..46 => Fault::Kill(Victim::Subscriber),
            46..52 => Fault::Stop(Victim::Subscriber, self.milliseconds(3000)),
            52..62 => Fault::Kill(puller),
            62..70 => Fault::Stop(puller, self.milliseconds(3000)),
            70..82 => Fault::PullCable(self.while_it_lasts()),
            82..92 => {
                let megabits = 2 + self.below(40) as u32;
                Fault::Congest { megabits, most: self.milliseconds(200), time: self.milliseconds(3000) }
            }
            _ => Fault::Commit,
        };
        Strike { pause, host, fault }
    }

    /// Returns a time within which hosts lose sight of each other every second time.
    fn while_it_lasts(&mut self) -> Duration {
        self.milliseconds(7000)
    }

    /// Returns a time of at least 10 ms.
    fn milliseconds(&mut self, limit: u64) -> Duration {
        Duration::from_millis(10 + self.below(limit))
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }
}

#[test]
fn same_seed_gives_the_same_plan_and_every_fault() {
    let strikes = |seed| {
        let mut plan = Plan::new(seed);
        (0..40).map(|_| plan.next(4)).collect::<Vec<_>>()
    };
    assert_eq!(strikes(1), strikes(1));
    assert_ne!(strikes(1), strikes(2));
    let kinds = |strikes: Vec<Strike>| {
        let kind = |strike: &Strike| match strike.fault {
            Fault::Kill(Victim::Bridge) => 0,
            Fault::Kill(Victim::Publisher) => 1,
            Fault::Kill(Victim::Subscriber) => 2,
            Fault::Kill(Victim::Puller { .. }) => 3,
            Fault::Stop(Victim::Bridge, _) => 4,
            Fault::Stop(Victim::Publisher, _) => 5,
            Fault::Stop(Victim::Subscriber, _) => 6,
            Fault::Stop(Victim::Puller { .. }, _) => 7,
            Fault::PullCable(_) => 8,
            Fault::Congest { .. } => 9,
            Fault::Commit => 10,
        };
        strikes.iter().map(kind).collect::<std::collections::BTreeSet<_>>().len()
    };
    assert_eq!(kinds(strikes(super::SEED)), 11);
}
