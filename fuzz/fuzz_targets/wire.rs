// Holds 157.
//! The messages of the protocol, their frames, and text that users write: decoding, and agreement with encoding.
#![no_main]

use libfuzzer_sys::fuzz_target;
use partywall_wire::{
    BadRequest, BrokerHello, ClientHello, Event, Frame, FrameReader, Name, Pattern, Point, Refusal, Reply, Request,
    WireError, frame,
    handshake::{self, Speaker},
    limits::{MAX_MESSAGE, PROTOCOL},
};
use serde::{Serialize, de::DeserializeOwned};

fuzz_target!(|input: &[u8]| {
    let Some((decoder, body)) = input.split_first() else { return };
    match decoder % 7 {
        0 => request(body),
        1 => message::<Reply>(body),
        2 => message::<Event>(body),
        3 => first_message::<ClientHello>(body),
        4 => first_message::<BrokerHello>(body),
        5 => frames(body),
        _ => text(body),
    }
});

/// Decodes a message, encodes it, and decodes that again: both must be the same.
fn message<T: Serialize + DeserializeOwned>(body: &[u8]) {
    let decoded = |body: &[u8]| Frame { body: body.to_vec(), fds: 0 }.decode::<T>();
    if let Ok(message) = decoded(body) {
        let encoded = frame::encode(&message, 0, MAX_MESSAGE).expect("no encoding is longer than what was decoded");
        let again = decoded(&encoded[frame::HEAD..]).expect("our own encoding is decoded");
        // Compared as bytes, because a message may contain NaN, which differs from itself.
        assert!(frame::encode(&again, 0, MAX_MESSAGE) == Ok(encoded));
    }
}

/// Decodes a request as a broker does, which decodes the same requests as a client would, and refuses some others.
fn request(body: &[u8]) {
    message::<Request>(body);
    let decoded = Frame { body: body.to_vec(), fds: 0 }.decode::<Request>();
    match Request::decode(body) {
        Ok(request) => assert_eq!(decoded, Ok(request)),
        Err(BadRequest::Refused(_, Refusal::BadName { name, .. })) => {
            assert!(decoded.is_err());
            assert!(Name::new(&name).is_err());
        }
        Err(BadRequest::Refused(_, refusal)) => panic!("{refusal:?}"),
        Err(BadRequest::Malformed(_)) => assert!(decoded.is_err()),
    }
}

fn first_message<T: Serialize + DeserializeOwned>(body: &[u8]) {
    let Ok(greeting) = handshake::decode(body) else { return };
    if let Ok(rest) = greeting.decode::<T>() {
        let speaker = Speaker { protocol: PROTOCOL, ..greeting.speaker };
        let encoded = handshake::encode(&speaker, &rest, 0).expect("no encoding is longer than what was decoded");
        let again = handshake::decode(&encoded[frame::HEAD..]).expect("our own encoding is decoded");
        assert_eq!(again.speaker.pid, speaker.pid);
        let rest: T = again.decode().expect("our own encoding is decoded");
        assert!(handshake::encode(&again.speaker, &rest, 0).is_ok());
    }
}

/// Checks that the frames of a stream are the same however it is cut into reads.
fn frames(body: &[u8]) {
    const LIMIT: usize = 1 << 12;
    let Some((cut, stream)) = body.split_first() else { return };
    let read = |pieces: &mut dyn Iterator<Item = &[u8]>| {
        let mut reader = FrameReader::new(LIMIT);
        let mut frames = Vec::new();
        for piece in pieces {
            reader.push(piece);
            loop {
                match reader.next_frame(usize::from(*cut)) {
                    Ok(frame) => frames.push(frame),
                    Err(WireError::NeedBytes(0) | WireError::NeedFds(0)) => panic!("nothing is needed"),
                    Err(WireError::NeedBytes(_)) => break,
                    Err(last) => return (frames, Some(last)),
                }
            }
        }
        (frames, None)
    };
    let whole = read(&mut std::iter::once(stream));
    assert_eq!(read(&mut stream.chunks(usize::from(cut % 16) + 1)), whole);
    assert!(whole.0.iter().all(|frame| !frame.body.is_empty() && frame.body.len() <= LIMIT));
}

fn text(body: &[u8]) {
    let Ok(text) = std::str::from_utf8(body) else { return };
    if let Ok(point) = text.parse::<Point>() {
        assert_eq!(point.to_string().parse(), Ok(point));
    }
    let (pattern, name) = text.split_once('\n').unwrap_or((text, text));
    if let Ok(pattern) = Pattern::new(pattern) {
        assert!(!pattern.as_str().bytes().all(|byte| byte == b'*') || pattern.matches(name));
        if !pattern.as_str().contains(['*', '?']) {
            assert_eq!(pattern.matches(name), pattern.as_str() == name);
        }
    }
}
