//! Exercise 5, recovery from a crash: `cargo run -p partywall --example exercise_crash`. The program starts itself as
//! three servers: the first dies while it loads weights, the second takes over and dies later, the third finds what is
//! there.
#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

use std::{
    error::Error,
    io::{BufRead, BufReader},
    process::{self, Command, Stdio},
    thread,
    time::Duration,
};

use partywall::{DType, Domain, OpenOrBuild, Place, Result};

const NAME: &str = "example/weights";
const ELEMENTS: u64 = 1 << 20;
const TIMEOUT: Duration = Duration::from_secs(60);

fn main() -> std::result::Result<(), Box<dyn Error>> {
    match std::env::args().nth(1).as_deref() {
        Some("dies-loading") => serve(true)?,
        Some("serve") => serve(false)?,
        _ => {
            let program = std::env::current_exe()?;
            let start = |role: &str| Command::new(&program).arg(role).spawn();
            let mut first = Command::new(&program).arg("dies-loading").stdout(Stdio::piped()).spawn()?;
            let mut said = String::new();
            BufReader::new(first.stdout.take().expect("it is a pipe")).read_line(&mut said)?;
            print!("{said}"); // it loads now
            let mut second = start("serve")?; // change it: start ten servers, and one loads
            println!("the first server: {}", first.wait()?);
            println!("the second server: {}", second.wait()?);
            println!("the third server: {}", start("serve")?.wait()?);
            Domain::connect()?.remove(NAME)?;
        }
    }
    Ok(())
}

fn serve(dies_loading: bool) -> Result<()> {
    let domain = Domain::connect()?;
    // One process loads; the others wait for it, or open what is there.
    let weights = match domain.open_or_build(NAME, TIMEOUT)? {
        OpenOrBuild::Opened(segment) => {
            println!("server {}: the weights are there", process::id());
            segment
        }
        OpenOrBuild::Build(claim) => {
            println!("server {}: loading", process::id());
            // kept: the name outlives this process; change it: do not keep it, and sleep a second before the third
            // server
            let draft = claim.create(Place::Host).kept(true);
            let mut build = draft.tensor("w", DType::F32, &[ELEMENTS]).allocate()?;
            let (first_half, rest) = build.as_mut_slice::<f32>("w")?.split_at_mut(ELEMENTS as usize / 2);
            first_half.fill(0.5);
            if dies_loading {
                thread::sleep(Duration::from_millis(300));
                process::abort(); // nobody will ever see the half
            }
            rest.fill(0.5);
            build.commit()?
        }
    };
    let right = weights.tensor("w")?.as_slice::<f32>()?.iter().all(|weight| *weight == 0.5);
    println!("server {}: every weight is right: {right}", process::id());
    process::abort() // and the weights stay
}
