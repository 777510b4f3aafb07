//! The Rust code in `docs/` compiles: each block of a page is here as it stands there, in a function that has what the
//! page takes for given.
#![allow(dead_code, reason = "it is compiled, not run: most of it needs a GPU or another process")]

use std::{iter, process::Command, time::Duration};

use partywall::{
    Block, BlockRef, DType, DeviceChoice, Domain, Gpu, Place, Policy, Publisher, Queue, Result, Segment, Subscriber,
    Task, Ticket, cuda::StreamRef, gpu,
};

const THIS: &str = include_str!("docs.rs");

#[rustfmt::skip]
fn topics_publisher(domain: &Domain, place: Place, picture: Vec<u8>, second: Duration) -> Result<()> {
    // Created by the first process that asks for it, opened by the others.
    let frames = domain.topic("frames").dtype(DType::U8).shape(&[480, 640, 3]).place(place).open_or_create()?;
    let publisher = frames.publisher()?;
    publisher.wait_for_subscribers(1, Duration::from_secs(60))?;          // or the subscriber asks for history
    let mut loan = publisher.loan(DType::U8, &[480, 640, 3], second)?;   // a block that no other process sees
    loan.as_mut_slice::<u8>()?.fill(7);                                  // or a kernel, see below
    loan.header(b"camera 3")?;                                           // up to 256 bytes of your own
    loan.filled().publish(second)?;
    publisher.send(DType::U8, &[480, 640, 3], &picture, second)?;        // a copy of bytes, in any kind of memory
    Ok(())
}

#[rustfmt::skip]
#[allow(clippy::print_stdout, reason = "an example")]
fn topics_subscriber(domain: &Domain) -> Result<()> {
    let frames = domain.topic("frames").timeout(Duration::from_secs(60)).open()?;
    for sample in &frames.subscribe(Policy::Latest).until_idle(true).join()? {   // ends when all publishers have left
        let sample = sample?;                                    // dropping it frees the block
        println!("{:?} {}", sample.shape(), sample.as_slice::<u8>()?[0]);
    }
    Ok(())
}

#[rustfmt::skip]
fn topics_publisher_on_a_gpu(publisher: &Publisher, stream: StreamRef<'_>, second: Duration) -> Result<()> {
    let loan = publisher.loan(DType::F32, &[1024, 1024], second)?;
    // a kernel on `stream` that writes loan.device()?
    loan.filled().publish_on(stream, second)?;                   // returns at once; the kernel may not have begun
    Ok(())
}

#[rustfmt::skip]
#[allow(unused_variables, reason = "a kernel would read it")]
fn topics_subscriber_on_a_gpu(subscriber: &Subscriber, stream: StreamRef<'_>, second: Duration) -> Result<()> {
    let sample = subscriber.recv(second)?;                       // returns at once, too
    let input = sample.device_on(stream)?;                       // this stream's later work waits for the kernel
    // a kernel on `stream` that reads `input`
    sample.release_on(stream)?;                                  // the block is free when the kernel has finished
    Ok(())
}

#[rustfmt::skip]
#[allow(clippy::print_stdout, reason = "an example")]
fn queues_submitter(domain: &Domain, place: Place, second: Duration) -> Result<()> {
    let queue = domain.queue("work").tasks(1024).inputs(64, 1 << 20).outputs(64, 1 << 20).place(place).open_or_create()?;
    let mut input = queue.inputs().alloc(second)?;                   // a block that only this process uses
    input.as_mut_slice::<f32>()?.fill(49.0);
    let task = Task::new("sqrt").input(input).output(1 << 20).max_attempts(3);
    let ticket = queue.submit(task, second).map_err(|refused| refused.error)?;
    let result = ticket.wait(second)?;                               // taken: the output block is ours
    println!("{}", result.output().expect("room was asked for").as_slice::<f32>()?[0]);
    Ok(())
}

#[rustfmt::skip]
#[allow(unused_variables, reason = "a kernel would read it")]
fn queues_submitter_on_a_gpu(ticket: &Ticket, stream: StreamRef<'_>, second: Duration) -> Result<()> {
    let result = ticket.wait_on(stream, second)?;                    // the host waits for no GPU
    let output = result.device()?;                                   // this stream's later work waits for the worker's
    // a kernel on `stream` that reads `output`
    let taken = result.take(second)?;                                // what it reads is the result
    taken.into_output().expect("room was asked for").release_on(stream)?;
    Ok(())
}

#[rustfmt::skip]
fn queues_of_segments(domain: &Domain, queue: &Queue, input: Block, second: Duration) -> Result<()> {
    let model = domain.open("model", second)?;                       // frozen or mutable, on the host or on a GPU
    let weights = queue.attach(&model)?;                             // the queue holds this version from now on
    let layer = weights.tensor(&model.tensor("layers.0")?)?;         // or weights.part(0..4096)
    let task = Task::new("infer").part(layer.clone()).input(input);
    queue.submit(task, second).map_err(|refused| refused.error)?;
    queue.detach(&weights, Duration::MAX)?;                          // when no task names it any more
    Ok(())
}

#[rustfmt::skip]
fn queues_worker(domain: &Domain) -> Result<()> {
    let queue = domain.queue("work").timeout(Duration::from_secs(60)).open()?;
    for task in queue.claims(Duration::from_secs(60)) {              // ends when no task comes for a minute
        let mut task = task?;
        let roots: Vec<f32> = task.inputs()[0].as_slice::<f32>()?.iter().map(|value| value.sqrt()).collect();
        task.output_mut()?.as_mut_slice::<f32>()?.copy_from_slice(&roots);
        task.complete()?;                                            // dropped instead, the task goes to another worker
    }
    Ok(())
}

