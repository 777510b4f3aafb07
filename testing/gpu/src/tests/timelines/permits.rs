// Holds 182.
//! Permits that streams release. The scenes run on every driver, as in `scenes.rs`.
#![allow(clippy::unwrap_used)] // tests, their helpers included

use std::{thread, time::Duration};

use partywall::{
    Domain, Error, Semaphore,
    cuda::{Access, DeviceSlice, Stream},
    error::Unreachable,
    info::MemberState,
};

use super::{
    scenes::Gate,
    world::{TIMEOUT, World, eventually, gpu, in_a_child, next_order, say},
};

/// Carries out the commands of the test, one word each, in order.
pub(crate) fn play() {
    let domain = Domain::options().start(false).connect().unwrap();
    let gpu = gpu(&domain);
    let stream = Stream::new(gpu.context()).unwrap();
    let other = Stream::new(gpu.context()).unwrap();
    let gate = Gate::new(&gpu);
    gpu.kernels().unwrap();
    let semaphore = domain.semaphore("seats", 1).unwrap();
    let mut permit = None;
    say("ready");
    while let Some(order) = next_order() {
        match order.as_str() {
            "acquire" => permit = Some(semaphore.acquire(TIMEOUT).unwrap()),
            "stop" => gate.stop(&stream),
            "give" => permit.take().unwrap().release_on(stream.as_ref()).unwrap(),
            "go" => gate.go(&other),
            "fault" => {
                // SAFETY: the first pages are never mapped, so the write faults on purpose. (Address 2⁴⁰ would not do:
                // a kernel can write there, measured on an H200 with driver 580.)
                #[allow(unsafe_code)]
                let nowhere = unsafe { DeviceSlice::from_raw(4096, 4, Access::ReadWrite) };
                gpu.kernels().unwrap().enqueue_fill(other.as_ref(), nowhere).unwrap();
                eventually("the loss is detected", || other.synchronize().is_err());
            }
            "refused" => {
                let refused = permit.take().unwrap().release_on(stream.as_ref()).unwrap_err();
                say(&format!("done {}: {}", refused.error.anchor(), refused.error.advice()));
                permit = Some(*refused.value);
                continue;
            }
            other => panic!("unknown command {other}"),
        }
        say("done");
    }
}

fn is_taken(semaphore: &Semaphore) -> bool {
    semaphore.try_acquire().unwrap().is_none()
}

pub(crate) fn a_permit_goes_back_behind_the_work_of_its_stream(world: &World) {
    let semaphore = world.connect().semaphore("seats", 1).unwrap();
    let mut other = world.play("permit");
    for order in ["acquire", "stop", "give"] {
        other.request(order);
    }
    assert!(is_taken(&semaphore));
    assert!(matches!(semaphore.acquire(Duration::from_millis(50)), Err(Error::Timeout { .. })));
    thread::scope(|scope| {
        let next = scope.spawn(|| semaphore.acquire(TIMEOUT).map(drop));
        other.request("go");
        next.join().unwrap().unwrap();
    });
    // On an empty stream it is released immediately, every time.
    for _ in 0..20 {
        other.request("acquire");
        other.request("give");
        semaphore.acquire(TIMEOUT).unwrap().release().unwrap();
    }
}

pub(crate) fn a_permit_of_a_stream_comes_back_when_its_process_is_killed(world: &World) {
    let semaphore = world.connect().semaphore("seats", 1).unwrap();
    let mut other = world.play("permit");
    for order in ["acquire", "stop", "give"] {
        other.request(order);
    }
    other.kill();
    semaphore.acquire(TIMEOUT).unwrap().release().unwrap();
}

/// The connection ends and the permits of the process are released, but not before the stream reaches that point.
pub(crate) fn a_connection_that_ends_keeps_the_permits_of_streams(world: &World) {
    let outside = world.connect().semaphore("seats", 1).unwrap();
    let domain = world.connect();
    let gpu = gpu(&domain);
    let stream = Stream::new(gpu.context()).unwrap();
    let other = Stream::new(gpu.context()).unwrap();
    let gate = Gate::new(&gpu);
    gate.stop(&stream);
    let permit = domain.semaphore("seats", 1).unwrap().acquire(TIMEOUT).unwrap();
    permit.release_on(stream.as_ref()).unwrap();
    let ending = thread::spawn(move || drop(domain));
    assert!(matches!(outside.acquire(Duration::from_millis(100)), Err(Error::Timeout { .. })));
    assert!(!ending.is_finished());
    gate.go(&other);
    ending.join().unwrap();
    outside.acquire(TIMEOUT).unwrap().release().unwrap();
}

/// The end of the work cannot be proved.
pub(crate) fn a_permit_of_a_lost_context_comes_back_with_the_end_of_its_process(world: &World) {
    let domain = world.connect();
    let semaphore = domain.semaphore("seats", 1).unwrap();
    let states = || domain.members().unwrap().iter().map(|member| member.state).collect::<Vec<_>>();
    let mut other = world.play("permit");
    for order in ["acquire", "stop", "give", "fault"] {
        other.request(order);
    }
    assert!(matches!(semaphore.acquire(Duration::from_millis(500)), Err(Error::Timeout { .. })));
    eventually("the loss is told", || states() == [MemberState::Alive, MemberState::LostContext]);
    other.kill();
    let permit = semaphore.acquire(TIMEOUT).unwrap();
    assert_eq!(states(), [MemberState::Alive]);
    // A refused release leaves the permit where it is.
    let mut another = world.play("permit");
    permit.release().unwrap();
    another.request("acquire");
    another.request("fault");
    let refused = another.request("refused");
    assert!(refused.starts_with("broken-context: restart this process"), "{refused}");
    eventually("the loss is told", || states() == [MemberState::Alive, MemberState::LostContext]);
    assert!(is_taken(&semaphore));
    another.kill();
    semaphore.acquire(TIMEOUT).unwrap().release().unwrap();
}

pub(crate) fn a_forked_child_gives_no_permit_to_a_stream(world: &World) {
    let domain = world.connect();
    let gpu = gpu(&domain);
    let semaphore = domain.semaphore("seats", 1).unwrap();
    let stream = Stream::new(gpu.context()).unwrap();
    let mut permit = Some(semaphore.acquire(TIMEOUT).unwrap());
    assert!(in_a_child(|| {
        let Err(refused) = permit.take().unwrap().release_on(stream.as_ref()) else { return false };
        matches!(refused.error, Error::Unreachable(Unreachable::Forked { .. }))
            && matches!(refused.value.release(), Err(Error::Unreachable(Unreachable::Forked { .. })))
    }));
    assert_eq!(semaphore.available(), 0);
    permit.unwrap().release_on(stream.as_ref()).unwrap();
    eventually("it is released", || semaphore.available() == 1);
}
