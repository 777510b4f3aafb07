//! The bed of hosts itself: it must do to packets what tests rely on.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use partywall_harness::hosts::{Condition, Host, Line, Switch};

const RELAY: &str = env!("CARGO_BIN_EXE_partywall-relay");

/// A socket on a host that waits at most this long for a packet that does not come.
fn socket(host: &Host) -> UdpSocket {
    let address = SocketAddr::from((host.address(), 7000));
    let socket = host.run(|| UdpSocket::bind(address)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    socket
}

/// Sends a byte until it arrives, because a cable needs a moment.
fn arrives(from: &UdpSocket, to: &UdpSocket) {
    to.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    partywall_harness::eventually("a packet arrives", || {
        from.send_to(&[1], to.local_addr().unwrap()).unwrap();
        to.recv(&mut [0]).is_ok()
    });
    // Those that were sent in vain meanwhile.
    while to.recv(&mut [0]).is_ok() {}
}

#[test]
fn needs_namespaces_hosts_reach_each_other_through_a_switch_until_a_cable_is_pulled() {
    let switch = Switch::new(3);
    let [first, second, third] = [0, 1, 2].map(|host| socket(&switch.hosts()[host]));
    for (from, to) in [(&first, &second), (&second, &third), (&third, &first)] {
        arrives(from, to);
    }
    switch.plug(1, false);
    first.send_to(&[2], second.local_addr().unwrap()).unwrap();
    assert!(second.recv(&mut [0]).is_err());
    arrives(&third, &first);
    switch.plug(1, true);
    arrives(&first, &second);
}

#[test]
fn needs_namespaces_hosts_get_all_bytes_over_a_limited_cable() {
    let switch = Switch::new(2);
    switch.limit(1, 100);
    let [from, to] = [0, 1].map(|host| &switch.hosts()[host]);
    let address = SocketAddr::from((to.address(), 7001));
    let listener = to.run(|| TcpListener::bind(address)).unwrap();
    let sent = partywall_harness::noise(1 << 20, 1);
    let received = thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            let mut received = Vec::new();
            listener.accept().unwrap().0.read_to_end(&mut received).unwrap();
            received
        });
        from.run(|| TcpStream::connect(address)).unwrap().write_all(&sent).unwrap();
        receiver.join().unwrap()
    });
    assert!(received == sent);
}

#[test]
fn needs_namespaces_hosts_are_delayed_and_cut_off_by_a_line() {
    let mut line = Line::new(Path::new(RELAY), 7);
    let [there, back] = [0, 1].map(|host| socket(&line.hosts()[host]));
    arrives(&there, &back);
    arrives(&back, &there);

    let wait = Duration::from_millis(100);
    there.set_read_timeout(Some(wait)).unwrap();
    back.set_read_timeout(Some(wait)).unwrap();
    line.set(Condition { is_open: [false, true], ..Condition::default() });
    there.send_to(&[2], back.local_addr().unwrap()).unwrap();
    assert!(back.recv(&mut [0]).is_err());
    back.send_to(&[2], there.local_addr().unwrap()).unwrap();
    assert!(there.recv(&mut [0]).is_ok());

    line.set(Condition { loss: 1.0, ..Condition::default() });
    back.send_to(&[3], there.local_addr().unwrap()).unwrap();
    assert!(there.recv(&mut [0]).is_err());

    let delay = Duration::from_millis(30);
    line.set(Condition { delay, ..Condition::default() });
    let start = Instant::now();
    there.send_to(&[4], back.local_addr().unwrap()).unwrap();
    back.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    assert!(back.recv(&mut [0]).is_ok());
    assert!(start.elapsed() >= delay, "no packet is early");
}

#[test]
fn needs_namespaces_hosts_lose_the_same_packets_with_the_same_seed() {
    let lost = |seed| {
        let mut line = Line::new(Path::new(RELAY), seed);
        line.set(Condition { loss: 0.5, ..Condition::default() });
        let [there, back] = [0, 1].map(|host| socket(&line.hosts()[host]));
        for number in 0..100 {
            there.send_to(&[number], back.local_addr().unwrap()).unwrap();
        }
        back.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let mut byte = [0];
        let mut received = Vec::new();
        while back.recv(&mut byte).is_ok() {
            received.push(byte[0]);
        }
        received
    };
    let first = lost(1);
    assert!((20..80).contains(&first.len()), "{first:?}");
    assert_eq!(first, lost(1));
    assert_ne!(first, lost(2));
}
