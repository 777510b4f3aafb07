//! Exercise 4, a work queue: `cargo run -p partywall --example exercise_work_queue`. A master submits numbers, and
//! workers return their square roots. The first worker dies with a task in its hands, and the second one does it again.
#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

use std::{env, error::Error, process, process::Command, time::Duration};

use partywall::{Domain, Place, Queue, Result, Task};

const NAME: &str = "exercise/work-queue";
const TASKS: u32 = 16;
const BYTES: u64 = 4;
const TIMEOUT: Duration = Duration::from_secs(60);

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let domain = Domain::connect()?;
    // Master and workers create it, so that any of them may start first.
    let queue = domain.queue(NAME).tasks(TASKS).inputs(TASKS, BYTES).outputs(TASKS, BYTES);
    let queue = queue.place(Place::Host).open_or_create()?;
    match env::args().nth(1).as_deref() {
        Some("dies") => work(&queue, true)?,
        Some("works") => work(&queue, false)?,
        _ => master(&queue)?,
    }
    Ok(())
}

fn master(queue: &Queue) -> std::result::Result<(), Box<dyn Error>> {
    let start = |role: &str| Command::new(env::current_exe()?).arg(role).spawn();
    let submit = |number: u32| {
        let mut input = queue.inputs().alloc(TIMEOUT)?;
        input.as_mut_slice::<f32>()?[0] = (number * number) as f32;
        queue.submit(Task::new("sqrt").input(input).output(BYTES), TIMEOUT).map_err(|refused| refused.error)
    };
    let tickets = (0..TASKS).map(submit).collect::<Result<Vec<_>>>()?;
    println!("the first worker: {}", start("dies")?.wait()?);
    let mut worker = start("works")?; // change it: start three of them
    let mut right = 0;
    let mut again = 0;
    for (number, ticket) in (0..TASKS).zip(tickets) {
        let result = ticket.wait(TIMEOUT)?;
        let root = result.output().expect("it was asked for").as_slice::<f32>()?[0];
        right += u32::from(root == number as f32);
        again += u32::from(result.attempt() > 1);
    }
    println!("{right} of {TASKS} results are right, {again} of them by a second attempt");
    worker.kill()?; // it waits for more tasks
    worker.wait()?;
    Ok(())
}

fn work(queue: &Queue, dies: bool) -> Result<()> {
    for task in queue.claims(TIMEOUT) {
        let mut task = task?;
        if dies {
            process::abort(); // change it: `return task.fail("too hard");`, also with `.max_attempts(1)` above
        }
        let (inputs, output) = task.inputs_and_output()?;
        output.as_mut_slice::<f32>()?[0] = inputs[0].as_slice::<f32>()?[0].sqrt();
        task.complete()?;
    }
    Ok(())
}
