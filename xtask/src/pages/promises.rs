//! Joins the promises with the tests that hold them. SPEC.md lists them, and docs/costs.md the goals among them.
//!
//! A comment such as `// Holds 12, 153.` stands directly above a test or above an entry of a table of tests or
//! benchmarks. In the first line of a file of tests it speaks for the file; in that of a `main.rs` or `mod.rs`, for its
//! folder.

use std::collections::BTreeMap;
use std::path::Path;

use super::{Tree, is_word};

/// The files that list tests or benchmarks in tables instead of marking functions.
const TABLES: [&str; 4] = [
    "crates/partywall-lab/src/bench/subjects/mod.rs",
    "crates/partywall/tests/timeline/gpus.rs",
    "testing/gpu/src/tests/mod.rs",
    "testing/gpu/src/tests/timelines/mod.rs",
];

/// The parts of the paths of files that contain nothing but tests.
const TESTS: [&str; 5] = ["fuzz_targets", "models.rs", "testing", "tests", "tests.rs"];

/// How a promise ends that nothing holds yet.
const UNTESTED: &str = "*Untested.*";

/// How the promise of a goal ends that was met.
const MET: &str = "*Met.*";

/// Returns the index from promises to tests, as a page, and what is wrong in SPEC.md, in docs/costs.md and in the
/// comments.
pub(super) fn index(spec: &str, costs: &str, tree: &Tree) -> (String, Vec<String>) {
    let mut wrong = Vec::new();
    let mut promises = BTreeMap::new();
    for (number, text) in spec.lines().filter_map(promise).chain(costs.lines().filter_map(goal)) {
        if promises.insert(number, (text, Vec::new())).is_some() {
            wrong.push(format!("SPEC.md, docs/costs.md: two promises have the number {number}"));
        }
    }
    for (path, text) in &tree.files {
        let lines: Vec<_> = text.lines().collect();
        for (at, line) in lines.iter().enumerate() {
            let Some(numbers) = numbers(line) else { continue };
            let holder = holder(path, at, &lines[at + 1..]);
            let Some(holder) = holder.filter(|_| !numbers.is_empty()) else {
                let place = format!("{}:{}", path.display(), at + 1);
                wrong
                    .push(format!("{place}: write `Holds 1, 2.` directly above a test or in the first line of a file"));
                continue;
            };
            for number in numbers {
                match promises.get_mut(&number) {
                    Some((_, holders)) => holders.push(holder.clone()),
                    None => wrong.push(format!("{holder}: there is no promise {number}")),
                }
            }
        }
    }
    for (number, (text, holders)) in &promises {
        if holders.is_empty() != text.ends_with(UNTESTED) {
            wrong.push(format!(
                "SPEC.md, docs/costs.md: promise {number} needs either a test that says `Holds {number}.` or {UNTESTED}"
            ));
        }
    }
    (page(&promises), wrong)
}

type Promises<'a> = BTreeMap<u32, (&'a str, Vec<String>)>;

fn page(promises: &Promises<'_>) -> String {
    let mut page = "# What holds each promise\n\n## Promises with a mark\n\n".to_owned();
    let marked = promises.iter().filter(|(_, (text, _))| text.ends_with('*') && !text.ends_with(MET));
    marked.for_each(|(number, (text, _))| page += &format!("* {number}: {text}\n"));
    page += "\n## All promises\n";
    for (number, (text, holders)) in promises {
        page += &format!("\n{number}: {text}\n\n");
        holders.iter().for_each(|holder| page += &format!("* {holder}\n"));
    }
    page
}

/// Returns the number and the text of a promise: an entry of a list that begins with a number and a colon.
fn promise(line: &str) -> Option<(u32, &str)> {
    let (number, text) = line.strip_prefix("* ")?.split_once(": ")?;
    Some((number.parse().ok()?, text))
}

/// Returns the number and the text of a goal: the first two cells of a row whose first cell is a number.
fn goal(line: &str) -> Option<(u32, &str)> {
    let (number, rest) = line.strip_prefix("| ")?.split_once(" | ")?;
    let (text, _) = rest.split_once(" | ")?;
    Some((number.parse().ok()?, text))
}

