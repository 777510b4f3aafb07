//! Encodes bytes as one piece. The encoding equals that of a sequence of numbers, without a call for each number.

use std::fmt;

use serde::{Deserializer, Serializer, de};

pub(crate) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_bytes(bytes)
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    deserializer.deserialize_bytes(Bytes)
}

struct Bytes;

impl de::Visitor<'_> for Bytes {
    type Value = Vec<u8>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("bytes")
    }

    fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Self::Value, E> {
        Ok(bytes.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use serde::{Deserialize, Serialize};

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Piece(#[serde(with = "super")] Vec<u8>);

    #[test]
    fn bytes_are_encoded_as_a_sequence() {
        for len in [0, 1, 127, 128, 20_000] {
            let bytes: Vec<u8> = (0..len).map(|i| i as u8).collect();
            let piece = Piece(bytes.clone());
            let encoded = postcard::to_allocvec(&piece).unwrap();
            assert_eq!(encoded, postcard::to_allocvec(&bytes).unwrap());
            assert_eq!(postcard::from_bytes::<Piece>(&encoded).unwrap(), piece);
            // The length exceeds the bytes that follow.
            assert!(len == 0 || postcard::from_bytes::<Piece>(&encoded[..encoded.len() - 1]).is_err());
        }
    }
}
