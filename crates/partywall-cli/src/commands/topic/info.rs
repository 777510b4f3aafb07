//! `partywall topic info`. With `--json`: as `partywall show` of a topic.

use partywall::{Error, error::Mismatch, info::Named};

use crate::{Context, commands::show, failure::Failure};

/// The arguments of the command.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// The topic
    name: String,
}

/// Runs the command.
pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let name = &arguments.name;
    partywall::check_name(name)?;
    let domain = context.options().start(false).connect()?;
    let info = domain.inspect(name)?;
    let is = Named::of(info.version.control.as_ref());
    if is == Named::Topic {
        return show::topic(context, &domain, info);
    }
    Err(Error::Mismatch(Mismatch::Object { name: name.clone(), is, wanted: Named::Topic }).into())
}
