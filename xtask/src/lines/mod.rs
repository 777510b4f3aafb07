//! `cargo xtask lines`: the code lines in `crates/*/src`, by crate.
//!
//! A code line has something besides white space and comments, is compiled without `cfg(test)`, `cfg(loom)` and
//! `cfg(fuzzing)`, and lies in a file that a module of such code declares.

mod lexer;
mod source;

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use crate::tools::{cannot_read, entries};

/// The crate that replaces the vendor's driver in tests and demonstrations. Its size is not part of Partywall's size.
const SIMULATED_DRIVER: &str = "partywall-simcuda";

/// Returns the table for the workspace at `root`.
pub(crate) fn report(root: &Path) -> Result<String, String> {
    let mut counted = Vec::new();
    let mut apart = Vec::new();
    for folder in entries(&root.join("crates"))? {
        let source = folder.join("src");
        if source.is_dir() {
            let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let lines = crate_lines(&source)?;
            if name == SIMULATED_DRIVER {
                apart.push((name, lines))
            } else {
                counted.push((name, lines))
            };
        }
    }
    counted.push(("total".to_owned(), counted.iter().map(|(_, lines)| lines).sum()));
    let width = counted.iter().chain(&apart).map(|(name, _)| name.len()).max().unwrap_or(0);
    let mut table = String::new();
    for (name, lines) in &counted {
        let _ = writeln!(table, "{name:<width$}  {lines:>6}");
    }
    for (name, lines) in &apart {
        let _ = writeln!(table, "{name:<width$}  {lines:>6}  (not in the total)");
    }
    Ok(table)
}

/// Counts the code lines of one crate, from its roots along the declarations of modules.
fn crate_lines(source: &Path) -> Result<usize, String> {
    let mut all = BTreeSet::new();
    rust_files(source, &mut all)?;
    let mut open: Vec<(PathBuf, bool)> = ["lib.rs", "main.rs"]
        .map(|root| (source.join(root), false))
        .into_iter()
        .filter(|(root, _)| root.is_file())
        .collect();
    open.extend(all.iter().filter(|file| file.starts_with(source.join("bin"))).map(|file| (file.clone(), false)));
    let mut seen = BTreeSet::new();
    let mut lines = 0;
    while let Some((file, test)) = open.pop() {
        let text = fs::read_to_string(&file).map_err(|error| cannot_read(&file, &error))?;
        let found = source::read(&text);
        if !test {
            lines += found.lines;
        }
        for module in found.modules {
            open.push((module_file(&file, &module.path)?, test || module.test));
        }
        seen.insert(file);
    }
    match all.difference(&seen).next() {
        Some(file) => Err(format!("{} belongs to no module; declare it or delete it", file.display())),
        None => Ok(lines),
    }
}

/// Returns the file of a module that another file declares.
fn module_file(file: &Path, path: &[String]) -> Result<PathBuf, String> {
    let stem = file.file_stem().unwrap_or_default();
    let mut folder = file.parent().unwrap_or(file).to_path_buf();
    if !["lib", "main", "mod"].iter().any(|root| stem == *root) {
        folder.push(stem);
    }
    folder.extend(path);
    [folder.with_extension("rs"), folder.join("mod.rs")]
        .into_iter()
        .find(|candidate| candidate.is_file())
        .ok_or_else(|| format!("{} declares the module {}, which has no file", file.display(), path.join("::")))
}

fn rust_files(folder: &Path, files: &mut BTreeSet<PathBuf>) -> Result<(), String> {
    for path in entries(folder)? {
        if path.is_dir() {
            rust_files(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.insert(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that is removed when the test ends.
    struct Folder(PathBuf);

    impl Folder {
        fn with(name: &str, files: &[(&str, &str)]) -> Self {
            let root = std::env::temp_dir().join(format!("xtask-lines-{name}-{}", std::process::id()));
            for (file, text) in files {
                let path = root.join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Self(root)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn files_of_test_modules_are_not_counted() {
        let workspace = Folder::with(
            "modules",
            &[
                ("crates/one/src/lib.rs", "mod a;\n#[cfg(test)]\nmod tests;\n"),
                ("crates/one/src/a/mod.rs", "mod b;\n"),
                ("crates/one/src/a/b.rs", "fn f() {}\n"),
                ("crates/one/src/tests/mod.rs", "mod c;\n"),
                ("crates/one/src/tests/c.rs", "fn f() {}\n"),
                ("crates/partywall-simcuda/src/lib.rs", "fn f() {}\n"),
            ],
        );
        let table = "\
one                     3
total                   3
partywall-simcuda       1  (not in the total)
";
        assert_eq!(report(&workspace.0).unwrap(), table);
    }

    #[test]
    fn file_without_a_module_is_an_error() {
        let workspace = Folder::with("orphan", &[("crates/one/src/lib.rs", ""), ("crates/one/src/a.rs", "")]);
        let error = report(&workspace.0).unwrap_err();
        assert!(error.contains("a.rs belongs to no module"), "{error}");
    }
}
