//! `partywall doctor`, on this machine and on worse ones.
#![allow(clippy::unwrap_used)] // tests, their helpers included

use partywall_harness::{Output, Running, Sandbox};
use serde_json::Value;

/// The probe with this name in a JSON report.
fn probe<'a>(report: &'a Value, name: &str) -> &'a Value {
    let probes = report["probes"].as_array().unwrap();
    probes.iter().find(|probe| probe["name"] == name).unwrap_or_else(|| panic!("no probe {name:?} in {report}"))
}

/// `partywall` on a machine whose driver cannot be found, whatever the machine is.
fn without_a_driver(sandbox: &Sandbox, arguments: &[&str]) -> Output {
    let mut command = sandbox.command(arguments);
    Running::spawn(command.env("PARTYWALL_LIBCUDA", "/nonexistent/libcuda.so.1")).wait()
}

#[test]
fn a_machine_without_a_driver_does_the_main_job_in_host_memory() {
    let sandbox = Sandbox::new();
    let output = without_a_driver(&sandbox, &["doctor", "--json"]);
    let report = output.json();
    for name in ["kernel", "processes", "host memory", "socket directory", "broker", "main job, host"] {
        assert_eq!(probe(&report, name)["outcome"], "ok", "{name}: {report}");
    }
    for name in ["GPUs", "MPS", "peers", "GPU kernels", "GPU memory", "stream waits, GPU", "legacy memory"] {
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
    // Where device files show that a GPU is there, a missing library is a failure of the main job on it.
    let gpu_expected = std::path::Path::new("/dev/nvidiactl").exists();
    assert_eq!(report["main_job"]["gpu"], if gpu_expected { Value::Bool(false) } else { Value::Null });
    output.expect(i32::from(gpu_expected));
    assert_eq!(sandbox.run(["status"]).code, Some(4), "the doctor has started a broker of the user's");
    sandbox.broker();
}

#[test]
fn people_read_columns_and_a_verdict() {
    let sandbox = Sandbox::new();
    let output = sandbox.run(["doctor"]);
    let text = output.text();
    assert!(text.contains("\nok       kernel              Linux "), "{text}");
    assert!(text.contains("\nThe main job in host memory works.\n"), "{text}");
    assert!(text.contains("on a GPU works.") || output.code == Some(1) || text.contains("There is no GPU"), "{text}");
    sandbox.broker();
}

#[test]
fn a_running_broker_is_seen_and_left_alone() {
    let sandbox = Sandbox::new();
    let pid = sandbox.broker();
    let report = without_a_driver(&sandbox, &["doctor", "--json"]).json();
    assert!(probe(&report, "broker")["detail"].as_str().unwrap().contains(&format!("process {pid} ")), "{report}");
    assert_eq!(sandbox.broker(), pid);
}

#[test]
fn a_directory_that_others_may_enter_is_refused_with_the_way_out() {
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

#[test]
fn a_driver_that_is_none_is_a_finding() {
    let sandbox = Sandbox::new();
    // A library, but not this one.
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
fn a_probe_that_hangs_is_ended() {
    let sandbox = Sandbox::new();
    // Nothing on this machine hangs, but nothing runs the demo in a millisecond either.
    let output = without_a_driver(&sandbox, &["doctor", "--json", "--limit", "0.001"]).expect(1);
    let report = output.json();
    let main_job = probe(&report, "main job, host");
    assert_eq!(main_job["outcome"], "failed");
    assert!(main_job["detail"].as_str().unwrap().contains("was killed"), "{main_job}");
    assert_eq!(report["main_job"]["host"], false);
    sandbox.broker();
}
