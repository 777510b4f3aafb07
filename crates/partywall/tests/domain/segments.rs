//! Information about the names and members of a domain, and names that are left to a connection.

use std::time::Duration;

use partywall::{
    DType, Error,
    error::{Busy, InvalidArgument, NotFound, Unreachable},
    info::{Lifetime, MemberState},
};
use partywall_harness::place;

use super::world::{World, commit};

#[test]
fn names_are_listed_in_order_over_many_messages() {
    let world = World::new();
    let domain = world.connect();
    let segments: Vec<_> = (0..3000).map(|i| commit(&domain, &format!("n/{i:05}"), i, false)).collect();
    let names = domain.names().unwrap();
    assert_eq!(names.len(), 3000);
    assert!(names.windows(2).all(|pair| pair[0].name < pair[1].name));
    let status = domain.status().unwrap();
    assert_eq!((status.names, status.leases, status.members), (3000, 3000, 0));
    drop(segments);
    assert_eq!(domain.names().unwrap(), []);
}

// Holds 247.
#[test]
fn left_name_stays_without_a_lease_until_its_connection_ends() {
    let world = World::new();
    let domain = world.connect();
    let other = world.connect();
    commit(&domain, "x", 7, false).leave_name().unwrap();
    let status = other.status().unwrap();
    assert_eq!((status.names, status.leases), (1, 0));
    let opened = other.open("x", Duration::ZERO).unwrap();
    drop(domain);
    assert_eq!(other.names().unwrap().iter().filter(|name| name.latest.is_some()).count(), 0);
    assert!(matches!(other.open("x", Duration::ZERO), Err(Error::NotFound(NotFound::Name { .. }))));
    opened.wait_withdrawn(Duration::ZERO).unwrap();
}

// Holds 47.
#[test]
fn given_name_ends_with_its_owner() {
    let world = World::new();
    let domain = world.connect();
    let owner = world.connect();
    let watcher = world.connect();
    let give = |name: &str, kept: bool| {
        let builder = domain.create(name, place()).tensor("t", DType::U8, &[4]).kept(kept).owner(owner.member());
        builder.allocate().map(|build| build.commit().unwrap())
    };
    let refused = give("kept", true).map(drop).unwrap_err();
    assert!(matches!(refused, Error::InvalidArgument(InvalidArgument::Options { .. })), "{refused}");
    assert_eq!(refused.anchor(), "cannot-keep");

    let put = domain.put("put", place()).owner(owner.member());
    let refused = put.clone().kept(true).check().unwrap_err();
    assert_eq!(refused.anchor(), "cannot-keep", "before any file is read");
    drop(put.stream(&[7; 4][..], 4).unwrap());

    drop(give("x", false).unwrap());
    give("x", false).unwrap().leave_name().unwrap();
    drop(domain);
    let opened = watcher.open("x", Duration::ZERO).unwrap();
    assert_eq!((opened.version(), opened.is_kept()), (2, false));
    let put = watcher.open("put", Duration::ZERO).unwrap();
    drop(owner);
    put.wait_withdrawn(Duration::ZERO).unwrap();
    opened.wait_withdrawn(Duration::ZERO).unwrap();
}

// Holds 247.
#[test]
fn left_names_keep_one_version_each() {
    let world = World::new();
    let domain = world.connect();
    let other = world.connect();
    for version in 1..=2000 {
        commit(&domain, "x", version, false).leave_name().unwrap();
    }
    let status = domain.status().unwrap();
    assert_eq!((status.names, status.versions, status.leases), (1, 1, 0));
    assert_eq!(other.open("x", Duration::ZERO).unwrap().version(), 2000);
    other.remove("x").unwrap();
    assert_eq!(domain.status().unwrap().versions, 0);

    // A newer version that another process has committed does not belong to this connection.
    commit(&domain, "x", 1, false).leave_name().unwrap();
    let newer = commit(&other, "x", 2, false);
    drop(domain);
    assert_eq!(other.open("x", Duration::ZERO).unwrap().version(), newer.version());
}

#[test]
fn withdrawn_names_are_those_of_the_connection() {
    let world = World::new();
    let domain = world.connect();
    let other = world.connect();
    let held = commit(&domain, "held", 1, false);
    commit(&domain, "left", 1, false).leave_name().unwrap();
    drop(commit(&domain, "kept", 1, true));
    let theirs = commit(&other, "theirs", 1, false);
    // If a reader leaves a name, or the name stays anyway, no connection gets it.
    domain.open("theirs", Duration::ZERO).unwrap().leave_name().unwrap();
    domain.open("kept", Duration::ZERO).unwrap().leave_name().unwrap();
    domain.withdraw_names().unwrap();
    let names = || domain.names().unwrap().into_iter().filter(|name| name.latest.is_some()).map(|name| name.name);
    assert_eq!(names().collect::<Vec<_>>(), ["kept", "theirs"]);
    assert_eq!(held.tensors().len(), 1);
    drop(theirs);
    assert_eq!(names().collect::<Vec<_>>(), ["kept"]);
}

#[test]
fn inspection_shows_a_version_without_opening_it() {
    let world = World::new();
    let domain = world.connect();
    let mut builder = domain.create("model", place()).kept(true);
    for i in 0..3000 {
        // More tensors than fit into a message, so that the table is sent as a memfd.
        builder = builder.tensor(&format!("model.layers.{i}.mlp.weight"), DType::F16, &[3, 5]);
    }
    drop(builder.allocate().unwrap().commit().unwrap());
    let information = domain.inspect("model").unwrap();
    assert_eq!(information.table.len(), 3000);
    assert_eq!(
        (information.version.version, information.version.lifetime, information.version.leases),
        (1, Lifetime::Kept, 0)
    );
    assert!(information.is_latest && information.holders.is_empty() && information.builder.is_none());
    assert!(matches!(domain.inspect("model@7"), Err(Error::NotFound(NotFound::Version { .. }))));
    assert!(matches!(domain.inspect("nothing"), Err(Error::NotFound(NotFound::Name { .. }))));
    let opened = world.connect().open("model", Duration::ZERO).unwrap();
    assert_eq!(opened.len(), 3000);
    assert_eq!(domain.inspect("model").unwrap().holders.len(), 1);
}

#[test]
fn members_are_listed_with_their_holdings() {
    let world = World::new();
    let ours = world.connect();
    let theirs = world.connect();
    let segment = commit(&theirs, "x", 1, false);
    let members = ours.members().unwrap();
    assert_eq!(members.len(), 2);
    assert!(members.iter().all(|m| m.state == MemberState::Alive && m.pid == std::process::id()));
    let holder = members.iter().find(|m| m.member == theirs.member()).unwrap();
    assert_eq!((holder.leases, holder.bytes), (1, segment.bytes()));
    drop((segment, theirs));
    assert_eq!(ours.members().unwrap().len(), 1);
}

#[test]
fn broker_in_use_is_not_stopped_without_force() {
    let world = World::new();
    let domain = world.connect();
    let _segment = commit(&domain, "x", 1, false);
    assert!(matches!(domain.stop_broker(false), Err(Error::Busy(Busy::BrokerInUse { names: 1, members: 0 }))));
    domain.stop_broker(true).unwrap();
    super::world::eventually("the end of the broker", || {
        matches!(domain.ping(), Err(Error::Unreachable(Unreachable::Gone { .. })))
    });
    assert!(!world.socket().exists());
}
