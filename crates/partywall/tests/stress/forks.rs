// Holds 99.
//! A process that forks while it uses a domain.
#![allow(unsafe_code)] // fork itself, and what only a forked child may do

#[cfg(feature = "tokio")]
use std::{
    pin::Pin,
    task::{Context, Poll, Waker},
};
use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use partywall::{DType, Domain, Error, Place as At, Policy, Refreshed, error::Unreachable};

use super::{
    eventually,
    place::{Place, commit, say, value},
};

/// Runs `work` in a forked child, and returns whether it returned `true`.
fn in_child(work: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child calls nothing that waits for another thread of the parent: `work` uses the library, which is
    // what is tried here, and the child leaves without running anything of the parent's.
    match unsafe { libc::fork() } {
        0 => {
            // A child that hangs counts as a failure.
            // SAFETY: both calls only set what the kernel knows of this process.
            unsafe {
                libc::signal(libc::SIGALRM, libc::SIG_DFL);
                libc::alarm(10);
            }
            let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or(false);
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(if good { 0 } else { 1 }) }
        }
        child => {
            // The child drops its own copies.
            std::mem::forget(work);
            let mut status = -1;
            // SAFETY: waits for our own child and writes to `status`.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            if status != 0 {
                eprintln!("the child ended with {status:#x}");
            }
            status == 0
        }
    }
}

