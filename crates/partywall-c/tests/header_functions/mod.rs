//! The functions of the header, for tests of all of them.
#![allow(dead_code, clippy::unwrap_used)] // each test uses a part

use std::{fs, path::Path};

/// A function as the header declares it.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) returns: String,
    pub(crate) name: String,
    /// The types and names of the parameters.
    pub(crate) parameters: Vec<String>,
}

/// The header without comments.
pub(crate) fn header() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/partywall/partywall.h");
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| line.split("//").next().unwrap().trim_end()).collect::<Vec<_>>().join("\n")
}

/// The functions in the order of the header.
pub(crate) fn functions() -> Vec<Function> {
    let header = header();
    // A declaration begins a line, and ends with the first `);`.
    let declarations = header.split("\n\n").filter(|part| part.contains("pw_") && part.trim_end().ends_with(");"));
    declarations.filter_map(|declaration| function(declaration.trim())).collect()
}

fn function(declaration: &str) -> Option<Function> {
    let flat = declaration.split_whitespace().collect::<Vec<_>>().join(" ");
    let (head, parameters) = flat.split_once('(')?;
    let parameters = parameters.strip_suffix(");")?;
    let at = head.rfind([' ', '*'])? + 1;
    let (returns, name) = head.split_at(at);
    if !name.starts_with("pw_") {
        return None;
    }
    let mut depth = 0;
    let list = parameters.split(|c| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        c == ',' && depth == 0
    });
    let list = list.map(str::trim).filter(|one| *one != "void").map(str::to_owned).collect();
    Some(Function { returns: returns.trim().to_owned(), name: name.to_owned(), parameters: list })
}
