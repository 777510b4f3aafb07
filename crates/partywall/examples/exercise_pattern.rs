//! Exercise 1, a recognisable pattern: `cargo run -p partywall --example exercise_pattern` starts a process that writes
//! numbers and one that checks them. In two terminals: `… -- write cuda:0` (or `host`), and `… -- check`.
#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

use std::{env, error::Error, process::Command, time::Duration};

use partywall::{DType, DeviceChoice, Domain, gpu};

const NAME: &str = "exercise/pattern";
const ROWS: u64 = 1024;
const COLUMNS: u64 = 256;
const TIMEOUT: Duration = Duration::from_secs(60);

/// The number at an index. A wrong offset, type or order changes nearly all of them.
fn pattern(index: usize) -> u32 {
    // change it: make all numbers equal, shift what is written by one, and see that nothing is noticed
    (index as u32).wrapping_mul(2_654_435_761)
}

fn main() -> Result<(), Box<dyn Error>> {
    let start = |role: &str| Command::new(env::current_exe()?).arg(role).spawn();
    match env::args().nth(1).as_deref() {
        Some("write") => write(&env::args().nth(2).unwrap_or("host".to_owned())),
        Some("check") => check(),
        _ => {
            let mut writer = start("write")?;
            let mut checker = start("check")?;
            println!("the writer: {}", writer.wait()?);
            println!("the checker: {}", checker.wait()?);
            Ok(())
        }
    }
}

fn write(device: &str) -> Result<(), Box<dyn Error>> {
    let (place, _) = gpu::resolve(device.parse::<DeviceChoice>()?)?;
    // kept: the name outlives this process
    let draft = Domain::connect()?.create(NAME, place).kept(true);
    // change it: write f32, and see the checker refuse it
    let mut build = draft.tensor("x", DType::U32, &[ROWS, COLUMNS]).allocate()?;
    let numbers: Vec<u32> = (0..(ROWS * COLUMNS) as usize).map(pattern).collect();
    build.write("x", bytemuck::cast_slice(&numbers))?; // change it: write from a kernel, see `cudarc.rs`
    drop(build.commit()?); // type and shape travel with the name
    Ok(())
}

fn check() -> Result<(), Box<dyn Error>> {
    let domain = Domain::connect()?;
    let segment = domain.open(NAME, TIMEOUT)?; // waits for the writer
    let x = segment.tensor("x")?;
    if x.dtype() != DType::U32 {
        return Err(format!("x has elements of {}, not of u32", x.dtype()).into());
    }
    let mut numbers = vec![0_u32; x.elements() as usize];
    x.read_at(0, bytemuck::cast_slice_mut(&mut numbers))?; // change it: read the last row alone
    let right = numbers.iter().enumerate().filter(|(index, number)| **number == pattern(*index)).count();
    println!("{right} of {} numbers are right, {:?} on {}", numbers.len(), x.shape(), segment.place());
    domain.remove(NAME)?;
    Ok(())
}
