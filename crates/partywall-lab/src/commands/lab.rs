//! `partywall lab`: runs the labs.

use clap::Args;
use partywall_cli::{Context, Failure, simulation};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Use two GPUs that are simulated in software, and the domain `simulated`
    #[arg(long, global = true)]
    simulated: bool,
    #[command(flatten)]
    labs: crate::Arguments,
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    if arguments.simulated {
        simulation::enter(context)?;
    }
    arguments.labs.run(&context.into())
}
