//! Several hosts on one machine: network namespaces, with a switch or a slow and lossy line between them. Only root makes
//! them; a test that does has `needs_namespaces_hosts` in its name.
//!
//! The kernels of the machines that test this have no netem. A [`Switch`] limits rates and pulls cables; for delays and
//! losses a [`Line`] passes each packet through the program `partywall-relay`.

use std::{
    fs::{self, File},
    net::Ipv4Addr,
    os::fd::{AsFd, AsRawFd},
    path::Path,
    process::Command,
    sync::Arc,
    thread,
    time::Duration,
};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::{Actor, Running};

/// A host: a network namespace, which ends with its last clone and with the processes in it.
#[derive(Debug, Clone)]
pub struct Host {
    namespace: Arc<File>,
    address: Ipv4Addr,
}

/// Hosts with a cable each to one switch.
#[derive(Debug)]
pub struct Switch {
    namespace: Host,
    hosts: Vec<Host>,
}

/// Two hosts, and a line between them that delays, loses and cuts off.
#[derive(Debug)]
pub struct Line {
    hosts: [Host; 2],
    relay: Actor,
}

/// What a [`Line`] does to packets.
#[derive(Debug, Clone, Copy)]
pub struct Condition {
    /// How long each packet takes.
    pub delay: Duration,
    /// How much longer one may take; packets overtake each other then.
    pub jitter: Duration,
    /// The part of all packets that is lost, from 0 to 1.
    pub loss: f64,
    /// Whether packets get from the first host to the second, and from the second to the first.
    pub is_open: [bool; 2],
}

impl Default for Condition {
    /// Nothing is delayed or lost.
    fn default() -> Self {
        Self { delay: Duration::ZERO, jitter: Duration::ZERO, loss: 0.0, is_open: [true; 2] }
    }
}

impl Host {
    fn new(address: Ipv4Addr) -> Self {
        // The namespace of a process that waits; it goes on to exist as long as this file is open.
        let mut process = Running::spawn(Command::new("unshare").args(["--net", "sh", "-c", "echo made; read _"]));
        assert_eq!(process.line(), "made");
        let namespace = File::open(format!("/proc/{}/ns/net", process.pid())).unwrap();
        let host = Self { namespace: Arc::new(namespace), address };
        // Its announcements would be packets that no test knows of.
        host.run(|| fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1")).unwrap();
        host.ip("link set lo up");
        host
    }

    /// Returns the address that the other hosts know.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Runs a function on this host: its sockets and the processes that it starts belong to it.
    ///
    /// # Panics
    /// If the function does.
    pub fn run<T: Send>(&self, function: impl FnOnce() -> T + Send) -> T {
        // Only a thread of its own may stay in another namespace.
        thread::scope(|scope| {
            let enter = move || {
                move_into_link_name_space(self.namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
                function()
            };
            scope.spawn(enter).join().unwrap()
        })
    }

    fn ip(&self, words: &str) {
        self.tool("ip", words);
    }

    fn tool(&self, program: &str, words: &str) {
        let output = self.run(|| Command::new(program).args(words.split(' ')).output()).unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {words}: {stderr}");
    }

    /// The path by which other programs find the namespace while this process lives.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.namespace.as_raw_fd())
    }
}

impl Switch {
    /// Makes that many hosts, 10.83.0.1 and following, and their cables.
    ///
    /// # Panics
    /// If the machine refuses.
    pub fn new(count: u8) -> Self {
        let namespace = Host::new(Ipv4Addr::UNSPECIFIED);
        namespace.ip("link add switch type bridge");
        namespace.ip("link set switch up");
        let hosts: Vec<_> = (1..=count).map(|number| Host::new(Ipv4Addr::new(10, 83, 0, number))).collect();
        for (number, host) in hosts.iter().enumerate() {
            namespace.ip(&format!("link add port{number} type veth peer name cable netns {}", host.path()));
            namespace.ip(&format!("link set port{number} master switch up"));
            host.ip(&format!("address add {}/24 dev cable", host.address));
            host.ip("link set cable up");
        }
        Self { namespace, hosts }
    }

    /// Returns the hosts.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// Pulls the cable of a host out, or plugs it in.
    ///
    /// # Panics
    /// If there is no such host.
    pub fn plug(&self, host: usize, is_in: bool) {
        self.namespace.ip(&format!("link set port{host} {}", if is_in { "up" } else { "down" }));
    }

    /// Limits the cable of a host, in each direction. Packets wait for at most 50 ms.
    ///
    /// # Panics
    /// If there is no such host.
    pub fn limit(&self, host: usize, megabits_per_second: u32) {
        self.congest(host, megabits_per_second, Duration::from_millis(50));
    }

    /// Limits the cable of a host, in each direction. A packet that would wait for longer than `most` is lost.
    ///
    /// # Panics
    /// If there is no such host.
    pub fn congest(&self, host: usize, megabits_per_second: u32, most: Duration) {
        let latency = most.as_millis();
        let rule = format!("root tbf rate {megabits_per_second}mbit burst 256kb latency {latency}ms");
        self.queue(host, "replace", &rule);
    }

    /// Takes the limit from the cable of a host.
    ///
    /// # Panics
    /// If it has none, or there is no such host.
    pub fn unlimit(&self, host: usize) {
        self.queue(host, "delete", "root");
    }

    fn queue(&self, host: usize, action: &str, rule: &str) {
        self.namespace.tool("tc", &format!("qdisc {action} dev port{host} {rule}"));
        self.hosts[host].tool("tc", &format!("qdisc {action} dev cable {rule}"));
    }
}

impl Line {
    /// Makes two hosts, 10.84.0.1 and 10.84.0.2. With the same `seed`, the same packets are lost. `relay` is the program
    /// [`relay`](crate::relay).
    ///
    /// # Panics
    /// If the machine refuses.
    pub fn new(relay: &Path, seed: u64) -> Self {
        let hosts = [1, 2].map(|number| Host::new(Ipv4Addr::new(10, 84, 0, number)));
        let mut command = Command::new(relay);
        command.arg(seed.to_string()).args(hosts.iter().map(Host::path));
        let mut relay = Actor::spawn(&mut command);
        relay.expect("ready");
        for host in &hosts {
            host.ip(&format!("address add {}/24 dev line", host.address));
            // Large packets keep the relay from being the limit.
            host.ip("link set line mtu 60000 up");
        }
        Self { hosts, relay }
    }

    /// Returns the hosts.
    pub fn hosts(&self) -> &[Host; 2] {
        &self.hosts
    }

    /// Changes what happens to the packets that come from now on.
    ///
    /// # Panics
    /// If the relay has ended.
    pub fn set(&mut self, condition: Condition) {
        let Condition { delay, jitter, loss, is_open } = condition;
        let loss = (loss * 1e6) as u32;
        let [there, back] = is_open.map(u8::from);
        self.relay.send(&format!("{} {} {loss} {there} {back}", delay.as_micros(), jitter.as_micros()));
        self.relay.expect("set");
    }
}
