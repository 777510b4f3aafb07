//! The tasks of the repository, as `cargo xtask COMMAND`.
//!
//! | module | holds |
//! |---|---|
//! | [`steps`] | `check` and `test`: the steps, and a table of their results |
//! | [`changes`] | which packages have changed |
//! | [`tools`] | the workspace, child processes, and tools that are not part of Rust |
//! | [`ptx`] | `ptx`: the GPU kernels, compiled and compared |
//! | [`spirv`] | `spirv`: the shaders, compiled and compared |
//! | [`fuzz`] | `fuzz`: the fuzz targets, and a short run of each |
//! | [`stacks`] | `stacks`: the Python package with the real frameworks above it |
//! | [`c_install`] | `c-install`: the library for C and C++, with its headers and packages |
//! | [`c_archive`] | `c-archive`: the same as an archive of a release |
//! | [`gpu_bundle`] | `gpu-bundle`: what a machine with a GPU needs to run the tests there |

#![allow(clippy::print_stdout, reason = "a program that people run and read; the lint is meant for libraries")]

mod c_archive;
mod c_install;
mod changes;
mod fuzz;
mod gpu_bundle;
mod pages;
mod ptx;
mod spirv;
mod stacks;
mod steps;
mod tools;

use std::process::ExitCode;

use tools::Workspace;

const HELP: &str = "\
usage: cargo xtask COMMAND

  check           format, clippy, and the unit tests of what changed: while you work
  test            everything that has to hold before a change lands; some steps only if what they
                  guard has changed since main
  test --long     what takes too long for that, and the steps that it leaves out; CI runs both
  test --list     the steps of both, with their names, and what some of them guard
  test --only STEP...   these steps alone
  fuzz TARGET SECONDS   run a target of fuzz/ for so long, and keep inputs that reach new code
  ptx             compile */*/kernels/*.cu to PTX, which is checked in
  ptx --check     compile them and compare with what is checked in
  spirv           compile */*/kernels/*.comp to SPIR-V, which is checked in
  c-install --prefix DIR [--debug] [--libraries DIR]
                  install the library for C and C++ with its headers and packages for CMake and
                  pkg-config; --debug builds without optimisation, --libraries takes built libraries
  c-archive [--out DIR] [--libraries DIR --program FILE]
                  pack it with the program and all licences for a release, into target/c-archive/
  gpu-bundle      pack the binary, the GPU tests and the benchmarks into target/gpu-bundle/, to be
                  run on a machine that has an NVIDIA driver and nothing else
  stacks          make target/stacks, an environment of 7 GB with vLLM for CPUs, Ray and transformers,
                  and test the integrations in it; writes docs/measurements/stacks.md
  help            this text
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["check"] => Workspace::locate().and_then(|workspace| steps::check(&workspace)),
        ["test"] => Workspace::locate().and_then(|workspace| steps::test(&workspace)),
        ["test", "--long"] => Workspace::locate().and_then(|workspace| steps::test_long(&workspace)),
        ["test", "--list"] => {
            print!("{}", steps::list());
            Ok(())
        }
        ["test", "--only", names @ ..] if !names.is_empty() => {
            Workspace::locate().and_then(|workspace| steps::only(&workspace, names))
        }
        ["fuzz", target, seconds] => Workspace::locate().and_then(|workspace| fuzz::run(&workspace, target, seconds)),
        ["ptx"] => ptx::regenerate(),
        ["ptx", "--check"] => check_ptx(),
        ["spirv"] => Workspace::locate().and_then(|workspace| spirv::regenerate(&workspace)),
        ["stacks"] => Workspace::locate().and_then(|workspace| stacks::run(&workspace)),
        ["c-install", options @ ..] => Workspace::locate().and_then(|workspace| c_install::run(&workspace, options)),
        ["c-archive", options @ ..] => Workspace::locate().and_then(|workspace| c_archive::run(&workspace, options)),
        ["gpu-bundle"] => Workspace::locate().and_then(|workspace| gpu_bundle::build(&workspace)),
        ["help" | "--help" | "-h"] => {
            print!("{HELP}");
            Ok(())
        }
        [] => return misused("no command given"),
        _ => return misused(&format!("'{}' is not a command of xtask", words.join(" "))),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

fn check_ptx() -> Result<(), String> {
    match ptx::check()? {
        ptx::CheckOutcome::Passed { files } => {
            println!("{files} kernel files compile to the PTX that is checked in");
            Ok(())
        }
        ptx::CheckOutcome::Differs(what) => {
            Err(format!("the PTX is not what the kernels compile to:\n{what}\nrun: cargo xtask ptx"))
        }
        ptx::CheckOutcome::Skipped(reason) => {
            println!("skipped, nothing was compared: {reason}");
            Ok(())
        }
    }
}

fn misused(what: &str) -> ExitCode {
    eprint!("error: {what}\n\n{HELP}");
    ExitCode::from(2)
}
