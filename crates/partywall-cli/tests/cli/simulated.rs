//! The command in a domain on the simulated driver, with memory that another program allocated.

use std::{io::Read, sync::Arc};

use partywall::{
    DType, Domain,
    cuda::{DeviceBuffer, ForeignMemory},
};
use partywall_harness::{ROLE, Running, Sandbox, binary, eventually, simulated_driver};
use serde_json::json;

/// Runs the other program.
#[allow(clippy::print_stdout)] // it is how it talks to the test
pub(crate) fn play() {
    let domain = Domain::options().start(false).connect().unwrap();
    let gpu = domain.gpu(partywall::gpu::devices().unwrap()[0].uuid().unwrap()).unwrap();
    let buffer = Arc::new(DeviceBuffer::new(gpu.context(), 8192).unwrap());
    gpu.stream().copy_from_host(buffer.as_slice(), &[7; 8192]).unwrap();
    let memory = ForeignMemory::try_from(buffer).unwrap();
    let published = domain.publish("theirs").tensor("x", DType::U8, &[4096], &memory).commit();
    println!("\nready {}", published.is_ok());
    let _ = std::io::stdin().read(&mut [0]);
}

#[test]
fn legacy_memory_is_shown_and_read_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    sandbox.broker();
    let simulated = |arguments: &[&str]| {
        let mut command = sandbox.command(arguments);
        Running::spawn(command.env("PARTYWALL_LIBCUDA", simulated_driver())).wait()
    };
    let mut program = sandbox.program(std::env::current_exe().unwrap());
    program.args(["--exact", "role", "--nocapture"]).env(ROLE, "other program");
    let mut publisher = Running::spawn(program.env("PARTYWALL_LIBCUDA", simulated_driver()));
    while publisher.line() != "ready true" {}

    let show = simulated(&["show", "theirs", "--json"]).expect(0).json();
    assert_eq!(
        (&show["kind"], &show["committer"], &show["bytes"]),
        (&json!("legacy"), &json!(publisher.pid()), &json!(8192))
    );
    let promises = json!({ "read_only": "convention", "outlives_publisher": false, "hides_neighbours": false });
    assert_eq!(show["promises"], promises);
    let text = simulated(&["show", "theirs"]).expect(0).text();
    assert!(text.contains("goes with its publisher") && text.contains(&publisher.pid().to_string()), "{text}");
    assert!(simulated(&["ls"]).expect(0).text().contains("legacy"));
    let status = simulated(&["status", "--json"]).expect(0).json();
    assert_eq!((&status["simulated"], &status["members"][0]["simulated"]), (&json!(true), &json!(true)));
    assert!(simulated(&["status"]).expect(0).text().contains("simulated"));
    simulated(&["get", "theirs:x", "x.npy"]).expect(0);
    let file = std::fs::read(sandbox.path().join("x.npy")).unwrap();
    assert_eq!(file[file.len() - 4096..], [7; 4096]);

    // A process on any driver may inspect names, but only members on the same driver may share memory.
    sandbox.run(["ls"]).expect(0);
    let refused = sandbox.run(["get", "theirs", "z.npy"]).expect(5);
    assert!(refused.stderr.contains("simulated CUDA driver") && refused.stderr.contains("--domain"), "{refused:?}");

    let pid = publisher.pid();
    publisher.kill();
    eventually("the proof of its death", || sandbox.run(["ls"]).text().is_empty());
    let gone = simulated(&["get", "theirs", "y.npy"]);
    assert!(gone.stderr.contains(&format!("its publisher, pid {pid}, died")), "{gone:?}");
}

/// The driver's library is there, and the device nodes are not: the first call answers one of these codes.
#[test]
fn driver_without_devices_is_named_with_its_answer() {
    let sandbox = Sandbox::simulated(1);
    sandbox.file("f", "hello");
    sandbox.run(["put", "f", "x", "--device", "cuda"]).expect(0);
    let codes =
        [("100", "CUDA_ERROR_NO_DEVICE"), ("304", "CUDA_ERROR_OPERATING_SYSTEM"), ("999", "CUDA_ERROR_UNKNOWN")];
    for (code, name) in codes {
        let without = |arguments: &[&str]| {
            let mut command = sandbox.command(arguments);
            Running::spawn(command.env("SIMCUDA_FAULTS", format!("cuInit:1={code}"))).wait()
        };
        let refused = without(&["get", "x", "-"]).expect(6);
        assert!(refused.stderr.contains(&format!("cuInit failed: {name} ({code})")), "{refused:?}");
        assert!(refused.stderr.contains("partywall doctor"), "{refused:?}");
        without(&["put", "f", "y", "--device", "cuda"]).expect(6);
        without(&["put", "f", name, "--device", "host"]).expect(0);
        assert_eq!(without(&["get", name, "-"]).expect(0).stdout, b"hello");
    }
    assert_eq!(sandbox.run(["get", "x", "-"]).expect(0).stdout, b"hello");
}

