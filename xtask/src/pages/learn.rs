//! Checks what pages say about driver facts, steps of labs and examples.

use std::path::Path;

use super::{Tree, code, is_word};

/// The examples that pages tell their readers to run.
const EXAMPLES: &str = "crates/partywall/examples";

/// The list of all driver facts.
const FACTS: &str = "testing/gpu/src/tests/facts/mod.rs";

/// Returns the driver facts that a page names and that do not exist. A fact is code that begins with `fact_`.
pub(super) fn facts(page: &Path, text: &str, tree: &Tree) -> Vec<String> {
    let list = tree.files.iter().find(|(path, _)| path == Path::new(FACTS)).map_or("", |(_, text)| text);
    let exists = |name: &str| list.lines().any(|line| line.split_whitespace().nth(2) == Some(name));
    let named = code(text).filter_map(|span| span.strip_prefix("fact_"));
    let absent = named.filter(|name| !exists(name));
    absent.map(|name| format!("{}: there is no driver fact {name}", page.display())).collect()
}

/// Returns the steps of labs that a page names and that do not exist. A page names them behind the lab's command:
/// `` `partywall lab vmm`, steps `send`, `receive` ``.
pub(super) fn steps(page: &Path, text: &str, tree: &Tree) -> Vec<String> {
    let mut wrong = Vec::new();
    let parts: Vec<_> = text.split('`').collect();
    let mut lab = None;
    let mut in_steps = false;
    // Code is at odd places, between two texts.
    for (index, part) in parts.iter().enumerate().filter(|(index, _)| index % 2 == 1) {
        let between = parts[index - 1];
        if let Some(name) = part.strip_prefix("partywall lab ") {
            lab = name.split_whitespace().next();
            in_steps = false;
            continue;
        }
        in_steps = matches!(between, ", step " | ", steps ") || between == ", " && in_steps;
        if let Some(lab) = lab.filter(|_| in_steps) {
            // A lab is a folder of the labs' crate, or an example.
            let folders =
                [format!("crates/partywall-lab/src/{}", lab.replace('-', "_")), format!("examples/{lab}/src")];
            let quoted = format!("\"{part}\"");
            if !folders.iter().any(|folder| tree.find(folder).iter().any(|(_, text)| text.contains(&quoted))) {
                wrong.push(format!("{}: the lab {lab} has no step {part}", page.display()));
            }
        }
    }
    wrong
}

/// Returns the examples that a page runs with Cargo and that do not exist. `NAME` stands for any.
pub(super) fn examples(page: &Path, text: &str, tree: &Tree) -> Vec<String> {
    let named = text.split("--example ").skip(1).filter_map(|rest| rest.split(|c| !is_word(c)).next());
    let absent = named.filter(|name| *name != "NAME" && tree.find(&format!("{EXAMPLES}/{name}.rs")).is_empty());
    absent.map(|name| format!("{}: there is no example {name}", page.display())).collect()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn tree() -> Tree {
        let file = |path: &str, text: &str| (PathBuf::from(path), text.to_owned());
        Tree {
            files: vec![
                file(FACTS, "facts! {\n    memory {\n        Measured ONE a_range_is_mapped_once\n"),
                file("crates/partywall/examples/topic.rs", ""),
                file("crates/partywall-lab/src/handle_file/consumer.rs", "Step::new(\"no-file\", …) \"half-file\""),
            ],
        }
    }

    #[test]
    fn missing_facts_are_named() {
        let text = "`fact_a_range_is_mapped_once`, `fact_a_range_is_mapped`";
        assert_eq!(facts(Path::new("p.md"), text, &tree()), ["p.md: there is no driver fact a_range_is_mapped"]);
    }

    #[test]
    fn missing_examples_are_named() {
        let text =
            "`cargo run -p partywall --example NAME`, `cargo run --example topic -- x`, `cargo run --example top`";
        assert_eq!(examples(Path::new("p.md"), text, &tree()), ["p.md: there is no example top"]);
    }

    #[test]
    fn missing_steps_are_named() {
        let of = |text: &str| steps(Path::new("p.md"), text, &tree());
        assert_eq!(of("`partywall lab handle-file`, steps `no-file`, `half-file`; `other`"), [""; 0]);
        let text =
            "`partywall lab handle-file`, step `no-file`; `partywall lab handle-file`, steps `half-file`, `file`";
        assert_eq!(of(text), ["p.md: the lab handle-file has no step file"]);
        assert_eq!(of("`partywall lab pipeline`, `ring` and `work-queue`"), [""; 0]);
        assert_eq!(of("| `other` | `partywall lab vmm`, step `send` |"), ["p.md: the lab vmm has no step send"]);
    }
}
