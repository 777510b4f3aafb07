//! The `partywall` command on a GPU.

use std::{path::Path, process::Command};

use super::{
    facts::Mps,
    world::{World, ensure, say, tell},
};

fn partywall(world: &World, arguments: &[&str]) -> Result<String, String> {
    partywall_with(world, arguments, &[])
}

fn partywall_with(world: &World, arguments: &[&str], environment: &[(&str, &Path)]) -> Result<String, String> {
    let binary = std::env::var_os("PARTYWALL_BIN").ok_or("PARTYWALL_BIN names the binary to test")?;
    let output = Command::new(binary)
        .args(arguments)
        .envs(environment.iter().copied())
        .env("PARTYWALL_SOCKET", world.socket())
        .output()
        .map_err(tell)?;
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure(output.status.success(), || {
        format!("partywall {} failed ({}):\n{text}", arguments.join(" "), output.status)
    })?;
    Ok(text)
}

/// The demonstration.
pub(crate) fn the_demo_passes() -> Result<(), String> {
    let world = World::new()?;
    let text = partywall(&world, &["demo", "--device", "cuda"])?;
    ensure(text.contains("262,144"), || text)
}

/// Runs a lab to its end. Prints its output and returns it.
fn lab(name: &str, environment: &[(&str, &Path)]) -> Result<String, String> {
    let world = World::new()?;
    let text = partywall_with(&world, &["lab", name], environment)?;
    say(&text);
    ensure(text.contains("Claims, and whether they held"), || "its end is missing".to_owned())?;
    Ok(text)
}

/// Runs a lab whose steps must all be as expected.
fn promised(name: &str, environment: &[(&str, &Path)]) -> Result<(), String> {
    let text = lab(name, environment)?;
    ensure(text.contains(" steps, 0 of them not as expected."), || "not all is as expected".to_owned())
}

pub(crate) fn lab_errors() -> Result<(), String> {
    lab("errors", &[]).map(drop)
}

/// What the driver answers for memory that was freed meanwhile is not known.
pub(crate) fn lab_handle_file() -> Result<(), String> {
    lab("handle-file", &[]).map(drop)
}

pub(crate) fn lab_vmm() -> Result<(), String> {
    lab("vmm", &[]).map(drop)
}

pub(crate) fn lab_p2p() -> Result<(), String> {
    promised("p2p", &[])
}

pub(crate) fn lab_coherency() -> Result<(), String> {
    lab("coherency", &[]).map(drop)
}

/// Runs under MPS, and again without it.
pub(crate) fn lab_coherency_under_mps() -> Result<(), String> {
    let mps = Mps::start()?;
    lab("coherency", &[mps.environment()]).map(drop)
}

pub(crate) fn lab_events() -> Result<(), String> {
    promised("events", &[])
}

pub(crate) fn lab_events_under_mps() -> Result<(), String> {
    let mps = Mps::start()?;
    promised("events", &[mps.environment()])
}

pub(crate) fn lab_semaphore() -> Result<(), String> {
    promised("semaphore", &[])
}

/// The killed workers have no work on the GPU at that moment, so the MPS server survives.
pub(crate) fn lab_semaphore_under_mps() -> Result<(), String> {
    let mps = Mps::start()?;
    promised("semaphore", &[mps.environment()])
}

pub(crate) fn lab_crash() -> Result<(), String> {
    promised("crash", &[])
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
    promised("work-queue", &[mps.environment()])
}

/// The benchmark checks all bytes that it measures with.
pub(crate) fn bench() -> Result<(), String> {
    let world = World::new()?;
    let text = partywall(&world, &["bench", "all", "--device", "cuda", "--quick"])?;
    say(&text);
    ensure(text.contains("a legacy handle") && text.contains("from stream to stream"), || "not all is there".to_owned())
}

/// The doctor finds everything in order.
pub(crate) fn the_doctor_is_content() -> Result<(), String> {
    let world = World::new()?;
    partywall(&world, &["doctor"]).map(drop)
}

/// Weights that one process has put are read by another, byte for byte, after the first has ended.
pub(crate) fn weights_outlive_their_process() -> Result<(), String> {
    let world = World::new()?;
    let folder = world.socket().with_file_name("model");
    std::fs::create_dir_all(&folder).map_err(tell)?;
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
        ensure(std::fs::read(&file).map_err(tell)? == *bytes, || format!("{from} differs"))?;
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
    std::fs::write(path, file).map_err(tell)
}
