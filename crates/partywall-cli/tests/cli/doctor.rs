// Holds 307.
//! `partywall doctor`, on this machine and on machines with faults.

use partywall_harness::{Output, Running, Sandbox, simulated_driver};
use serde_json::Value;

/// Returns the probe with this name in a JSON report.
fn probe<'a>(report: &'a Value, name: &str) -> &'a Value {
    let probes = report["probes"].as_array().unwrap();
    probes.iter().find(|probe| probe["name"] == name).unwrap_or_else(|| panic!("no probe {name:?} in {report}"))
}

/// Runs `partywall` as on a machine without a driver, even if this machine has one.
fn without_a_driver(sandbox: &Sandbox, arguments: &[&str]) -> Output {
    let mut command = sandbox.command(arguments);
    Running::spawn(command.env("PARTYWALL_LIBCUDA", "/nonexistent/libcuda.so.1")).wait()
}

/// Runs `partywall doctor` on two simulated GPUs on which the given calls fail.
fn simulated(sandbox: &Sandbox, faults: &str, arguments: &[&str]) -> Output {
    let mut command = sandbox.command(["doctor"]);
    command.args(arguments).env("PARTYWALL_LIBCUDA", simulated_driver());
    Running::spawn(command.env("SIMCUDA_DEVICES", "2").env("SIMCUDA_FAULTS", faults)).wait()
}

/// Fails the test unless exactly the named probes failed, each with its expected detail.
#[track_caller]
fn assert_only(report: &Value, failures: &[(&str, &str)]) {
    for probe in report["probes"].as_array().unwrap() {
        let name = probe["name"].as_str().unwrap();
        let detail = probe["detail"].as_str().unwrap();
        match failures.iter().find(|(failing, _)| *failing == name) {
            Some((_, why)) => {
                assert!(probe["outcome"] == "failed" && detail.contains(why), "{probe}");
                assert!(probe["meaning"] != "" && probe["fix"] != "", "{probe}");
            }
            None => assert_ne!(probe["outcome"], "failed", "{probe}"),
        }
    }
    assert!(failures.iter().all(|(name, _)| probe(report, name)["outcome"] == "failed"));
}

#[test]
fn doctor_passes_on_the_simulated_gpu_and_says_that_it_is_simulated() {
    let sandbox = Sandbox::new();
    let ledger = sandbox.path().join("ledger");
    std::fs::create_dir(&ledger).unwrap();
    let mut command = sandbox.command(["doctor", "--json"]);
    command.env("PARTYWALL_LIBCUDA", simulated_driver()).env("SIMCUDA_LEDGER", &ledger);
    let report = Running::spawn(&mut command).wait().expect(0).json();
    assert_only(&report, &[]);
    let processes: Vec<_> = std::fs::read_dir(&ledger).unwrap().collect();
    assert!(processes.len() >= 10, "each probe of a GPU is a process, and some are two: {processes:?}");
    for process in processes {
        let left = std::fs::read_to_string(process.unwrap().path()).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&left).unwrap(), Value::Array(Vec::new()), "{left}");
    }
    assert_eq!(report["simulated"], true);
    assert_eq!(report["main_job"]["gpu"], true);
    assert!(probe(&report, "GPU driver")["detail"].as_str().unwrap().starts_with("SIMULATED"), "{report}");
    let linked = Running::spawn(sandbox.command(["doctor", "--json"]).env("PARTYWALL_LIBCUDA", "simulated")).wait();
    assert_eq!(linked.expect(0).json()["simulated"], true, "the driver that is part of the program");
    let text = simulated(&sandbox, "", &[]).expect(0).text();
    assert!(text.ends_with("The CUDA driver is SIMULATED: nothing here says anything about a GPU.\n"), "{text}");
    sandbox.broker();
}

