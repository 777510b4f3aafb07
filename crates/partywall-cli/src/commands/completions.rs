//! `partywall completions SHELL`: a script that a shell reads, the same with `--json`.

use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use clap_complete::{Shell, generate};

use crate::{Context, command, failure::Failure, lab};

/// The arguments of the command.
#[derive(Debug, Args)]
#[command(after_help = INSTALL)]
pub(crate) struct Arguments {
    /// The shell
    #[arg(value_parser = PossibleValuesParser::new(["bash", "zsh", "fish"]).try_map(|name| name.parse::<Shell>()))]
    shell: Shell,
}

/// The directory in which each shell looks for its script.
const INSTALL: &str = "\
bash: partywall completions bash > ~/.local/share/bash-completion/completions/partywall
zsh:  partywall completions zsh > DIRECTORY/_partywall, with DIRECTORY in $fpath
fish: partywall completions fish > ~/.config/fish/completions/partywall.fish";

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    lab::take_over_description();
    let mut script = Vec::new();
    generate(arguments.shell, &mut command(), "partywall", &mut script);
    context.output().document(&String::from_utf8_lossy(&script));
    Ok(())
}