/// The broker is outside, as the host's is for a container that has its socket and not its driver.
#[test]
fn needs_namespaces_hidden_driver_leaves_host_memory() {
    let sandbox = Sandbox::new();
    sandbox.file("f", "hello");
    let library = sandbox.file("driver/libcuda.so", std::fs::read(simulated_driver()).unwrap());
    sandbox.broker();
    let inside = |arguments: &[&str]| {
        let mut command = sandbox.program("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-ec"]);
        command.args(["mount -t tmpfs none driver; exec \"$PARTYWALL_BIN\" \"$@\"", "sh"]).args(arguments);
        Running::spawn(command.env("PARTYWALL_LIBCUDA", &library)).wait()
    };
    let refused = inside(&["put", "f", "x", "--device", "cuda"]).expect(6);
    assert!(refused.stderr.contains("cannot load the CUDA driver library"), "{refused:?}");
    let auto = inside(&["put", "f", "x"]).expect(0);
    assert!(auto.text().contains("on host") && auto.stderr.is_empty(), "{auto:?}");
    assert_eq!(sandbox.run(["get", "x", "-"]).expect(0).stdout, b"hello");
}

/// The driver is the simulated one, which does not start and does not say that it needs no nodes. On a machine with a
/// GPU, `command_hidden_nodes_leave_host_memory` asks its driver.
// Holds 64.
#[test]
fn needs_namespaces_hidden_nodes_leave_host_memory() {
    const SYMBOL: &[u8] = b"simcuda_version";
    let sandbox = Sandbox::new();
    sandbox.file("f", "hello");
    sandbox.broker();
    let mut library = std::fs::read(simulated_driver()).unwrap();
    while let Some(at) = library.windows(SYMBOL.len()).position(|part| part == SYMBOL) {
        library[at] = b'S';
    }
    let library = sandbox.file("libcuda.so", library);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/learn/hide-gpu-nodes.sh");
    let inside = |program: &str, arguments: &[&str]| {
        let mut command = sandbox.program("sh");
        command.args([script, program]).args(arguments).env("PARTYWALL_LIBCUDA", &library);
        let always: Vec<_> = (1..20).map(|call| format!("cuInit:{call}=999")).collect();
        Running::spawn(command.env("SIMCUDA_FAULTS", always.join(","))).wait()
    };
    let nodes = inside("ls", &["/dev"]).expect(0).text();
    assert_eq!(
        nodes.split_whitespace().collect::<Vec<_>>(),
        ["fd", "full", "null", "random", "shm", "tty", "urandom", "zero"]
    );
    // The driver's library creates nodes that it misses.
    assert_ne!(inside("touch", &["/dev/nvidiactl"]).code, Some(0));
    let partywall = |arguments: &[&str]| inside(binary().to_str().unwrap(), arguments);
    let refused = partywall(&["put", "f", "x", "--device", "cuda"]).expect(6);
    let reason = "cuInit failed: CUDA_ERROR_UNKNOWN (999); this process has no /dev/nvidiactl, no /dev/nvidia-uvm, no /dev/nvidiaN";
    assert!(refused.stderr.contains(reason), "{refused:?}");
    let report = partywall(&["doctor", "--json"]).expect(1).json();
    let probes = report["probes"].as_array().unwrap();
    let driver = probes.iter().find(|probe| probe["name"] == "GPU driver").unwrap();
    assert_eq!((&driver["outcome"], &driver["detail"]), (&json!("failed"), &json!(reason)), "{driver}");
    assert!(driver["fix"].as_str().unwrap().contains("--gpus all"), "{driver}");
    assert_eq!(
        probes.iter().filter(|probe| probe["outcome"] == "failed").count(),
        1,
        "one cause, one failure: {report}"
    );
    let auto = partywall(&["put", "f", "x"]).expect(0);
    assert!(auto.stderr.contains("in host memory, because no GPU can be used: cuInit failed"), "{auto:?}");
    assert_eq!(sandbox.run(["get", "x", "-"]).expect(0).stdout, b"hello");
}
