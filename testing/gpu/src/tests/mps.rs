//! `partywall mps` and `run --mps` with the vendor's daemon. What does not depend on it is tested with a stand-in, in
//! `partywall-cli/tests/cli/mps.rs`.

use std::{fs, path::PathBuf, process::Command, time::Instant};

use partywall_harness::{Running, Signal};
use partywall_os::process;
use serde_json::Value;

use super::{
    commands::partywall,
    world::{TIMEOUT, World, ensure, error_text, say},
};

/// Ends the domain's daemon when it is dropped, also after a failure.
struct Ended<'a>(&'a World);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        if let Err(error) = partywall(self.0, &["mps", "stop", "--force"]) {
            say(&error);
        }
    }
}

/// A command under MPS is a client of the domain's daemon, which the watcher stops after it.
pub(crate) fn daemon_serves_clients_and_stops() -> Result<(), String> {
    let world = World::new()?;
    let _ended = Ended(&world);
    partywall(&world, &["mps", "start", "--idle-exit", "1"])?;
    let client = client(&world)?;
    let pid = client.pid();
    let status = status(&world)?;
    ensure(clients(&status) == [pid], || format!("{pid} is the only client: {status}"))?;
    let members = world.domain.members().map_err(error_text)?;
    let member = members.iter().find(|member| member.pid == pid).ok_or("it is no member")?;
    let pipes = root(&world).join("pipe").display().to_string();
    ensure(member.mps.as_deref() == Some(&*pipes), || format!("{:?} is not {pipes}", member.mps))?;
    let shown = partywall(&world, &["show", "held"])?;
    ensure(shown.contains(&format!("under the MPS daemon at {pipes}: pid {pid}")), || shown.clone())?;
    client.signal(Signal::TERM);
    client.wait();
    until("the watcher stops the daemon", || !root(&world).exists())
}

/// A killed watcher harms neither the daemon nor its clients, and the next start replaces it.
pub(crate) fn daemon_outlives_its_watcher() -> Result<(), String> {
    let world = World::new()?;
    let _ended = Ended(&world);
    let client = client(&world)?;
    let watcher = status(&world)?["watcher"].as_u64().ok_or("there is no watcher")?;
    kill(watcher)?;
    until("the watcher is gone", || status(&world).is_ok_and(|status| status["watcher"].is_null()))?;
    ensure(clients(&status(&world)?) == [client.pid()], || "the client is gone".to_owned())?;
    partywall(&world, &["mps", "start"])?;
    let status = status(&world)?;
    ensure(status["watcher"].is_u64() && clients(&status) == [client.pid()], || status.to_string())
}

/// A daemon that was killed with its watcher leaves a directory that the next start clears.
pub(crate) fn killed_daemon_is_replaced() -> Result<(), String> {
    let world = World::new()?;
    let _ended = Ended(&world);
    partywall(&world, &["mps", "start"])?;
    let watcher = status(&world)?["watcher"].as_u64().ok_or("there is no watcher")?;
    let daemon = fs::read_to_string(root(&world).join("pipe/nvidia-cuda-mps-control.pid")).map_err(error_text)?;
    kill(watcher)?;
    kill(daemon.trim().parse().map_err(error_text)?)?;
    until("the daemon is gone", || status(&world).is_ok_and(|status| status["runs"] == false))?;
    let client = client(&world)?;
    let status = status(&world)?;
    ensure(clients(&status) == [client.pid()], || status.to_string())
}

/// `mps stop` is refused while there are clients.
pub(crate) fn stop_spares_clients() -> Result<(), String> {
    let world = World::new()?;
    let _ended = Ended(&world);
    let client = client(&world)?;
    let refused = partywall(&world, &["mps", "stop"]).err().ok_or("the daemon was stopped")?;
    ensure(refused.contains("is in use by 1 client"), || refused.clone())?;
    ensure(clients(&status(&world)?) == [client.pid()], || "the client is gone".to_owned())
}

/// The doctor measures hand-offs in time slices and under MPS; how long they take is printed and not judged.
pub(crate) fn doctor_measures_a_shorter_hand_off() -> Result<(), String> {
    let world = World::new()?;
    let _ended = Ended(&world);
    let binary = binary()?;
    for (arguments, how) in
        [(&["doctor"][..], "µs, in time slices"), (&["run", "--mps", &binary, "doctor"], "µs, under MPS")]
    {
        let text = partywall(&world, arguments)?;
        let line = text.lines().find(|line| line.contains("a hand-off from a kernel")).unwrap_or_default();
        say(line);
        ensure(line.contains(how), || text.clone())?;
    }
    Ok(())
}

/// Starts a process under MPS that holds memory of the GPU.
fn client(world: &World) -> Result<Running, String> {
    let file = world.directory().join("bytes");
    fs::write(&file, vec![7; 1 << 20]).map_err(error_text)?;
    let binary = binary()?;
    let mut command = Command::new(&binary);
    command.args(["run", "--mps", &binary, "put"]).arg(&file).args(["held", "--hold", "--device", "cuda"]);
    let mut client = Running::spawn(command.env("PARTYWALL_SOCKET", world.socket()));
    let line = client.line();
    ensure(line.contains("holding it"), || line.clone())?;
    Ok(client)
}

fn binary() -> Result<String, String> {
    std::env::var("PARTYWALL_BIN").map_err(|_| "PARTYWALL_BIN names the binary to test".to_owned())
}

fn status(world: &World) -> Result<Value, String> {
    serde_json::from_str(&partywall(world, &["--json", "mps", "status"])?).map_err(error_text)
}

fn clients(status: &Value) -> Vec<u32> {
    let servers = status["servers"].as_array().into_iter().flatten();
    let pids = servers.flat_map(|server| server["clients"].as_array().into_iter().flatten());
    pids.filter_map(|pid| u32::try_from(pid.as_u64()?).ok()).collect()
}

fn root(world: &World) -> PathBuf {
    world.socket().with_extension("mps")
}

fn kill(pid: u64) -> Result<(), String> {
    let pidfd = process::pidfd(u32::try_from(pid).map_err(error_text)?).map_err(error_text)?;
    process::kill(&pidfd, Signal::KILL).map_err(error_text)
}

fn until(what: &str, mut condition: impl FnMut() -> bool) -> Result<(), String> {
    let deadline = Instant::now() + TIMEOUT;
    while !condition() {
        ensure(Instant::now() < deadline, || format!("not within {} s: {what}", TIMEOUT.as_secs()))?;
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    Ok(())
}
