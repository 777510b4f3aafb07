//! `partywall man`. With `--out` and `--json`: `directory`, `pages` (a number).

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use clap::{Args, Command};
use clap_mangen::Man;
use partywall::{ErrorKind, files::write_file};
use serde_json::json;

use crate::{Context, command, failure::Failure, lab, text};

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
    lab::take_over_description();
    let output = context.output();
    let Some(directory) = &arguments.out else {
        let mut page = Vec::new();
        // Writing to a vector cannot fail.
        let _ = Man::new(command()).render(&mut page);
        output.document(&String::from_utf8_lossy(&page));
        return Ok(());
    };
    let failed = |error| {
        let what = format!("cannot write the manual pages to {}: {error}", directory.display());
        Failure::new(ErrorKind::Refused, what, "name a writable directory")
    };
    fs::create_dir_all(directory).map_err(failed)?;
    let mut command = command().disable_help_subcommand(true);
    command.build();
    let pages = write(command, directory).map_err(failed)?;
    output.line(format!("{} in {}", text::count(pages, "manual page"), directory.display()));
    output.value(&json!({ "directory": directory, "pages": pages }));
    Ok(())
}

/// Writes the pages of a command and of those below it. Returns how many.
fn write(command: Command, directory: &Path) -> io::Result<u64> {
    let mut pages = 1;
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        pages += write(below.clone(), directory)?;
    }
    let page = Man::new(command);
    let mut text = Vec::new();
    page.render(&mut text)?;
    write_file(&directory.join(page.get_filename()), &text, true)?;
    Ok(pages)
}