/// Returns the numbers of a comment about promises; none if their form is wrong.
fn numbers(line: &str) -> Option<Vec<u32>> {
    let line = line.trim_start();
    let rest = line.strip_prefix("// Holds ").or_else(|| line.strip_prefix("# Holds "))?;
    if !rest.chars().all(|c| c.is_ascii_digit() || matches!(c, ' ' | ',' | '.')) {
        return None;
    }
    let list = rest.strip_suffix('.').unwrap_or_default().split(", ");
    Some(list.map(|number| number.parse().ok()).collect::<Option<_>>().unwrap_or_default())
}

/// Returns what a comment at a line of a file speaks for, or nothing if no test is there.
fn holder(path: &Path, at: usize, below: &[&str]) -> Option<String> {
    if at > 0 {
        return test(path, below).map(|name| format!("`{}` `{name}`", path.display()));
    }
    let is_folder = path.ends_with("main.rs") || path.ends_with("mod.rs");
    let whole = if is_folder { path.parent()? } else { path };
    let has_tests = path.iter().any(|part| TESTS.iter().any(|tests| part == *tests));
    has_tests.then(|| format!("`{}`", whole.display()))
}

/// Returns the name of the test that begins in the first of these lines.
fn test<'a>(path: &Path, below: &[&'a str]) -> Option<&'a str> {
    let first = below.first()?;
    if first.trim() == "#[test]" {
        return below.iter().find_map(|line| function(line, "fn "));
    }
    if path.extension().is_some_and(|extension| extension == "py") {
        let margin = |line: &str| line.len() - line.trim_start().len();
        let is_decorator = |line: &str| line.trim_start().starts_with(['@', ')', ']']) || margin(line) > margin(first);
        let definition = below.iter().find(|line| !is_decorator(line))?;
        return function(definition, "def ").filter(|name| name.starts_with("test_"));
    }
    let is_table = TABLES.iter().any(|table| path == Path::new(table));
    if is_table { entry(below) } else { None }
}

/// Returns the name of a function that a line defines.
fn function<'a>(line: &'a str, keyword: &str) -> Option<&'a str> {
    line.trim_start().trim_start_matches("async ").strip_prefix(keyword)?.split(|c| !is_word(c)).next()
}

