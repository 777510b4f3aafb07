//! `partywall completions SHELL`: a script that a shell reads, the same with `--json`.

use clap::{Args, CommandFactory, ValueEnum};
use clap_complete::{
    generate,
    shells::{Bash, Fish, Zsh},
};

use crate::{Cli, Context, failure::Failure};

/// The arguments of the command.
#[derive(Debug, Args)]
#[command(after_help = INSTALL)]
pub(crate) struct Arguments {
    /// The shell
    shell: Shell,
}

/// The directory in which each shell looks for its script.
const INSTALL: &str = "\
bash: partywall completions bash > ~/.local/share/bash-completion/completions/partywall
zsh:  partywall completions zsh > DIRECTORY/_partywall, with DIRECTORY in $fpath
fish: partywall completions fish > ~/.config/fish/completions/partywall.fish";

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let mut script = Vec::new();
    let mut cli = Cli::command();
    match arguments.shell {
        Shell::Bash => generate(Bash, &mut cli, NAME, &mut script),
        Shell::Zsh => generate(Zsh, &mut cli, NAME, &mut script),
        Shell::Fish => generate(Fish, &mut cli, NAME, &mut script),
    }
    context.output().document(&String::from_utf8_lossy(&script));
    Ok(())
}

/// The name of the program.
const NAME: &str = "partywall";