// Holds 85, 308.
#[test]
fn doctor_tries_one_gpu_unless_all_are_requested_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let second = "GPU-51301ca7-0000-0000-0000-000000000001";
    for (device, tried) in
        [("auto", &["cuda:0 "][..]), ("cuda:1", &["cuda:1 "]), (second, &["cuda:1 "]), ("all", &["cuda:0 ", "cuda:1 "])]
    {
        let report = simulated(&sandbox, "", &["--json", "--device", device]).expect(0).json();
        let handed = probe(&report, "hand-off")["detail"].as_str().unwrap();
        assert!(handed.contains("takes ") && handed.contains(" µs, on the simulated driver"), "{handed}");
        for name in
            ["GPUs", "GPU kernels", "GPU memory", "pinned memory", "stream waits, GPU", "hand-off", "legacy memory"]
        {
            let detail = probe(&report, name)["detail"].as_str().unwrap();
            let heads: Vec<_> = detail.lines().map(|line| &line[..7]).collect();
            assert_eq!(heads, tried, "{name} with {device}");
        }
    }
    let report = simulated(&sandbox, "", &["--json", "--device", "cuda:7"]).expect(1).json();
    assert!(probe(&report, "GPUs")["detail"].as_str().unwrap().contains("no cuda:7"), "{report}");
    sandbox.broker();
}

#[test]
fn driver_refusal_is_a_finding_and_the_rest_continues_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let faults =
        "cuStreamWaitValue32:1=801,cuIpcGetMemHandle:1=1,cuIpcOpenEventHandle:1=205,cuDeviceCanAccessPeer:1=999";
    let report = simulated(&sandbox, faults, &["--json"]).json();
    let refused = "cuStreamWaitValue32 failed: CUDA_ERROR_NOT_SUPPORTED (801)";
    assert_only(
        &report,
        &[
            ("peers", "cuDeviceCanAccessPeer failed: CUDA_ERROR_UNKNOWN (999)"),
            ("stream waits, GPU", refused),
            ("stream waits, host", refused),
            ("legacy memory", "cuIpcGetMemHandle failed: CUDA_ERROR_INVALID_VALUE (1)"),
            ("legacy events", "cuIpcOpenEventHandle failed: CUDA_ERROR_MAP_FAILED (205)"),
        ],
    );
    let faults = "cuMemHostRegister:1=2,cuIpcOpenMemHandle:1=400,cuIpcGetEventHandle:1=801";
    let report = simulated(&sandbox, faults, &["--json"]).json();
    assert_only(
        &report,
        &[
            ("stream waits, host", "cuMemHostRegister failed: CUDA_ERROR_OUT_OF_MEMORY (2)"),
            ("hand-off", "cuMemHostRegister failed: CUDA_ERROR_OUT_OF_MEMORY (2)"),
            ("legacy memory", "cuIpcOpenMemHandle failed: CUDA_ERROR_INVALID_HANDLE (400)"),
            ("legacy events", "cuIpcGetEventHandle failed: CUDA_ERROR_NOT_SUPPORTED (801)"),
        ],
    );
    assert!(probe(&report, "stream waits, host")["fix"].as_str().unwrap().contains("ulimit -l"), "{report}");
    sandbox.broker();
}

#[test]
fn driver_crash_in_a_probe_or_the_other_process_is_a_finding_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let report = simulated(&sandbox, "cuStreamWriteValue64:1=kill,cuIpcOpenMemHandle:1=kill", &["--json"]).json();
    assert_only(
        &report,
        &[
            ("stream waits, GPU", "its process ended with signal: 9"),
            ("stream waits, host", "its process ended with signal: 9"),
            ("hand-off", "the other process gave no answer and ended with signal: 9"),
            ("legacy memory", "the other process gave no answer and ended with signal: 9"),
        ],
    );
    sandbox.broker();
}

#[test]
fn gpu_without_shareable_memory_fails_the_main_job_on_the_simulated_gpu() {
    let sandbox = Sandbox::new();
    let report = simulated(&sandbox, "cuMemImportFromShareableHandle:1=801", &["--json"]).expect(1).json();
    assert_eq!(probe(&report, "GPU memory")["outcome"], "failed", "{report}");
    assert!(probe(&report, "GPU memory")["meaning"].as_str().unwrap().contains("host memory"), "{report}");
    assert_eq!((&report["main_job"]["host"], &report["main_job"]["gpu"]), (&Value::Bool(true), &Value::Bool(false)));
    let report = simulated(&sandbox, "cuDevicePrimaryCtxRetain:1=46", &["--json"]).expect(1).json();
    assert!(probe(&report, "GPU kernels")["detail"].as_str().unwrap().contains("DEVICE_UNAVAILABLE"), "{report}");
    sandbox.broker();
}

