//! Checks what the pages of the repository say about the repository itself.
//!
//! Every page names files, driver facts, steps of labs and examples, and links to pages and their headings. Tests name
//! the promises of SPEC.md and docs/costs.md that they hold. ARCHITECTURE.md names the functions of its journeys and the strata of a
//! crate, and says where `unsafe` is allowed and that the broker links no CUDA. Each manifest gives the reason for each dependency on somebody else's
//! crate.
//! Without this check, a rename would make such a sentence wrong without notice.

pub(crate) mod book;
mod journeys;
mod learn;
mod promises;
mod strata;

use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use crate::tools::{Workspace, cannot_read};

/// The index from promises to tests, in the target directory.
const INDEX: &str = "spec-index.md";

/// How ARCHITECTURE.md begins its sentence about `unsafe`.
const UNSAFE: &str = "* `unsafe` lives in ";

/// Packages that the broker must not be built with.
const CUDA: &[&str] = &["cudarc", "libloading", "partywall-cuda", "partywall-simcuda"];

/// Writes the index of promises and returns every sentence that is wrong, or nothing.
pub(crate) fn check(workspace: &Workspace) -> Result<Vec<String>, String> {
    let tree = Tree::read(workspace)?;
    let page = |name: &str| {
        let path = workspace.root.join(name);
        fs::read_to_string(&path).map_err(|error| cannot_read(&path, &error))
    };
    let (index, mut wrong) = promises::index(&page("SPEC.md")?, &page("docs/costs.md")?, &tree);
    let path = workspace.target.join(INDEX);
    fs::write(&path, index).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    for (path, text) in tree.pages() {
        wrong.extend(paths(path, text, &tree));
        wrong.extend(learn::facts(path, text, &tree));
        wrong.extend(learn::steps(path, text, &tree));
        wrong.extend(learn::examples(path, text, &tree));
    }
    wrong.extend(links(&tree));
    wrong.extend(book::check(&tree));
    let architecture = page("ARCHITECTURE.md")?;
    wrong.extend(journeys::check(&architecture, &tree));
    wrong.extend(strata::check(&architecture, &tree));
    wrong.extend(places_of_unsafe(&architecture, &tree));
    wrong.extend(reasons(&tree));
    wrong.extend(dependencies_of_broker(workspace)?);
    Ok(wrong)
}

/// The files of the repository, with the text of sources and pages.
struct Tree {
    files: Vec<(PathBuf, String)>,
}

impl Tree {
    fn read(workspace: &Workspace) -> Result<Self, String> {
        let mut list = Command::new("git");
        list.args(["ls-files", "--cached", "--others", "--exclude-standard"]).current_dir(&workspace.root);
        let output = output(&mut list)?;
        // The page at the end of a link is read at its own place, where its links begin.
        let is_text = |path: &Path| {
            let extension = path.extension().and_then(|extension| extension.to_str());
            matches!(extension, Some("rs" | "py" | "md" | "toml")) && !workspace.root.join(path).is_symlink()
        };
        let read = |line: &str| {
            let path = PathBuf::from(line);
            let text =
                if is_text(&path) { fs::read_to_string(workspace.root.join(&path)).ok()? } else { String::new() };
            Some((path, text))
        };
        Ok(Self { files: output.lines().filter_map(read).collect() })
    }

    fn pages(&self) -> impl Iterator<Item = &(PathBuf, String)> {
        self.files.iter().filter(|(path, _)| path.extension().is_some_and(|extension| extension == "md"))
    }

    /// Returns the files at a path, or below it if it is a folder. Paths of crates may leave out `crates/`.
    fn find(&self, path: &str) -> Vec<&(PathBuf, String)> {
        let path = path.trim_end_matches('/');
        let below = |root: &Path| self.files.iter().filter(|file| file.0.starts_with(root)).collect::<Vec<_>>();
        let found = below(Path::new(path));
        if found.is_empty() { below(&Path::new("crates").join(path)) } else { found }
    }
}

