//! `partywall completions SHELL`: a script that a shell reads, the same with `--json`.
//!
//! The script also completes what begins with `//`: hosts, and the names that a host exports, if `partywall` says them
//! within a second.

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
    context.output().document(&with_remote_names(&String::from_utf8_lossy(&script), arguments.shell));
    Ok(())
}

/// Adds what completes hosts and their names.
fn with_remote_names(script: &str, shell: Shell) -> String {
    match shell {
        Shell::Fish => format!("{script}{FISH}"),
        // In these the function for all arguments asks it first.
        Shell::Zsh => script.replacen(FUNCTION, &format!("{NAMES}{ZSH}{FUNCTION}{FIRST}"), 1),
        _ => script.replacen(FUNCTION, &format!("{NAMES}{BASH}{FUNCTION}{FIRST}"), 1),
    }
}

const FUNCTION: &str = "_partywall() {\n";
const FIRST: &str = "    _partywall_remote && return 0\n";

const NAMES: &str = r#"
_partywall_names() {
    case $1 in
        //*/*) timeout 1 partywall ls "${1%"${1#//*/}"}" 2>/dev/null | awk 'NR > 1 {sub(/@[0-9]+$/, "", $1); print $1}' ;;
        //*) timeout 1 partywall hosts 2>/dev/null | awk 'NR > 1 {print $1 "/"}' ;;
    esac
}
"#;

const BASH: &str = r#"
_partywall_remote() {
    local typed=${COMP_WORDS[COMP_CWORD]} name
    [[ $typed == //* ]] || return 1
    COMPREPLY=()
    # compgen would expand what a host has sent.
    while read -r name; do
        [[ $name != "$typed"* ]] || COMPREPLY+=("$name")
    done < <(_partywall_names "$typed")
    [[ ${COMPREPLY[0]-} != */ ]] || compopt -o nospace
}
"#;

const ZSH: &str = r#"
_partywall_remote() {
    [[ $words[CURRENT] == //* ]] || return 1
    compadd -S '' -- ${(f)"$(_partywall_names $words[CURRENT])"}
}
"#;

const FISH: &str = r#"
function __partywall_names
    set -l host (string match -r '^//[^/]+/' -- (commandline -ct))
    if test -n "$host"
        timeout 1 partywall ls $host 2>/dev/null | awk 'NR > 1 {sub(/@[0-9]+$/, "", $1); print $1}'
    else
        timeout 1 partywall hosts 2>/dev/null | awk 'NR > 1 {print $1 "/"}'
    end
end
complete -c partywall -n 'string match -q "//*" -- (commandline -ct)' -f -a '(__partywall_names)'
"#;
