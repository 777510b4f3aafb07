//! `partywall explain`: an entry of `docs/troubleshooting.md`, which is part of the program. With `--json`: `entry`,
//! `text`; without an entry `entries`, a list of `entry`, `message` and `about` (the section that it is in).

use clap::Args;
use partywall::{ErrorKind, near::nearest};
use serde_json::json;

use crate::{Context, failure::Failure};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The entry, as the last line of an error names it [default: list all]
    entry: Option<String>,
}

/// An entry of the page.
#[derive(Debug, Clone, Copy)]
struct PageEntry {
    name: &'static str,
    /// The section that it is in.
    about: &'static str,
    text: &'static str,
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let output = context.output();
    let Some(wanted) = &arguments.entry else {
        let message = |entry: &PageEntry| entry.text.lines().find(|line| !line.is_empty()).unwrap_or_default().trim();
        output.value(&json!({
            "entries": entries().map(|entry| json!({
                "entry": entry.name,
                "message": message(&entry),
                "about": entry.about,
            })).collect::<Vec<_>>(),
        }));
        let rows: Vec<_> = entries().map(|entry| vec![entry.name.to_owned(), message(&entry).to_owned()]).collect();
        output.table(&["ENTRY", "MESSAGE"], &rows, &[]);
        return Ok(());
    };
    let Some(entry) = entries().find(|entry| entry.name == wanted) else {
        let near = nearest(entries().map(|entry| entry.name), wanted);
        let meant = near.first().map_or_else(String::new, |near| format!("did you mean {near}? "));
        let advice = format!("{meant}`partywall explain` lists all entries");
        return Err(Failure::new(ErrorKind::NotFound, format!("there is no entry {wanted:?}"), advice));
    };
    output.value(&json!({ "entry": entry.name, "text": entry.text }));
    output.line(entry.text);
    Ok(())
}

fn entries() -> impl Iterator<Item = PageEntry> {
    PAGE.split("\n## ").skip(1).flat_map(|section| {
        let (about, _) = section.split_once('\n').unwrap_or((section, ""));
        section.split("\n### ").skip(1).map(move |entry| {
            let (name, text) = entry.split_once('\n').unwrap_or((entry, ""));
            PageEntry { name, about, text: text.trim_matches('\n') }
        })
    })
}

/// A link, so that the page is in the package of this crate.
const PAGE: &str = include_str!("../../troubleshooting.md");
