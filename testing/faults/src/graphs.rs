//! The operation that captures and launches a CUDA graph.

use partywall::cuda::{CudaError, Graph};
use partywall::{Error, GraphLaunch};
use partywall_harness::WATCHDOG;

use crate::operations::{FIRST_GPU, Outcome, Setting, next_writer, of};

pub(crate) fn launch(setting: &Setting) -> Outcome {
    let gpu = setting.domain.gpu(FIRST_GPU)?;
    let writer = next_writer(setting, &setting.name)?;
    let timeline = setting.domain.timeline(&setting.name)?;
    let passed = next_writer(setting, &format!("{}/passed", setting.name))?;
    let last = writer.timeline().value();
    let known = passed.timeline().value();
    let mut nodes = None;
    let captured = Graph::capture(gpu.context(), |stream| {
        let wait = setting.domain.capture_wait(stream)?;
        nodes = Some((wait, setting.domain.capture_signal(stream)?));
        Ok::<(), Failure>(())
    });
    let graph = captured.map_err(|failure| failure.of(setting))?;
    let (wait, signal) = nodes.expect("the capture has succeeded");
    let launch_with = |v| {
        let launch = GraphLaunch::new(graph.as_ref(), gpu.stream()).wait(&wait, &timeline, last + v);
        let launched = launch.signal(&signal, &passed, known + v).run(|| {
            // SAFETY: the graph uses nothing but the words of its nodes, which this function keeps.
            #[allow(unsafe_code)]
            unsafe { graph.launch(gpu.stream()) }?;
            Ok::<(), Failure>(())
        });
        launched.map_err(|failure| failure.of(setting))?;
        writer.signal(last + v)?;
        passed.timeline().wait(known + v, WATCHDOG)
    };
    let launched = launch_with(1).and_then(|()| launch_with(2)).and_then(|()| {
        // Shows that the stream has passed the waits: until then their leases are kept.
        passed.signal_on(gpu.stream(), known + 3)?;
        passed.timeline().wait(known + 3, WATCHDOG)
    });
    // Releases the stream in every case.
    drop(writer);
    let done = gpu.stream().synchronize().map_err(|error| of(setting, error));
    launched.and(done)
}

/// An error of a capture or a launch.
enum Failure {
    Library(Error),
    Driver(CudaError),
}

impl Failure {
    fn of(self, setting: &Setting) -> Error {
        match self {
            Self::Library(error) => error,
            Self::Driver(error) => of(setting, error),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Library(error)
    }
}

impl From<CudaError> for Failure {
    fn from(error: CudaError) -> Self {
        Self::Driver(error)
    }
}
