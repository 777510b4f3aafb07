//! The steps that read the repository and run none of its tests.

use std::process::Command;
use std::time::Duration;

use super::python::{OPTIMISED, OPTIMISED_BUILD};
use super::{Outcome, rust::PACKAGES};
use crate::tools::{self, Workspace};
use crate::{pages, ptx, spirv};

/// The timeout for downloading the advisory database.
const FETCH_TIMEOUT: Duration = Duration::from_secs(120);

pub(super) fn format(workspace: &Workspace) -> Outcome {
    // The fuzz targets are a workspace of their own, with a lock file that a new dependency of a crate makes outdated.
    let fuzz = ["--manifest-path", "fuzz/Cargo.toml"];
    let run = |arguments: &[&str], more: &[&str]| {
        let mut command = workspace.cargo(arguments.iter().copied());
        workspace.run(command.args(more))
    };
    run(&["fmt", "--all", "--check"], &[])
        .and_then(|()| run(&["fmt", "--check"], &fuzz))
        .and_then(|()| run(&["tree", "--locked", "--depth", "0"], &fuzz))
        .into()
}

pub(super) fn clippy(workspace: &Workspace) -> Outcome {
    workspace.run(workspace.cargo(["clippy", "--all-targets"]).args(PACKAGES).args(["--", "-D", "warnings"])).into()
}

/// The program and the library have the same name, so both write their pages to the same place. They are built one
/// after the other, and the pages of the library remain.
///
/// With an example cargo selects the features of dependencies as for clippy and the tests. Otherwise it would compile
/// `syn`, all macros and what uses them again.
pub(super) fn rustdoc(workspace: &Workspace) -> Outcome {
    let build = |targets| {
        let mut command = workspace.cargo(["doc", targets, "--no-deps", "--document-private-items"]);
        command.args(PACKAGES).args(["--example", "producer"]);
        workspace.run(command.env("RUSTDOCFLAGS", "-D warnings"))
    };
    build("--bins").and_then(|()| build("--lib")).into()
}

pub(super) fn licences(workspace: &Workspace) -> Outcome {
    let check = || workspace.run(deny(workspace)?.args(["check", "licenses", "bans", "sources"]));
    check().into()
}

/// Fetches the database and checks against it in two commands, because only a failure of the second concerns the
/// dependencies.
pub(super) fn advisories(workspace: &Workspace) -> Outcome {
    let commands = deny(workspace).and_then(|fetch| Ok((fetch, deny(workspace)?)));
    let (mut fetch, mut check) = match commands {
        Ok(commands) => commands,
        Err(message) => return Outcome::Failed(message),
    };
    if let Err(message) = workspace.run_within(FETCH_TIMEOUT, fetch.args(["fetch", "db"])) {
        return Outcome::Skipped(format!("the advisory database is out of reach: {message}"));
    }
    workspace.run(check.args(["check", "--disable-fetch", "advisories"])).into()
}

fn deny(workspace: &Workspace) -> Result<Command, String> {
    let mut command = Command::new(tools::cargo_deny(workspace)?);
    command.arg("--locked").current_dir(&workspace.root);
    Ok(command)
}

pub(super) fn pages(workspace: &Workspace) -> Outcome {
    judge(workspace, pages::check(workspace), "sentences of the pages are wrong; mend the page or what it names")
}

pub(super) fn book(workspace: &Workspace) -> Outcome {
    judge(workspace, pages::book::build(workspace), "links of the book are broken; mend the page that has them")
}

fn judge(workspace: &Workspace, found: Result<Vec<String>, String>, what: &str) -> Outcome {
    match found {
        Ok(wrong) if wrong.is_empty() => Outcome::Passed,
        Ok(wrong) => {
            workspace.say(&wrong.join("\n"));
            Outcome::Failed(format!("{} {what}", wrong.len()))
        }
        Err(message) => Outcome::Failed(message),
    }
}

pub(super) fn kernels(workspace: &Workspace) -> Outcome {
    match ptx::check() {
        Ok(ptx::CheckOutcome::Passed { files }) => {
            workspace.say(&format!("{files} kernel files compile to the PTX that is checked in"));
            Outcome::Passed
        }
        Ok(ptx::CheckOutcome::Differs(what)) => {
            workspace.say(&what);
            Outcome::Failed("the PTX is not what the kernels compile to; run: cargo xtask ptx".to_owned())
        }
        Ok(ptx::CheckOutcome::Skipped(reason)) => Outcome::Skipped(reason),
        Err(message) => Outcome::Failed(message),
    }
}

pub(super) fn shaders(workspace: &Workspace) -> Outcome {
    match spirv::check(workspace) {
        Ok(spirv::CheckOutcome::Passed(files)) => {
            workspace.say(&format!("{files} shaders compile to the SPIR-V that is checked in"));
            Outcome::Passed
        }
        Ok(spirv::CheckOutcome::Differs(files)) => {
            files.iter().for_each(|file| workspace.say(&format!("{} compiles to other SPIR-V", file.display())));
            Outcome::Failed("the SPIR-V is not what the shaders compile to; run: cargo xtask spirv".to_owned())
        }
        Ok(spirv::CheckOutcome::Skipped(reason)) => Outcome::Skipped(reason),
        Err(message) => Outcome::Failed(message),
    }
}

/// Builds the program as `cargo install` does, without the slow options, and checks its size. With debugging
/// information it would be several times as large.
pub(super) fn optimised_binary(workspace: &Workspace) -> Outcome {
    const MAX_BYTES: u64 = 20 << 20;
    let build = || {
        workspace.run(&mut workspace.cargo(OPTIMISED_BUILD.split_whitespace()))?;
        let program = workspace.target.join(OPTIMISED).join("partywall");
        let bytes = std::fs::metadata(&program).map_err(|error| tools::cannot_read(&program, &error))?.len();
        if bytes > MAX_BYTES {
            let mib = bytes >> 20;
            let allowed = MAX_BYTES >> 20;
            return Err(format!("{} has {mib} MiB, {allowed} are allowed: is it stripped?", program.display()));
        }
        Ok(())
    };
    build().into()
}
