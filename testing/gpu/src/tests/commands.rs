//! The `partywall` command on a GPU.

use std::{
    fs::{self, Permissions},
    io::Write,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::Path,
    process::{Command, ExitStatus, Stdio},
    time::Instant,
};

use partywall::Domain;

use partywall_cuda::Driver;
use partywall_harness::Running;
use partywall_measure::{ComparisonResult, Report};

use super::{
    facts::Mps,
    needs::NOBODY,
    world::{Broker, World, ensure, error_text, eventually, say},
};

pub(super) fn partywall(world: &World, arguments: &[&str]) -> Result<String, String> {
    partywall_with(world, arguments, &[])
}

fn partywall_with(world: &World, arguments: &[&str], environment: &[(&str, &Path)]) -> Result<String, String> {
    let (status, text) = ended(world, arguments, environment)?;
    ensure(status.success(), || format!("partywall {} failed ({status}):\n{text}", arguments.join(" ")))?;
    Ok(text)
}

/// Runs the program, and returns how it ended and what it printed.
fn ended(world: &World, arguments: &[&str], environment: &[(&str, &Path)]) -> Result<(ExitStatus, String), String> {
    let binary = std::env::var_os("PARTYWALL_BIN").ok_or("PARTYWALL_BIN names the binary to test")?;
    let output = Command::new(binary)
        .args(arguments)
        .envs(environment.iter().copied())
        .env("PARTYWALL_SOCKET", world.socket())
        .output()
        .map_err(error_text)?;
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    Ok((output.status, text))
}

/// The demonstration.
pub(crate) fn the_demo_passes() -> Result<(), String> {
    let world = World::new()?;
    let text = partywall(&world, &["demo", "--device", "cuda"])?;
    ensure(text.contains("262,144"), || text)
}

/// Two users read what the other has put on a GPU, if it is shared; neither removes it.
pub(crate) fn put_for_another_user() -> Result<(), String> {
    let broker = Broker::new();
    let socket = broker.socket();
    let directory = socket.parent().ok_or("the socket has no directory")?;
    fs::create_dir(directory)
        .and_then(|()| fs::set_permissions(directory, Permissions::from_mode(0o711)))
        .map_err(error_text)?;
    // The other user may not be allowed to pass the folder of the program.
    let program = directory.join("partywall");
    fs::copy(std::env::var_os("PARTYWALL_BIN").ok_or("PARTYWALL_BIN names the binary to test")?, &program)
        .and_then(|_| fs::set_permissions(&program, Permissions::from_mode(0o755)))
        .map_err(error_text)?;
    let mut serve = Command::new(&program);
    serve.args(["serve", "--allow-uid", &NOBODY.to_string()]).env("PARTYWALL_SOCKET", &socket);
    let _serving = Running::spawn(&mut serve);
    eventually("the broker", || Ok(Domain::options().socket(&socket).start(false).connect().is_ok()))?;
    // Returns the exit status, and what the command wrote.
    let run = |user: u32, arguments: &[&str], input: &[u8]| -> Result<(Option<i32>, Vec<u8>, String), String> {
        let mut command = Command::new(&program);
        command.args(arguments).env("PARTYWALL_SOCKET", &socket).current_dir("/").uid(user).gid(user);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(error_text)?;
        child.stdin.take().ok_or("there is no input")?.write_all(input).map_err(error_text)?;
        let output = child.wait_with_output().map_err(error_text)?;
        Ok((output.status.code(), output.stdout, String::from_utf8_lossy(&output.stderr).into_owned()))
    };
    for (owner, reader, name, other) in [(0, NOBODY, "a", "b"), (NOBODY, 0, "c", "d")] {
        let bytes = name.repeat(1 << 20).into_bytes();
        let (put, _, said) = run(owner, &["put", "--device", "cuda", "--shared", "-", name], &bytes)?;
        ensure(put == Some(0), || format!("user {owner} put {name:?}: {said}"))?;
        let (put, _, said) = run(owner, &["put", "--device", "cuda", "-", other], &bytes)?;
        ensure(put == Some(0), || format!("user {owner} put {other:?}: {said}"))?;
        let (got, found, said) = run(reader, &["get", name, "-"], &[])?;
        ensure(got == Some(0) && found == bytes, || format!("user {reader} got {} bytes: {said}", found.len()))?;
        for arguments in [&["rm", name][..], &["get", other, "-"], &["rm", other]] {
            let (code, found, said) = run(reader, arguments, &[])?;
            let refused = code.is_some_and(|code| code != 0) && found.is_empty() && said.contains(&reader.to_string());
            ensure(refused, || format!("user {reader}: {} returned {code:?}: {said}", arguments.join(" ")))?;
            say(&format!("user {reader}: {}: {said}", arguments.join(" ")));
        }
    }
    Ok(())
}

