// Holds 162.
//! Clients that misbehave in every way that costs the broker something, as a user for whom the kernel has limits.

use partywall_harness::hostile::{BIG, Hostile};
use partywall_wire::{Answer, Call, limits::MAX_FDS};

use crate::{
    common::{Client, called, eventually, opened},
    roles::{self, SAYS},
    unread::{CHUNKS, publish},
};

/// Runs [`others_are_served_beside`] for each way to misbehave.
#[test]
fn others_are_served_beside_every_hostile_client_and_nothing_of_it_stays() {
    for way in Hostile::ALL {
        let mut child = roles::start_unprivileged(&format!("beside {}", way.name()));
        assert_eq!(child.expect(SAYS), "done", "{way:?}");
    }
}

// Holds 163.
#[test]
fn unfinished_messages_of_many_processes_leave_room_for_others() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("pw/test.sock");
    let mut broker = roles::start_small_broker(&socket, FEW_FILES);
    assert_eq!(broker.expect(SAYS), "ready");
    let mut other = Client::join(&socket);
    publish(&mut other);
    let before = broker.open_files();
    // Together they send more descriptors than the broker may have open.
    let mut begun = Vec::new();
    for _ in 0..5 {
        let mut process = roles::start("unfinished", &socket);
        assert_eq!(process.expect(SAYS), "begun");
        open_and_release(&mut other);
        begun.push(process);
    }
    // Each process has two sockets and a pidfd there.
    let most = before + 3 * begun.len() + MAX_FDS;
    eventually("the descriptors of one message stay", || broker.open_files() <= most);
    let mut late = Client::join(&socket);
    late.commit("late", b"late", false);
    open_and_release(&mut late);
}

/// The open files of the broker: as many as its limits need, which each broker checks before it starts. The kernel
/// allows a user of the broker as many descriptors in flight.
const OPEN_FILES: u64 = 16_384;

/// The open files of a broker beside a flood of descriptors: as many as a user usually may have, and as the hostile
/// process could fill with one message that it does not finish on each of four connections.
const FEW_FILES: u64 = 1_024;

/// Uses a broker beside a process that misbehaves, and that may have 1,024 open files.
pub(crate) fn others_are_served_beside(way: Hostile) {
    assert!(!rustix::process::geteuid().is_root(), "the kernel has no such limits for root");
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("pw/test.sock");
    let mut broker = match way {
        Hostile::FloodsDescriptors => roles::start_small_broker(&socket, FEW_FILES),
        _ => roles::start_broker(&socket, OPEN_FILES),
    };
    assert_eq!(broker.expect(SAYS), "ready");
    let mut other = Client::join(&socket);
    publish(&mut other);
    // Control memory of timelines and semaphores stays for the next ones.
    other.ask(Call::OpenTimeline { name: called("t"), writer: true, shared: false }).unwrap();
    other.ask(Call::OpenSemaphore { name: called("s"), maximum: 2, shared: false }).unwrap();
    let before = held(&mut other);
    let mut hostile = roles::start(&format!("hostile {}", way.name()), &socket);
    assert_eq!(hostile.expect(SAYS), "begun");
    for _ in 0..30 {
        assert_eq!(other.ask(Call::Ping), Ok(Answer::Done));
        open_and_release(&mut other);
        let mut late = Client::join(&socket);
        late.commit("late", b"late", false);
        open_and_release(&mut late);
        assert_eq!(late.ask(Call::Bye), Ok(Answer::Done));
    }
    assert!(!hostile.has_ended(), "it misbehaved until now");
    hostile.kill();
    eventually("nothing of it stays", || held(&mut other) == before);
    open_and_release(&mut other);
}

fn open_and_release(client: &mut Client) {
    let (outcome, fds) = client.open(BIG);
    assert_eq!(fds.len(), CHUNKS);
    let lease = opened(outcome).lease;
    assert_eq!(client.ask(Call::Release { lease }), Ok(Answer::Done));
}

/// What the broker holds: members, names, versions, leases, timelines, semaphores and descriptors.
fn held(client: &mut Client) -> [u64; 7] {
    let status = client.status();
    let members = client.members().len() as u64;
    [members, status.names, status.versions, status.leases, status.timelines, status.semaphores, status.fds]
}
