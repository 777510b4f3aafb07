use std::time::Duration;

use proptest::prelude::*;

use super::world::{RingEntry, Tag, Tags, World, WorldOptions};
use crate::topic::{
    PIECE_BYTES,
    receiver::{ReceiverEvent, StreamEnd},
    wire::{
        Bounded, Cursor, EndReason, FromOrigin, FromReceiver, Resume, RingId, SampleHead, SampleKind, StreamPolicy,
        Window,
    },
};

const MS: Duration = Duration::from_millis(1);
/// Longer than any history.
const NEVER: Duration = Duration::from_secs(1 << 30);

#[derive(Debug, Clone)]
enum Step {
    Publish(RingEntry),
    Take(u32),
    /// A publisher joins, or all leave.
    Publisher(bool),
    /// Deliver a message out of order, and keep it to be delivered again.
    Up(usize, bool),
    Down(usize, bool),
    LoseUp(usize),
    LoseDown(usize),
    /// Deliver everything in order.
    Run,
    Grant(bool),
    Finish(bool),
    Pass(Duration),
    /// Whether messages get through, up and down, while the hosts believe each other alive.
    Cut(bool, bool),
    Disconnect,
    Connect,
    /// The link fails with all that is on its way.
    Break,
    KillOrigin,
    KillReceiver,
    /// Replace numbers of a message on its way.
    ForgeUp(usize, u8, u64),
    ForgeDown(usize, u8, u64),
}

/// What happens to a stream.
#[derive(Debug, Clone, Copy)]
struct Troubles {
    kills: bool,
    refusals: bool,
    own: bool,
    forgery: bool,
}

const NONE: Troubles = Troubles { kills: false, refusals: false, own: false, forgery: false };

fn step(troubles: Troubles) -> impl Strategy<Value = Step> {
    let Troubles { kills, refusals, own, forgery } = troubles;
    let bytes = prop_oneof![
        2 => Just(0),
        4 => 1..100_u64,
        2 => Just(PIECE_BYTES),
        2 => Just(PIECE_BYTES + 1),
        2 => 0..6 * PIECE_BYTES,
    ];
    let own = prop::bool::weighted(if own { 0.2 } else { 0.0 });
    let failed = prop::bool::weighted(0.1);
    let entry = (bytes, failed, own).prop_map(|(bytes, failed, own)| RingEntry { bytes, failed, own });
    let succeeds = move || prop::bool::weighted(if refusals { 0.8 } else { 1.0 });
    let at = || prop_oneof![4 => Just(0), 1 => 0..32_usize];
    let again = || prop::bool::weighted(0.1);
    let number = || prop_oneof![0..8_u64, any::<u64>(), Just(u64::MAX)];
    let usual = prop_oneof![
        12 => entry.prop_map(Step::Publish),
        12 => prop_oneof![2 => Just(1), 1 => 2..6_u32].prop_map(Step::Take),
        2 => any::<bool>().prop_map(Step::Publisher),
        16 => (at(), again()).prop_map(|(index, again)| Step::Up(index, again)),
        24 => (at(), again()).prop_map(|(index, again)| Step::Down(index, again)),
        1 => at().prop_map(Step::LoseUp),
        1 => at().prop_map(Step::LoseDown),
        2 => Just(Step::Run),
        10 => succeeds().prop_map(Step::Grant),
        10 => succeeds().prop_map(Step::Finish),
        4 => (1..1500_u32).prop_map(|ms| Step::Pass(MS * ms)),
        1 => (1..12_000_u32).prop_map(|ms| Step::Pass(MS * ms)),
        1 => (prop::bool::weighted(0.7), prop::bool::weighted(0.7)).prop_map(|(up, down)| Step::Cut(up, down)),
        1 => Just(Step::Disconnect),
        2 => Just(Step::Connect),
        1 => Just(Step::Break),
    ];
    let mut steps = vec![(100, usual.boxed())];
    if kills {
        steps.push((2, prop_oneof![Just(Step::KillOrigin), Just(Step::KillReceiver)].boxed()));
    }
    if forgery {
        steps.push((6, (at(), any::<u8>(), number()).prop_map(|(at, field, to)| Step::ForgeUp(at, field, to)).boxed()));
        steps.push((
            6,
            (at(), any::<u8>(), number()).prop_map(|(at, field, to)| Step::ForgeDown(at, field, to)).boxed(),
        ));
    }
    prop::strategy::Union::new_weighted(steps)
}

