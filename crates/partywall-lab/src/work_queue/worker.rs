//! A worker: claims tasks and computes square roots, by the CPU in host memory and by a kernel on a GPU.

use super::*;
use crate::device::Working;

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let job: Job = session.parent().hear()?;
    let worker = Worker::new(session)?;
    match job {
        Job::Half => {
            let mut task = worker.queue.claim(TIMEOUT)?;
            worker.write(&mut task, ELEMENTS / 2)?;
            session.await_kill("the master did not kill this worker in the middle of a task")
        }
        Job::Work { reports } => {
            let times = worker.work()?;
            if reports {
                session.report(describe(&times))?;
            }
            session.finish(())
        }
    }
}

struct Worker {
    queue: Queue,
    /// `None` in host memory.
    device: Option<Working<SquareRoots>>,
}

impl Worker {
    fn new(session: &Session) -> Result<Self, Failure> {
        let queue = session.domain().queue(QUEUE).timeout(TIMEOUT).open()?;
        let device = queue.gpu().map(|gpu| Working::new(gpu, SquareRoots::load)).transpose()?;
        device.iter().for_each(|device| broker::prepare(session.domain(), &device.stream));
        Ok(Self { queue, device })
    }

    /// Does tasks until the one of kind `LAST`. Returns the host's time for each.
    fn work(&self) -> Result<Vec<Duration>, Failure> {
        let mut times = Vec::new();
        for task in self.queue.claims(TIMEOUT) {
            let mut task = task?;
            let start = Instant::now();
            if task.kind() == LAST {
                task.complete()?;
                break;
            }
            self.write(&mut task, ELEMENTS)?;
            match &self.device {
                None => task.complete()?,
                // No host waits for the GPU here. The result is complete when the stream reaches this point.
                Some(device) => task.complete_on(device.stream.as_ref()).map_err(|refused| refused.0)?,
            }
            times.push(start.elapsed());
        }
        if let Some(device) = &self.device {
            device.stream.synchronize().doing("running kernels")?;
        }
        Ok(times)
    }

    /// Writes the square roots of the first elements into the output of this attempt.
    fn write(&self, task: &mut ClaimedTask, elements: usize) -> Result<(), Failure> {
        let Some(device) = &self.device else {
            let (inputs, output) = task.inputs_and_output()?;
            let roots = output.as_mut_slice::<f32>()?;
            for (root, number) in roots.iter_mut().zip(inputs[0].as_slice::<f32>()?).take(elements) {
                *root = number.sqrt();
            }
            return Ok(());
        };
        let stream = device.stream.as_ref();
        task.wait_inputs_on(stream)?;
        let numbers = task.inputs()[0].device()?;
        let numbers = numbers.as_slice().slice(0, elements as u64 * 4).doing("reading an input")?;
        device.kernels.enqueue(stream, numbers, task.output()?.device()?.as_slice()).doing("launching a kernel")
    }
}

fn describe(times: &[Duration]) -> Step {
    Step::new(
        "work",
        "The tasks of the first worker",
        "A worker claims the oldest task by one compare-and-swap, reads the input in place, and writes into an output \
         block of this attempt alone. Completing publishes attempt and block in one step. Neither the broker nor the \
         driver is involved.",
    )
    .value("tasks", times.len().to_string())
    .value("host time per task", spread(times))
    .judge(true, "finished", "")
}