/// Without the device nodes a process gets no GPU memory, is told which nodes it lacks, and shares host memory. The
/// broker is outside, as the host's is for a container.
pub(crate) fn hidden_nodes_leave_host_memory() -> Result<(), String> {
    const HIDE: &str = include_str!("../../../../docs/learn/hide-gpu-nodes.sh");
    let world = World::new()?;
    let script = world.directory().join("hide-gpu-nodes.sh");
    let file = world.directory().join("file");
    fs::write(&script, HIDE).and_then(|()| fs::write(&file, "hello")).map_err(error_text)?;
    let binary = std::env::var_os("PARTYWALL_BIN").ok_or("PARTYWALL_BIN names the binary to test")?;
    let inside = |arguments: &[&str]| -> Result<(Option<i32>, String), String> {
        let mut command = Command::new("sh");
        command.arg(&script).arg(&binary).args(arguments).env("PARTYWALL_SOCKET", world.socket());
        let output = command.output().map_err(error_text)?;
        let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        say(&format!("partywall {}: {text}", arguments.join(" ")));
        Ok((output.status.code(), text))
    };
    let file = file.display().to_string();
    let (code, text) = inside(&["put", &file, "x", "--device", "cuda"])?;
    ensure(code == Some(6) && text.contains("no /dev/nvidiactl") && text.contains("partywall doctor"), || text)?;
    let (_, text) = inside(&["doctor"])?;
    ensure(text.contains("no /dev/nvidiactl") && text.contains("--gpus all"), || text)?;
    let (code, text) = inside(&["put", &file, "x"])?;
    ensure(code == Some(0) && text.contains("in host memory, because no GPU can be used"), || text)?;
    ensure(partywall(&world, &["get", "x", "-"])? == "hello", || "outside, other bytes are read".to_owned())
}

/// Runs a lab to its end, and prints its output. The first argument is its name. Returns whether all its steps are as
/// expected, which is what its exit code says.
fn lab(arguments: &[&str], environment: &[(&str, &Path)]) -> Result<bool, String> {
    let world = World::new()?;
    let (status, text) = ended(&world, &[&["lab"], arguments].concat(), environment)?;
    say(&text);
    let last =
        text.lines().rfind(|line| line.contains(" as expected") && line.contains("; ")).ok_or("its end is missing")?;
    let is_expected = !last.contains(" different");
    ensure(status.code() == Some(i32::from(!is_expected)), || format!("{status}, but its last line is: {last}"))?;
    Ok(is_expected)
}

/// Runs a lab whose steps must all be as expected.
fn promised(arguments: &[&str], environment: &[(&str, &Path)]) -> Result<(), String> {
    ensure(lab(arguments, environment)?, || "not all is as expected".to_owned())
}

pub(crate) fn lab_errors() -> Result<(), String> {
    lab(&["errors"], &[]).map(drop)
}

pub(crate) fn lab_handle_file() -> Result<(), String> {
    promised(&["handle-file"], &[])
}

pub(crate) fn lab_fork() -> Result<(), String> {
    promised(&["fork"], &[])
}

pub(crate) fn lab_vmm() -> Result<(), String> {
    lab(&["vmm"], &[]).map(drop)
}

pub(crate) fn lab_p2p() -> Result<(), String> {
    promised(&["p2p"], &[])
}

pub(crate) fn lab_coherency() -> Result<(), String> {
    lab(&["coherency"], &[]).map(drop)
}

