//! Bridges of several hosts on one machine: each host is a sandbox with a broker of its own, and all listen on the
//! loopback. Those of [`network`] and [`chaos`] are in network namespaces, with cables between them.
#![allow(clippy::unwrap_used, reason = "helpers of tests are outside #[test]")]

mod chaos;
mod hostile;
mod hosts;
mod network;
mod programs;
mod pull;
mod raw;
mod tls;
mod topics;

use std::process::Command;

use partywall_harness::{Output, ROLE, Running, Sandbox, eventually, hosts::Host as Network};
use serde_json::Value;

/// A host with a running bridge.
struct Host {
    sandbox: Sandbox,
    name: String,
    bridge: Option<Running>,
    /// Where the bridge listens.
    endpoint: String,
    /// The network namespace, if it has its own.
    network: Option<Network>,
}

impl Host {
    /// Starts a broker and a bridge that connects to the bridges of these hosts.
    fn start(name: &str, others: &[&Self], options: &[&str]) -> Self {
        let endpoint = "127.0.0.1:0".into();
        let mut host = Self { sandbox: Sandbox::new(), name: name.into(), bridge: None, endpoint, network: None };
        let connect = others.iter().map(|other| &other.endpoint[..]).collect::<Vec<_>>();
        host.bridge(&connect, options);
        host
    }

    /// Starts a broker in a network, without a bridge.
    fn on(network: &Network, name: &str) -> Self {
        let endpoint = format!("tcp/{}:7447", network.address());
        let network = Some(network.clone());
        let host = Self { sandbox: Sandbox::new(), name: name.into(), bridge: None, endpoint, network };
        host.sandbox.broker();
        host
    }

    /// Starts the bridge, at the address at which it listened before.
    fn bridge(&mut self, connect: &[&str], options: &[&str]) {
        let mut arguments = vec!["--json", "bridge", "--host", &self.name, "--listen", &self.endpoint];
        arguments.extend(connect.iter().flat_map(|endpoint| ["--connect", endpoint]));
        arguments.extend(self.network.is_some().then_some("--insecure-network"));
        arguments.extend(options);
        let mut bridge = self.spawn(&arguments);
        let said: Value = serde_json::from_str(&bridge.line()).unwrap();
        assert_eq!(said["host"], self.name, "{said}");
        self.endpoint = said["endpoints"][0].as_str().unwrap().to_owned();
        self.bridge = Some(bridge);
    }

    /// Starts a command on this host.
    fn spawn(&self, arguments: &[&str]) -> Running {
        let spawn = || Running::spawn(&mut command(&self.sandbox, arguments));
        match &self.network {
            Some(network) => network.run(spawn),
            None => spawn(),
        }
    }

    /// Runs a command on this host.
    fn run(&self, arguments: &[&str]) -> Output {
        self.spawn(arguments).wait()
    }

    /// Returns what this host knows about another one.
    fn view(&self, host: &str) -> Value {
        let hosts = self.run(&["--json", "hosts"]).expect(0).json();
        let found = hosts["hosts"].as_array().unwrap().iter().find(|view| view["host"] == host).cloned();
        found.unwrap_or_default()
    }

    /// Waits until this host knows another one in this state.
    fn await_state(&self, host: &str, state: &str) -> Value {
        eventually(&format!("//{host} is {state}"), || self.view(host)["state"] == state);
        self.view(host)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // Before the sandbox looks for what is left.
        if let Some(bridge) = self.bridge.take() {
            bridge.kill();
        }
    }
}

/// Checks that a refusal names its entry of `docs/troubleshooting.md`, and that the entry quotes it.
fn assert_quoted(refused: &Output) {
    let message = refused.stderr.lines().find_map(|line| line.strip_prefix("error: ")).unwrap();
    let entry = refused.stderr.rsplit_once("more: partywall explain ").unwrap().1.trim();
    let page = include_str!("../../../../docs/troubleshooting.md");
    let text = page.split_once(&format!("\n### {entry}\n")).unwrap().1;
    let quoted = text.lines().find_map(|line| line.strip_prefix("    ")).unwrap();
    let mut rest = message;
    for part in quoted.split('…') {
        rest = rest.split_once(part).unwrap_or_else(|| panic!("{message:?} is not {quoted:?}")).1;
    }
}

/// Returns a command of `partywall` in a sandbox. Programs are found beside it.
fn command(sandbox: &Sandbox, arguments: &[&str]) -> Command {
    sandbox.command(arguments)
}

/// The other programs that tests start, as this program. It is no test itself.
#[test]
fn role() {
    match std::env::var(ROLE).as_deref() {
        Ok("legacy") => pull::publish_legacy(),
        Ok(role) => chaos::play(role),
        Err(_) => {}
    }
}