/// Returns the paths in a page that do not exist. A path is code that begins with a top-level folder, or that ends as
/// the names of sources and pages do: that may be the end of a path. What is in `target` is built, not checked in.
fn paths(page: &Path, text: &str, tree: &Tree) -> Vec<String> {
    let folders = ["crates/", "testing/", "python/", "docs/", "xtask/", "examples/"];
    let endings = [".rs", ".md", ".cu", ".toml"];
    let is_absent = |text: &&str| {
        let is_plain = text.chars().all(|c| is_word(c) || matches!(c, '/' | '.' | '-'));
        let is_whole = folders.iter().any(|folder| text.starts_with(folder));
        let is_end = endings.iter().any(|ending| text.ends_with(ending));
        let ends = || tree.files.iter().any(|(path, _)| path.ends_with(text));
        is_plain
            && !text.starts_with("target/")
            && (is_whole && tree.find(text).is_empty() || !is_whole && is_end && !ends())
    };
    code(text).filter(is_absent).map(|path| format!("{}: there is no {path}", page.display())).collect()
}

/// Returns the links of all pages to files and headings that do not exist.
fn links(tree: &Tree) -> Vec<String> {
    let broken = |(path, text): &'_ (PathBuf, String)| -> Vec<String> {
        let absent = targets(text).filter(|target| !leads_somewhere(path, text, target, tree));
        absent.map(|target| format!("{}: the link to {target} leads nowhere", path.display())).collect()
    };
    tree.pages().flat_map(broken).collect()
}

/// Returns where the links of a page lead to, without those that leave the repository.
fn targets(text: &str) -> impl Iterator<Item = &str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
    targets.filter(|target| !target.contains("://") && !target.contains(' '))
}

/// Returns the file that a link of a page leads to, and the heading or nothing.
fn resolve<'a>(page: &Path, target: &'a str) -> (PathBuf, &'a str) {
    let (file, heading) = target.split_once('#').unwrap_or((target, ""));
    if file.is_empty() {
        return (page.to_path_buf(), heading);
    }
    let mut path = page.parent().unwrap_or(Path::new("")).to_path_buf();
    for part in Path::new(file).components() {
        match part {
            Component::ParentDir => drop(path.pop()),
            part => path.push(part),
        }
    }
    (path, heading)
}

fn leads_somewhere(page: &Path, text: &str, target: &str, tree: &Tree) -> bool {
    let (path, heading) = resolve(page, target);
    if path == page {
        return has_heading(text, heading);
    }
    let found: Vec<_> = tree.files.iter().filter(|(other, _)| other.starts_with(&path)).collect();
    !found.is_empty() && (heading.is_empty() || found.iter().any(|(_, text)| has_heading(text, heading)))
}

/// Returns whether a text has a heading with this anchor. Forges form an anchor from the heading's letters, digits,
/// hyphens and underscores, with hyphens for spaces.
fn has_heading(text: &str, anchor: &str) -> bool {
    let headings = text.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    let mut anchors = headings.map(|heading| {
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.collect::<String>().to_lowercase().replace(' ', "-")
    });
    anchors.any(|other| other == anchor) || text.contains(&format!("id=\"{anchor}\""))
}

/// Returns the files with `unsafe` that ARCHITECTURE.md does not name, by their crate or by themselves.
fn places_of_unsafe(architecture: &str, tree: &Tree) -> Vec<String> {
    let Some(sentence) = architecture.lines().find(|line| line.starts_with(UNSAFE)) else {
        return vec![format!("ARCHITECTURE.md has no sentence that begins with {UNSAFE:?}")];
    };
    let named = |path: &Path| {
        code(sentence).any(|place| path.starts_with(place) || path.starts_with(Path::new("crates").join(place)))
    };
    let sources = tree.files.iter().filter(|(path, _)| {
        let mut parts = path.components().map(|part| part.as_os_str());
        let is_ours = parts.next().is_some_and(|part| part == "crates" || part == "examples");
        is_ours && parts.nth(1).is_some_and(|part| part == "src")
    });
    let allowed = sources.filter(|(_, text)| text.contains("allow(unsafe_code")).map(|(path, _)| path.as_path());
    let unnamed = allowed.filter(|path| !named(path));
    unnamed.map(|path| format!("ARCHITECTURE.md does not say that {} has unsafe code", path.display())).collect()
}

/// Returns the dependencies in manifests that no comment above them gives a reason for. Dependencies on our own crates,
/// and those that the workspace's manifest lists, need none.
fn reasons(tree: &Tree) -> Vec<String> {
    let manifests = tree.files.iter().filter(|(path, _)| path.ends_with("Cargo.toml"));
    manifests.flat_map(|(path, text)| without_reason(path, text)).collect()
}