pub(crate) fn play(words: &[&str]) {
    let domain = Domain::options().start(false).connect().unwrap();
    let segment = commit(&domain, "held", 7, false).unwrap();
    match words[0] {
        "using" => {
            let claim = match domain.open_or_build("building", Duration::ZERO).unwrap() {
                partywall::OpenOrBuild::Build(claim) => claim,
                other => panic!("{other:?}"),
            };
            let descriptors = domain.descriptors("held", Duration::ZERO).unwrap();
            // The child drops its copy: `read` takes it out, and the parent keeps its own.
            // SAFETY: only the child, which has a copy of everything, uses and drops these.
            let copies = unsafe {
                let objects = (std::ptr::read(&domain), std::ptr::read(&segment), std::ptr::read(&claim));
                (objects, std::ptr::read(&descriptors))
            };
            let good = in_child(move || {
                let ((domain, segment, claim), descriptors) = copies;
                let forked = |error| matches!(error, Error::Unreachable(Unreachable::Forked { parent }) if parent != std::process::id());
                let good = value(&segment) == 7
                    && forked(domain.ping().unwrap_err())
                    && forked(domain.open("held", Duration::from_secs(9)).unwrap_err())
                    && forked(domain.descriptors("held", Duration::from_secs(9)).unwrap_err())
                    && partywall_os::memfd::len(&descriptors.chunks()[0]) == Ok(descriptors.bytes())
                    && forked(commit(&domain, "new", 1, true).unwrap_err());
                drop((segment, descriptors, claim, domain));
                // A connection of the child's own belongs to another member.
                good && Domain::options().start(false).connect().is_ok_and(|own| own.ping().is_ok())
            });
            assert!(good);
            assert_eq!(domain.status().unwrap().leases, 2, "the segment's, and the descriptors'");
            drop(descriptors);
            assert!(matches!(domain.open_or_build("building", Duration::from_millis(1)), Err(Error::Timeout { .. })));
            drop(claim);
            drop(domain.open("held", Duration::ZERO).unwrap());
        }
        "calling" => {
            let done = AtomicBool::new(false);
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        while !done.load(Ordering::Relaxed) {
                            drop(domain.open("held", Duration::from_millis(1)).unwrap());
                        }
                    });
                }
                for _ in 0..100 {
                    assert!(in_child(|| matches!(domain.ping(), Err(Error::Unreachable(Unreachable::Forked { .. })))));
                }
                done.store(true, Ordering::Relaxed);
            });
            domain.ping().unwrap();
        }
        "growing" => {
            let log = domain.create("log", At::Host).tensor("x", DType::U8, &[1]).mutable(true);
            let log = log.allocate().unwrap().commit().unwrap();
            let done = AtomicBool::new(false);
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        while !done.load(Ordering::Relaxed) {
                            assert_eq!(log.refresh().unwrap(), Refreshed::Unchanged);
                        }
                    });
                }
                let forked = |result| matches!(result, Err(Error::Unreachable(Unreachable::Forked { .. })));
                let refused = || forked(log.refresh().map(drop)) && forked(log.grow().spare(1).commit());
                let good = (0..100).all(|_| in_child(refused));
                done.store(true, Ordering::Relaxed);
                assert!(good);
            });
        }
        "permit" => {
            let semaphore = domain.semaphore("seats", 2).unwrap();
            let permits = [(); 2].map(|()| semaphore.acquire(Duration::ZERO).unwrap());
            // SAFETY: as above.
            let [released, dropped] = unsafe { std::ptr::read(&permits) };
            let good = in_child(|| {
                let refused = |result| matches!(result, Err(Error::Unreachable(Unreachable::Forked { .. })));
                drop(dropped);
                refused(semaphore.acquire(Duration::from_secs(9)).map(drop))
                    && refused(semaphore.try_acquire().map(drop))
                    && refused(released.release())
            });
            assert!(good && semaphore.available() == 0, "a child gave its parent's permits back");
            drop(permits);
            assert_eq!(semaphore.available(), 2);
        }
        "queue" => {
            let queue = domain.queue("work").place(partywall::Place::Host).open_or_create().unwrap();
            let wait = Duration::from_secs(9);
            let submit = || queue.submit(partywall::Task::new("echo"), wait).unwrap();
            let tickets = [submit(), submit()];
            let tasks = [(); 2].map(|()| queue.claim(wait).unwrap());
            // SAFETY: as above.
            let [completed, dropped] = unsafe { std::ptr::read(&tasks) };
            let good = in_child(|| {
                let forked = |error| matches!(error, Error::Unreachable(Unreachable::Forked { .. }));
                drop(dropped);
                forked(queue.claim(wait).unwrap_err())
                    && forked(queue.try_claim().unwrap_err())
                    && forked(queue.submit(partywall::Task::new("echo"), wait).unwrap_err().error)
                    && forked(tickets[0].wait(wait).unwrap_err())
                    && forked(tickets[0].cancel().unwrap_err())
                    && forked(queue.purge(&tickets[0].task()).unwrap_err())
                    && forked(completed.extend(wait).unwrap_err())
                    && forked(completed.complete().unwrap_err())
            });
            assert!(good && tasks.iter().all(|task| task.is_claimed()), "a child ended its parent's claim");
            tasks.into_iter().for_each(|task| task.complete().unwrap());
            tickets.iter().for_each(|ticket| drop(ticket.wait(wait).unwrap()));
        }
        #[cfg(feature = "tokio")]
        "futures" => {
            let topic = domain.topic("frames").max_bytes(64).place(partywall::Place::Host).open_or_create().unwrap();
            let subscriber = topic.subscriber(Policy::Block).unwrap();
            let queue = domain.queue("work").place(partywall::Place::Host).open_or_create().unwrap();
            let semaphore = domain.semaphore("seats", 1).unwrap();
            let _writer = domain.timeline_writer("steps").unwrap();
            let timeline = domain.timeline("steps").unwrap();
            let permit = semaphore.try_acquire().unwrap();
            type Waiting<'f> = Pin<Box<dyn Future<Output = partywall::Result<()>> + 'f>>;
            let poll = |future: &mut Waiting<'_>| match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(outcome) => Some(outcome),
                Poll::Pending => None,
            };
            let mut futures: [Waiting<'_>; 4] = [
                Box::pin(async { semaphore.acquire_async().await.map(drop) }),
                Box::pin(async { subscriber.recv_async().await.map(drop) }),
                Box::pin(async { queue.claim_async().await.map(drop) }),
                Box::pin(timeline.wait_async(1)),
            ];
            assert!(futures.iter_mut().all(|future| poll(future).is_none()));
            // SAFETY: as above.
            let [polled, dropped] = unsafe { [std::ptr::read(&futures), std::ptr::read(&futures)] };
            let forked = |outcome| matches!(outcome, Some(Err(Error::Unreachable(Unreachable::Forked { .. }))));
            assert!(in_child(move || polled.into_iter().all(|mut future| forked(poll(&mut future)))));
            assert!(in_child(move || {
                drop(dropped);
                true
            }));
            assert_eq!(semaphore.waiting(), 1, "a child left the line of its parent");
            drop(permit);
            eventually("the permit", || poll(&mut futures[0]).is_some());
        }
        "topic" => {
            let topic = domain.topic("frames").max_bytes(64).place(partywall::Place::Host).open_or_create().unwrap();
            let publisher = topic.publisher().unwrap();
            let subscriber = topic.subscriber(Policy::Block).unwrap();
            let loan = || publisher.loan(DType::U8, &[1], Duration::ZERO).unwrap();
            loan().filled().publish(Duration::ZERO).unwrap();
            loan().filled().publish(Duration::ZERO).unwrap();
            let half = loan();
            let filled = loan().filled();
            let sample = subscriber.recv(Duration::ZERO).unwrap();
            let other = subscriber.recv(Duration::ZERO).unwrap();
            let event = subscriber.event().unwrap();
            let before = topic.stats();
            let all = (topic, publisher, subscriber, half, filled, sample, event, other);
            // SAFETY: as above.
            let copy = unsafe { std::ptr::read(&all) };
            let good = in_child(move || {
                let (topic, publisher, subscriber, half, filled, sample, event, other) = copy;
                let forked = |error| matches!(error, Error::Unreachable(Unreachable::Forked { .. }));
                let good = forked(topic.publisher().unwrap_err())
                    && forked(topic.subscriber(Policy::Latest).unwrap_err())
                    && forked(publisher.loan(DType::U8, &[1], Duration::from_secs(9)).unwrap_err())
                    && forked(subscriber.recv(Duration::from_secs(9)).unwrap_err())
                    && forked(subscriber.event().unwrap_err())
                    && publisher.published() == 2;
                let refused = filled.publish(Duration::from_secs(9)).unwrap_err();
                let unreleased = sample.release().unwrap_err();
                drop((half, event, topic, publisher, subscriber, other));
                good && forked(refused.error) && forked(unreleased)
            });
            let (topic, publisher, subscriber, half, filled, sample, event, other) = all;
            assert!(good && topic.stats() == before, "a child let go of what is its parent's");
            assert_eq!(sample.bytes().unwrap(), [0]);
            filled.publish(Duration::ZERO).unwrap();
            half.filled().publish(Duration::ZERO).unwrap();
            drop(other);
            (0..2).for_each(|_| drop(subscriber.recv(Duration::ZERO).unwrap()));
            assert_eq!(publisher.published(), 4);
            drop((sample, event));
        }
        "publishing" => {
            let topic = domain
                .topic("frames")
                .max_bytes(64)
                .place(partywall::Place::Host)
                .loans(3)
                .held(3)
                .open_or_create()
                .unwrap();
            let publisher = topic.publisher().unwrap();
            let subscriber = topic.subscriber(Policy::DropOldest).unwrap();
            let publish = || {
                let loan = publisher.loan(DType::U8, &[1], Duration::from_secs(9)).unwrap();
                loan.filled().publish(Duration::ZERO).unwrap();
            };
            // The first child may exist before any of the threads runs.
            publish();
            let done = AtomicBool::new(false);
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        while !done.load(Ordering::Relaxed) {
                            publish();
                            drop(subscriber.try_recv().unwrap());
                        }
                    });
                }
                let forked = |result| matches!(result, Err(Error::Unreachable(Unreachable::Forked { .. })));
                let refused = || {
                    forked(subscriber.try_recv().map(drop))
                        && forked(publisher.try_loan(DType::U8, &[1]).map(drop))
                        && topic.stats().published > 0
                        && publisher.published() > 0
                };
                let good = (0..200).all(|_| in_child(refused));
                done.store(true, Ordering::Relaxed);
                assert!(good);
            });
        }
        "building" => {
            let builder = domain.create("draft", At::Host).tensor("x", DType::U8, &[64 << 20]);
            let mut build = builder.allocate().unwrap();
            let address = {
                let bytes = build.as_mut_bytes("x").unwrap();
                bytes.fill(1);
                bytes.as_ptr()
            };
            // SAFETY: as above.
            let copy = unsafe { std::ptr::read(&build) };
            let good = in_child(move || {
                let mut copy = copy;
                // The draft is not mapped here, so that the child cannot keep it from being frozen. Something of the
                // child's own comes to lie where it was.
                // SAFETY: asks for a range only if nothing is there.
                let own = unsafe {
                    libc::mmap(
                        address.cast_mut().cast(),
                        64 << 20,
                        libc::PROT_READ | libc::PROT_WRITE,
                        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE,
                        -1,
                        0,
                    )
                };
                let own = own.cast::<u8>();
                assert_eq!(own.cast_const(), address);
                // SAFETY: mapped writable just now.
                unsafe { own.write_volatile(5) };
                let refused = copy.as_mut_bytes("x").is_err();
                drop(copy);
                // SAFETY: still mapped, or the child dies of it, which fails the test.
                refused && unsafe { own.read_volatile() == 5 }
            });
            assert!(good, "a child that drops a build unmaps memory of its own");
            build.as_mut_bytes("x").unwrap()[0] = 2;
            assert_eq!(build.commit().unwrap().tensor("x").unwrap().as_bytes().unwrap()[..2], [2, 1]);
        }
        other => panic!("{other}"),
    }
    drop((segment, domain));
    say("good");
}

