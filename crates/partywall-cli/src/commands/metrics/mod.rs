//! `partywall metrics`: prints what a domain holds and does as metrics for Prometheus, once or at each request over
//! HTTP.
//!
//! The program is a client of the broker, so the broker neither listens nor waits for anything on its behalf. `--json`
//! changes only how errors and the address are printed: metrics are always text.

mod collect;
mod family;
mod idle;
mod listen;

use std::net::SocketAddr;

use clap::Args;

use crate::{
    Context,
    failure::Failure,
    snapshot::{Observer, Snapshot},
    text::parse_number,
};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Answer requests over HTTP until Ctrl-C, instead of printing once; port 0 takes a free port [default:
    /// 127.0.0.1:9464]
    #[arg(long, value_name = "ADDRESS:PORT", num_args = 0..=1, default_missing_value = "127.0.0.1:9464", value_parser = parse_address)]
    listen: Option<SocketAddr>,
    /// How many names and how many members have series of their own; the rest are in the sums only
    #[arg(long, value_name = "NUMBER", default_value_t = 1000, value_parser = parse_number::<usize>)]
    max_names: usize,
}

fn parse_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| format!("{text:?} is not an address and a port: write ADDRESS:PORT, as in 127.0.0.1:9464"))
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let most = arguments.max_names;
    let mut observer = Observer::new(context);
    let mut snapshot = || Snapshot::take(observer.domain()?, most);
    match arguments.listen {
        None => {
            context.output().document(&family::to_text(collect::families(&snapshot()?, most, None)));
            Ok(())
        }
        Some(address) => {
            let mut idle = idle::Idle::default();
            listen::serve(context.output(), address, || {
                let families = snapshot().map(|snapshot| collect::families(&snapshot, most, Some(&mut idle)));
                family::to_text(families.unwrap_or_else(|_| collect::without_broker()))
            })
        }
    }
}
