//! Objects of JSON, as their files have them.

use std::{collections::HashSet, fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, Visitor},
};

/// The members of an object, in the order of the file.
///
/// A key that is there twice is an error: readers would keep one of its values, and not all of them the same one.
#[derive(Debug)]
pub(crate) struct Members<T>(pub(crate) Vec<(String, T)>);

/// The value of a member; its type may depend on the key.
pub(crate) trait Member: Sized {
    /// Reads the value of the member `key`.
    fn read<'de, A: MapAccess<'de>>(key: &str, map: &mut A) -> Result<Self, A::Error>;
}

impl Member for String {
    fn read<'de, A: MapAccess<'de>>(_: &str, map: &mut A) -> Result<Self, A::Error> {
        map.next_value()
    }
}

impl<'de, T: Member> Deserialize<'de> for Members<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Object(PhantomData))
    }
}

struct Object<T>(PhantomData<T>);

impl<'de, T: Member> Visitor<'de> for Object<T> {
    type Value = Members<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members<T>, A::Error> {
        let mut members = Vec::new();
        let mut keys = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            if !keys.insert(key.clone()) {
                return Err(A::Error::custom(format!("it has the key {key:?} twice")));
            }
            let value = T::read(&key, &mut map).map_err(|error| A::Error::custom(format!("{key:?}: {error}")))?;
            members.push((key, value));
        }
        Ok(Members(members))
    }
}
