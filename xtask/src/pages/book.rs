//! Builds a book from the pages, with mdBook.
//!
//! The chapters are the pages that can be reached from `docs/index.md`, the learning path first. They keep their paths,
//! so that a link leads to the same place in the book, in a checkout and on a forge; other files that they link to are
//! copied.

use std::collections::VecDeque;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Tree, resolve, targets};
use crate::tools::{self, Workspace, cannot_read};

/// The lists that give the chapters their order.
const LISTS: [&str; 2] = ["docs/learn/index.md", "docs/index.md"];

/// The first chapter, which is also the page that the book opens with.
const FRONT: &str = "README.md";

/// The parts of the book, each with the folder of its pages. A page belongs to the first folder that it is in.
const PARTS: [(&str, &str); 3] = [("Learn", "docs/learn"), ("Use", "docs"), ("The repository", "")];

/// Builds the book in `target/book/html` and returns the links in it that lead nowhere.
pub(crate) fn build(workspace: &Workspace) -> Result<Vec<String>, String> {
    let program = tools::mdbook(workspace)?;
    let tree = Tree::read(workspace)?;
    let folder = workspace.target.join("book");
    stage(workspace, &tree, &folder)?;
    workspace.run(Command::new(program).arg("build").arg(&folder))?;
    broken(&folder.join("html"))
}

/// Returns the pages below `docs` that the book would not contain, and the links that a book cannot follow.
pub(super) fn check(tree: &Tree) -> Vec<String> {
    let linked = linked(tree);
    let pages = tree.pages().map(|(path, _)| path).filter(|path| path.starts_with("docs"));
    let orphans = pages.filter(|path| !linked.contains(path));
    let mut wrong: Vec<_> =
        orphans.map(|path| format!("{}: no page of the book leads to it", path.display())).collect();
    let folders = linked.iter().filter(|path| !tree.files.iter().any(|(file, _)| file == *path));
    wrong.extend(folders.map(|path| format!("{}: a link leads to a folder; name a file in it", path.display())));
    wrong
}

/// Writes the sources of the book: the pages and what they link to, `SUMMARY.md` and the settings.
fn stage(workspace: &Workspace, tree: &Tree, folder: &Path) -> Result<(), String> {
    let source = folder.join("src");
    let write = |to: PathBuf, bytes: &[u8]| {
        fs::create_dir_all(to.parent().unwrap_or(folder))
            .and_then(|()| fs::write(&to, bytes))
            .map_err(|error| format!("cannot write {}: {error}", to.display()))
    };
    let copy = |from: &Path, to: PathBuf| {
        let from = workspace.root.join(from);
        write(to, &fs::read(&from).map_err(|error| cannot_read(&from, &error))?)
    };
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(format!("cannot remove {}: {error}", folder.display()));
        }
        _ => {}
    }
    let linked = linked(tree);
    linked.iter().try_for_each(|path| copy(path, source.join(path)))?;
    for name in ["book.toml", "book.css"] {
        copy(&Path::new("docs").join(name), folder.join(name))?;
    }
    write(source.join("SUMMARY.md"), summary(&linked, tree).as_bytes())
}

/// Returns the pages and other files that can be reached by links, in the order in which they are met.
fn linked(tree: &Tree) -> Vec<PathBuf> {
    let mut found = LISTS.map(PathBuf::from).to_vec();
    let mut unread = VecDeque::from(found.clone());
    while let Some(page) = unread.pop_front() {
        let Some((_, text)) = tree.pages().find(|(path, _)| *path == page) else { continue };
        for target in targets(text) {
            let (path, _) = resolve(&page, target);
            if !found.contains(&path) {
                found.push(path.clone());
                unread.push_back(path);
            }
        }
    }
    found
}

/// Returns the text of `SUMMARY.md`: one chapter for each page, named by its first heading.
fn summary(linked: &[PathBuf], tree: &Tree) -> String {
    let chapter = |path: &Path| {
        let (_, text) = tree.pages().find(|(page, _)| page == path)?;
        let title = text.lines().find_map(|line| line.strip_prefix("# ")).unwrap_or("Untitled");
        Some(format!("[{title}]({})\n", path.display()))
    };
    let mut summary = chapter(Path::new(FRONT)).unwrap_or_default();
    let mut rest: Vec<_> = linked.iter().filter(|path| *path != Path::new(FRONT)).collect();
    for (name, folder) in PARTS {
        let (part, others): (Vec<_>, Vec<_>) = rest.into_iter().partition(|path| path.starts_with(folder));
        summary += &format!("\n# {name}\n\n");
        part.iter().filter_map(|path| chapter(path)).for_each(|line| summary += &format!("- {line}"));
        rest = others;
    }
    summary
}

