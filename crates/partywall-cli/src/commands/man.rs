//! `partywall man`. With `--out` and `--json`: `directory`, `pages` (a number).

use std::{fs, path::PathBuf};

use clap::{Args, CommandFactory};
use clap_mangen::{Man, generate_to};
use partywall::ErrorKind;
use serde_json::json;

use crate::{Cli, Context, failure::Failure, text};

/// The arguments of the command.
#[derive(Debug, Args)]
#[command(after_help = INSTALL)]
pub(crate) struct Arguments {
    /// Write the pages of all commands into this directory, which is created if it is missing
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// How to install and read the manual pages.
const INSTALL: &str = "\
Install:  partywall man --out ~/.local/share/man/man1
Read:     man partywall, man partywall-get; without installing: partywall man | man -l -";

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let output = context.output();
    let Some(directory) = &arguments.out else {
        let mut page = Vec::new();
        // Writing to a vector cannot fail.
        let _ = Man::new(Cli::command()).render(&mut page);
        output.document(&String::from_utf8_lossy(&page));
        return Ok(());
    };
    let failed = |error| {
        let what = format!("cannot write the manual pages to {}: {error}", directory.display());
        Failure::new(ErrorKind::Refused, what, "name a writable directory")
    };
    fs::create_dir_all(directory).map_err(failed)?;
    generate_to(Cli::command(), directory).map_err(failed)?;
    let is_ours = |name: &str| name.starts_with("partywall") && name.ends_with(".1");
    let entries = fs::read_dir(directory).map_err(failed)?.flatten();
    let pages = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_ours)).count();
    output.line(format!("{} in {}", text::count(pages as u64, "manual page"), directory.display()));
    output.value(&json!({ "directory": directory, "pages": pages }));
    Ok(())
}