#[test]
fn machine_without_a_driver_does_the_main_job_in_host_memory() {
    let sandbox = Sandbox::new();
    let output = without_a_driver(&sandbox, &["doctor", "--json"]);
    let report = output.json();
    for name in ["kernel", "processes", "host memory", "socket directory", "broker", "main job, host"] {
        assert_eq!(probe(&report, name)["outcome"], "ok", "{name}: {report}");
    }
    for name in [
        "GPUs",
        "MPS",
        "peers",
        "GPU kernels",
        "GPU memory",
        "pinned memory",
        "stream waits, GPU",
        "hand-off",
        "legacy memory",
    ] {
        assert_eq!(probe(&report, name)["outcome"], "skipped", "{name}: {report}");
    }
    let driver = probe(&report, "GPU driver");
    assert_ne!(driver["outcome"], "ok", "{driver}");
    assert!(driver["detail"].as_str().unwrap().contains("cannot load the CUDA driver library"), "{driver}");
    for probe in report["probes"].as_array().unwrap() {
        for field in ["detail", "meaning", "fix"] {
            assert!(probe[field].is_string(), "{field} of {probe}");
        }
        assert!(probe["micros"].is_number(), "{probe}");
    }
    assert_eq!(report["main_job"]["host"], true);
    assert_eq!(report["simulated"], false);
    // If device files show that the machine has a GPU, a missing library is a failure of the main job on the GPU.
    let gpu_expected = std::path::Path::new("/dev/nvidiactl").exists();
    assert_eq!(report["main_job"]["gpu"], if gpu_expected { Value::Bool(false) } else { Value::Null });
    output.expect(i32::from(gpu_expected));
    assert_eq!(sandbox.run(["status"]).code, Some(4), "the doctor has started a broker of the user's");
    sandbox.broker();
}

#[test]
fn doctor_prints_columns_and_a_conclusion() {
    let sandbox = Sandbox::new();
    let output = sandbox.run(["doctor"]);
    let text = output.text();
    assert!(text.contains("\nok       kernel              Linux "), "{text}");
    assert!(text.contains("\nThe main job in host memory works.\n"), "{text}");
    assert!(text.contains("on a GPU works.") || output.code == Some(1) || text.contains("No GPU was tested"), "{text}");
    sandbox.broker();
}

#[test]
fn running_broker_is_reported_and_left_alone() {
    let sandbox = Sandbox::new();
    let pid = sandbox.broker();
    let report = without_a_driver(&sandbox, &["doctor", "--json"]).json();
    assert!(probe(&report, "broker")["detail"].as_str().unwrap().contains(&format!("process {pid} ")), "{report}");
    assert_eq!(sandbox.broker(), pid);
}

#[test]
fn directory_open_to_others_is_refused_with_advice() {
    use std::os::unix::fs::PermissionsExt;
    let sandbox = Sandbox::new();
    let directory = sandbox.path().join("open");
    std::fs::create_dir(&directory).unwrap();
    std::fs::set_permissions(&directory, PermissionsExt::from_mode(0o755)).unwrap();
    let socket = directory.join("s.sock");
    let report = without_a_driver(&sandbox, &["doctor", "--json", "--socket", socket.to_str().unwrap()]).json();
    let found = probe(&report, "socket directory");
    assert_eq!(found["outcome"], "failed");
    assert!(found["detail"].as_str().unwrap().contains("0755"), "{found}");
    assert!(found["fix"].as_str().unwrap().contains("chmod 700"), "{found}");
    assert_eq!(report["main_job"]["host"], true, "the main job is tried elsewhere: {report}");
    sandbox.broker();
}

