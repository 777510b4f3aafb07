// Holds 68.
//! Publishers that drop their publications, die, and fork.

use std::{io::Read, sync::Arc, time::Duration};

use partywall::{
    DType, Domain, Error,
    cuda::ForeignMemory,
    error::{DeviceFault, Gone, NotFound},
};
use partywall_harness::{Signal, World, eventually};

use super::world::{TIMEOUT, buffer, gpu, publication, publish, simulated, value_of};

/// The roles of the other processes.
#[allow(clippy::print_stdout)] // it is how they talk to the test
pub(crate) fn play(role: &str) {
    let domain = Domain::options().start(false).connect().unwrap();
    let ready = || println!("\nready");
    let wait = || {
        let _ = std::io::stdin().read(&mut [0]);
    };
    match role {
        "publisher" => {
            let _published = publish(&domain, "theirs", 5);
            ready();
            wait();
        }
        "publisher that leaves" => {
            let published = publication(&domain, "theirs", 5).until_unused(true).commit().unwrap();
            ready();
            wait();
            published.leave_name().unwrap();
            wait();
        }
        "reader" => {
            let _opened = domain.open("ours", TIMEOUT).unwrap();
            ready();
            wait();
        }
        "copier" => {
            let _copy = publication(&domain, "copy", 6).kept(true).commit_copy().unwrap();
            ready();
            wait();
        }
        "reader of many" => {
            ready();
            let many = domain.open("many", TIMEOUT).unwrap();
            let end = many.tensor("end").unwrap();
            assert_eq!((end.shape(), end.strides()), (vec![2, 8], vec![64, 1]));
            assert_eq!(many.metadata().collect::<Vec<_>>(), [("made by", "a test")]);
            assert!(many.tensor("empty").unwrap().to_vec().unwrap().is_empty());
            println!("{} {} {}", value_of(&many, "begin"), value_of(&many, "end"), value_of(&many, "other"));
        }
        "writer" => {
            ready();
            let shared = domain.opener("shared").read_write().open().unwrap();
            shared.tensor("x").unwrap().write_at(0, &[9]).unwrap();
            println!("written");
        }
        "forker" => {
            let _published = publish(&domain, "theirs", 5);
            ready();
            let outcome = in_a_child(|| {
                // CUDA does not work in the child. The test is that it does not use the parent's address as its own.
                let domain = Domain::options().start(false).connect().map_err(|e| e.to_string())?;
                match domain.open("theirs", Duration::ZERO) {
                    Ok(_) => Err("the child has opened it".into()),
                    Err(Error::DeviceFault(DeviceFault::Cuda { .. } | DeviceFault::NoDevice { .. })) => Ok(()),
                    Err(other) => Err(other.to_string()),
                }
            });
            println!("{}", if outcome { "refused" } else { "opened" });
            assert_eq!(value_of(&domain.open("theirs", Duration::ZERO).unwrap(), "x"), 5);
            wait();
        }
        other => panic!("no role is called {other:?}"),
    }
}

/// Returns whether `body` succeeds in a forked child, which then ends.
#[allow(unsafe_code)]
pub(crate) fn in_a_child(body: impl FnOnce() -> Result<(), String>) -> bool {
    // SAFETY: the locks that the child needs are its own; it ends without unwinding into the parent's code.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let outcome = body();
        if let Err(why) = &outcome {
            eprintln!("{why}");
        }
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(outcome.is_err())) };
    }
    let mut status = 0;
    // SAFETY: the status is a live number.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}

