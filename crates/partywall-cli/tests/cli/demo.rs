//! `partywall demo`: its output, its failures, and deaths of its processes.

use partywall_harness::{Output, Running, Sandbox, Signal, eventually};
use serde_json::Value;

/// Returns the steps of one role, from the JSON lines of a run.
fn steps(output: &Output, role: &str) -> Vec<String> {
    let lines = output.text();
    let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter(|line| line["role"] == role).map(|line| line["step"].as_str().unwrap_or("error").to_owned()).collect()
}

/// Runs `partywall` as on a machine without a driver, even if this machine has one.
fn without_a_driver(sandbox: &Sandbox, arguments: &[&str]) -> Output {
    let mut command = sandbox.command(arguments);
    Running::spawn(command.env("PARTYWALL_LIBCUDA", "/nonexistent/libcuda.so.1")).wait()
}

// Holds 104.
#[test]
fn one_command_shares_host_memory() {
    let sandbox = Sandbox::new();
    let output = sandbox.run(["demo", "--device", "host"]).expect(0);
    let text = output.text();
    for expected in [
        "producer │ allocate",
        "1 MiB",
        "data[i] = (i*2 + 1337) ^ 0xDEADBEEF",
        " donated to the broker",
        "consumer │ open",
        "all 262,144 integers are right",
        "what was written, doubled",
        "demo producer --device host",
        "demo consumer --device host",
        "demo     │ kill ",
        ", with SIGKILL",
        " in place while the producer was killed",
        "observer │ open",
    ] {
        assert!(text.contains(expected), "{expected:?} is missing:\n{text}");
    }
    assert!(text.lines().last().unwrap().starts_with("demo passed: 262,144 integers"), "{text}");
    assert_eq!(output.stderr, "");
    // Those of the killed producer go once its death is proved, which may be after the demo.
    eventually("the names of the demo are gone", || sandbox.json(["ls"])["names"] == Value::Array(Vec::new()));
}

#[test]
fn each_step_is_a_json_line() {
    let sandbox = Sandbox::new();
    let output = sandbox.run(["demo", "--device", "host", "--json"]).expect(0);
    let round = ["allocate", "write", "commit", "wait"];
    let expected = [&["connect", "device"][..], &round, &round, &["verify", "verify-copy", "wait"]].concat();
    assert_eq!(steps(&output, "producer"), expected);
    let expected = [
        "connect",
        "device",
        "wait",
        "open",
        "verify",
        "verify-copy",
        "acknowledge",
        "wait",
        "open",
        "double",
        "acknowledge",
        "wait",
        "acknowledge",
        "read-on",
        "verify",
        "verify-copy",
        "wait",
        "release",
    ];
    assert_eq!(steps(&output, "consumer"), expected);
    let expected = ["connect", "device", "wait", "open", "verify", "verify-copy", "wait", "acknowledge", "wait"];
    assert_eq!(steps(&output, "observer"), expected);
    assert_eq!(steps(&output, "demo"), ["kill", "passed"]);
}

// Holds 104.
#[test]
fn killed_producer_leaves_its_array_to_the_others() {
    let sandbox = Sandbox::new();
    for arguments in [&["demo", "--device", "host", "--json"][..], &["demo", "--simulated", "--json"]] {
        let output = sandbox.run(arguments).expect(0);
        let lines: Vec<Value> = output.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let of = |role: &str, step: &str| {
            let at = lines.iter().position(|line| line["role"] == role && line["step"] == step);
            at.unwrap_or_else(|| panic!("{role} has no step {step}: {}", output.text()))
        };
        let [kill, read_on, open] = [of("demo", "kill"), of("consumer", "read-on"), of("observer", "open")];
        assert!(kill < read_on && kill < open, "{}", output.text());
        assert_eq!(lines[kill]["pid"], lines[of("producer", "connect")]["pid"]);
        assert_eq!(lines[kill]["signal"], 9);
        assert!(lines[read_on]["rounds"].as_u64() >= Some(1));
        assert_eq!(lines[open]["name"], lines[of("producer", "commit")]["name"]);
    }
    // Otherwise the end of the sandbox would wait for its idle exit.
    sandbox.run(["stop", "--domain", "simulated"]).expect(0);
}

