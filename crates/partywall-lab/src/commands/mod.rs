//! The commands that this program has beside those of `partywall`: their arguments, and what they print.

mod bench;
mod lab;
mod vulkan;

use clap::{ArgMatches, Args, FromArgMatches};
use partywall::ErrorKind;
use partywall_cli::{Failure, Lab, lab::Extension};

/// What this program contains beside `partywall`.
pub(crate) static LAB: Lab = Lab {
    commands: [
        Extension {
            name: "bench",
            augment: bench::Arguments::augment_args,
            run: |context, matches| bench::run(context, &parsed(matches)?),
        },
        Extension {
            name: "lab",
            augment: lab::Arguments::augment_args,
            run: |context, matches| lab::run(context, &parsed(matches)?),
        },
    ],
    vulkan: vulkan::try_it,
    elsewhere: || crate::labs().find_map(|lab| lab.elsewhere),
};

fn parsed<T: FromArgMatches>(matches: &ArgMatches) -> Result<T, Failure> {
    T::from_arg_matches(matches).map_err(|error| Failure::new(ErrorKind::Usage, error.to_string(), ""))
}