#[test]
fn open_reports_a_dead_publisher_on_the_simulated_gpu() {
    simulated("deaths::open_reports_a_dead_publisher_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let mut publisher = world.play("publisher");
        let opened = domain.open("theirs", TIMEOUT).unwrap();
        let pid = publisher.pid();
        publisher.kill();
        // Immediately, before the broker has proof: the driver refuses, and the library finds the reason.
        let other = world.connect();
        match other.open("theirs", Duration::ZERO) {
            Err(Error::Gone(Gone::OwnerDied { name, pid: dead, .. })) => {
                assert_eq!((name.as_str(), dead), ("theirs", pid))
            }
            // The mapping that this process has open is shared.
            Ok(shared) => assert_eq!(value_of(&shared, "x"), 5),
            Err(other) => panic!("{other}"),
        }
        opened.wait_withdrawn(TIMEOUT).unwrap();
        assert_eq!(value_of(&opened, "x"), 5, "what is open stays readable");
        drop(opened);
        for timeout in [Duration::ZERO, Duration::from_millis(20)] {
            let refused = domain.open("theirs", timeout);
            assert!(
                matches!(refused, Err(Error::Gone(Gone::OwnerDied { pid: dead, .. })) if dead == pid),
                "{refused:?}"
            );
        }
        assert!(matches!(domain.open("theirs@2", Duration::ZERO), Err(Error::NotFound(NotFound::Name { .. }))));
    });
}

#[test]
fn open_racing_with_the_publishers_death_reports_it_on_the_simulated_gpu() {
    simulated("deaths::open_racing_with_the_publishers_death_reports_it_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        for _ in 0..10 {
            let mut publisher = world.play("publisher");
            // The publisher is gone, but the broker has no proof of that yet, so it still passes the handle on.
            publisher.kill();
            let refused = domain.open("theirs", Duration::ZERO);
            assert!(matches!(refused, Err(Error::Gone(Gone::OwnerDied { .. }))), "{refused:?}");
        }
    });
}

#[test]
fn dropped_publication_is_withdrawn_on_the_simulated_gpu() {
    simulated("deaths::dropped_publication_is_withdrawn_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let reader = world.connect();
        let published = publish(&domain, "ours", 3);
        let opened = reader.open("ours", Duration::ZERO).unwrap();
        published.release().unwrap();
        opened.wait_withdrawn(TIMEOUT).unwrap();
        assert_eq!(value_of(&opened, "x"), 3);
        let pid = std::process::id();
        for timeout in [Duration::ZERO, Duration::from_millis(20)] {
            let refused = reader.open("ours", timeout);
            assert!(matches!(refused, Err(Error::Gone(Gone::Withdrawn { pid: by, .. })) if by == pid), "{refused:?}");
        }
        let again = publish(&domain, "ours", 4);
        assert_eq!(value_of(&reader.open("ours", Duration::ZERO).unwrap(), "x"), 4);
        reader.remove("ours").unwrap();
        assert!(matches!(reader.open("ours", Duration::ZERO), Err(Error::Gone(Gone::Withdrawn { .. }))));
        assert_eq!(value_of(&again, "x"), 4);
    });
}

// Holds 72.
#[test]
fn left_publication_lasts_until_its_readers_are_gone_on_the_simulated_gpu() {
    simulated("deaths::left_publication_lasts_until_its_readers_are_gone_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let other = world.connect();
        for is_killed in [true, false] {
            let memory = buffer(&gpu(&domain), 4096, 3);
            let freed = Arc::downgrade(&memory);
            let memory = ForeignMemory::try_from(memory).unwrap();
            let publication = domain.publish("ours").tensor("x", DType::U8, &[4096], &memory);
            let published = publication.until_unused(true).commit().unwrap();
            drop(memory);
            let mut reader = world.play("reader");
            published.leave_name().unwrap();
            eventually("the publisher has left", || other.inspect("ours").unwrap().version.leases == 1);
            assert_eq!(value_of(&other.open("ours", Duration::ZERO).unwrap(), "x"), 3, "a reader may pass it on");
            assert!(freed.upgrade().is_some());
            match is_killed {
                true => reader.kill(),
                false => reader.finish(),
            }
            eventually("the last reader is gone", || freed.upgrade().is_none());
            let ended = other.open("ours", Duration::ZERO);
            assert!(matches!(ended, Err(Error::Gone(Gone::Withdrawn { .. }))), "{ended:?}");
        }
    });
}

