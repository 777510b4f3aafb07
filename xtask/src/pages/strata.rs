//! Checks the strata of crates and of modules that ARCHITECTURE.md lists: nothing in them uses what is above its own
//! stratum.

use std::path::Path;

use super::{Tree, is_word};

/// What stands before the folder of a crate or module, in the first line of a list.
const STRATA: &str = "strata of ";

/// Returns what is wrong in the lists and in the code. A list names the modules in a folder from below, a stratum in each
/// line. Only modules that are joined by `+` know each other. A list may name a type that the root of the folder defines:
/// only the strata above know it.
pub(super) fn check(page: &str, tree: &Tree) -> Vec<String> {
    let lists = page.split("```text\n").skip(1).filter_map(|rest| rest.split("```").next());
    let lists = lists.filter_map(|list| list.strip_prefix(STRATA)?.split_once('\n'));
    let found: Vec<_> = lists.map(|(folder, list)| check_folder(folder.trim(), list, tree)).collect();
    if found.is_empty() { vec!["ARCHITECTURE.md lists no strata".to_owned()] } else { found.concat() }
}

fn check_folder(folder: &str, list: &str, tree: &Tree) -> Vec<String> {
    let mut groups: Vec<(usize, Vec<&str>)> = Vec::new();
    for (stratum, line) in list.lines().enumerate() {
        groups.extend(line.split_whitespace().map(|group| (stratum, group.split('+').collect())));
    }
    let group_of = |module: &str| groups.iter().position(|(_, group)| group.contains(&module));
    let mut wrong = Vec::new();
    for (path, text) in &tree.files {
        let Ok(inside) = path.strip_prefix(folder) else { continue };
        let Some(module) = module_of(inside) else { continue };
        let Some(own) = group_of(module) else {
            wrong.push(format!("ARCHITECTURE.md: the strata of {folder} lack {module}"));
            continue;
        };
        for used in roots(folder, inside).iter().flat_map(|root| uses(text, root)) {
            let file = path.display();
            match group_of(used) {
                Some(group) if group == own || groups[group].0 < groups[own].0 => {}
                Some(_) => wrong.push(format!("{file}: {used} is not in a stratum below that of {module}")),
                None if used.starts_with(char::is_uppercase) => {
                    wrong.push(format!("{file}: take {used} from its module, so that its stratum is known"));
                }
                None => {}
            }
        }
    }
    wrong
}

/// Returns the module at the root of a folder that a file belongs to; `None` for the root itself and for tests.
fn module_of(path: &Path) -> Option<&str> {
    let is_test = path.components().any(|part| matches!(part.as_os_str().to_str(), Some("tests.rs" | "tests")));
    let module = path.components().next()?.as_os_str().to_str()?;
    let module = module.strip_suffix(".rs").unwrap_or(module);
    (!is_test && path.extension().is_some_and(|extension| extension == "rs") && !matches!(module, "lib" | "mod"))
        .then_some(module)
}

/// Returns how a file in a folder names the folder's root: from the root of the crate, and from its own place.
fn roots(folder: &str, inside: &Path) -> [String; 2] {
    let below = folder.split_once("/src/").map_or_else(String::new, |(_, below)| below.replace('/', "::") + "::");
    let depth = inside.components().count() - usize::from(inside.ends_with("mod.rs"));
    [format!("crate::{below}"), "super::".repeat(depth)]
}

/// Returns what a file takes from a root, without its tests. Of paths that begin with `super`, only imports at the top of
/// the file count: within a module of the file they would begin elsewhere.
fn uses<'t>(text: &'t str, root: &str) -> Vec<&'t str> {
    let text = text.split("#[cfg(test)]\nmod ").next().unwrap_or(text);
    let mut all = Vec::new();
    for (at, found) in text.match_indices(root) {
        let line = text[..at].rsplit('\n').next().unwrap_or_default();
        let is_within = root.starts_with("super") && (!line.ends_with("use ") || line.starts_with(' '));
        if line.contains("//") || line.contains("#[doc") || line.ends_with(is_word) || is_within {
            continue;
        }
        let rest = &text[at + found.len()..];
        match rest.strip_prefix('{') {
            Some(list) => all.extend(first_names(list)),
            None => all.push(word(rest)),
        }
    }
    all
}

/// Returns the first names of the paths in a list of imports, up to its closing brace.
fn first_names(list: &str) -> Vec<&str> {
    let mut names = Vec::new();
    let mut depth = 0;
    let mut is_new = true;
    for (at, character) in list.char_indices() {
        match character {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => is_new = true,
            c if is_new && is_word(c) => {
                names.push(word(&list[at..]));
                is_new = false;
            }
            _ => {}
        }
    }
    names
}

fn word(text: &str) -> &str {
    text.split(|c| !is_word(c)).next().unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn checked(page: &str, files: &[(&str, &str)]) -> Vec<String> {
        let files = files.iter().map(|(path, text)| (PathBuf::from(path), (*text).to_owned())).collect();
        check(page, &Tree { files })
    }

    #[test]
    fn uses_that_run_up_are_reported() {
        let page = "```text\nstrata of a/src\n error wait\n link+domain\n pool\n```\n";
        let files = [
            ("a/src/lib.rs", "pub use crate::pool::Pool;"),
            (
                "a/src/error/mod.rs",
                "// crate::pool\nuse std::fmt;\n#[cfg(test)]\nmod tests {\n use crate::pool::Pool;\n}",
            ),
            ("a/src/wait.rs", "fn f() -> crate::error::Error {}"),
            ("a/src/link.rs", "use crate::{\n    domain::{Domain, pool},\n    error::Error,\n};"),
            ("a/src/domain.rs", "use crate::{pool::{self, Pool}, link::Link};"),
            ("a/src/pool.rs", "use crate::{Domain, error};"),
            ("a/src/pool/tests.rs", "use crate::Domain;"),
            ("a/src/new.rs", ""),
            ("a/build.rs", "use crate::pool;"),
        ];
        let wrong = [
            "a/src/wait.rs: error is not in a stratum below that of wait",
            "a/src/domain.rs: pool is not in a stratum below that of domain",
            "a/src/pool.rs: take Domain from its module, so that its stratum is known",
            "ARCHITECTURE.md: the strata of a/src lack new",
        ];
        assert_eq!(checked(page, &files), wrong);
        assert_eq!(checked("no list", &files), ["ARCHITECTURE.md lists no strata"]);
    }

    #[test]
    fn uses_within_a_module_are_found_from_its_root() {
        let page = "```text\nstrata of a/src/r\n types\n people\n Registry\n rules\n```\n";
        let files = [
            ("a/src/r/mod.rs", "use rules::Rule;"),
            ("a/src/r/types.rs", "mod inner {\n    use super::rules;\n}\nuse super::super::server;"),
            ("a/src/r/people/mod.rs", "use super::{Registry, types::Id};\nuse crate::types;"),
            ("a/src/r/people/users.rs", "use super::Member;\npub(crate) use super::super::rules::Rule;"),
            ("a/src/r/people/members.rs", "use crate::r::{rules, types};"),
            ("a/src/r/rules.rs", "use super::{Registry, people};"),
        ];
        let wrong = [
            "a/src/r/people/mod.rs: Registry is not in a stratum below that of people",
            "a/src/r/people/users.rs: rules is not in a stratum below that of people",
            "a/src/r/people/members.rs: rules is not in a stratum below that of people",
        ];
        assert_eq!(checked(page, &files), wrong);
    }
}
