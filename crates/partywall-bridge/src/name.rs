//! Names of what other hosts have: `//HOST/NAME[@VERSION]`. No local name looks like that, because none has an empty
//! part.

use std::{fmt, str::FromStr};

use partywall::{Pattern, check_name};

/// The name of a segment of another host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RemoteName {
    pub(crate) host: String,
    pub(crate) name: String,
    /// The version; none for the latest.
    pub(crate) version: Option<u64>,
}

/// A pattern of names of another host.
#[derive(Debug, Clone)]
pub(crate) struct RemotePattern {
    pub(crate) host: String,
    pub(crate) pattern: Pattern,
}

impl FromStr for RemoteName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (host, rest) = split(text)?;
        let (name, version) = match rest.split_once('@') {
            Some((name, digits)) => {
                let version = digits.parse().ok().filter(|version| *version > 0 && !digits.starts_with('+'));
                (name, Some(version.ok_or_else(|| format!("{digits:?} is not a version: versions count from 1"))?))
            }
            None => (rest, None),
        };
        check_name(name).map_err(|error| error.to_string())?;
        Ok(Self { host: host.to_owned(), name: name.to_owned(), version })
    }
}

impl fmt::Display for RemoteName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "//{}/{}", self.host, self.name)?;
        self.version.map_or(Ok(()), |version| write!(f, "@{version}"))
    }
}

impl FromStr for RemotePattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (host, pattern) = split(text)?;
        Ok(Self { host: host.to_owned(), pattern: Pattern::new(pattern)? })
    }
}

impl fmt::Display for RemotePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "//{}/{}", self.host, self.pattern.as_str())
    }
}

/// Checks the name of a host or of a realm: letters, digits, `-` and `.`, so that it is one part of a key.
///
/// # Errors
/// Returns a sentence that names the broken rule.
pub(crate) fn check_host(text: &str) -> Result<String, String> {
    if text.is_empty() || text.len() > MAX_HOST {
        return Err(format!("{text:?} has {} bytes; 1 to {MAX_HOST} are allowed", text.len()));
    }
    match text.chars().find(|c| !(c.is_ascii_alphanumeric() || "-.".contains(*c))) {
        Some(bad) => Err(format!("{text:?} contains {bad:?}; letters, digits, `-` and `.` are allowed")),
        None => Ok(text.to_owned()),
    }
}

/// Returns whether a text is an instance: one life of a bridge, 128 bits in hexadecimal.
pub(crate) fn is_instance(text: &str) -> bool {
    (1..=32).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Returns host and rest of `//HOST/REST`.
fn split(text: &str) -> Result<(&str, &str), String> {
    let rest = text.strip_prefix("//").ok_or_else(|| format!("{text:?} does not begin with //HOST/"))?;
    let (host, rest) = rest.split_once('/').ok_or_else(|| format!("{text:?} names a host and nothing there"))?;
    check_host(host)?;
    Ok((host, rest))
}

/// The maximum length of a host's name, as Linux has it.
const MAX_HOST: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_a_host_a_name_and_perhaps_a_version() {
        for (text, host, name, version) in
            [("//a/llm", "a", "llm", None), ("//cam-1.lan/frames/left@12", "cam-1.lan", "frames/left", Some(12))]
        {
            let read: RemoteName = text.parse().unwrap();
            assert_eq!(read, RemoteName { host: host.into(), name: name.into(), version });
            assert_eq!(read.to_string(), text);
        }
        let bad =
            ["llm", "/a/llm", "//a", "//a/", "///llm", "//a/llm@", "//a/llm@0", "//a/llm@+1", "//a/x//y", "//a b/x"];
        for text in bad {
            assert!(text.parse::<RemoteName>().is_err(), "{text}");
        }
        assert_eq!("//a/frames/*".parse::<RemotePattern>().unwrap().to_string(), "//a/frames/*");
        assert!("//*/frames".parse::<RemotePattern>().is_err());
    }
}
