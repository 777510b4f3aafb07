// Holds 53, 54.
//! Segments of the simulated GPU that grow, with each driver call of the growth failed and killed in turn; a commit
//! without a free file descriptor; and a host segment whose pages cannot be locked.
#![allow(clippy::unwrap_used, clippy::print_stdout)] // tests, their helpers included

use std::{fs::File, process::Command, time::Duration};

use partywall::{
    DType, Domain, Error, Place, cuda_anchor,
    error::{DeviceFault, LimitReached},
    gpu,
};
use partywall_harness::{ROLE, Running, World, simulated_driver};

/// Elements of 2 MiB, the granularity.
const CHUNK: u64 = 1 << 19;

/// Runs the other processes of the tests. It is no test itself.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let domain = Domain::options().start(false).connect().unwrap();
    let place = Place::Gpu(gpu::devices().unwrap()[0].uuid().unwrap());
    match role.as_str() {
        "grower" => {
            let build = domain.create("log", place).tensor("x", DType::U32, &[CHUNK]).mutable(true).kept(true);
            let log = build.allocate().unwrap().commit().unwrap();
            log.tensor("x").unwrap().write_at(0, &[7; 4 * CHUNK as usize]).unwrap();
            let before = calls();
            let grow = || log.grow().extend("x", 2 * CHUNK).commit();
            if let Err(error) = grow() {
                assert!(
                    matches!(
                        error,
                        Error::DeviceFault(DeviceFault::Cuda { .. }) | Error::LimitReached(LimitReached::Memory { .. })
                    ),
                    "{error}"
                );
                assert_eq!(log.tensor("x").unwrap().elements(), CHUNK);
                grow().unwrap();
            }
            println!("\ncalls {before} {}", calls());
            log.tensor("x").unwrap().write_at(4 * CHUNK - 4, &[8; 8]).unwrap();
            assert_eq!(log.tensor("x").unwrap().to_vec().unwrap()[4 * CHUNK as usize - 5..][..6], [7, 8, 8, 8, 8, 8]);
        }
        "reader" => {
            let log = domain.open("log", Duration::ZERO).unwrap();
            let x = log.tensor("x").unwrap();
            assert_eq!(x.to_vec().unwrap()[..4 * CHUNK as usize - 4], vec![7; 4 * CHUNK as usize - 4]);
            println!("\nelements {}", x.elements());
        }
        "poor committer" => {
            let build = domain.create("x", place).tensor("x", DType::U32, &[CHUNK]).allocate().unwrap();
            let files: Vec<_> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
            let failed = build.commit_or_keep().unwrap_err();
            let scarce = matches!(failed.error, Error::LimitReached(LimitReached::FileDescriptors(_)));
            assert!(scarce, "{}", failed.error);
            println!("\nerror {}", failed.error);
            drop(files);
            drop(failed.value.commit().unwrap());
        }
        "pinner" => {
            let build = domain.create("x", Place::Host).tensor("x", DType::U8, &[100]).allocate().unwrap();
            let segment = build.commit().unwrap();
            let Place::Gpu(uuid) = place else { unreachable!() };
            let gpu = domain.gpu(uuid).unwrap();
            match segment.pin(&gpu) {
                Err(error @ Error::DeviceFault(DeviceFault::Cuda { .. })) => {
                    let Error::DeviceFault(DeviceFault::Cuda { source, .. }) = &error else { unreachable!() };
                    println!("\nerror {}|{source}|{}|{}", cuda_anchor(source), error.anchor(), error.advice());
                }
                other => panic!("{other:?}"),
            }
            assert_eq!(segment.pin(&gpu).unwrap().bytes(), 100, "nothing was left behind");
        }
        other => panic!("no role is called {other:?}"),
    }
}

/// Driver calls of this process so far.
fn calls() -> usize {
    std::fs::read_to_string(std::env::var_os("SIMCUDA_CALLS").unwrap()).unwrap().lines().count()
}

/// Runs another process to its end, and returns what it said behind `word` if it lived to say it.
fn play(world: &World, role: &str, word: &str, faults: &str) -> Option<String> {
    let calls = world.directory().join("calls");
    let _ = std::fs::remove_file(&calls);
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "role", "--nocapture"]).env(ROLE, role).env("SIMCUDA_CALLS", &calls);
    command.env("PARTYWALL_LIBCUDA", simulated_driver()).env("SIMCUDA_FAULTS", faults);
    command.env("SIMCUDA_APART", "partywall-gpu");
    let output = Running::spawn(command.env("PARTYWALL_SOCKET", world.socket())).wait();
    let text = output.text();
    let said = text.lines().find_map(|line| line.strip_prefix(word)).map(|said| said.trim().to_owned());
    let killed = faults.ends_with("=kill") && output.code.is_none();
    assert!(killed || (output.code == Some(0) && said.is_some()), "{faults}: {text}\n{}", output.stderr);
    said
}

#[test]
fn each_driver_call_of_a_growth_may_fail_or_be_the_last_on_the_simulated_gpu() {
    let world = World::new();
    let said = play(&world, "grower", "calls ", "").unwrap();
    let (before, after) = said.split_once(' ').unwrap();
    let (before, after): (usize, usize) = (before.parse().unwrap(), after.parse().unwrap());
    assert!(after > before + 5, "a growth makes driver calls");
    for call in before + 1..=after {
        assert!(play(&world, "grower", "calls ", &format!("*:{call}=2")).is_some());
        let grown = play(&world, "reader", "elements ", "").unwrap();
        assert_eq!(grown, (2 * CHUNK).to_string(), "call {call} failed");
        assert_eq!(play(&world, "grower", "calls ", &format!("*:{call}=kill")), None);
        let old = play(&world, "reader", "elements ", "").unwrap();
        assert_eq!(old, CHUNK.to_string(), "killed at call {call}, before it was said");
    }
}

#[test]
fn commit_without_a_file_descriptor_says_so_and_can_be_repeated_on_the_simulated_gpu() {
    let said = play(&World::new(), "poor committer", "error ", "").unwrap();
    assert!(said.starts_with("no file descriptor is free for exporting memory on GPU"), "{said}");
}

#[test]
fn unlockable_pages_have_their_own_error_on_the_simulated_gpu() {
    let said = play(&World::new(), "pinner", "error ", "cuMemHostRegister:1=2").unwrap();
    let [anchor, message, of_error, advice] = said.split('|').collect::<Vec<_>>()[..] else { panic!("{said}") };
    assert_eq!((anchor, of_error), ("cannot-page-lock", "cannot-page-lock"));
    let document = include_str!("../../../docs/troubleshooting.md");
    let (_, entry) = document.split_once("\n### cannot-page-lock\n").unwrap();
    let quoted = entry.lines().find_map(|line| line.strip_prefix("    ")).unwrap();
    assert!(message.starts_with(quoted), "{message}");
    assert!(message.contains("ulimit -l") && advice.contains("ulimit -l"), "{message} {advice}");
}
