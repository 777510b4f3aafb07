//! Tasks that an asynchronous program serves: `cargo run -p partywall --features tokio --example async_queue -- serve` in
//! one terminal and `… ask` in another, in any order. Without an argument, one process does both.
#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

use std::time::Duration;

use partywall::{ClaimedTask, Domain, Place, Queue, Result, Task};
use tokio::{task::JoinSet, time};

const TASKS: u32 = 100;
const SLOTS: u32 = 64;
const NUMBERS: usize = 1024;
const BYTES: u64 = NUMBERS as u64 * 4;
const TIMEOUT: Duration = Duration::from_secs(60);

#[tokio::main]
async fn main() -> Result<()> {
    let domain = Domain::connect()?; // blocks, at most until the broker has started
    match std::env::args().nth(1).as_deref() {
        Some("serve") => serve(&domain).await,
        Some("ask") => ask(&domain).await,
        _ => run(&domain, &Domain::connect()?).await,
    }
}

/// Runs both roles, each with a connection of its own.
pub(crate) async fn run(first: &Domain, second: &Domain) -> Result<()> {
    tokio::try_join!(serve(first), ask(second)).map(drop)
}

/// Opens the queue, or creates it: either side may start first.
fn open(domain: &Domain) -> Result<Queue> {
    let queue = domain.queue("examples/async_queue").tasks(SLOTS).inputs(SLOTS, BYTES).outputs(SLOTS, BYTES);
    queue.place(Place::Host).open_or_create()
}

/// Serves many tasks at a time, on the threads of the runtime.
async fn serve(domain: &Domain) -> Result<()> {
    let queue = open(domain)?;
    let mut served = JoinSet::new();
    loop {
        let task = queue.claim_async().await?;
        if task.kind() == "last" {
            task.complete()?;
            break;
        }
        served.spawn(answer(task));
    }
    // A task whose future were dropped would go to another worker.
    while let Some(answered) = served.join_next().await {
        answered.expect("no task panics")?;
    }
    Ok(())
}

async fn answer(mut task: ClaimedTask) -> Result<()> {
    time::sleep(Duration::from_millis(10)).await; // stands for a database, or another service
    let (inputs, output) = task.inputs_and_output()?;
    for (root, number) in output.as_mut_slice::<f32>()?.iter_mut().zip(inputs[0].as_slice::<f32>()?) {
        *root = number.sqrt();
    }
    task.complete()
}

/// Submits all tasks at once. The futures wait for blocks and slots, so none is refused.
async fn ask(domain: &Domain) -> Result<()> {
    let queue = std::sync::Arc::new(open(domain)?);
    let mut asked = JoinSet::new();
    for number in 0..TASKS {
        let queue = queue.clone();
        asked.spawn(async move { time::timeout(TIMEOUT, is_right(&queue, number)).await });
    }
    let mut right = 0;
    while let Some(answer) = asked.join_next().await {
        right += u32::from(answer.expect("no task panics").expect("each is answered in time")?);
    }
    println!("{right} of {TASKS} results are right");
    queue.submit_async(Task::new("last")).await.map_err(|refused| refused.error)?.wait_async().await?;
    Ok(())
}

async fn is_right(queue: &Queue, number: u32) -> Result<bool> {
    let mut input = queue.inputs().alloc_async().await?;
    input.as_mut_slice::<f32>()?.fill((number * number) as f32);
    let task = Task::new("sqrt").input(input).output(BYTES);
    let ticket = queue.submit_async(task).await.map_err(|refused| refused.error)?;
    let result = ticket.wait_async().await?;
    let roots = result.output().expect("it was asked for").as_slice::<f32>()?;
    Ok(roots.iter().all(|root| *root == number as f32))
} // dropping the result frees its block
