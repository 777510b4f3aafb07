//! Clients that are stopped and never continued.

use std::time::Duration;

use partywall::Domain;
use partywall_wire::Call;

use super::{
    Dice, eventually,
    place::{Place, commit, linger, say},
    rounds,
    wire::{self, Client},
};

pub(crate) fn play(words: &[&str]) {
    let path = std::env::var("PARTYWALL_SOCKET").unwrap();
    match words[0] {
        "calling" => {
            let domain = Domain::options().start(false).connect().unwrap();
            say("ready");
            loop {
                drop(commit(&domain, "stopped", 1, true).unwrap());
                drop(domain.open("stopped", Duration::ZERO).unwrap());
            }
        }
        "frame" => {
            let mut client = Client::join(path.as_ref());
            let (commit, fds) = wire::commit("half", true, true);
            let bytes = client.request(Call::Commit(commit), fds.len());
            client.call.send(&bytes[..bytes.len() / 2], &fds.iter().collect::<Vec<_>>());
            say("ready");
            linger();
        }
        "waiting" => {
            let mut client = Client::join(path.as_ref());
            for _ in 0..1024 {
                client.ask(wire::open("big", true)).unwrap();
            }
            say("ready");
            linger();
        }
        other => panic!("{other}"),
    }
}

#[test]
fn stopped_clients_block_no_other_and_cost_the_broker_little() {
    let mut place = Place::new();
    let domain = place.connect();
    let mut stopped = Vec::new();
    let mut dice = Dice(3);
    for _ in 0..rounds(6) {
        let actor = place.play("stopped calling");
        std::thread::sleep(Duration::from_micros(dice.below(5000)));
        actor.stop();
        stopped.push(actor);
    }
    for role in ["frame", "waiting", "waiting", "waiting", "waiting"] {
        let actor = place.play(&format!("stopped {role}"));
        actor.stop();
        stopped.push(actor);
    }
    let before = place.broker().memory();
    // A call that another process delays ends with an error.
    let many: String = "m".repeat(14_000);
    for i in 0..20 {
        // A table as large as a message allows, for each client that waits and does not read.
        let builder = domain.create("big", partywall_harness::place()).metadata("text", &many);
        drop(builder.tensor("x", partywall::DType::U32, &[1]).kept(true).allocate().unwrap().commit().unwrap());
        drop(commit(&domain, &format!("other-{i}"), i, false).unwrap());
        domain.ping().unwrap();
    }
    let grown = place.broker().memory().saturating_sub(before);
    assert!(grown < 128 << 10, "the broker has grown by {grown} KiB");
    eprintln!("{} stopped; the broker grew by {grown} KiB", stopped.len());
    drop(stopped);
    eventually("the end of all that were stopped", || domain.members().unwrap().len() == 1);
    assert_eq!(domain.status().unwrap().leases, 0);
}