fn options(timeout: Duration, hostile: bool) -> impl Strategy<Value = WorldOptions> {
    let policy = prop_oneof![Just(StreamPolicy::Block), Just(StreamPolicy::DropOldest), Just(StreamPolicy::Latest)];
    let bytes = prop_oneof![1..100_u64, 1..5 * PIECE_BYTES];
    (policy, 1..6_u32, bytes).prop_map(move |(policy, samples, bytes)| {
        let window = Window { samples, bytes };
        WorldOptions { policy, window, timeout, hostile }
    })
}

fn history(world: &mut World, steps: Vec<Step>) {
    for step in steps {
        match step {
            Step::Publish(entry) => world.publish(entry),
            Step::Take(most) => drop(world.take_up_to(most)),
            Step::Publisher(is_there) => world.set_publisher(is_there),
            Step::Up(index, again) => drop(world.deliver_up(index, again)),
            Step::Down(index, again) => drop(world.deliver_down(index, again)),
            Step::LoseUp(index) if !world.up.is_empty() => drop(world.up.remove(index % world.up.len())),
            Step::LoseDown(index) if !world.down.is_empty() => drop(world.down.remove(index % world.down.len())),
            Step::LoseUp(_) | Step::LoseDown(_) => {}
            Step::Run => while world.deliver_up(0, false) || world.deliver_down(0, false) {},
            Step::Grant(grants) => drop(world.grant(grants)),
            Step::Finish(succeeds) => drop(world.finish(succeeds)),
            Step::Pass(time) => world.pass(time),
            Step::Cut(up, down) => world.open = (up, down),
            Step::Disconnect => world.disconnect(),
            Step::Connect => world.connect(),
            Step::Break => {
                world.up.clear();
                world.down.clear();
                world.disconnect();
            }
            Step::KillOrigin => world.kill_origin(),
            Step::KillReceiver => world.kill_receiver(),
            Step::ForgeUp(index, field, to) => forge_up(world, index, field, to),
            Step::ForgeDown(index, field, to) => forge_down(world, index, field, to),
        }
    }
}

fn forge_up(world: &mut World, index: usize, field: u8, to: u64) {
    if world.up.is_empty() {
        return;
    }
    let index = index % world.up.len();
    let mut message = world.up[index].clone();
    match (&mut message.body, field % 8) {
        (_, 0) => message.stream.number = to,
        (FromReceiver::Acknowledge(known), 1) => known.serial = to,
        (FromReceiver::Acknowledge(known), 2) => known.written.number = to,
        (FromReceiver::Acknowledge(known), 3) => known.written.piece = to,
        (FromReceiver::Acknowledge(known), 4) => known.arrived = Cursor { number: to, piece: 0 },
        (FromReceiver::Acknowledge(known), 5) => known.arrived.piece = to,
        (FromReceiver::Acknowledge(known), _) => known.resend = !known.resend,
        (FromReceiver::Join(join), 1) => join.window = Window { samples: to as u32, bytes: to },
        (FromReceiver::Join(join), _) => join.resume = Some(Resume { ring: RingId(7), position: to }),
        (body, _) => *body = FromReceiver::Leave,
    }
    world.up.push(message);
}

fn forge_down(world: &mut World, index: usize, field: u8, to: u64) {
    if world.down.is_empty() {
        return;
    }
    let index = index % world.down.len();
    let (mut message, mut payload) = world.down[index].clone();
    match (&mut message.body, field % 10) {
        (_, 0) => message.stream.number = to,
        (_, 1) => payload = None,
        (_, 2) => payload = Some(Tags(vec![Tag { position: 0, offset: 0, bytes: to }])),
        (FromOrigin::First { number, .. }, 3) => *number = to,
        (FromOrigin::First { samples, .. }, field) => {
            let mut changed = samples.to_vec();
            let at = to as usize % changed.len().max(1);
            match (changed.get_mut(at), field) {
                (Some(sample), 4) => sample.position = to,
                (Some(sample), 5) => sample.missed = to,
                (Some(sample), 6) => sample.kind = KINDS[to as usize % 4],
                (Some(sample), 7) => sample.bytes = to,
                (Some(_), 8) => drop(changed.remove(at)),
                _ => changed.push(SampleHead::change(SampleKind::Idle, to, 0)),
            }
            *samples = Bounded::new(changed).expect("they are few");
        }
        (FromOrigin::Next(at), 3) => at.piece = to,
        (FromOrigin::Next(at), _) => at.number = to,
        (FromOrigin::Joined { ring, .. }, 3) => *ring = RingId(to.into()),
        (FromOrigin::Joined { position, .. }, _) => *position = to,
        (FromOrigin::Probe { sent }, _) => sent.number = to,
        (body, _) => *body = FromOrigin::End { reason: EndReason::Detached, missed: to },
    }
    world.down.insert(index, (message, payload));
}