#[test]
fn without_a_gpu_auto_says_so_and_cuda_fails() {
    let sandbox = Sandbox::new();
    let auto = without_a_driver(&sandbox, &["demo"]).expect(0);
    assert_eq!(auto.stderr.lines().count(), 1, "{}", auto.stderr);
    assert!(auto.stderr.contains("host memory") && auto.stderr.contains("demo --simulated"), "{}", auto.stderr);
    for arguments in [&["demo", "--device", "cuda"][..], &["demo", "consumer", "--device", "cuda:1"]] {
        let cuda = without_a_driver(&sandbox, arguments).expect(6);
        assert_eq!(cuda.text(), "");
        assert!(cuda.stderr.contains("no GPU cuda:") && cuda.stderr.contains("partywall doctor"), "{}", cuda.stderr);
        assert!(cuda.stderr.contains("`partywall demo --simulated`"), "{}", cuda.stderr);
    }
}

// Holds 37.
#[test]
fn simulated_and_real_gpus_are_distinguished_and_kept_apart() {
    let sandbox = Sandbox::new();
    // A member of the user's domain. Simulated memory is never in that domain.
    let member = sandbox.domain();
    let mut command = sandbox.command(["demo", "--simulated"]);
    let output = Running::spawn(command.env("PARTYWALL_SOCKET", sandbox.socket())).wait().expect(0);
    let text = output.text();
    assert!(text.starts_with("Two processes") && text.contains("in memory of the SIMULATED GPU cuda:0."), "{text}");
    assert_eq!(text.matches("SIMULATED, which proves nothing about a GPU").count(), 3, "{text}");
    assert!(text.contains("simulated.sock"), "{text}");
    assert!(text.contains("demo producer --simulated --device cuda:0"), "{text}");
    assert!(text.lines().last().unwrap().contains("SIMULATED"), "{text}");
    let json = sandbox.run(["demo", "--simulated", "--device", "cuda:1", "--json"]).expect(0);
    let lines: Vec<Value> = json.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.last().unwrap()["simulated"], true);
    sandbox.run(["stop", "--domain", "simulated"]).expect(0);
    let named = sandbox.run(["demo", "--simulated", "--domain", "default"]);
    assert!(named.code != Some(0) && named.stderr.contains("on the simulated one"), "{named:?}");
    drop(member);
}

#[test]
fn roles_meet_in_either_order() {
    let sandbox = Sandbox::new();
    for order in [["producer", "consumer"], ["consumer", "producer"]] {
        let start = |role| {
            let mut running = sandbox.spawn(["demo", role, "--device", "host"]);
            // The role has found that the other role has not started yet.
            while !running.line().starts_with("device") {}
            running
        };
        let running = order.map(start);
        for running in running {
            running.wait().expect(0);
        }
    }
}

#[test]
fn second_producer_is_refused_naming_the_first() {
    let sandbox = Sandbox::new();
    let mut first = sandbox.spawn(["demo", "producer", "--device", "host"]);
    while !first.line().starts_with("commit") {}
    let second = sandbox.run(["demo", "producer", "--device", "host"]).expect(5);
    assert!(second.stderr.contains("\"demo/data\" already exists"), "{}", second.stderr);
    assert!(second.stderr.contains("another producer"), "{}", second.stderr);
    first.kill();
}

