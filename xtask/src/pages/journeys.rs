//! Checks the names in the journeys of ARCHITECTURE.md. Readers search for them, so each must be defined somewhere.

use super::{Tree, code, is_word};

/// The heading above the journeys.
const JOURNEYS: &str = "## Twelve journeys";

/// Returns the names that nothing defines. A name such as `Link::ask` counts as defined if a file defines `ask` and
/// contains the word `Link`, or is called so.
pub(super) fn check(page: &str, tree: &Tree) -> Vec<String> {
    let Some((_, rest)) = page.split_once(JOURNEYS) else {
        return vec![format!("ARCHITECTURE.md has no heading {JOURNEYS:?}")];
    };
    let journeys = rest.split("\n## ").next().unwrap_or(rest);
    let names = code(journeys).filter(|name| name.chars().all(|c| is_word(c) || matches!(c, ':' | '.')));
    let unknown = names.filter(|name| !is_defined(name, tree));
    unknown.map(|name| format!("ARCHITECTURE.md: nothing defines {name}")).collect()
}

fn is_defined(name: &str, tree: &Tree) -> bool {
    let mut parts = name.rsplit([':', '.']).filter(|part| !part.is_empty());
    let Some(last) = parts.next() else { return true };
    let owner = parts.next();
    tree.files.iter().any(|(path, text)| {
        let is_source = path.extension().is_some_and(|extension| extension == "rs" || extension == "py");
        let is_owner = |owner| has_word(text, owner) || path.with_extension("").ends_with(owner);
        is_source && owner.is_none_or(is_owner) && text.lines().any(|line| defines(line, last))
    })
}

/// Returns whether a line defines an item, or a variant of an enum.
fn defines(line: &str, name: &str) -> bool {
    let line = line.trim_start();
    let Some(at) = line.find(name) else { return false };
    let (before, after) = (&line[..at], &line[at + name.len()..]);
    let is_item = KEYWORDS.iter().any(|keyword| before.ends_with(keyword)) && !after.starts_with(is_word);
    let is_variant = before.is_empty() && name.starts_with(char::is_uppercase) && after.starts_with([',', '(', ' ']);
    is_item || is_variant
}

fn has_word(text: &str, word: &str) -> bool {
    text.match_indices(word)
        .any(|(at, _)| !text[..at].ends_with(is_word) && !text[at + word.len()..].starts_with(is_word))
}

/// What stands before the name of an item.
const KEYWORDS: [&str; 9] = ["fn ", "struct ", "enum ", "trait ", "const ", "static ", "mod ", "def ", "class "];

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn names_that_nothing_defines_are_reported() {
        let file = |path: &str, text: &str| (PathBuf::from(path), text.to_owned());
        let tree = Tree {
            files: vec![
                file(
                    "crates/a/src/link.rs",
                    "pub struct Link;\nimpl Link {\n    pub(crate) fn ask(&self) {}\n}\nfn asked() {}",
                ),
                file("crates/a/src/event.rs", "enum Event {\n    Died { member: u64 },\n}"),
                file("python/_arrays.py", "def taken(tensors):"),
                file("docs/cli.md", "fn gone() {}"),
            ],
        };
        let page = |name: &str| format!("## Twelve journeys\n\nIt begins with `{name}`.\n\n## Crates\n`nowhere`");
        for known in ["Link", "Link::ask", "link::ask", "Event::Died", "_arrays.taken", "serve --replace"] {
            assert_eq!(check(&page(known), &tree), [""; 0], "{known}");
        }
        for unknown in ["Line::ask", "Link::answer", "Lin", "Link::as", "gone", "Event::Born"] {
            assert_eq!(check(&page(unknown), &tree), [format!("ARCHITECTURE.md: nothing defines {unknown}")]);
        }
        assert_eq!(check("## Crates", &tree).len(), 1);
    }
}
