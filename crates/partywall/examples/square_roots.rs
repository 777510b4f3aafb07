//! Tasks for workers, none lost: `cargo run -p partywall --example square_roots -- master` in one terminal and
//! `… worker` in another, in any order; or the same roles of `python/examples/square_roots.py`.
#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

use std::{thread, time::Duration};

use partywall::{Domain, Place, Queue, Result, Task};

const TIMEOUT: Duration = Duration::from_secs(60);
const TASKS: u32 = 100;
const NUMBERS: usize = 1024;
const BYTES: u64 = NUMBERS as u64 * 4;

fn main() -> Result<()> {
    let domain = Domain::connect()?;
    match std::env::args().nth(1).as_deref() {
        Some("master") => master(&domain),
        Some("worker") => worker(&domain),
        _ => run(&domain, &Domain::connect()?),
    }
}

/// Runs both roles, each with a connection of its own.
pub(crate) fn run(first: &Domain, second: &Domain) -> Result<()> {
    thread::scope(|scope| {
        let worker = scope.spawn(move || worker(first));
        master(second)?;
        worker.join().expect("the worker does not panic")
    })
}

/// Opens the queue, or creates it: either side may start first.
fn open(domain: &Domain) -> Result<Queue> {
    let queue = domain.queue("examples/square_roots").tasks(64).inputs(64, BYTES).outputs(64, BYTES);
    queue.place(Place::Host).open_or_create()
}

fn master(domain: &Domain) -> Result<()> {
    let queue = open(domain)?;
    let submit = |number: u32| {
        let mut input = queue.inputs().alloc(TIMEOUT)?;
        input.as_mut_slice::<f32>()?.fill((number * number) as f32);
        // An unsubmitted task would come back with its blocks; this example ends then.
        queue.submit(Task::new("sqrt").input(input).output(BYTES), TIMEOUT).map_err(|refused| refused.error)
    };
    // No more at once than there are blocks.
    let mut right = 0;
    for first in (0..TASKS).step_by(32) {
        let numbers = first..TASKS.min(first + 32);
        let tickets = numbers.clone().map(submit).collect::<Result<Vec<_>>>()?;
        for (number, ticket) in numbers.zip(tickets) {
            let result = ticket.wait(TIMEOUT)?;
            let roots = result.output().expect("it was asked for").as_slice::<f32>()?;
            right += u32::from(roots.iter().all(|root| *root == number as f32));
        } // dropping the result frees its block
    }
    queue.submit(Task::new("last"), TIMEOUT).map_err(|refused| refused.error)?.wait(TIMEOUT)?;
    println!("{right} of {TASKS} results are right");
    Ok(())
}

fn worker(domain: &Domain) -> Result<()> {
    let queue = open(domain)?;
    for task in queue.claims(TIMEOUT) {
        let mut task = task?;
        match task.kind().as_str() {
            "sqrt" => {
                let (inputs, output) = task.inputs_and_output()?;
                let numbers = inputs[0].as_slice::<f32>()?; // in place: nothing is copied
                for (root, number) in output.as_mut_slice::<f32>()?.iter_mut().zip(numbers) {
                    *root = number.sqrt();
                }
                task.complete()?;
            }
            "last" => return task.complete(),
            other => task.fail(&format!("no worker knows {other:?}"))?,
        }
    }
    Ok(())
}