fn without_reason(path: &Path, manifest: &str) -> Vec<String> {
    let missing = |name: &str| format!("{}: no comment above {name} gives the reason for it", path.display());
    let mut wrong = Vec::new();
    let mut is_list = false;
    let mut above = "";
    for line in manifest.lines() {
        if let Some(section) = line.strip_prefix('[') {
            let section = section.trim_end_matches(']');
            is_list = section.ends_with("dependencies");
            let name = section.split_once("dependencies.").map(|(_, name)| name);
            wrong.extend(name.filter(|_| !above.starts_with('#')).map(missing));
        } else if is_list && let Some((name, what)) = line.split_once('=') {
            let is_ours =
                name.ends_with(".workspace ") || what.contains("workspace = true") || what.contains("path = ");
            if !name.starts_with('#') && !is_ours && !above.starts_with('#') {
                wrong.push(missing(name.trim()));
            }
        }
        above = line;
    }
    wrong
}

fn dependencies_of_broker(workspace: &Workspace) -> Result<Vec<String>, String> {
    let mut command = workspace.cargo(["tree", "--package", "partywall-broker", "--edges", "normal,build"]);
    command.args(["--prefix", "none", "--format", "{p}"]);
    let tree = output(&mut command)?;
    let packages: Vec<_> = tree.lines().filter_map(|line| line.split(' ').next()).collect();
    if !packages.contains(&"partywall-broker") {
        return Err("cargo tree does not list partywall-broker".to_owned());
    }
    let linked = CUDA.iter().filter(|package| packages.contains(package));
    Ok(linked
        .map(|package| format!("ARCHITECTURE.md: the broker contains no CUDA, but depends on {package}"))
        .collect())
}

/// Runs a command and returns what it prints.
fn output(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| format!("cannot start {command:?}: {error}"))?;
    if !output.status.success() {
        return Err(format!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the code spans of a text.
fn code(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> Tree {
        let file = |path: &str, text: &str| (PathBuf::from(path), text.to_owned());
        Tree {
            files: vec![
                file("crates/partywall/tests/domain/open.rs", ""),
                file("crates/partywall-os/src/map.rs", "#![allow(unsafe_code)]"),
                file("crates/partywall-cli/src/main.rs", ""),
            ],
        }
    }

    #[test]
    fn missing_paths_are_named() {
        let page = "| a row | `crates/partywall/tests/`, `domain/open.rs`, `target/index.md`, `crates/gone.rs`, `pen.rs`, \
                    `partywall put ./crates` |";
        let wrong = ["README.md: there is no crates/gone.rs", "README.md: there is no pen.rs"];
        assert_eq!(paths(Path::new("README.md"), page, &tree()), wrong);
    }

    #[test]
    fn dead_links_are_named() {
        let page = |path: &str, text: &str| (PathBuf::from(path), text.to_owned());
        let mut tree = tree();
        tree.files.push(page("docs/cli.md", "# The command line\n[a](../README.md#try-it) [b](gone.md) [c](#exit)"));
        tree.files.push(page("README.md", "## Try it\n[a](docs) [b](docs/cli.md#the-command-line) [c](https://x.y)"));
        let expected =
            ["docs/cli.md: the link to gone.md leads nowhere", "docs/cli.md: the link to #exit leads nowhere"];
        assert_eq!(links(&tree), expected);
    }

    #[test]
    fn dependencies_need_a_reason() {
        let manifest = "[features]\nx = []\n[workspace.dependencies]\nours = { path = \"crates/ours\" }\n# Why.\nkept = \"1\"\n\
                        bare = { version = \"2\" }\n[dev-dependencies]\na.workspace = true\nb = { workspace = true }\n\
                        [target.'cfg(x)'.dev-dependencies]\nc = \"1\"\n\n# Why.\n[dev-dependencies.d]\nversion = \"1\"\n\
                        [dependencies.e]\n";
        let missing = |name| format!("Cargo.toml: no comment above {name} gives the reason for it");
        assert_eq!(without_reason(Path::new("Cargo.toml"), manifest), ["bare", "c", "e"].map(missing));
    }

    #[test]
    fn unsafe_has_to_be_in_a_named_place() {
        assert_eq!(places_of_unsafe("* `unsafe` lives in `partywall-os`.", &tree()), [""; 0]);
        let wrong = places_of_unsafe("* `unsafe` lives in `partywall-cli`.", &tree());
        assert_eq!(wrong, ["ARCHITECTURE.md does not say that crates/partywall-os/src/map.rs has unsafe code"]);
        assert_eq!(places_of_unsafe("It lives in `partywall-os`.", &tree()).len(), 1);
    }
}
