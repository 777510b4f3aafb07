//! What only the program `partywall-bridge` contains: everything that concerns other hosts, so that no network code is
//! in `partywall`, which is also the broker. `partywall` becomes that program as it becomes `partywall-lab`, see
//! [`lab`](crate::lab).

use std::sync::OnceLock;

use crate::{
    Context,
    failure::Failure,
    lab::{Extension, Program},
};

/// What `partywall-bridge` contains beside `partywall`.
#[derive(Debug)]
pub struct Bridge {
    /// The commands `bridge`, `hosts` and `pull`.
    pub commands: [Extension; 3],
    /// Lists the names of a host, given as `//HOST`.
    pub ls: AskHost,
    /// Shows a name of a host, given as `//HOST/NAME[@V]`.
    pub show: AskHost,
}

/// A command about what its argument names on another host.
pub type AskHost = fn(&Context, &str) -> Result<(), Failure>;

/// The program that knows other hosts.
pub(crate) const BRIDGE_PROGRAM: Program = Program {
    name: "partywall-bridge",
    install: "install it in a clone of the repository: `cargo install --locked --path crates/partywall-bridge`",
};

static BRIDGE: OnceLock<&'static Bridge> = OnceLock::new();

/// Sets what this program contains.
pub fn set(bridge: &'static Bridge) {
    BRIDGE.get_or_init(|| bridge);
}

/// Returns what this program contains.
pub(crate) fn contained() -> Option<&'static Bridge> {
    BRIDGE.get().copied()
}

/// Runs `partywall COMMAND //HOST…` by the function for it, in the program that contains that.
pub(crate) fn remote(
    context: &Context,
    command: &str,
    of: fn(&Bridge) -> AskHost,
    argument: &str,
) -> Result<(), Failure> {
    match contained() {
        Some(bridge) => of(bridge)(context, argument),
        None => Err(BRIDGE_PROGRAM.enter(&format!("partywall {command} {argument}"))),
    }
}

/// Returns the host that a name `.bridge/REALM/HOST` stands for. A bridge has one for each host that it reaches.
pub(crate) fn host_of(name: &str) -> Option<&str> {
    name.strip_prefix(".bridge/")?.split_once('/').map(|(_, host)| host)
}

/// Returns whether an argument names something on another host.
pub(crate) fn is_remote(argument: &str) -> bool {
    argument.starts_with("//")
}
