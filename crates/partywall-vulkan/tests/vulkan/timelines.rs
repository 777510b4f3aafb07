// Holds 228.
//! Order between Vulkan and other processes.

use std::time::Duration;

use partywall::{Error as PartywallError, Timeline, error::Gone};
use partywall_harness::World;
use partywall_vulkan::{Error, ash::vk};

use super::{
    device::Fixture,
    memory::{import, target},
};

const TIMEOUT: Duration = Duration::from_secs(60);

fn has_ended<T: std::fmt::Debug>(result: partywall_vulkan::Result<T>) -> bool {
    matches!(result, Err(Error::Partywall(PartywallError::Gone(Gone::Timeline { .. }))))
}

fn line(world: &World) -> Timeline {
    world.connect().timeline("frames").unwrap()
}

#[test]
fn needs_vulkan_work_waits_for_another_process_and_signals_it() {
    let world = World::new();
    let domain = world.connect();
    let fixture = Fixture::new();
    let from = target(&domain, "from", 4096);
    let to = target(&domain, "to", 4096);
    let imported = [import(&fixture.gpu, &domain, "from"), import(&fixture.gpu, &domain, "to")];
    let source = imported[0].buffer("x", vk::BufferUsageFlags::TRANSFER_SRC).unwrap();
    let copy = imported[1].buffer("x", vk::BufferUsageFlags::TRANSFER_DST).unwrap();
    let writer = domain.timeline_writer("written").unwrap();
    let written = fixture.gpu.follow(domain.timeline("written").unwrap()).unwrap();
    let copied = fixture.gpu.signaller(domain.timeline_writer("copied").unwrap()).unwrap();
    let done = world.connect().timeline("copied").unwrap();
    for frame in 1..=100_u64 {
        // Enqueued before the value exists.
        fixture.copy(&source, &copy, Some(written.wait(frame).unwrap()), Some(copied.signal(frame).unwrap()));
        from.tensor("x").unwrap().write_at(0, &[frame as u8; 4096]).unwrap();
        assert!(done.value() < frame);
        writer.signal(frame).unwrap();
        done.wait(frame, TIMEOUT).unwrap();
        assert_eq!(to.tensor("x").unwrap().to_vec().unwrap(), [frame as u8; 4096]);
        written.check(frame).unwrap();
    }
    copied.finish(TIMEOUT).unwrap();
    assert!(done.ending().is_some());
    fixture.finish();
    drop((source, copy, imported, written));
}

#[test]
fn needs_vulkan_killed_writer_ends_waits_and_check_says_so() {
    let world = World::new();
    // The layer (1.3.239) takes signals of the host for pending as long as a queue waits for a later value.
    let fixture = Fixture::unvalidated();
    let mut writer = world.play("writer");
    let frames = fixture.gpu.follow(line(&world)).unwrap();
    writer.request("5");
    // Reached, reached soon, never reached.
    fixture.pass(Some(frames.wait(5).unwrap()), None);
    fixture.pass(Some(frames.wait(7).unwrap()), None);
    writer.request("7");
    fixture.pass(Some(frames.wait(9).unwrap()), None);
    fixture.pass(Some(frames.wait(1000).unwrap()), None);
    writer.kill();
    fixture.finish();
    frames.check(5).unwrap();
    frames.check(7).unwrap();
    assert!(has_ended(frames.check(9)));
    assert!(has_ended(frames.wait(9)) && has_ended(frames.wait(2000)));
    fixture.pass(Some(frames.wait(7).unwrap()), None);
    fixture.finish();
    drop(frames);
}

#[test]
fn needs_vulkan_timeline_that_ended_while_nobody_waited_is_noticed() {
    let world = World::new();
    let fixture = Fixture::new();
    let mut writer = world.play("writer");
    let frames = fixture.gpu.follow(line(&world)).unwrap();
    writer.request("5");
    writer.kill();
    frames.timeline().wait(6, TIMEOUT).unwrap_err();
    // The semaphore never had 5, and no value will come.
    fixture.pass(Some(frames.wait(5).unwrap()), None);
    assert!(has_ended(frames.wait(6)));
    fixture.finish();
    drop(frames);
}

#[test]
fn needs_vulkan_dropping_a_followed_timeline_ends_its_waits() {
    let world = World::new();
    let fixture = Fixture::new();
    let _writer = world.connect().timeline_writer("frames").unwrap();
    let frames = fixture.gpu.follow(line(&world)).unwrap();
    fixture.pass(Some(frames.wait(3).unwrap()), None);
    drop(frames);
    fixture.finish();
}

#[test]
fn needs_vulkan_values_beyond_32_bits_and_out_of_order_are_kept() {
    let world = World::new();
    let domain = world.connect();
    let fixture = Fixture::new();
    let writer = domain.timeline_writer("frames").unwrap();
    writer.signal((1 << 32) - 2).unwrap();
    let frames = fixture.gpu.follow(line(&world)).unwrap();
    let later: Vec<_> = [3_u64, 1, 2, 0].map(|n| (1 << 32) - 1 + n).into();
    for value in &later {
        assert_eq!(frames.wait(*value).unwrap().1, *value);
    }
    fixture.pass(Some(frames.wait((1 << 32) + 2).unwrap()), None);
    writer.signal((1 << 32) + 5).unwrap();
    fixture.finish();
    later.iter().for_each(|value| frames.check(*value).unwrap());
    assert!(matches!(frames.wait(u64::MAX), Err(Error::Value { .. } | Error::Partywall(_))));
    drop(frames);
}

#[test]
fn needs_vulkan_signals_grow_and_a_dropped_signaller_closes_its_timeline() {
    let world = World::new();
    let domain = world.connect();
    let fixture = Fixture::new();
    let copied = fixture.gpu.signaller(domain.timeline_writer("copied").unwrap()).unwrap();
    let done = domain.timeline("copied").unwrap();
    fixture.pass(None, Some(copied.signal(4).unwrap()));
    done.wait(4, TIMEOUT).unwrap();
    for stale in [0, 3, 4] {
        assert!(matches!(copied.signal(stale), Err(Error::Value { .. })), "{stale}");
    }
    // Promised, but never submitted.
    copied.signal(5).unwrap();
    drop(copied);
    assert!(matches!(done.wait(5, TIMEOUT), Err(PartywallError::Gone(Gone::Timeline { last: 4, .. }))));
    // Another writer continues.
    let next = fixture.gpu.signaller(domain.timeline_writer("copied").unwrap()).unwrap();
    fixture.pass(None, Some(next.signal(6).unwrap()));
    next.finish(TIMEOUT).unwrap();
    fixture.finish();
}