// Holds 386.
#[test]
fn directory_of_a_claim_is_where_its_containers_meet() {
    let sandbox = Sandbox::new();
    let claim = sandbox.path().join("claim");
    for directory in ["claim", "run", "two"] {
        std::fs::create_dir_all(sandbox.path().join(directory)).unwrap();
    }
    // Two containers have nothing else in common. The sandbox knows its processes, and so the broker of the first one, by
    // its own directory.
    let inside = |container: &str, arguments: &[&str]| {
        let mut command = sandbox.command(arguments);
        let own = sandbox.path().join(container);
        command.env("NVIDIA_DRA_LOCAL_IPC_DIR", &claim).env("XDG_RUNTIME_DIR", own);
        Running::spawn(command.env("PARTYWALL_LIBCUDA", "/nonexistent/libcuda.so.1")).wait()
    };
    let file = sandbox.file("w.bin", b"weights");
    inside("run", &["put", file.to_str().unwrap(), "w"]).expect(0);
    inside("two", &["show", "w"]).expect(0);
    let report = inside("two", &["doctor", "--json"]).json();
    let found = probe(&report, "socket directory");
    assert!(found["detail"].as_str().unwrap().contains("claim/partywall-"), "{found}");
    assert!(found["detail"].as_str().unwrap().contains("(where NVIDIA_DRA_LOCAL_IPC_DIR says)"), "{found}");
    inside("two", &["stop", "--force"]).expect(0);
    // What is not there is not used, and the doctor says so.
    std::fs::remove_dir_all(&claim).unwrap();
    let report = inside("two", &["doctor", "--json"]).json();
    let found = probe(&report, "socket directory");
    assert!(found["detail"].as_str().unwrap().contains("(where XDG_RUNTIME_DIR says)"), "{found}");
    assert!(found["meaning"].as_str().unwrap().starts_with("NVIDIA_DRA_LOCAL_IPC_DIR is set, but"), "{found}");
    assert_eq!(found["outcome"], "warning");
}

#[test]
fn invalid_driver_library_is_a_finding() {
    let sandbox = Sandbox::new();
    // A library, but not a CUDA driver.
    let library = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/libc.so.6", "/usr/lib/libc.so.6"];
    let library = library.into_iter().find(|path| std::path::Path::new(path).exists()).unwrap();
    let mut command = sandbox.command(["doctor", "--json"]);
    let output = Running::spawn(command.env("PARTYWALL_LIBCUDA", library)).wait().expect(1);
    let report = output.json();
    assert_eq!(probe(&report, "GPU driver")["outcome"], "failed", "{report}");
    assert_eq!(report["main_job"]["gpu"], false, "{report}");
    sandbox.broker();
}

#[test]
fn hanging_probe_is_killed() {
    let sandbox = Sandbox::new();
    // No probe on this machine hangs, but no demo finishes within a millisecond.
    let output = without_a_driver(&sandbox, &["doctor", "--json", "--limit", "0.001"]).expect(1);
    let report = output.json();
    let main_job = probe(&report, "main job, host");
    assert_eq!(main_job["outcome"], "failed");
    assert!(main_job["detail"].as_str().unwrap().contains("was killed"), "{main_job}");
    assert_eq!(report["main_job"]["host"], false);
    sandbox.broker();
}

// Holds 231.
#[test]
fn doctor_says_in_one_line_that_vulkan_has_no_driver() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(["doctor", "--json"]);
    command.env("PARTYWALL_LIBCUDA", simulated_driver()).env("VK_DRIVER_FILES", "/nonexistent/icd.json");
    let report = Running::spawn(&mut command).wait().expect(0).json();
    let vulkan = probe(&report, "Vulkan");
    assert_eq!(vulkan["outcome"], "skipped", "{vulkan}");
    let detail = vulkan["detail"].as_str().unwrap();
    assert!(detail.starts_with("cannot load Vulkan: ") && detail.contains("apt-get install"), "{detail}");
    assert_eq!(detail.lines().count(), 1);
    sandbox.broker();
}

// Holds 231.
#[test]
fn needs_vulkan_doctor_tries_host_memory() {
    let sandbox = Sandbox::new();
    let report = without_a_driver(&sandbox, &["doctor", "--json"]).json();
    let vulkan = probe(&report, "Vulkan");
    assert_eq!(vulkan["outcome"], "ok", "{vulkan}");
    assert!(vulkan["detail"].as_str().unwrap().starts_with("host memory, read and written by "), "{vulkan}");
    sandbox.broker();
}
