//! docs/c.md lists what Rust has and C has not. Each public function of the library is in that list or in `covered.txt`.
#![allow(clippy::unwrap_used)] // the outermost functions of tests

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// Functions by the name of their type.
type Functions = BTreeMap<String, BTreeSet<String>>;

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Returns the identifier at the beginning of a text.
fn identifier(text: &str) -> &str {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap()
}

/// Returns what follows `<…>`, in which there may be further ones.
fn behind_generics(text: &str) -> &str {
    let mut depth = 0;
    let end = text.find(|c| {
        depth += i32::from(c == '<') - i32::from(c == '>');
        depth == 0
    });
    &text[end.unwrap() + 1..]
}

/// The public functions of the library's types, as rustfmt lays them out.
fn public() -> Functions {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../partywall/src"), &mut files);
    let mut functions = Functions::new();
    for file in files {
        let text = fs::read_to_string(file).unwrap();
        let mut of = None;
        for line in text.lines().take_while(|line| !line.starts_with("#[cfg(test)]")) {
            if let Some(rest) = line.strip_prefix("impl") {
                // Implementations of traits are not functions of their own.
                let rest = if rest.starts_with('<') { behind_generics(rest) } else { rest };
                of = (!line.contains(" for ")).then(|| identifier(rest.trim_start()).to_owned());
            } else if line.starts_with('}') {
                of = None;
            } else if let Some(of) = &of
                && let Some(declared) = line.strip_prefix("    pub ")
                && let Some((qualifiers, name)) = declared.split_once("fn ")
                && qualifiers.split_whitespace().all(|word| ["const", "unsafe", "async"].contains(&word))
            {
                functions.entry(of.clone()).or_default().insert(identifier(name).to_owned());
            }
        }
    }
    functions
}

fn covered() -> Functions {
    let list = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("covered.txt")).unwrap();
    let row = |row: &str| {
        let mut words = row.split(' ').map(str::to_owned);
        (words.next().unwrap(), words.collect())
    };
    list.lines().map(row).collect()
}

/// The rows of the page; a type without any function in C has no set.
fn absent() -> BTreeMap<String, Option<BTreeSet<String>>> {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/c.md")).unwrap();
    let (_, section) = page.split_once("## What Rust has and C has not").unwrap();
    let row = |row: &str| {
        let mut cells = row.split(" | ");
        let of = cells.next()?.strip_prefix("| `")?.trim_end_matches('`').to_owned();
        let functions = cells.next()?;
        let names = || functions.split(", ").map(|name| name.trim_matches('`').to_owned()).collect();
        Some((of, (functions != "all").then(names)))
    };
    section.lines().filter_map(row).collect()
}

// Holds 371.
#[test]
fn each_function_of_rust_is_in_c_or_in_the_list_of_those_that_are_not() {
    let (public, covered, absent) = (public(), covered(), absent());
    let mut wrong = Vec::new();
    for (of, functions) in &public {
        let here = covered.get(of).cloned().unwrap_or_default();
        // The page has a sentence about futures.
        for name in functions.iter().filter(|name| !name.ends_with("_async")) {
            let is_listed = match absent.get(of) {
                Some(Some(names)) => names.contains(name),
                Some(None) => true,
                None => false,
            };
            if is_listed == here.contains(name) {
                wrong.push(format!("{of}::{name}: {}", if is_listed { "in both lists" } else { "in neither list" }));
            }
        }
    }
    let exists = |of: &str, name: &str| public.get(of).is_some_and(|functions| functions.contains(name));
    let listed = absent.iter().flat_map(|(of, names)| names.iter().flatten().map(move |name| (of, name)));
    let all = covered.iter().flat_map(|(of, names)| names.iter().map(move |name| (of, name))).chain(listed);
    wrong.extend(all.filter(|(of, name)| !exists(of, name)).map(|(of, name)| format!("{of}::{name} does not exist")));
    wrong.extend(absent.keys().filter(|of| !public.contains_key(*of)).map(|of| format!("{of} does not exist")));
    assert!(public.len() > 50, "the sources are read in another way than they are laid out");
    assert!(wrong.is_empty(), "correct docs/c.md or covered.txt:\n{}", wrong.join("\n"));
}
