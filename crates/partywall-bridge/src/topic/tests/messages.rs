use proptest::prelude::*;

use crate::topic::wire::{
    Acknowledgement, Bounded, Cursor, EndReason, FromOrigin, FromReceiver, Instance, Join, MAX_BATCH, MAX_DTYPE,
    MAX_HEADER, MAX_RANK, Malformed, Message, Resume, RingId, SampleHead, SampleKind, StreamId, StreamPolicy, Text,
    ToOrigin, ToReceiver, TopicInfo, Window,
};

fn stream() -> impl Strategy<Value = StreamId> {
    (any::<u128>(), any::<u128>(), any::<u64>()).prop_map(|(origin, receiver, number)| StreamId {
        origin: Instance(origin),
        receiver: Instance(receiver),
        number,
    })
}

fn cursor() -> impl Strategy<Value = Cursor> {
    (any::<u64>(), any::<u64>()).prop_map(|(number, piece)| Cursor { number, piece })
}

fn to_origin() -> impl Strategy<Value = ToOrigin> {
    let policy = prop_oneof![Just(StreamPolicy::Block), Just(StreamPolicy::DropOldest), Just(StreamPolicy::Latest)];
    let window = (any::<u32>(), any::<u64>()).prop_map(|(samples, bytes)| Window { samples, bytes });
    let resume = (any::<u128>(), any::<u64>()).prop_map(|(ring, position)| Resume { ring: RingId(ring), position });
    let join = (policy, any::<Option<u32>>(), window, prop::option::of(resume))
        .prop_map(|(policy, history, window, resume)| Join { policy, history, window, resume });
    let acknowledgement = (any::<u64>(), cursor(), cursor(), any::<bool>(), any::<bool>()).prop_map(
        |(serial, written, arrived, resend, asks)| Acknowledgement { serial, written, arrived, resend, asks },
    );
    let body = prop_oneof![
        join.prop_map(FromReceiver::Join),
        acknowledgement.prop_map(FromReceiver::Acknowledge),
        Just(FromReceiver::Leave),
    ];
    (stream(), body).prop_map(|(stream, body)| ToOrigin { stream, body })
}

fn sample() -> impl Strategy<Value = SampleHead> {
    let shape = prop::collection::vec(any::<u64>(), 0..=MAX_RANK);
    let header = prop::collection::vec(any::<u8>(), 0..=MAX_HEADER);
    let numbers = prop::array::uniform5(any::<u64>());
    let kind = prop::sample::select(vec![SampleKind::Whole, SampleKind::Failed, SampleKind::Idle, SampleKind::Busy]);
    ("[a-z0-9é]{0,32}", shape, header, numbers, kind).prop_map(|(dtype, shape, header, numbers, kind)| {
        let [position, publisher, sequence, missed, bytes] = numbers;
        SampleHead {
            kind,
            position,
            publisher,
            sequence,
            missed,
            dtype: Text::new(&dtype).unwrap(),
            shape: Bounded::new(shape).unwrap(),
            bytes,
            header: Bounded::new(header).unwrap(),
        }
    })
}

fn topic() -> impl Strategy<Value = TopicInfo> {
    let shape = prop::option::of(prop::collection::vec(any::<Option<u64>>(), 0..=MAX_RANK));
    let numbers = (any::<u64>(), prop::array::uniform5(any::<u32>()));
    (numbers, prop::option::of("[a-z0-9]{0,64}"), shape).prop_map(|((max_bytes, numbers), dtype, shape)| TopicInfo {
        max_bytes,
        depth: numbers[0],
        history: numbers[1],
        publishers: numbers[2],
        subscribers: numbers[3],
        held: numbers[4],
        dtype: dtype.map(|dtype| Text::new(&dtype).unwrap()),
        shape: shape.map(|shape| Bounded::new(shape).unwrap()),
    })
}

