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
    let context = partywall_labs::Context {
        domain: context.domain.clone(),
        socket: context.socket.clone(),
        flag: simulation::flag(),
        console: Rc::new(context.output()),
    };
    Ok(arguments.labs.run(&context)?)
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
        Rc::new(StandardError(*self))
    }

    fn place(&self, choice: DeviceChoice) -> Result<Place, partywall_labs::Failure> {
        Ok(device::place(*self, choice)?)
    }
}

/// The console of a lab whose result is on standard output.
#[derive(Debug)]
struct StandardError(Output);

impl Console for StandardError {
    fn line(&self, text: &str) {
        if !self.0.is_json() {
            self.0.relay(text);
        }
    }

    fn value(&self, value: &Value) {
        if self.0.is_json() {
            self.0.relay(value.to_string());
        }
    }

    fn table(&self, headings: &[&str], rows: &[Vec<String>], _spare: &[&str]) {
        for row in std::iter::once(headings.join("  ")).chain(rows.iter().map(|row| row.join("  "))) {
            self.line(&row);
        }
    }

    fn on_standard_error(&self) -> Rc<dyn Console> {
        Rc::new(Self(self.0))
    }

    fn place(&self, choice: DeviceChoice) -> Result<Place, partywall_labs::Failure> {
        Ok(device::place(self.0, choice)?)
    }
}
