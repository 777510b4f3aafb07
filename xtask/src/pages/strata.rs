//! Checks how the modules of crates use each other: no circle of them is large, and in the strata that ARCHITECTURE.md
//! lists, nothing uses what is above its own stratum.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use super::{Tree, is_word};

/// What stands before the folder of a crate or module, in the first line of a list.
const STRATA: &str = "strata of ";

/// The most modules of a folder that may all use each other.
const MAX_CIRCLE: usize = 4;

/// Returns what is wrong in the lists and in the code. A list names the modules in a folder from below, a stratum in each
/// line. Only modules that are joined by `+` know each other. A list may name a type that the root of the folder defines:
/// only the strata above know it.
pub(super) fn check(page: &str, tree: &Tree) -> Vec<String> {
    let lists = page.split("```text\n").skip(1).filter_map(|rest| rest.split("```").next());
    let lists = lists.filter_map(|list| list.strip_prefix(STRATA)?.split_once('\n'));
    let found: Vec<_> = lists.map(|(folder, list)| check_folder(folder.trim(), list, tree)).collect();
    let mut wrong = if found.is_empty() { vec!["ARCHITECTURE.md lists no strata".to_owned()] } else { found.concat() };
    let folders: BTreeSet<_> = tree.files.iter().flat_map(|(path, _)| path.ancestors().skip(1)).collect();
    wrong.extend(folders.iter().filter_map(|folder| large_circle(folder.to_str()?, tree)));
    wrong
}

/// Returns what is wrong if too many modules of a folder all use each other, directly or through others of it.
fn large_circle(folder: &str, tree: &Tree) -> Option<String> {
    if !folder.starts_with("crates/") || !folder.split('/').any(|part| part == "src") {
        return None;
    }
    let root = root_of(folder, tree);
    let mut used = BTreeMap::<&str, BTreeSet<&str>>::new();
    for (path, text) in &tree.files {
        let Ok(inside) = path.strip_prefix(folder) else { continue };
        if let Some(module) = module_of(inside) {
            used.entry(module).or_default().extend(modules_used(folder, inside, text, root));
        }
    }
    let reached = |from| {
        let mut reached = BTreeSet::new();
        let mut next = vec![from];
        while let Some(module) = next.pop() {
            next.extend(used.get(module).into_iter().flatten().filter(|module| reached.insert(**module)));
        }
        reached
    };
    let reached: BTreeMap<_, _> = used.keys().map(|module| (*module, reached(module))).collect();
    let circle = |module: &&str| -> Vec<&str> {
        reached[module].iter().copied().filter(|other| reached.get(other).is_some_and(|r| r.contains(module))).collect()
    };
    let largest = used.keys().map(circle).max_by_key(Vec::len)?;
    let (size, modules) = (largest.len(), largest.join(", "));
    (size > MAX_CIRCLE).then(|| format!("{folder}: {size} modules use each other, and {MAX_CIRCLE} may: {modules}"))
}

