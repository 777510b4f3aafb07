//! The tokens of a Rust file with their lines: only as much of the language as is needed to find code lines and
//! `cfg(test)`.
//!
//! Comments and white space leave no token. A literal is one token, however many lines it covers.

/// A word, a literal or one punctuation character.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Token<'a> {
    pub(super) text: &'a str,
    /// The line that it starts on, from zero.
    pub(super) line: usize,
}

/// Returns the tokens of a file in order. Text that is not valid Rust also gives tokens; the compiler reports it.
pub(super) fn tokens(source: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    let mut rest = source;
    let mut line = 0;
    while let Some(first) = rest.chars().next() {
        let length = match first {
            _ if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            _ if rest.starts_with("/*") => block_comment(rest),
            _ if first.is_whitespace() => first.len_utf8(),
            _ => {
                let length = token(rest, first);
                tokens.push(Token { text: &rest[..length], line });
                length
            }
        };
        line += rest[..length].matches('\n').count();
        rest = &rest[length..];
    }
    tokens
}

fn token(rest: &str, first: char) -> usize {
    if let Some(length) = string(rest) {
        return length;
    }
    if is_word(first) {
        return rest.find(|letter| !is_word(letter)).unwrap_or(rest.len());
    }
    if first == '\'' { quote(rest) } else { first.len_utf8() }
}

fn is_word(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
}

/// Returns the length of a block comment, which may contain others.
fn block_comment(rest: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < rest.len() {
        if rest[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                break;
            }
        } else {
            at += rest[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    at
}

/// Returns the length of the string that starts here, with its prefix, or `None` if no string starts here.
fn string(rest: &str) -> Option<usize> {
    let prefix = ["br", "cr", "r", "b", "c", ""].into_iter().find(|prefix| {
        let after = rest.strip_prefix(prefix).map(|after| after.trim_start_matches('#'));
        after.is_some_and(|after| after.starts_with('"'))
    })?;
    let after = &rest[prefix.len()..];
    let hashes = after.len() - after.trim_start_matches('#').len();
    let start = prefix.len() + hashes + 1;
    if prefix.ends_with('r') {
        let end = format!("\"{}", "#".repeat(hashes));
        return Some(rest[start..].find(&end).map_or(rest.len(), |at| start + at + end.len()));
    }
    // Hashes without an r stand before another token.
    (hashes == 0).then(|| start + closing(&rest[start..], '"'))
}

/// Returns the length of a character literal, or of the quote and name of a lifetime.
fn quote(rest: &str) -> usize {
    let after = &rest[1..];
    let mut letters = after.chars();
    let first = letters.next();
    if first == Some('\\') || letters.next() == Some('\'') {
        return 1 + closing(after, '\'');
    }
    1 + after.find(|letter| !is_word(letter)).unwrap_or(after.len())
}

/// Returns the length up to and including the closing quote.
fn closing(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, letter) in text.char_indices() {
        if letter == quote && !escaped {
            return at + 1;
        }
        escaped = letter == '\\' && !escaped;
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(source: &str) -> Vec<&str> {
        tokens(source).into_iter().map(|token| token.text).collect()
    }

    #[test]
    fn comments_leave_nothing() {
        assert_eq!(texts("a // b\n/// c\n/* d /* e */ f */ g"), ["a", "g"]);
    }

    #[test]
    fn literals_are_one_token() {
        assert_eq!(texts(r##"x = "// \" {" + r#"" }"# ;"##), ["x", "=", r#""// \" {""#, "+", r###"r#"" }"#"###, ";"]);
        assert_eq!(texts(r"b'\'' '{' c"), ["b", r"'\''", "'{'", "c"]);
    }

    #[test]
    fn lifetimes_are_not_characters() {
        assert_eq!(texts("&'a str, '\u{e9}'"), ["&", "'a", "str", ",", "'\u{e9}'"]);
    }

    #[test]
    fn tokens_know_their_line() {
        let lines: Vec<_> = tokens("a\n\"b\nc\" d\n").into_iter().map(|token| token.line).collect();
        assert_eq!(lines, [0, 1, 2]);
    }
}
