//! How values that other crates define, or that deserve a shorter form, are written to the journal.

use std::{fmt, sync::Arc};

use serde::{Deserialize, Deserializer, Serializer, de};

/// Decodes a map or a set that may be large. What was written is in order, so the tree is built at once; serde would
/// insert one element after the other, which takes most of the time of a restart.
pub(super) fn ordered<'de, D, C>(deserializer: D) -> Result<C, D::Error>
where
    D: Deserializer<'de>,
    C: IntoIterator<Item: Deserialize<'de>> + FromIterator<C::Item>,
{
    Ok(Vec::<C::Item>::deserialize(deserializer)?.into_iter().collect())
}

/// Bytes in one piece. The encoding equals that of a sequence of numbers, without a call for each number.
pub(super) mod bytes {
    use super::{Arc, Deserializer, Serializer, de, fmt};

    pub(in super::super) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(bytes)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<[u8]>, D::Error> {
        deserializer.deserialize_bytes(Bytes)
    }

    struct Bytes;

    impl de::Visitor<'_> for Bytes {
        type Value = Arc<[u8]>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("bytes")
        }

        fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Self::Value, E> {
            Ok(bytes.into())
        }
    }
}

/// A pattern, as its text.
pub(super) mod pattern {
    use partywall_wire::Pattern;

    use super::{Deserializer, Serializer, de};

    pub(in super::super) fn serialize<S: Serializer>(pattern: &Pattern, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(pattern.as_str())
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Pattern, D::Error> {
        let text: String = de::Deserialize::deserialize(deserializer)?;
        Pattern::new(&text).map_err(de::Error::custom)
    }
}