/// Runs under MPS, and again without it.
pub(crate) fn lab_coherency_under_mps() -> Result<(), String> {
    let mps = Mps::start()?;
    lab(&["coherency"], &[mps.environment()]).map(drop)
}

pub(crate) fn lab_events() -> Result<(), String> {
    promised(&["events"], &[])
}

pub(crate) fn lab_events_under_mps() -> Result<(), String> {
    let mps = Mps::start()?;
    promised(&["events"], &[mps.environment()])
}

pub(crate) fn lab_semaphore() -> Result<(), String> {
    promised(&["semaphore"], &[])
}

/// The killed workers have no work on the GPU at that moment, so the MPS server survives.
pub(crate) fn lab_semaphore_under_mps() -> Result<(), String> {
    let mps = Mps::start()?;
    promised(&["semaphore"], &[mps.environment()])
}

pub(crate) fn lab_crash() -> Result<(), String> {
    promised(&["crash"], &[])
}

/// Renders, and returns the last line of the report.
fn render(arguments: &[&str], environment: &[(&str, &Path)]) -> Result<serde_json::Value, String> {
    let world = World::new()?;
    let arguments = [&["lab", "render", "--device", "cuda", "--json"], arguments].concat();
    let text = partywall_with(&world, &arguments, &[environment, &contained()?].concat())?;
    say(&text);
    let last = text.lines().rfind(|line| line.starts_with('{')).ok_or("the report is empty")?;
    let report: serde_json::Value = serde_json::from_str(last).map_err(error_text)?;
    for count in ["missing", "twice", "torn", "different"] {
        ensure(report[count] == 0, || format!("{count}: {report}"))?;
    }
    Ok(report)
}

/// The environment in which a program uses the simulated driver that it contains, with its own kernels, instead of the
/// one that the tests load. Nothing on a real GPU.
fn contained() -> Result<Vec<(&'static str, &'static Path)>, String> {
    let is_simulated = Driver::load().map_err(error_text)?.is_simulated();
    let chosen = is_simulated.then(|| (Driver::LIBRARY_VARIABLE, Path::new(Driver::SIMULATED)));
    Ok(chosen.into_iter().collect())
}

/// A scene for a GPU, or for a simulated one.
fn scene() -> Result<[&'static str; 6], String> {
    let is_simulated = Driver::load().map_err(error_text)?.is_simulated();
    Ok(match is_simulated {
        false => ["--size", "1920x1080", "--scene", "torus:131072", "--frames", "2000"],
        true => ["--size", "96x64", "--scene", "torus:500", "--frames", "40"],
    })
}

/// Runs the lab `render`. The frame rate is printed and not judged. All frames are compared with the CPU's, or with
/// those of the same scene.
pub(crate) fn lab_render() -> Result<(), String> {
    let report = render(&scene()?, &[])?;
    for pipeline in ["one_process", "driver", "textbook"] {
        ensure(report["baselines"][pipeline].as_f64() > Some(0.0), || format!("{pipeline} was not measured"))?;
    }
    // Triangles that a warp covers, and one that fills tiles.
    render(&["--size", "1280x720", "--scene", "torus:18", "--frames", "3", "--renderers", "1"], &[]).map(drop)
}

pub(crate) fn lab_render_under_mps() -> Result<(), String> {
    let mps = Mps::start()?;
    let report = render(&scene()?, &[mps.environment()])?;
    ensure(report["pipeline"]["under_mps"] == true, || "it did not run under MPS".to_owned())
}

/// Vulkan draws what the CPU draws, also after the death of a renderer.
pub(crate) fn lab_render_by_vulkan() -> Result<(), String> {
    let scene = ["--size", "960x540", "--frames", "30", "--renderer", "vulkan"];
    render(&scene, &[])?;
    let report = render(&[&scene[..], &["--kill", "renderer"]].concat(), &[])?;
    ensure(report["killed"][0]["role"] == "renderer", || "the renderer was not killed".to_owned())
}

/// Each role is killed once.
pub(crate) fn lab_render_survives_deaths() -> Result<(), String> {
    for role in ["renderer", "geometry", "compositor", "writer", "broker"] {
        let report = render(&[&scene()?[..], &["--kill", role]].concat(), &[])?;
        ensure(report["killed"][0]["role"] == role, || format!("the {role} was not killed"))?;
    }
    Ok(())
}

