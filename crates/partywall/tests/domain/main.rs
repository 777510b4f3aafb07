//! Domains and segments over a real broker and real sockets, where [`partywall_harness::place`] says.
#![allow(clippy::unwrap_used)] // tests, their helpers included

mod advance;
mod attachments;
mod broker_death;
mod build;
mod deaths;
mod descriptors;
#[cfg(feature = "tokio")]
mod futures;
mod growth;
mod known_failures;
mod open;
mod pidfds;
mod pools;
mod privileges;
mod queues;
mod segments;
mod semaphores;
mod spans;
mod topics;
mod users;
mod watch;
mod withdrawals;
mod world;

use std::time::Duration;

use partywall::{Claim, Domain, Segment, SharedSlice, Tensor};

/// How long anything may take that should take no time: a watchdog, not a limit.
const TIMEOUT: Duration = Duration::from_secs(60);

#[test]
fn owners_go_to_any_thread() {
    const fn anywhere<T: Send + Sync>() {}
    const {
        anywhere::<Domain>();
        anywhere::<Segment>();
        anywhere::<Tensor<'_>>();
        anywhere::<SharedSlice<'_, u32>>();
        anywhere::<Claim>();
        anywhere::<partywall::Descriptors>();
        anywhere::<partywall::Build>();
        anywhere::<partywall::Semaphore>();
        anywhere::<partywall::Permit>();
        anywhere::<partywall::Pool>();
        anywhere::<partywall::Block>();
        anywhere::<partywall::Topic>();
        anywhere::<partywall::Publisher>();
        anywhere::<partywall::Loan>();
        anywhere::<partywall::Filled>();
        anywhere::<partywall::Subscriber>();
        anywhere::<partywall::Sample>();
        anywhere::<partywall::Queue>();
        anywhere::<partywall::Ticket>();
        anywhere::<partywall::ClaimedTask>();
        anywhere::<partywall::Attachment>();
        anywhere::<partywall::SegmentPart>();
        anywhere::<partywall::Error>();
    };
}

/// Runs the other processes that tests start. It is no test itself; see [`world::World::play`].
#[test]
fn role() {
    if let Ok(role) = std::env::var(world::ROLE) {
        match role.as_str() {
            "grower" | "follower" => growth::play(&role),
            "permit holder" | "permit waiter" | "permit loser" => semaphores::play(&role),
            role if role.starts_with("topic ") => topics::play(role),
            role if role.starts_with("pool ") => pools::play(role),
            role if role.starts_with("queue ") => queues::play(role),
            role if role.starts_with("attachments ") => attachments::play(role),
            role if role.starts_with("withdrawals ") => withdrawals::play(role),
            role if role.starts_with("descriptors ") => descriptors::play(role),
            #[cfg(feature = "tokio")]
            role if role.starts_with("futures ") => futures::play(role),
            role if role.starts_with("known ") => known_failures::play(role),
            "users guest" => users::play(),
            "privileged" => privileges::play(),
            "trainer" => advance::play(),
            "sandboxed" => pidfds::play(),
            "watcher" => watch::play(),
            _ => deaths::play(&role),
        }
    }
}
