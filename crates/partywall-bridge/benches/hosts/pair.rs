//! Two hosts on a switch, with a broker and a bridge each.

use std::process::Command;

use partywall::{DType, Place, Policy, Publisher, Subscriber, Topic};
use partywall_harness::{
    Running, Sandbox, WATCHDOG, eventually,
    hosts::{Host, Switch},
};
use partywall_measure::Failure;
use partywall_os::clock::monotonic_ns;

/// The hosts. `a` exports everything, and `b` imports its topic under `block`.
pub(super) struct Pair {
    pub(super) switch: Switch,
    pub(super) a: Sandbox,
    pub(super) b: Sandbox,
    bridges: Vec<Running>,
}

/// A topic that crosses: a publisher at `a`, a subscriber at `b`.
pub(super) struct Stream {
    _topics: [Topic; 2],
    publisher: Publisher,
    subscriber: Subscriber,
    bytes: usize,
}

impl Pair {
    pub(super) fn new() -> Self {
        let switch = Switch::new(2);
        let (a, b) = (Sandbox::new(), Sandbox::new());
        a.broker();
        b.broker();
        let mut pair = Self { switch, a, b, bridges: Vec::new() };
        pair.bridges = vec![pair.bridge(0), pair.bridge(1)];
        pair
    }

    /// Starts a bridge. What it says of other hosts comes on standard output.
    pub(super) fn bridge(&self, host: usize) -> Running {
        let listen = address(&self.switch.hosts()[host]);
        let mut arguments = vec!["bridge", "--insecure-network", "--listen", &listen, "--host"];
        let first = address(&self.switch.hosts()[0]);
        match host {
            0 => arguments.extend(["a", "--export", "*"]),
            _ => arguments.extend(["b", "--connect", &first, "--import", "//a/*", "--policy", "block"]),
        }
        let mut bridge = self.spawn(host, &arguments);
        let mut expected = vec![" at tcp/"];
        // Either may be said first.
        expected.extend((host == 1).then_some("//a is there"));
        while !expected.is_empty() {
            let line = bridge.line();
            expected.retain(|part| !line.contains(part));
        }
        bridge
    }

    /// Returns a command of `partywall` on a host, with both outputs in one.
    fn command(&self, host: usize, arguments: &[&str]) -> Command {
        let sandbox = [&self.a, &self.b][host];
        let mut command = sandbox.program("sh");
        command.args(["-c", "exec \"$0\" \"$@\" 2>&1"]).arg(env!("CARGO_BIN_EXE_partywall-bridge")).args(arguments);
        command
    }

    pub(super) fn spawn(&self, host: usize, arguments: &[&str]) -> Running {
        let mut command = self.command(host, arguments);
        self.switch.hosts()[host].run(|| Running::spawn(&mut command))
    }

    /// Replaces the bridge of `a`. Returns the former one.
    pub(super) fn take_bridge(&mut self) -> Running {
        self.bridges.remove(0)
    }

    pub(super) fn put_bridge(&mut self) {
        self.bridges.insert(0, self.bridge(0));
    }

    /// Returns a line of the bridge of `b`.
    pub(super) fn said(&mut self) -> String {
        self.bridges.last_mut().unwrap().line()
    }

    /// Creates a topic at both hosts, with as few blocks as go with samples of this size.
    pub(super) fn stream(&self, bytes: usize) -> Result<Stream, Failure> {
        let name = format!("t-{bytes}");
        let depth = if bytes < 1 << 20 { 64 } else { 4 };
        let create = |sandbox: &Sandbox| {
            let topic = sandbox.domain_of_running().topic(&name).max_bytes(bytes as u64).depth(depth);
            topic.place(Place::Host).create()
        };
        let [b, a] = [create(&self.b)?, create(&self.a)?];
        let publisher = a.publisher()?;
        let subscriber = b.subscriber(Policy::Block)?;
        publisher.wait_for_subscribers(1, WATCHDOG)?;
        Ok(Stream { _topics: [a, b], publisher, subscriber, bytes })
    }
}

impl Stream {
    /// Publishes as many samples. Returns when it began, in nanoseconds of the machine's clock.
    pub(super) fn publish(&self, count: usize) -> Result<u64, Failure> {
        let mut began = None;
        for _ in 0..count {
            let loan = self.publisher.loan(DType::U8, &[self.bytes as u64], WATCHDOG)?;
            let filled = loan.filled();
            began.get_or_insert_with(monotonic_ns);
            filled.publish(WATCHDOG).map_err(|failed| failed.error)?;
        }
        began.ok_or_else(|| "nothing was published".into())
    }

    /// Receives as many samples. Returns when the last one was there.
    pub(super) fn receive(&self, count: usize) -> Result<u64, Failure> {
        for _ in 0..count {
            drop(self.subscriber.recv(WATCHDOG)?);
        }
        Ok(monotonic_ns())
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // Before the sandboxes look for what is left.
        self.bridges.drain(..).for_each(|bridge| drop(bridge.kill()));
        eventually("the bridges end", || self.a.processes().len() <= 2 && self.b.processes().len() <= 2);
    }
}

/// Returns where a bridge of a host listens.
pub(super) fn address(host: &Host) -> String {
    format!("tcp/{}:7447", host.address())
}
