//! Names of segments, timelines and semaphores.

use std::{borrow::Borrow, fmt, ops::Deref, sync::Arc};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::limits::MAX_NAME;

/// A name that obeys the rules of [`check_name`]. No other can be made or decoded.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Arc<str>);

impl Name {
    /// Checks a name.
    ///
    /// # Errors
    /// As [`check_name`].
    pub fn new(text: &str) -> Result<Self, String> {
        check_name(text).map(|()| Self(text.into()))
    }

    /// Returns the text of the name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Checks a name: letters, digits and `._-/`, at most [`MAX_NAME`] bytes, no empty part and no part `.` or `..`.
///
/// # Errors
/// Returns a sentence that names the broken rule.
pub fn check_name(name: &str) -> Result<(), String> {
    if name.is_empty() {
        return Err("a name needs at least one character".into());
    }
    if name.len() > MAX_NAME {
        return Err(format!("a name has at most {MAX_NAME} bytes, this one has {}", name.len()));
    }
    if let Some(bad) = name.chars().find(|c| !(c.is_ascii_alphanumeric() || "._-/".contains(*c))) {
        return Err(format!("a name consists of letters, digits and `._-/`, not {bad:?}"));
    }
    match name.split('/').find(|part| matches!(*part, "" | "." | "..")) {
        Some("") => Err("a name must not begin or end with `/` or contain `//`".into()),
        Some(part) => Err(format!("a name must not contain the part `{part}`")),
        None => Ok(()),
    }
}

impl Deref for Name {
    type Target = str;

    fn deref(&self) -> &str {
        self.as_str()
    }
}

impl Borrow<str> for Name {
    fn borrow(&self) -> &str {
        self.as_str()
    }
}

impl PartialEq<str> for Name {
    fn eq(&self, other: &str) -> bool {
        self.as_str() == other
    }
}

impl PartialEq<&str> for Name {
    fn eq(&self, other: &&str) -> bool {
        self.as_str() == *other
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.as_str().to_owned()
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// As its text.
impl Serialize for Name {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// Refuses a text that is not a name. [`Request::decode`](crate::Request::decode) says which rule it breaks.
impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Text)
    }
}

struct Text;

impl de::Visitor<'_> for Text {
    type Value = Name;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Name, E> {
        Name::new(text).map_err(E::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_names_give_the_reason() {
        for (name, word) in [
            ("", "at least one"),
            ("a b", "' '"),
            ("ä", "'ä'"),
            ("a:b", "':'"),
            ("a@3", "'@'"),
            ("/a", "begin or end"),
            ("a/", "begin or end"),
            ("a//b", "contain"),
            ("a/../b", "`..`"),
            (".", "`.`"),
            ("a\0b", "'\\0'"),
        ] {
            let why = Name::new(name).expect_err(name);
            assert!(why.contains(word), "{name:?}: {why}");
            assert!(postcard::from_bytes::<Name>(&postcard::to_allocvec(name).unwrap()).is_err(), "{name:?}");
        }
        assert!(Name::new(&"x".repeat(MAX_NAME + 1)).expect_err("long").contains("255"));
    }

    #[test]
    fn ordinary_names_pass() {
        for text in ["a", "llm", "models/llama-3.1_8b", "a.b", "...", &"x".repeat(MAX_NAME)] {
            let name = Name::new(text).expect(text);
            let encoded = postcard::to_allocvec(&name).unwrap();
            assert_eq!(encoded, postcard::to_allocvec(text).unwrap());
            assert_eq!(postcard::from_bytes(&encoded), Ok(name));
        }
    }
}