/// All labs in one command. What differs on this machine is in the output.
pub(crate) fn lab_tour() -> Result<(), String> {
    lab(&["tour"], &contained()?).map(drop)
}

/// Workers are killed while their kernels run.
pub(crate) fn lab_work_queue() -> Result<(), String> {
    let world = World::new()?;
    let arguments = ["lab", "work-queue", "--device", "cuda", "--workers", "4", "--tasks", "5000", "--kill"];
    let text = partywall(&world, &arguments)?;
    say(&text);
    ensure(text.contains("every task has one result, and it is right"), || "not all is right".to_owned())
}

/// No worker is killed: the death of a client with work on the GPU may end the server for all clients.
pub(crate) fn lab_work_queue_under_mps() -> Result<(), String> {
    let mps = Mps::start()?;
    promised(&["work-queue"], &[mps.environment()])
}

/// Writers are killed half-way while kernels of readers check every word.
pub(crate) fn lab_weights() -> Result<(), String> {
    promised(&["weights"], &[])
}

/// The CPU and the GPU check what the other has written.
pub(crate) fn lab_weights_in_pinned_memory() -> Result<(), String> {
    promised(&["weights", "--device", "pinned"], &[])
}

/// The killed trainers have no work on the GPU at that moment, so the MPS server survives.
pub(crate) fn lab_weights_under_mps() -> Result<(), String> {
    let mps = Mps::start()?;
    promised(&["weights"], &[mps.environment()])
}

/// Members of every kind are killed while they work on the GPU, time-sliced: at least 200 on a real one.
pub(crate) fn lab_chaos() -> Result<(), String> {
    chaos("cuda", 200)
}

/// Members are killed while they use pinned memory by the CPU and the GPU: at least 50 on a real one.
pub(crate) fn lab_chaos_in_pinned_memory() -> Result<(), String> {
    chaos("pinned", 50)
}

/// Runs `chaos` until `enough` members were killed, or 10 with a simulated driver.
fn chaos(device: &str, enough: u32) -> Result<(), String> {
    let is_simulated = Driver::load().map_err(error_text)?.is_simulated();
    let enough = if is_simulated { 10 } else { enough };
    let world = World::new()?;
    let history = world.directory().join("history.jsonl").display().to_string();
    let enough = enough.to_string();
    let arguments =
        ["lab", "chaos", "--device", device, "--duration", "300", "--kills", &enough, "--history", &history];
    let text = partywall(&world, &arguments)?;
    say(&text);
    let kills = text.lines().find_map(|line| line.split_once("kills ")?.1.trim().parse::<u32>().ok()).unwrap_or(0);
    ensure(kills >= enough.parse().unwrap_or(0), || format!("only {kills} members were killed"))
}

/// Measures everything and reads the report. How long that took is printed and not judged: other work may be running.
pub(crate) fn bench() -> Result<(), String> {
    let world = World::new()?;
    let out = world.directory().join("report");
    let folder = out.display().to_string();
    let mut arguments = vec!["bench", "all", "--device", "cuda", "--out", &folder];
    // A simulated GPU copies gigabytes no faster than a host.
    let is_simulated = Driver::load().map_err(error_text)?.is_simulated();
    if is_simulated {
        arguments.push("--quick");
    }
    let start = Instant::now();
    let text = partywall(&world, &arguments)?;
    say(&text);
    say(&format!("measured in {:.0} s", start.elapsed().as_secs_f64()));

    let report = Report::read_json(&out.join("report.json")).map_err(error_text)?;
    ensure(report.machine.gpu.is_some(), || "the GPU is not named".to_owned())?;
    ensure(is_simulated || report.machine.driver.is_some(), || "the driver is not named".to_owned())?;
    for result in &report.comparisons {
        for measurement in result.floor.iter().chain(&result.rivals).chain([&result.measured]) {
            let p = &measurement.percentiles;
            let ordered = [p.min, p.p25, p.p50, p.p75, p.p90, p.p99, p.max].is_sorted();
            ensure(ordered && p.n > 0, || format!("{}: {p:?}", measurement.case))?;
        }
    }
    for question in QUESTIONS {
        let of = |result: &ComparisonResult| result.measured.case.parameters.get("of").cloned().unwrap_or_default();
        let answered = report.comparisons.iter().any(|result| of(result).contains(question));
        ensure(answered, || format!("nothing answers {question:?}"))?;
    }
    let page = std::fs::read_to_string(out.join("report.html")).map_err(error_text)?;
    let charts = report.charts();
    ensure(!charts.is_empty(), || "nothing varies".to_owned())?;
    for chart in charts {
        let svg = chart.svg().map_err(error_text)?;
        ensure(page.contains(&svg), || format!("the page has no plot of {:?}", chart.title))?;
    }
    ensure(page.len() < 1_000_000 && !page.contains("http"), || format!("the page has {} bytes", page.len()))
}