/// Returns the name of an entry of a table: the last part of a path, or the first string, which may be a line or two
/// below.
fn entry<'a>(below: &[&'a str]) -> Option<&'a str> {
    let path = below.first()?.trim_end_matches(',').rsplit("::").next().unwrap_or_default().trim();
    if !path.is_empty() && path.chars().all(is_word) {
        return Some(path);
    }
    below.iter().take(3).find_map(|line| line.split('"').nth(1))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// Returns the index and what is wrong if these files hold promise 1 or, where they say so, promise 2.
    fn of(promises: &str, files: &[(&str, &str)]) -> (String, Vec<String>) {
        let files = files.iter().map(|(path, text)| (PathBuf::from(path), (*text).to_owned())).collect();
        index(promises, "", &Tree { files })
    }

    #[test]
    fn every_form_of_a_test_is_in_the_index() {
        let cases = [
            ("crates/a/src/lib.rs", "mod m {\n    // Holds 1.\n    #[test]\n    fn it_is() {}\n", "`it_is`"),
            ("python/tests/test_a.py", "import a\n# Holds 1.\n@mark(\n    x,\n)\ndef test_a(d):\n", "`test_a`"),
            ("python/tests/test_b.py", "class A:\n    # Holds 1.\n    async def test_b(d):\n", "`test_b`"),
            (
                "testing/gpu/src/tests/mod.rs",
                "\n    // Holds 1.\n    test(\"it_loads\", 1, driver::loads),",
                "`it_loads`",
            ),
            (
                "testing/gpu/src/tests/mod.rs",
                "\n// Holds 1.\nTest {\n    a,\n    ..test(\"slow\", 1, a::b)\n}",
                "`slow`",
            ),
            ("testing/gpu/src/tests/timelines/mod.rs", "\n    // Holds 1.\n    ONE scenes::it_ends\n", "`it_ends`"),
            ("crates/partywall/tests/timeline/gpus.rs", "\n        // Holds 1.\n        it_waits,\n", "`it_waits`"),
            ("crates/a/tests/whole.rs", "// Holds 1.\n//! A file.\n", "`crates/a/tests/whole.rs`\n"),
            ("crates/a/tests/whole/main.rs", "// Holds 1.\n//! A folder.\n", "`crates/a/tests/whole`\n"),
            ("python/tests/test_c.py", "# Holds 1.\n\"\"\"A file.\"\"\"\n", "`python/tests/test_c.py`\n"),
        ];
        for (path, text, expected) in cases {
            let (page, wrong) = of("* 1: A promise", &[(path, text)]);
            assert_eq!(wrong, [""; 0], "{path}");
            assert!(page.contains("\n1: A promise\n\n* `") && page.contains(expected), "{path}: {page}");
        }
    }

    #[test]
    fn promises_and_tests_have_to_match() {
        let test = [("crates/a/src/lib.rs", "\n// Holds 1, 2.\n#[test]\nfn it_is() {}\n")];
        assert_eq!(of("* 1: A\n* 2: B *Met.*\n* 3: C *Untested.*", &test).1, [""; 0]);
        let cases = [
            ("* 1: A", "`crates/a/src/lib.rs` `it_is`: there is no promise 2"),
            ("* 1: A\n* 2: B\n* 3: C *Missed.*", "promise 3 needs either a test"),
            ("* 1: A\n* 2: B *Untested.*", "promise 2 needs either a test"),
            ("* 1: A\n* 2: B\n* 2: C", "two promises have the number 2"),
        ];
        for (promises, expected) in cases {
            let wrong = of(promises, &test).1;
            assert!(wrong.len() == 1 && wrong[0].contains(expected), "{promises}: {wrong:?}");
        }
    }

    #[test]
    fn comments_belong_to_tests() {
        let cases = [
            ("crates/a/src/lib.rs", "\n// Holds 1.\nfn helper() {}\n"),
            ("crates/a/src/lib.rs", "\n// Holds 1.\n\n#[test]\nfn it_is() {}\n"),
            ("crates/a/src/lib.rs", "// Holds 1.\n//! No file of tests.\n"),
            ("crates/a/src/lib.rs", "\n// Holds 1,2\n#[test]\nfn it_is() {}\n"),
            ("python/tests/test_a.py", "\n# Holds 1.\ndef helper():\n"),
            ("testing/gpu/src/tests/mod.rs", "\n// Holds 1.\nmod commands;\nmod cudarc;\n"),
        ];
        for (path, text) in cases {
            let wrong = of("", &[(path, text)]).1;
            assert!(wrong.len() == 1 && wrong[0].contains("directly above a test"), "{text}: {wrong:?}");
        }
        assert_eq!(of("", &[("crates/a/src/lib.rs", "// Holds the lock.\n// Holds 2 of them.\n")]).1, [""; 0]);
    }

    #[test]
    fn goals_are_promises() {
        let costs = "| # | Promise | latest |\n|--:|---|---|\n| [1](a.md) | A | 5 ns |\n| 2 | B *Met.* | 5 \u{b5}s |";
        let files = vec![(PathBuf::from("crates/a/tests/a.rs"), "// Holds 1, 2.\n//! A file.".to_owned())];
        let (page, wrong) = index("* 1: A *Met.*", costs, &Tree { files });
        assert_eq!(wrong, [""; 0]);
        assert!(page.contains("\n2: B *Met.*\n\n* `crates/a/tests/a.rs`\n"), "{page}");
    }

    #[test]
    fn marks_are_listed_first() {
        let page = of("* 1: A *Met.*\n* 2: B *Untested.*", &[]).0;
        assert!(page.contains("with a mark\n\n* 2: B *Untested.*\n\n## All"), "{page}");
    }
}