#[rustfmt::skip]
fn pools_first(domain: &Domain, place: Place) -> Result<BlockRef> {
    let frames = domain.pool("frames").blocks(64).block_bytes(4 << 20).place(place).open_or_create()?;
    let mut frame = frames.alloc(Duration::from_secs(1))?;      // waits for one, in order; dropping it frees it
    frame.bytes_mut()?.fill(7);                                 // host memory; on a GPU: frame.device()? and a stream
    let reference = frame.offer()?;                             // send it as text, or by serde
    Ok(reference)
}

#[rustfmt::skip]
fn pools_second(domain: &Domain, reference: BlockRef) -> Result<()> {
    let frames = domain.pool("frames").timeout(Duration::from_secs(60)).open()?;
    let frame = frames.accept(&reference)?;                     // read in place; this process holds it now
    drop(frame);
    Ok(())
}

#[rustfmt::skip]
#[allow(unused_variables, clippy::print_stdout, reason = "an example")]
fn descriptors(domain: &Domain) -> Result<(), Box<dyn std::error::Error>> {
    let weights = domain.descriptors("weights", Duration::from_secs(10))?;
    for tensor in weights.table().iter() {
        println!("{}: chunk {}, byte {}", tensor.name(), tensor.chunk(), tensor.offset());
    }
    let mut program = Command::new("./renderer");
    for (fd, chunk) in weights.pass_to(&mut program)?.into_iter().zip(weights.chunks()) {
        program.arg(format!("{fd}:{}", chunk.bytes()));          // the child inherits the descriptor with this number
    }
    let status = program.status()?;                              // `weights`, and with it the lease, lives until then
    Ok(())
}

#[rustfmt::skip]
#[allow(unused_variables, reason = "other processes open it")]
fn pinned_maker(domain: &Domain) -> Result<()> {
    let (place, _) = gpu::resolve(DeviceChoice::Pinned(None))?;
    let mut build = domain.create("batch", place).tensor("x", DType::F32, &[1024]).allocate()?;
    build.as_mut_slice::<f32>("x")?.fill(1.0);                       // by the CPU
    let batch = build.commit()?;
    Ok(())
}

#[rustfmt::skip]
#[allow(unused_variables, reason = "a kernel would read it")]
fn pinned_reader_on_a_gpu(domain: &Domain, gpu: &Gpu) -> Result<()> {
    let batch = domain.opener("batch").device(gpu.uuid()).open()?;   // in another process, on any GPU
    let range = batch.tensor("x")?.device()?;                        // for its kernels and copies
    Ok(())
}

#[rustfmt::skip]
#[allow(unused_variables, reason = "it holds the name")]
fn pinned_copies(segment: &Segment, target: &Segment, gpu: &Gpu) -> Result<()> {
    let on_gpu = segment.to("llm-gpu", Place::Gpu(gpu.uuid()), gpu.stream())?.commit()?;   // waits for the copy
    target.copy_from(segment, gpu.stream())?;                        // into memory with the same tensors
    Ok(())
}

#[cfg(feature = "tokio")]
#[rustfmt::skip]
#[allow(clippy::print_stdout, reason = "an example")]
async fn async_worker(domain: &Domain) -> Result<()> {
    let queue = domain.queue("work").open_async().await?;                // waits for a queue that does not exist yet
    loop {
        let task = queue.claim_async().await?;
        tokio::spawn(async move {
            println!("{} {:?}", task.kind(), task.arguments());          // whatever it takes, also with more `.await`
            task.complete()                                              // dropped instead, the task goes to another worker
        });
    }
}

#[cfg(feature = "tokio")]
#[rustfmt::skip]
#[allow(clippy::print_stdout, reason = "an example")]
async fn async_submitter(queue: &Queue, second: Duration) -> Result<()> {
    let mut task = Task::new("sqrt").output(8).max_attempts(3);
    task = task.input(queue.inputs().alloc_async().await?);
    let ticket = queue.submit_async(task).await.map_err(|refused| refused.error)?;
    match tokio::time::timeout(second, ticket.wait_async()).await {
        Ok(result) => println!("{} bytes", result?.bytes()),
        Err(_) => println!("not done yet: {}", ticket.status().name()),  // the ticket can be asked again
    }
    Ok(())
}

/// The lines of each block of Rust code in a page.
fn blocks(page: &str) -> Vec<Vec<&str>> {
    let mut lines = page.lines();
    let next = || {
        lines.find(|line| *line == "```rust")?;
        Some(lines.by_ref().take_while(|line| *line != "```").map(str::trim).collect())
    };
    iter::from_fn(next).collect()
}

#[test]
fn rust_code_of_the_pages_is_compiled() {
    let compiled: Vec<_> = THIS.lines().map(str::trim).collect();
    for (page, text, count) in [
        ("topics.md", include_str!("../../../docs/topics.md"), 4),
        ("pools.md", include_str!("../../../docs/pools.md"), 2),
        ("queues.md", include_str!("../../../docs/queues.md"), 4),
        ("descriptors.md", include_str!("../../../docs/descriptors.md"), 1),
        ("pinned.md", include_str!("../../../docs/pinned.md"), 3),
        ("ordering.md", include_str!("../../../docs/ordering.md"), 0),
        ("async.md", include_str!("../../../docs/async.md"), 2),
    ] {
        let blocks = blocks(text);
        assert_eq!(blocks.len(), count, "{page}: as many blocks are expected here");
        for block in blocks {
            let is_here = compiled.windows(block.len()).any(|lines| lines == block);
            assert!(is_here, "{page}: copy this block to {}:\n{}", file!(), block.join("\n"));
        }
    }
}