/// Measures hand-offs from stream to stream under MPS, and time-sliced beside it.
pub(crate) fn bench_under_mps() -> Result<(), String> {
    let mps = Mps::start()?;
    let world = World::new()?;
    let arguments = ["bench", "handoff", "--device", "cuda", "--quick"];
    let text = partywall_with(&world, &arguments, &[mps.environment()])?;
    say(&text);
    ensure(text.contains("notifies a stream of another, under MPS"), || "nothing was measured under MPS".to_owned())?;
    let is_answered = ["notifies a stream of another, time-sliced", "time-sliced hand-offs are left out, refused"]
        .iter()
        .any(|part| text.contains(part));
    ensure(is_answered, || "nothing is said about time slices".to_owned())
}

/// Parts of what a report on a GPU is about.
const QUESTIONS: [&str; 14] = [
    "the harness itself",
    "latency of a dependent load",
    "latency of a write, __threadfence()",
    "bandwidth of a kernel that reads",
    "copies from page-locked host memory into",
    "copies to page-locked host memory out of",
    "copies within the GPU out of",
    "one process notifies another",
    "a stream of one process notifies a stream of another, time-sliced",
    "memory that a further process, and a further mapping, takes",
    "opening shared memory",
    "closing shared memory",
    "taking a block and giving it back",
    "one process notifies several by a topic",
];

/// The doctor finds everything in order.
pub(crate) fn the_doctor_is_content() -> Result<(), String> {
    let world = World::new()?;
    partywall(&world, &["doctor"]).map(drop)
}

/// Weights that one process has put are read by another, byte for byte, after the first has ended.
pub(crate) fn weights_outlive_their_process() -> Result<(), String> {
    let world = World::new()?;
    let folder = world.socket().with_file_name("model");
    std::fs::create_dir_all(&folder).map_err(error_text)?;
    let contents: Vec<Vec<u8>> = (0..3_u32)
        .map(|shard| (0..(8_u32 << 20) + shard).map(|i| (i.wrapping_mul(shard + 3) >> 3) as u8).collect())
        .collect();
    for (shard, bytes) in contents.iter().enumerate() {
        write_safetensors(&folder.join(format!("model-{shard}.safetensors")), &format!("tensor.{shard}"), bytes)?;
    }
    partywall(&world, &["put", &folder.display().to_string(), "weights", "--device", "cuda"])?;
    let shown = partywall(&world, &["show", "weights"])?;
    ensure(shown.contains("vmm"), || shown)?;
    for (shard, bytes) in contents.iter().enumerate() {
        let file = world.socket().with_file_name("out.bin");
        let from = format!("weights:tensor.{shard}");
        partywall(&world, &["get", &from, &file.display().to_string(), "--force"])?;
        ensure(std::fs::read(&file).map_err(error_text)? == *bytes, || format!("{from} differs"))?;
    }
    partywall(&world, &["rm", "weights"]).map(drop)
}

fn write_safetensors(path: &Path, name: &str, bytes: &[u8]) -> Result<(), String> {
    let header = serde_json::json!({
        name: { "dtype": "U8", "shape": [bytes.len()], "data_offsets": [0, bytes.len()] }
    });
    let header = header.to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(bytes);
    std::fs::write(path, file).map_err(error_text)
}
