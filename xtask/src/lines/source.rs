//! One Rust file: how many of its lines are code that a release compiles, and which modules it declares.

use std::collections::BTreeSet;

use super::lexer::{self, Token};

/// The code lines and modules of one file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Source {
    /// Lines with code outside of `cfg(test)`, `cfg(loom)` and `cfg(fuzzing)`.
    pub(super) lines: usize,
    /// The declared modules that have files of their own.
    pub(super) modules: Vec<Module>,
}

/// A declaration `mod name;`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Module {
    /// The names of the inline modules around it, then its own name.
    pub(super) path: Vec<String>,
    /// True if only tests and models compile it.
    pub(super) test: bool,
}

/// Reads the text of a file.
pub(super) fn read(text: &str) -> Source {
    let tokens = lexer::tokens(text);
    let mut lines = BTreeSet::new();
    let mut modules = Vec::new();
    // The inline modules around a token, each with the depth of braces at its end.
    let mut inline: Vec<(&str, usize)> = Vec::new();
    let mut depth = 0_usize;
    // The end of the test code that a token is in.
    let mut test_until = 0;
    for (at, token) in tokens.iter().enumerate() {
        if at >= test_until
            && let Some(cfg) = cfg(&tokens, at)
            && cfg.tests_only
        {
            if cfg.inner {
                lines.clear();
                test_until = tokens.len();
            } else {
                test_until = end_of_item(&tokens, cfg.end);
            }
        }
        let test = at < test_until;
        if !test {
            lines.extend(token.line..=token.line + token.text.matches('\n').count());
        }
        match (token.text, text_at(&tokens, at + 2)) {
            ("{", _) => depth += 1,
            ("}", _) => {
                depth = depth.saturating_sub(1);
                inline.pop_if(|(_, end)| *end == depth);
            }
            ("mod", "{") => inline.push((text_at(&tokens, at + 1), depth)),
            ("mod", ";") => {
                let path = inline.iter().map(|(name, _)| *name).chain([text_at(&tokens, at + 1)]);
                modules.push(Module { path: path.map(str::to_owned).collect(), test });
            }
            _ => {}
        }
    }
    // A literal may cover blank lines.
    let blank: Vec<bool> = text.lines().map(|line| line.trim().is_empty()).collect();
    let lines = lines.into_iter().filter(|line| blank.get(*line) == Some(&false)).count();
    Source { lines, modules }
}

/// An attribute `#[cfg(…)]` or `#![cfg(…)]`.
struct Cfg {
    inner: bool,
    /// True if no build without `test` and `loom` meets its condition.
    tests_only: bool,
    /// The index behind its last token.
    end: usize,
}

