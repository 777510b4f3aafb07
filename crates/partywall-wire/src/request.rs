//! Requests, and how a broker decodes them.

use postcard::{Deserializer, de_flavors::Flavor};
use serde::{Deserialize, Serialize};

use crate::{call::Call, frame::WireError, id::RequestId, name::check_name, refusal::Refusal};

/// A member's request. Its number grows with each request and names the ticket if the request has to wait.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Unique within the member, also across its reconnections.
    pub id: RequestId,
    /// The operation.
    pub call: Call,
}

/// Why bytes are no request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BadRequest {
    /// All of it can be read but a name, so it can be refused.
    Refused(RequestId, Refusal),
    /// The peer does not speak this protocol.
    Malformed(WireError),
}

impl Request {
    /// Decodes a request that takes up the whole body.
    ///
    /// # Errors
    /// [`BadRequest`]. A text in the place of a name is refused with [`Refusal::BadName`].
    pub fn decode(body: &[u8]) -> Result<Self, BadRequest> {
        let malformed = |why: String| BadRequest::Malformed(WireError::Malformed(why));
        let mut deserializer = Deserializer::from_flavor(Pieces { rest: body, text: None });
        let decoded = Self::deserialize(&mut deserializer);
        let Pieces { rest, text } = deserializer.finalize().map_err(|error| malformed(error.to_string()))?;
        match (decoded, text) {
            (Ok(request), _) if rest.is_empty() => Ok(request),
            (Ok(_), _) => Err(malformed(format!("{} bytes follow the message", rest.len()))),
            (Err(error @ postcard::Error::SerdeDeCustom), Some(text)) => Err(match (take_id(body), bad_name(text)) {
                (Some(id), Some(refusal)) => BadRequest::Refused(id, refusal),
                _ => malformed(error.to_string()),
            }),
            (Err(error), _) => Err(malformed(error.to_string())),
        }
    }
}

fn take_id(body: &[u8]) -> Option<RequestId> {
    postcard::take_from_bytes(body).ok().map(|(id, _)| id)
}

fn bad_name(text: &[u8]) -> Option<Refusal> {
    let name = std::str::from_utf8(text).ok()?;
    let why = check_name(name).err()?;
    Some(Refusal::BadName { name: name.chars().take(256).collect(), why })
}

/// The bytes of a message. If a text is refused by its type, it is the last piece that was taken: everything else but
/// texts and bytes is taken byte by byte.
struct Pieces<'a> {
    rest: &'a [u8],
    /// The last piece, if no single byte has been taken since.
    text: Option<&'a [u8]>,
}

impl<'a> Flavor<'a> for Pieces<'a> {
    type Remainder = Self;
    type Source = &'a [u8];

    fn pop(&mut self) -> postcard::Result<u8> {
        let (byte, rest) = self.rest.split_first().ok_or(postcard::Error::DeserializeUnexpectedEnd)?;
        *self = Self { rest, text: None };
        Ok(*byte)
    }

    /// Sequences allocate no more than can follow.
    fn size_hint(&self) -> Option<usize> {
        Some(self.rest.len())
    }

    fn try_take_n(&mut self, count: usize) -> postcard::Result<&'a [u8]> {
        let taken = self.rest.split_at_checked(count).ok_or(postcard::Error::DeserializeUnexpectedEnd);
        let (text, rest) = taken?;
        *self = Self { rest, text: Some(text) };
        Ok(text)
    }

    fn finalize(self) -> postcard::Result<Self> {
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MAX_RANK, Name, limits::MAX_NAME};

    /// Encodes a request that has `text` where this one has the name `n`.
    fn with_text(call: Call, text: &[u8]) -> Vec<u8> {
        let encoded = postcard::to_allocvec(&Request { id: RequestId(300), call }).unwrap();
        let at = encoded.windows(2).position(|pair| pair == [1, b'n']).expect("a name");
        let length = postcard::to_allocvec(&text.len()).unwrap();
        [&encoded[..at], &length, text, &encoded[at + 2..]].concat()
    }

    fn calls() -> [Call; 2] {
        let name = || Name::new("n").unwrap();
        [
            Call::Inspect { name: name(), version: Some(1) },
            Call::OpenTimeline { name: name(), writer: true, shared: false },
        ]
    }

    // Holds 366.
    #[test]
    fn text_that_is_no_name_is_refused_with_its_reason() {
        let long = "x".repeat(MAX_NAME + 100);
        for call in calls() {
            for text in ["", "a b", "/", "ä", &long] {
                let Err(BadRequest::Refused(id, Refusal::BadName { name, why })) =
                    Request::decode(&with_text(call.clone(), text.as_bytes()))
                else {
                    panic!("{text:?} is refused")
                };
                assert_eq!((id, Err(why)), (RequestId(300), check_name(text)));
                assert!(text.starts_with(&name) && name.chars().count() == text.chars().count().min(256));
            }
            let request = Request { id: RequestId(300), call: call.clone() };
            assert_eq!(Request::decode(&with_text(call, b"n")), Ok(request));
        }
    }

    // Holds 366.
    #[test]
    fn bytes_that_are_no_request_are_malformed() {
        let malformed = |body: &[u8]| matches!(Request::decode(body), Err(BadRequest::Malformed(_)));
        let [call, _] = calls();
        let whole = with_text(call.clone(), b"n");
        for end in 0..whole.len() {
            assert!(malformed(&whole[..end]), "{end}");
        }
        assert!(malformed(&[&whole[..], &[0]].concat()), "bytes follow");
        assert!(malformed(&with_text(call, &[0xff])), "no text");
        assert!(malformed(&[7, 0xff, 0xff, 0xff, 0xff, 0x0f]), "no such call");
    }

    /// A shape with too many dimensions follows bytes that are no name either.
    // Holds 366.
    #[test]
    fn other_values_are_not_taken_for_names() {
        let extents = vec![Some(1_u64); MAX_RANK + 1];
        let table = [1, b' '];
        let body = [&table[..], &postcard::to_allocvec(&extents).unwrap()].concat();
        let mut deserializer = Deserializer::from_flavor(Pieces { rest: &body, text: None });
        type Shaped = (String, crate::SampleShape);
        assert_eq!(Shaped::deserialize(&mut deserializer), Err(postcard::Error::SerdeDeCustom));
        assert_eq!(deserializer.finalize().unwrap().text, None);
    }
}
