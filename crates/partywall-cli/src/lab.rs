//! What only the program `partywall-lab` contains: labs, benchmarks, the simulated driver, the probe of Vulkan.
//!
//! `partywall` starts that program with its own arguments and becomes it, as git does with its commands: for `lab` and
//! `bench`, for `--simulated` and `PARTYWALL_LIBCUDA=simulated`, and where help, completions and manual pages describe
//! these. It looks for it in its own directory, then on `PATH`. In the same way `partywall-lab` becomes the program of
//! a lab that it does not contain.

use std::{env, os::unix::process::CommandExt, path::PathBuf, process::Command, sync::OnceLock};

use clap::{Arg, ArgAction, ArgMatches};
use partywall::{ErrorKind, doctor::TryVulkan};
use partywall_os::environment;

use crate::{Context, bridge, failure::Failure, simulation};

/// What `partywall-lab` contains beside `partywall`.
#[derive(Debug)]
pub struct Lab {
    /// The commands.
    pub commands: [Extension; 2],
    /// Tries memory in Vulkan, for the doctor.
    pub vulkan: TryVulkan,
    /// The program of a lab that this one does not contain.
    pub elsewhere: fn() -> Option<&'static Program>,
}

/// A program that this one becomes for what it does not contain.
#[derive(Debug)]
pub struct Program {
    /// Its file.
    pub name: &'static str,
    /// How to get it, in the imperative.
    pub install: &'static str,
}

/// A command that `partywall` knows by its name and its summary.
#[derive(Debug)]
pub struct Extension {
    /// The name.
    pub name: &'static str,
    /// Adds the arguments.
    pub augment: fn(clap::Command) -> clap::Command,
    /// Runs the command.
    pub run: fn(&Context, &ArgMatches) -> Result<(), Failure>,
}

/// The program that contains the lab.
pub(crate) const LAB_PROGRAM: Program = Program {
    name: "partywall-lab",
    install: "install it in a clone of the repository: `cargo install --locked --path crates/partywall-lab`, or \
              `pip install ./python/lab`",
};

static LAB: OnceLock<Option<&'static Lab>> = OnceLock::new();

/// Sets what this program contains.
pub(crate) fn set(lab: Option<&'static Lab>) {
    LAB.get_or_init(|| lab);
}

/// Returns what this program contains.
pub(crate) fn contained() -> Option<&'static Lab> {
    LAB.get().copied().flatten()
}

/// Completes the definition of the command line. Commands that this program does not contain take any arguments.
pub(crate) fn complete(program: clap::Command) -> clap::Command {
    program.mut_subcommands(|command| match extension(command.get_name()) {
        Some(extension) => {
            let about = command.get_about().cloned();
            (extension.augment)(command).about(about.unwrap_or_default())
        }
        None if ["bench", "bridge", "hosts", "lab", "pull"].contains(&command.get_name()) => {
            with_any_arguments(command)
        }
        None => command,
    })
}

/// Returns the command of this name that this program contains beside those of `partywall`.
fn extension(name: &str) -> Option<&'static Extension> {
    let lab = contained().map_or(&[][..], |lab| &lab.commands);
    let bridge = bridge::contained().map_or(&[][..], |bridge| &bridge.commands);
    lab.iter().chain(bridge).find(|extension| extension.name == name)
}

/// Lets a command take any arguments, which the program that contains it reads.
#[must_use]
pub fn with_any_arguments(command: clap::Command) -> clap::Command {
    let arguments = Arg::new("arguments").num_args(0..).trailing_var_arg(true).allow_hyphen_values(true).hide(true);
    command.disable_help_flag(true).arg(arguments.action(ArgAction::Append))
}

/// Runs a command of the lab or of the bridge, in the program that contains it.
pub(crate) fn run(context: &Context, name: &str, matches: &ArgMatches, program: &Program) -> Result<(), Failure> {
    let Some(extension) = extension(name) else { return Err(program.enter(&format!("partywall {name}"))) };
    let matches = matches.subcommand_matches(name).expect("the caller has found the command by this name");
    (extension.run)(context, matches)
}

/// Becomes `partywall-lab` if the environment chooses the simulated driver. Without that program, what needs no driver
/// goes on working.
pub(crate) fn take_over_simulation() {
    if simulation::is_chosen() {
        take_over();
    }
}

/// Becomes `partywall-lab`, unless this is that program, or it is not installed.
pub(crate) fn take_over() {
    if contained().is_none() {
        LAB_PROGRAM.take_over();
    }
}

/// Becomes a program that describes commands that this one does not contain, if one is installed.
pub(crate) fn take_over_description() {
    if let Some(program) = contained().map_or(Some(&LAB_PROGRAM), |lab| (lab.elsewhere)()) {
        program.take_over();
    }
    if contained().is_none() && bridge::contained().is_none() {
        bridge::BRIDGE_PROGRAM.take_over();
    }
}

/// Returns the command of the program that contains the simulated driver: this one, or the one that is installed.
pub(crate) fn command(needed_for: &str) -> Result<Command, Failure> {
    let program = match contained() {
        Some(_) => env::current_exe().map_err(|error| Failure::system("finding this program", error))?,
        None => LAB_PROGRAM.path(needed_for)?,
    };
    Ok(Command::new(program))
}

impl Program {
    /// Becomes the program, with the arguments of this process. Returns only if that fails.
    #[must_use]
    pub fn enter(&self, needed_for: &str) -> Failure {
        self.path(needed_for).map_or_else(|failure| failure, |path| self.execute(Command::new(path)))
    }

    fn path(&self, needed_for: &str) -> Result<PathBuf, Failure> {
        self.find().ok_or_else(|| {
            let name = self.name;
            let message =
                format!("`{needed_for}` needs the program {name}, which is neither beside this one nor on PATH");
            Failure::new(ErrorKind::NotFound, message, self.install)
        })
    }

    /// Returns whether it is installed.
    #[must_use]
    pub fn is_installed(&self) -> bool {
        self.find().is_some()
    }

    /// Becomes the program, if it is installed.
    fn take_over(&self) {
        if let Some(path) = self.find() {
            self.execute(Command::new(path));
        }
    }

    /// Becomes the program by this command, with the arguments of this process. Returns only if that fails.
    pub(crate) fn execute(&self, mut command: Command) -> Failure {
        let mut arguments = env::args_os();
        let name = arguments.next().unwrap_or_else(|| "partywall".into());
        let program = command.get_program().display().to_string();
        let error = environment::shield(&mut command).arg0(name).args(arguments).exec();
        Failure::new(ErrorKind::Refused, format!("cannot start {program}: {error}"), self.install)
    }

    fn find(&self) -> Option<PathBuf> {
        let directories = environment::program_directories().into_iter();
        directories.map(|directory| directory.join(self.name)).find(|program| environment::is_executable(program))
    }
}