/// Returns the attribute that starts at a token.
fn cfg(tokens: &[Token<'_>], at: usize) -> Option<Cfg> {
    let inner = text_at(tokens, at + 1) == "!";
    let open = at + 1 + usize::from(inner);
    let words = [text_at(tokens, at), text_at(tokens, open), text_at(tokens, open + 1), text_at(tokens, open + 2)];
    if words != ["#", "[", "cfg", "("] {
        return None;
    }
    let mut next = open + 3;
    let tests_only = condition(tokens, &mut next) == Some(false);
    Some(Cfg { inner, tests_only, end: end_of_group(tokens, open) })
}

/// Evaluates a condition with `test` and `loom` off, or returns `None` if it depends on something else. Advances `next`
/// past the condition.
fn condition(tokens: &[Token<'_>], next: &mut usize) -> Option<bool> {
    let name = text_at(tokens, *next);
    *next += 1;
    if text_at(tokens, *next) != "(" {
        // `feature = "name"` has two tokens more.
        if text_at(tokens, *next) == "=" {
            *next += 2;
        }
        return if matches!(name, "test" | "loom" | "fuzzing") { Some(false) } else { None };
    }
    let end = end_of_group(tokens, *next);
    *next += 1;
    let mut parts = Vec::new();
    while *next + 1 < end {
        parts.push(condition(tokens, next));
        if text_at(tokens, *next) == "," {
            *next += 1;
        }
    }
    *next = end;
    match name {
        "not" => parts.first().copied().flatten().map(|holds| !holds),
        "any" if parts.contains(&Some(true)) => Some(true),
        "any" if parts.iter().all(|part| *part == Some(false)) => Some(false),
        "all" if parts.contains(&Some(false)) => Some(false),
        "all" if parts.iter().all(|part| *part == Some(true)) => Some(true),
        _ => None,
    }
}

/// Returns the index after the target of an attribute: an item, a statement, a field, an arm or an expression.
fn end_of_item(tokens: &[Token<'_>], mut at: usize) -> usize {
    while text_at(tokens, at) == "#" {
        at = end_of_group(tokens, at + 1);
    }
    // These declarations end with a semicolon, even if they contain braces. `const` may also begin a function.
    let word = tokens[at..]
        .iter()
        .map(|token| token.text)
        .find(|word| !matches!(*word, "pub" | "(" | "crate" | "super" | ")"));
    let is_function = tokens[at..].iter().take(8).any(|token| token.text == "fn");
    let needs_semicolon = matches!(word, Some("use" | "let" | "static" | "const" | "type")) && !is_function;
    while at < tokens.len() {
        match tokens[at].text {
            "{" => {
                at = end_of_group(tokens, at);
                if !needs_semicolon && !matches!(text_at(tokens, at), "else" | "." | "?" | "," | ";" | ")" | "]") {
                    return at;
                }
            }
            "(" | "[" => at = end_of_group(tokens, at),
            ")" | "]" | "}" => return at,
            ";" => return at + 1,
            "," if !needs_semicolon => return at + 1,
            _ => at += 1,
        }
    }
    at
}

/// Returns the index behind the bracket that closes the one at a token.
fn end_of_group(tokens: &[Token<'_>], open: usize) -> usize {
    let mut depth = 0_usize;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        match token.text {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            return at + 1;
        }
    }
    tokens.len()
}

fn text_at<'a>(tokens: &[Token<'a>], at: usize) -> &'a str {
    tokens.get(at).map_or("", |token| token.text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> usize {
        read(text).lines
    }

    fn module(path: &[&str], test: bool) -> Module {
        Module { path: path.iter().map(|name| (*name).to_owned()).collect(), test }
    }

    #[test]
    fn blank_lines_and_comments_are_not_counted() {
        assert_eq!(lines("//! Head.\n\n/// What it is.\nfn a() { // why\n    /* more */\n}\n"), 2);
    }

    #[test]
    fn literal_counts_its_nonblank_lines() {
        assert_eq!(lines("const A: &str = \"\\\n// b\n\nc\";\n"), 3);
    }

    #[test]
    fn test_items_are_not_counted() {
        assert_eq!(lines("#[cfg(any(test, fuzzing))]\nmod tests {\n    fn a() {}\n}\nfn b() {}\n"), 1);
        assert_eq!(lines("#[cfg(test)]\nmod tests {\n    fn a() {}\n}\nfn b() {}\n"), 1);
        assert_eq!(lines("#[cfg(test)]\n#[allow(unused)]\nuse a::{\n    b,\n};\nfn b() {}\n"), 1);
        assert_eq!(lines("#[cfg(test)]\npub(crate) const fn a() {\n}\nfn b() {}\n"), 1);
        assert_eq!(lines("struct A {\n    #[cfg(test)]\n    b: u8,\n    c: u8,\n}\n"), 3);
        assert_eq!(lines("fn a() {\n    #[cfg(test)]\n    if b() {\n    } else {\n    }\n    c();\n}\n"), 3);
    }

    #[test]
    fn possible_release_condition_is_counted() {
        for condition in ["not(test)", "not(loom)", "feature = \"a\"", "any(test, unix)", "not(all(test, unix))"] {
            assert_eq!(lines(&format!("#[cfg({condition})]\nfn a() {{}}\n")), 2, "{condition}");
        }
        for condition in ["test", "loom", "all(test, not(loom))", "any(test, loom)", "all(unix, test)"] {
            assert_eq!(lines(&format!("#[cfg({condition})]\nfn a() {{}}\n")), 0, "{condition}");
        }
    }

    #[test]
    fn inner_condition_holds_for_the_whole_file() {
        let source = read("//! Head.\n#![cfg(test)]\nmod a;\nfn b() {}\n");
        assert_eq!(source, Source { lines: 0, modules: vec![module(&["a"], true)] });
    }

    #[test]
    fn modules_in_files_are_found() {
        let source =
            read("mod a;\npub mod b {\n    mod c;\n}\n#[cfg(test)]\nmod d;\n#[cfg(test)]\nmod e { mod f; }\nmod g;\n");
        let expected = [
            module(&["a"], false),
            module(&["b", "c"], false),
            module(&["d"], true),
            module(&["e", "f"], true),
            module(&["g"], false),
        ];
        assert_eq!(source.modules, expected);
    }
}