fn to_receiver() -> impl Strategy<Value = ToReceiver> {
    let body = prop_oneof![
        (any::<u128>(), any::<u64>(), topic()).prop_map(|(ring, position, topic)| FromOrigin::Joined {
            ring: RingId(ring),
            position,
            topic
        }),
        (any::<u64>(), prop::collection::vec(sample(), 0..4))
            .prop_map(|(number, samples)| FromOrigin::First { number, samples: Bounded::new(samples).unwrap() }),
        cursor().prop_map(FromOrigin::Next),
        cursor().prop_map(|sent| FromOrigin::Probe { sent }),
        any::<u64>().prop_map(|missed| FromOrigin::End { reason: EndReason::Full, missed }),
    ];
    (stream(), body).prop_map(|(stream, body)| ToReceiver { stream, body })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn messages_round_trip(up in to_origin(), down in to_receiver()) {
        prop_assert_eq!(ToOrigin::decode(&up.encode()), Ok(up));
        prop_assert_eq!(ToReceiver::decode(&down.encode()), Ok(down));
    }

    #[test]
    fn any_bytes_are_refused_or_a_message(bytes in prop::collection::vec(any::<u8>(), 0..200), down in to_receiver()) {
        for bytes in [&bytes[..], &[&down.encode()[..1], &bytes].concat()] {
            if let Ok(message) = ToOrigin::decode(bytes) {
                prop_assert!(ToOrigin::decode(&message.encode()) == Ok(message));
            }
            if let Ok(message) = ToReceiver::decode(bytes) {
                prop_assert!(ToReceiver::decode(&message.encode()) == Ok(message));
            }
        }
    }

    #[test]
    fn changed_messages_are_refused_or_others(down in to_receiver(), at in any::<prop::sample::Index>(), to in any::<u8>()) {
        let mut bytes = down.encode();
        let at = at.index(bytes.len());
        bytes[at] = to;
        if let Ok(message) = ToReceiver::decode(&bytes) {
            prop_assert!(message.encode().len() <= ToReceiver::MOST);
        }
        bytes[at..].iter_mut().for_each(|byte| *byte = to);
        drop(ToReceiver::decode(&bytes));
    }

    #[test]
    fn part_of_a_message_is_none(down in to_receiver(), at in any::<prop::sample::Index>()) {
        let bytes = down.encode();
        prop_assert_eq!(ToReceiver::decode(&bytes[..at.index(bytes.len())]), Err(Malformed::Invalid));
    }
}

const STREAM: StreamId = StreamId { origin: Instance(u128::MAX), receiver: Instance(u128::MAX), number: u64::MAX };

fn largest(samples: usize) -> ToReceiver {
    let sample = SampleHead {
        kind: SampleKind::Busy,
        position: u64::MAX,
        publisher: u64::MAX,
        sequence: u64::MAX,
        missed: u64::MAX,
        dtype: Text::new(&"x".repeat(MAX_DTYPE)).unwrap(),
        shape: Bounded::new(vec![u64::MAX; MAX_RANK]).unwrap(),
        bytes: u64::MAX,
        header: Bounded::new(vec![255; MAX_HEADER]).unwrap(),
    };
    let samples = Bounded::new(vec![sample; samples]).unwrap();
    ToReceiver { stream: STREAM, body: FromOrigin::First { number: u64::MAX, samples } }
}

#[test]
fn encoded_messages_have_their_bound() {
    let bytes = largest(MAX_BATCH).encode();
    assert!(bytes.len() <= ToReceiver::MOST);
    assert_eq!(ToReceiver::decode(&bytes), Ok(largest(MAX_BATCH)));
    let most = Cursor { number: u64::MAX, piece: u64::MAX };
    let known = Acknowledgement { serial: u64::MAX, written: most, arrived: most, resend: true, asks: true };
    let window = Window { samples: u32::MAX, bytes: u64::MAX };
    let resume = Some(Resume { ring: RingId(u128::MAX), position: u64::MAX });
    let join = Join { policy: StreamPolicy::Latest, history: Some(u32::MAX), window, resume };
    for body in [FromReceiver::Acknowledge(known), FromReceiver::Join(join)] {
        assert!(ToOrigin { stream: STREAM, body }.encode().len() <= ToOrigin::MOST);
    }
}

#[test]
fn messages_with_more_than_allowed_are_refused() {
    let bytes = largest(1).encode();
    // The length of each part, where the encoding has it.
    let at = |length: &[u8]| bytes.windows(length.len()).position(|window| window == length).unwrap();
    let dtype = at(&[MAX_DTYPE as u8, b'x']);
    let shape = dtype + 1 + MAX_DTYPE;
    let mut long = bytes.clone();
    long[dtype] += 1;
    long.insert(dtype + 1, b'x');
    assert_eq!(ToReceiver::decode(&long), Err(Malformed::Invalid));
    let mut long = bytes.clone();
    long[shape] += 1;
    long.insert(shape + 1, 0);
    assert_eq!(ToReceiver::decode(&long), Err(Malformed::Invalid));
    // As many values as a peer likes to claim.
    let mut endless = bytes[..shape].to_vec();
    endless.extend([255, 255, 255, 255, 255, 255, 255, 255, 255, 1]);
    assert_eq!(ToReceiver::decode(&endless), Err(Malformed::Invalid));
    assert!(Text::<2>::new("xyz").is_none());
    assert!(Bounded::<u8, 2>::new(vec![0; 3]).is_none());
    assert_eq!(ToReceiver::decode(&[0; ToReceiver::MOST + 1]), Err(Malformed::Long(ToReceiver::MOST + 1)));
    assert_eq!(ToOrigin::decode(&[]), Err(Malformed::Invalid));
    assert_eq!(ToOrigin::decode(&[9, 0]), Err(Malformed::Version(9)));
}
