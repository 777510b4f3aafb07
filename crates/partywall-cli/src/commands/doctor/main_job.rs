//! The main job: runs the real demo with a broker of its own.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use partywall::{
    Domain,
    doctor::{ChildEnd, Finding, run_within},
};
use partywall_os::{dir::PrivateDir, environment};
use serde_json::Value;

/// How long the broker may take to end.
const FAREWELL: Duration = Duration::from_secs(5);

/// How long a broker may take to appear after its starter was killed.
const STRAGGLER: Duration = Duration::from_secs(1);

/// Runs `partywall demo` on `device`.
pub(super) fn run(limit: Duration, device: &str) -> Finding {
    let place = if device == "host" { "host" } else { "gpu" };
    let scratch = match Scratch::new(place) {
        Ok(scratch) => scratch,
        Err(error) => return Finding::failed(error).fix("make the temporary directory writable, or set TMPDIR"),
    };
    let timeout = (limit.as_secs_f64() / 2.0).max(0.001).to_string();
    let ended = std::env::current_exe().and_then(|program| {
        let mut command = Command::new(program);
        command.arg("--json").arg("--socket").arg(scratch.socket());
        // Where the broker writes its log.
        command.env("XDG_STATE_HOME", &scratch.path);
        run_within(command.args(["demo", "--device", device, "--timeout", &timeout]), limit)
    });
    let stopped = scratch.stop_broker(ended.as_ref().is_ok_and(|ended| ended.status.is_none()));
    match ended {
        Err(error) => Finding::failed(format!("cannot run `partywall demo`: {error}")),
        Ok(ended) => judge(&ended, limit, stopped),
    }
}

fn judge(ended: &ChildEnd, limit: Duration, stopped: bool) -> Finding {
    let said: Vec<Value> =
        ended.stdout.split(|byte| *byte == b'\n').filter_map(|it| serde_json::from_slice(it).ok()).collect();
    let passed = said.iter().any(|line| line["role"] == "demo" && line["step"] == "passed");
    let opened = said.iter().find(|line| line["role"] == "consumer" && line["step"] == "open");
    let opened = opened.and_then(|line| line["micros"].as_f64()).unwrap_or_default();
    match ended.status {
        Some(status) if status.success() && passed && stopped => Finding::ok(format!(
            "`partywall demo` passed, through a broker of its own: 262,144 integers right on both sides, opened in {opened:.0} µs"
        )),
        Some(status) if status.success() && passed => Finding::failed("the demo passed, but its broker did not end")
            .means("a broker on this machine may hang")
            .fix("look for `partywall serve` processes, and report it"),
        Some(status) => {
            let error = said.iter().find_map(|line| line["error"]["message"].as_str()).map(str::to_owned);
            let why = error.unwrap_or_else(|| format!("{status}: {}", ended.last_words()));
            let advice = said.iter().find_map(|line| line["error"]["advice"].as_str()).unwrap_or_default();
            Finding::failed(why).means("sharing memory between processes does not work here").fix(advice)
        }
        None => {
            Finding::failed(format!("`partywall demo` did not end within {} s and was killed", limit.as_secs_f64()))
                .means("something that the demo needs hangs")
                .fix("run `partywall demo` to see which step hangs")
        }
    }
}

/// A directory for a broker, removed on drop.
struct Scratch {
    path: PathBuf,
}

impl Scratch {
    fn new(place: &str) -> Result<Self, String> {
        let path = environment::temporary_directory().join(format!("partywall-doctor-{}-{place}", std::process::id()));
        // Private to this user, as the broker requires.
        PrivateDir::open(&path, true).map_err(|why| format!("{}: {why}", path.display()))?;
        Ok(Self { path })
    }

    fn socket(&self) -> PathBuf {
        self.path.join("s")
    }

    /// Ends a broker that runs there or is just starting. Returns whether it has ended.
    fn stop_broker(&self, demo_was_killed: bool) -> bool {
        let socket = self.socket();
        // A killed demo may leave a broker that is just starting.
        let appears = Instant::now() + if demo_was_killed { STRAGGLER } else { Duration::ZERO };
        while !exists(&socket) && Instant::now() < appears {
            std::thread::sleep(Duration::from_millis(10));
        }
        if let Ok(domain) = Domain::options().socket(&socket).start(false).connect() {
            // The broker has ended once its socket is gone.
            let _ = domain.stop_broker(true);
        }
        let deadline = Instant::now() + FAREWELL;
        while exists(&socket) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
        !exists(&socket)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Only a broker's log can be left in it.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}