/// Returns the links of a folder of HTML to files and anchors that do not exist.
fn broken(folder: &Path) -> Result<Vec<String>, String> {
    let mut wrong = Vec::new();
    for page in html(folder)? {
        let text = read(&page)?;
        let mut absent = Vec::new();
        for target in attributes(&text).filter(|target| !target.contains(':')) {
            let (path, anchor) = resolve(&page, target);
            let leads_somewhere = path.is_file()
                && (anchor.is_empty() || read(&path).is_ok_and(|text| text.contains(&format!("id=\"{anchor}\""))));
            if !leads_somewhere {
                absent.push(target);
            }
        }
        let name = page.strip_prefix(folder).unwrap_or(&page).display();
        wrong.extend(absent.iter().map(|target| format!("{name}: the link to {target} leads nowhere")));
    }
    Ok(wrong)
}

/// Returns the pages of HTML in a folder and below it.
fn html(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let mut pages = Vec::new();
    for path in tools::entries(folder)? {
        if path.is_dir() {
            pages.extend(html(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "html") {
            pages.push(path);
        }
    }
    Ok(pages)
}

/// Returns where the elements of a page of HTML lead to.
fn attributes(text: &str) -> impl Iterator<Item = &str> {
    let values = |name: &'static str| text.split(name).skip(1).filter_map(|rest| rest.split_once('"'));
    values(" href=\"").chain(values(" src=\"")).map(|(value, _)| value)
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| cannot_read(path, &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> Tree {
        Tree { files: files.iter().map(|(path, text)| (PathBuf::from(path), (*text).to_owned())).collect() }
    }

    #[test]
    fn chapters_are_in_parts_and_in_the_order_of_the_links() {
        let tree = tree(&[
            ("README.md", "# Partywall"),
            ("docs/index.md", "# Where to read\n[b](b.md) [learn](learn/index.md) [a](a.md#x) [r](../README.md)"),
            ("docs/a.md", "# A\n[code](../crates/a.rs) [spec](../SPEC.md)"),
            ("docs/b.md", "# B"),
            ("docs/learn/index.md", "# Learn it\n[terms](terms.md)"),
            ("docs/learn/terms.md", "# Terms"),
            ("SPEC.md", "# Promises"),
            ("crates/a.rs", ""),
        ]);
        let expected = "[Partywall](README.md)\n\n# Learn\n\n- [Learn it](docs/learn/index.md)\n- [Terms](docs/learn/terms.md)\n\n# Use\n\n\
                        - [Where to read](docs/index.md)\n- [B](docs/b.md)\n- [A](docs/a.md)\n\n\
                        # The repository\n\n- [Promises](SPEC.md)\n";
        assert_eq!(summary(&linked(&tree), &tree), expected);
        assert_eq!(check(&tree), [""; 0]);
    }

    #[test]
    fn orphans_and_folders_are_named() {
        let files = ["docs/learn/index.md", "docs/a.md", "crates/a.rs"].map(|path| (path, ""));
        let tree = tree(&[&files[..], &[("docs/index.md", "[a](../crates)")]].concat());
        let expected =
            ["docs/a.md: no page of the book leads to it", "crates: a link leads to a folder; name a file in it"];
        assert_eq!(check(&tree), expected);
    }

    #[test]
    fn broken_links_of_html_are_named() {
        let folder = std::env::temp_dir().join(format!("partywall-book-{}", std::process::id()));
        fs::create_dir_all(folder.join("a")).unwrap();
        let page =
            "<a href=\"../index.html#x\"><a href=\"../index.html#y\"><img src=\"no.svg\"><a href=\"https://x.y\">";
        fs::write(folder.join("index.html"), "<h1 id=\"x\">").unwrap();
        fs::write(folder.join("a/b.html"), page).unwrap();
        let found = broken(&folder);
        fs::remove_dir_all(&folder).unwrap();
        let expected =
            ["../index.html#y", "no.svg"].map(|target| format!("a/b.html: the link to {target} leads nowhere"));
        assert_eq!(found.unwrap(), expected);
    }
}