#[test]
fn forked_child_cannot_use_its_parents_connection_with_host_memory() {
    let place = Place::new();
    let domain = place.connect();
    place.start("fork using").expect("good");
    eventually("the end of all members", || domain.members().unwrap().len() == 1);
    assert_eq!(domain.status().unwrap().names, 0);
}

#[test]
fn forking_in_the_middle_of_calls_hangs_no_process() {
    Place::new().start("fork calling").expect("good");
}

#[test]
fn forking_while_a_segment_grows_hangs_no_process() {
    Place::new().start("fork growing").expect("good");
}

#[test]
fn forked_child_releases_no_permit_of_its_parent() {
    Place::new().start("fork permit").expect("good");
}

#[test]
fn forked_child_does_not_use_its_parents_queue() {
    Place::new().start("fork queue").expect("good");
}

#[test]
fn forked_child_does_not_use_its_parents_topic() {
    Place::new().start("fork topic").expect("good");
}

#[cfg(feature = "tokio")]
#[test]
fn forked_child_does_not_wait_on_in_its_parents_futures() {
    Place::new().start("fork futures").expect("good");
}

#[test]
fn forking_while_samples_are_exchanged_hangs_no_process() {
    Place::new().start("fork publishing").expect("good");
}

#[test]
fn forked_child_unmaps_nothing_when_it_drops_a_build() {
    Place::new().start("fork building").expect("good");
}

/// A program that is executed meanwhile inherits nothing.
#[test]
fn executed_program_inherits_no_file_of_a_domain() {
    let before = files_of_an_executed_program();
    let place = Place::new();
    let domain = place.connect();
    let segment = commit(&domain, "x", 1, false).unwrap();
    let mut build = domain.create("y", At::Host).tensor("x", DType::U8, &[64]).allocate().unwrap();
    build.as_mut_bytes("x").unwrap().fill(1);
    assert_eq!(files_of_an_executed_program(), before);
    drop((segment, build));
}

/// Returns the numbers of the files that an executed program has open.
fn files_of_an_executed_program() -> String {
    let listing = std::process::Command::new("ls").arg("/proc/self/fd").output().unwrap();
    String::from_utf8(listing.stdout).unwrap()
}
