//! Patterns of names.

use std::{fmt, sync::Arc};

use crate::limits::MAX_NAME;

/// A pattern of names: `*` matches any number of characters, including `/` and none; `?` matches one.
#[derive(Clone, PartialEq, Eq)]
pub struct Pattern(Arc<str>);

impl Pattern {
    /// Parses a pattern: the characters of a name, `*` and `?`.
    ///
    /// # Errors
    /// Returns a sentence that names the broken rule. A pattern that breaks a rule matches no name.
    pub fn new(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Err("a pattern needs at least one character; `*` matches every name".into());
        }
        if text.len() > MAX_NAME {
            return Err(format!("a pattern has at most {MAX_NAME} bytes, this one has {}", text.len()));
        }
        match text.chars().find(|c| !(c.is_ascii_alphanumeric() || "._-/*?".contains(*c))) {
            Some(bad) => Err(format!("a pattern consists of letters, digits, `._-/`, `*` and `?`, not {bad:?}")),
            None => Ok(Self(text.into())),
        }
    }

    /// Returns the text of the pattern.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns whether `name` matches. The number of steps is at most the product of the two lengths.
    pub fn matches(&self, name: &str) -> bool {
        let pattern = self.0.as_bytes();
        let name = name.as_bytes();
        let mut p = 0;
        let mut n = 0;
        // Where to resume after a mismatch: the last star, and the first character that it does not cover yet.
        let mut retry: Option<(usize, usize)> = None;
        while n < name.len() {
            match pattern.get(p) {
                Some(b'*') => {
                    retry = Some((p, n + 1));
                    p += 1;
                }
                Some(c) if *c == b'?' || *c == name[n] => {
                    p += 1;
                    n += 1;
                }
                _ => match retry {
                    Some((star, next)) => {
                        retry = Some((star, next + 1));
                        p = star + 1;
                        n = next;
                    }
                    None => return false,
                },
            }
        }
        pattern[p..].iter().all(|c| *c == b'*')
    }
}

impl fmt::Debug for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(pattern: &str, name: &str) -> bool {
        Pattern::new(pattern).unwrap_or_else(|why| panic!("{why}")).matches(name)
    }

    #[test]
    fn patterns_match_like_a_shell() {
        for (pattern, name) in [
            ("*", "a"),
            ("*", "a/b"),
            ("**", "a/b"),
            ("a*", "abc"),
            ("*c", "abc"),
            ("a?c", "abc"),
            ("*b*d", "abcbd"),
            ("a**b", "ab"),
            ("llm/*", "llm/a/b"),
        ] {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in
            [("b", "a"), ("?", "ab"), ("a*", "ba"), ("*b*d", "abc"), ("a?c", "ac"), ("llm/*", "llm"), ("ab", "a")]
        {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
        assert!(!matches(&"*a".repeat(50), &"a".repeat(49)));
    }

    #[test]
    fn patterns_that_match_no_name_are_refused() {
        for (pattern, word) in [("", "at least one"), ("a b", "' '"), ("[ab]", "'['"), ("ä", "'ä'")] {
            assert!(Pattern::new(pattern).is_err_and(|why| why.contains(word)), "{pattern}");
        }
        assert!(Pattern::new(&"x".repeat(MAX_NAME + 1)).is_err_and(|why| why.contains("255")));
    }
}
