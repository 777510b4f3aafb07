//! The labs that are programs of their own, as far as this program describes them.

use partywall_cli::lab::Program;

use crate::lab::{Lab, Role};

/// `partywall lab render`, an example of the public interface with dependencies of its own: `examples/render`.
///
/// The program completes this with the options, the beliefs and what the roles do.
pub const RENDER: Lab = Lab {
    name: "render",
    title: "processes render one picture into shared memory, and one may be killed",
    on_host: true,
    broker: true,
    traced: true,
    kills_by: &["--kill", "renderer", "--frames", "24", "--size", "160x90", "--scene", "torus:2000"],
    roles: &[role("geometry"), role("renderer"), role("compositor"), role("writer"), role("viewer"), role("plain")],
    observer: role("watcher"),
    elsewhere: Some(&Program {
        name: "partywall-render",
        install: "install it in a clone of the repository: `cargo install --locked --path examples/render`, or \
                  `pip install ./python/lab`",
    }),
    ..Lab::DEFAULT
};

/// Returns a role for the list of labs. Only the lab's program plays it.
const fn role(name: &'static str) -> Role {
    Role::new(name, "", |_| Ok(()))
}