const KINDS: [SampleKind; 4] = [SampleKind::Whole, SampleKind::Failed, SampleKind::Idle, SampleKind::Busy];

/// Checks that each sample since the receiver began is published or counted, and that gaps show in the sequence.
fn check_counts(world: &World) {
    let Some(start) = world.start else { return };
    let counts = world.counts();
    let crossed = world.crossing(start).count() as u64;
    assert_eq!(counts.published, world.local.len() as u64);
    assert_eq!(counts.published + counts.missed + counts.failed, crossed, "{counts:?}");
    let mut due = world.crossing(start).zip(0_u64..);
    for sample in &world.local {
        let number = due.find_map(|((position, _), number)| (position == sample.position).then_some(number));
        assert_eq!(Some(sample.sequence), number, "a gap does not show");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    // Holds 454.
    #[test]
    fn blocking_stream_loses_nothing_between_two_instances(
        options in options(NEVER, false),
        steps in prop::collection::vec(step(NONE), 0..400),
    ) {
        let mut world = World::new(WorldOptions { policy: StreamPolicy::Block, ..options });
        history(&mut world, steps);
        world.settle();
        let start = world.start.expect("it has joined");
        let due: Vec<u64> =
            world.crossing(start).filter(|(_, entry)| !entry.failed).map(|(position, _)| position).collect();
        let got: Vec<u64> = world.local.iter().map(|sample| sample.position).collect();
        prop_assert_eq!(got, due);
        prop_assert_eq!(world.counts().missed, 0);
        check_counts(&world);
    }

    // Holds 454.
    #[test]
    fn samples_are_published_or_counted(
        options in options(Duration::from_secs(10), false),
        steps in prop::collection::vec(step(Troubles { kills: true, refusals: true, ..NONE }), 0..400),
    ) {
        let mut world = World::new(options);
        history(&mut world, steps);
        world.settle();
        check_counts(&world);
    }

    /// Without resumed streams: a ring that has lost samples does not tell whose they were.
    // Holds 453.
    #[test]
    fn own_samples_do_not_cross_and_are_not_missed(
        options in options(NEVER, false),
        steps in prop::collection::vec(step(Troubles { own: true, ..NONE }), 0..200),
    ) {
        let mut world = World::new(WorldOptions { policy: StreamPolicy::Block, ..options });
        history(&mut world, steps);
        world.settle();
        check_counts(&world);
    }

    #[test]
    fn end_of_a_topic_comes_after_its_samples(
        options in options(Duration::from_secs(10), false),
        steps in prop::collection::vec(step(Troubles { refusals: true, ..NONE }), 0..200),
        is_removed in any::<bool>(),
    ) {
        let mut world = World::new(options);
        history(&mut world, steps);
        // Whatever it was doing, there is a stream then.
        if is_removed {
            world.settle();
            world.publish(RingEntry { bytes: 2 * PIECE_BYTES, failed: false, own: false });
            world.take();
            world.publish(RingEntry { bytes: 1, failed: false, own: false });
            world.end_topic();
        } else {
            world.stop_export();
        }
        world.settle();
        if is_removed {
            prop_assert_eq!(world.end, Some(StreamEnd::Origin(EndReason::TopicOver)));
            prop_assert!(!world.publisher_is_open());
            check_counts(&world);
        }
    }

    /// A peer ends its own stream at most, and its credit is all it gets: `World` checks that after each step. Its next
    /// instance has a stream like any other.
    // Holds 456.
    #[test]
    fn forged_messages_end_a_stream_at_most(
        options in options(Duration::from_secs(10), true),
        steps in prop::collection::vec(step(Troubles { kills: true, refusals: true, own: true, forgery: true }), 0..400),
        is_origin in any::<bool>(),
    ) {
        let mut world = World::new(options);
        history(&mut world, steps);
        world.up.clear();
        world.down.clear();
        if is_origin {
            world.kill_origin();
        } else {
            world.kill_receiver();
        }
        world.settle();
        // Leaving returns everything.
        world.receiver_event(ReceiverEvent::Stop);
        world.settle();
        prop_assert!(!world.publisher_is_open());
    }
}