fn check_folder(folder: &str, list: &str, tree: &Tree) -> Vec<String> {
    let mut groups: Vec<(usize, Vec<&str>)> = Vec::new();
    for (stratum, line) in list.lines().enumerate() {
        groups.extend(line.split_whitespace().map(|group| (stratum, group.split('+').collect())));
    }
    let group_of = |module: &str| groups.iter().position(|(_, group)| group.contains(&module));
    let root = root_of(folder, tree);
    let mut wrong = Vec::new();
    for (path, text) in &tree.files {
        let Ok(inside) = path.strip_prefix(folder) else { continue };
        let Some(module) = module_of(inside) else { continue };
        let Some(own) = group_of(module) else {
            wrong.push(format!("ARCHITECTURE.md: the strata of {folder} lack {module}"));
            continue;
        };
        for used in modules_used(folder, inside, text, root) {
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

/// Returns the text of a folder's root.
fn root_of<'t>(folder: &str, tree: &'t Tree) -> &'t str {
    let places = ["/lib.rs", "/mod.rs", ".rs"].map(|end| PathBuf::from(format!("{folder}{end}")));
    tree.files.iter().find(|(path, _)| places.contains(path)).map_or("", |(_, text)| text)
}

/// Returns the modules of a folder that a file in it uses. A type that the folder's root takes from a module stands for
/// this module; another one stands for itself.
fn modules_used<'t>(folder: &str, inside: &Path, text: &'t str, root: &'t str) -> Vec<&'t str> {
    let imports = root.split("use ").skip(1).filter_map(|import| Some(import.split_once(';')?.0));
    let imports: Vec<_> = imports.flat_map(|import| elements(import.trim_start_matches("self::"))).collect();
    let module = |name| {
        let takes = |import: &&str| {
            let names = import.split_once("::").map_or("", |(_, names)| names);
            names.split(|c| !is_word(c)).any(|part| part == name)
        };
        imports.iter().copied().find(takes).map_or(name, word)
    };
    let resolved = |name: &'t str| if name.starts_with(char::is_uppercase) { module(name) } else { name };
    uses(folder, inside, text).into_iter().map(resolved).collect()
}

/// Returns what a file in a folder takes from the folder's root, without its tests. Of paths that begin with `super`, only
/// imports at the top of the file count: within a module of the file they would begin elsewhere.
fn uses<'t>(folder: &str, inside: &Path, text: &'t str) -> Vec<&'t str> {
    let text = text.split("#[cfg(test)]\nmod ").next().unwrap_or(text);
    let below: Vec<_> = folder.split_once("/src/").map_or_else(Vec::new, |(_, below)| below.split('/').collect());
    let depth = inside.components().count() - usize::from(inside.ends_with("mod.rs"));
    let mut all = Vec::new();
    for (root, below) in [("crate::", &below[..]), (&"super::".repeat(depth), &[])] {
        for (at, found) in text.match_indices(root) {
            let line = text[..at].rsplit('\n').next().unwrap_or_default();
            let is_within = root.starts_with("super") && (!line.ends_with("use ") || line.starts_with(' '));
            if !(line.contains("//") || line.contains("#[doc") || line.ends_with(is_word) || is_within) {
                all.extend(names(&text[at + found.len()..], below));
            }
        }
    }
    all
}

/// Returns the first names after `below` of the path or list of paths that a text begins with.
fn names<'t>(text: &'t str, below: &[&str]) -> Vec<&'t str> {
    if text.starts_with('{') {
        return elements(text).into_iter().flat_map(|element| names(element, below)).collect();
    }
    let name = word(text);
    match below {
        [] => vec![name],
        [first, below @ ..] if *first == name => {
            text[name.len()..].strip_prefix("::").map_or_else(Vec::new, |rest| names(rest, below))
        }
        _ => Vec::new(),
    }
}

/// Returns the elements of the list in braces that a text begins with; the text itself if it begins with none.
fn elements(text: &str) -> Vec<&str> {
    let Some(list) = text.strip_prefix('{') else { return vec![text] };
    let mut elements = Vec::new();
    let mut depth = 0;
    let mut begin = 0;
    for (at, character) in list.char_indices() {
        if depth == 0 && matches!(character, ',' | '}') {
            elements.push(list[begin..at].trim());
            begin = at + 1;
        }
        match character {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            _ => {}
        }
    }
    elements
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

    #[test]
    fn large_circle_of_modules_is_reported() {
        let page = "```text\nstrata of x/src\n```\n";
        let ring = [
            ("crates/k/src/m/mod.rs", "pub use self::{b::B, e::{E, F}};"),
            ("crates/k/src/m/a.rs", "use crate::{error, m::{B, c::{self, C}}};"),
            ("crates/k/src/m/b.rs", "use super::c::C;"),
            ("crates/k/src/m/c/d.rs", "use super::super::d::D;"),
            ("crates/k/src/m/d.rs", "fn f() -> crate::m::F {}"),
            ("crates/k/src/m/e.rs", "use super::{a::A, f};"),
            ("crates/k/src/m/f.rs", "use crate::m;"),
        ];
        let wrong = "crates/k/src/m: 5 modules use each other, and 4 may: a, b, c, d, e";
        assert_eq!(checked(page, &ring), [wrong]);
        let without_a: Vec<_> = ring.into_iter().filter(|(path, _)| !path.ends_with("a.rs")).collect();
        assert!(checked(page, &without_a).is_empty());
    }
}
