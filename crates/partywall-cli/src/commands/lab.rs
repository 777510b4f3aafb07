//! `partywall lab`: runs the experiments of [`partywall_labs`].

use std::rc::Rc;

use clap::Args;
use partywall::{DeviceChoice, Place};
use partywall_labs::Console;
use serde_json::Value;

use crate::{Context, device, failure::Failure, output::Output, simulation};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Use two GPUs that are simulated in software, and the domain `simulated`
    #[arg(long, global = true)]
    simulated: bool,
    #[command(flatten)]
    labs: partywall_labs::Arguments,
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    if arguments.simulated {
        simulation::enter(context)?;
    }
    Ok(arguments.labs.run(&labs_context(context))?)
}

/// Returns the program's options and its output as labs use them.
pub(super) fn labs_context(context: &Context) -> partywall_labs::Context {
    partywall_labs::Context {
        domain: context.domain.clone(),
        socket: context.socket.clone(),
        flag: simulation::flag(),
        console: Rc::new(context.output()),
    }
}

impl Console for Output {
    fn line(&self, text: &str) {
        Output::line(*self, text);
    }

    fn value(&self, value: &Value) {
        Output::value(*self, value);
    }

    fn table(&self, headings: &[&str], rows: &[Vec<String>], spare: &[&str]) {
        Output::table(*self, headings, rows, spare);
    }

    fn on_standard_error(&self) -> Rc<dyn Console> {
        Rc::new(Output::on_standard_error(*self))
    }

    fn has_colours(&self) -> bool {
        Output::has_colours(*self)
    }

    fn place(&self, choice: DeviceChoice) -> Result<Place, partywall_labs::Failure> {
        Ok(device::place(*self, choice)?)
    }
}