#[test]
fn left_publication_lasts_without_room_for_its_watch_on_the_simulated_gpu() {
    simulated("deaths::left_publication_lasts_without_room_for_its_watch_on_the_simulated_gpu", |_| {
        let world = World::with(|config| config.limits.member_waits = 0);
        let domain = world.connect();
        let other = world.connect();
        let memory = buffer(&gpu(&domain), 4096, 3);
        let freed = Arc::downgrade(&memory);
        let memory = ForeignMemory::try_from(memory).unwrap();
        let publication = domain.publish("ours").tensor("x", DType::U8, &[4096], &memory);
        let published = publication.until_unused(true).commit().unwrap();
        drop(memory);
        let reader = world.play("reader");
        published.leave_name().unwrap();
        eventually("the publisher has left", || other.inspect("ours").unwrap().version.leases == 1);
        // A thread that gave up would have done so by its first wait.
        std::thread::sleep(Duration::from_millis(100));
        assert!(freed.upgrade().is_some(), "a reader has it");
        reader.finish();
        eventually("the last reader is gone", || freed.upgrade().is_none());
    });
}

// Holds 72.
#[test]
fn left_publication_ends_at_once_without_readers_on_the_simulated_gpu() {
    simulated("deaths::left_publication_ends_at_once_without_readers_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let memory = buffer(&gpu(&domain), 4096, 3);
        let freed = Arc::downgrade(&memory);
        let memory = ForeignMemory::try_from(memory).unwrap();
        let publication = domain.publish("ours").tensor("x", DType::U8, &[4096], &memory);
        let published = publication.until_unused(true).commit().unwrap();
        drop(memory);
        assert!(freed.upgrade().is_some());
        published.leave_name().unwrap();
        eventually("it is not used", || freed.upgrade().is_none());
        assert!(matches!(domain.open("ours", Duration::ZERO), Err(Error::Gone(Gone::Withdrawn { .. }))));
    });
}

// Holds 72.
#[test]
fn left_publication_ends_with_its_publisher_on_the_simulated_gpu() {
    simulated("deaths::left_publication_ends_with_its_publisher_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let mut publisher = world.play("publisher that leaves");
        let opened = domain.open("theirs", Duration::ZERO).unwrap();
        publisher.proceed();
        eventually("the publisher has left", || domain.inspect("theirs").unwrap().version.leases == 1);
        let pid = publisher.pid();
        publisher.kill();
        opened.wait_withdrawn(TIMEOUT).unwrap();
        assert_eq!(value_of(&opened, "x"), 5, "what is open stays readable");
        let ended = domain.open("theirs", Duration::ZERO);
        assert!(matches!(ended, Err(Error::Gone(Gone::OwnerDied { pid: dead, .. })) if dead == pid), "{ended:?}");
    });
}

#[test]
fn waiting_open_gets_the_next_publication_on_the_simulated_gpu() {
    simulated("deaths::waiting_open_gets_the_next_publication_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let mut publisher = world.play("publisher");
        publisher.kill();
        eventually("the proof of its death", || domain.members().unwrap().len() == 1);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| domain.open("theirs", TIMEOUT));
            let publisher = world.play("publisher");
            assert_eq!(value_of(&waiter.join().unwrap().unwrap(), "x"), 5);
            publisher.signal(Signal::KILL);
        });
    });
}

#[test]
fn forked_child_uses_no_address_of_its_parent_on_the_simulated_gpu() {
    simulated("deaths::forked_child_uses_no_address_of_its_parent_on_the_simulated_gpu", |world| {
        let mut forker = world.play("forker");
        assert_eq!(forker.line(), "refused");
        assert_eq!(value_of(&world.connect().open("theirs", TIMEOUT).unwrap(), "x"), 5);
    });
}