#[test]
fn one_wrong_element_is_found() {
    let sandbox = Sandbox::new();
    for index in ["0", "4711", "262143"] {
        let output = sandbox.run(["demo", "--device", "host", "--corrupt", index]).expect(1);
        assert!(output.stderr.contains(&format!("is wrong at index {index}: expected ")), "{}", output.stderr);
        assert!(output.stderr.contains("the consumer ended with exit code 1"), "{}", output.stderr);
        assert!(!output.text().contains("demo passed"));
    }
    let mut producer = sandbox.spawn(["demo", "producer", "--device", "host", "--corrupt", "77"]);
    while !producer.line().starts_with("commit") {}
    let consumer = sandbox.run(["demo", "consumer"]).expect(1);
    let expected = (77_u32 * 2 + 1337) ^ 0xDEAD_BEEF;
    let found = expected ^ 1;
    let message = format!("at index 77: expected {expected} ({expected:#010x}), found {found} ({found:#010x})");
    assert!(consumer.stderr.contains(&message), "{}", consumer.stderr);
    producer.kill();
}

#[test]
fn lone_role_times_out() {
    let sandbox = Sandbox::new();
    let consumer = sandbox.run(["demo", "consumer", "--device", "host", "--timeout", "0.3"]).expect(7);
    assert!(consumer.stderr.contains("demo/data was not committed within 0.3 s"), "{}", consumer.stderr);
    assert!(consumer.stderr.contains("partywall demo producer"), "{}", consumer.stderr);
    let producer = sandbox.run(["demo", "producer", "--device", "host", "--timeout", "0.3"]).expect(7);
    assert!(producer.stderr.contains("demo/data-read was not committed within 0.3 s"), "{}", producer.stderr);
    assert_eq!(sandbox.json(["ls"])["names"], Value::Array(Vec::new()));
}

#[test]
fn consumer_notices_the_killed_producer() {
    let sandbox = Sandbox::new();
    let points = [
        ("committed", "the producer has ended"),
        ("acknowledged", "the producer has ended"),
        ("shared", "died before it had checked"),
    ];
    for (point, message) in points {
        let mut consumer = sandbox.spawn(["demo", "consumer", "--device", "host"]);
        while !consumer.line().starts_with("device") {}
        let producer = sandbox.run(["demo", "producer", "--device", "host", "--crash-at", point]);
        assert_eq!(producer.code, None, "killed: {producer:?}");
        let output = consumer.wait();
        // A producer that is killed right after the commit may be gone before the consumer has mapped its memory.
        let missed = point == "committed" && output.code == Some(3);
        assert!(missed || (output.code == Some(1) && output.stderr.contains(message)), "{point}: {output:?}");
        eventually("the dead producer's names go", || sandbox.json(["ls"])["names"] == Value::Array(Vec::new()));
    }
    let both = sandbox.run(["demo", "--device", "host", "--crash-at", "acknowledged"]).expect(1);
    assert!(both.stderr.contains("the producer was killed by signal 9"), "{}", both.stderr);
}

#[test]
fn killed_demo_takes_its_children_along() {
    let sandbox = Sandbox::new();
    sandbox.broker();
    let mut demo = sandbox.spawn(["demo", "--device", "host"]);
    while !demo.line().contains("connect") {}
    demo.signal(Signal::KILL);
    demo.wait();
    // The broker and its supervisor, if it has one, are not children of the demo.
    eventually("the roles end with the demo", || {
        let command = |pid: &u32| std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let is_role = |pid: &u32| command(pid).split(|byte| *byte == 0).any(|word| word == b"--with-parent");
        !sandbox.processes().iter().any(is_role)
    });
    eventually("their names go", || sandbox.json(["ls"])["names"] == Value::Array(Vec::new()));
}

#[test]
fn invalid_demo_arguments_are_usage_errors() {
    let sandbox = Sandbox::new();
    for arguments in [
        &["demo", "--device", "tpu"][..],
        &["demo", "--timeout", "soon"],
        &["demo", "--timeout", "0"],
        &["demo", "bystander"],
        &["demo", "producer", "--corrupt", "262144"],
    ] {
        sandbox.run(arguments).expect(2);
    }
    let name = sandbox.run(["demo", "--device", "host", "--name", "a//b"]).expect(2);
    assert!(name.stderr.contains("is not a name"), "{}", name.stderr);
}
