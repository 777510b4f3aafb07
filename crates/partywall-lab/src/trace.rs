//! Traces of labs (`--trace`), which the observer records.

use std::{
    io::{BufWriter, ErrorKind as IoErrorKind},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use partywall::{Domain, ErrorKind, Recording, files::Draft};
use serde_json::json;

use crate::{failure::Failure, reporter::Reporter};

/// A file that was created for a trace.
#[derive(Debug)]
pub(super) struct TraceFile {
    path: PathBuf,
    file: Draft,
}

/// A trace that is being recorded. Recording ends when this is dropped.
#[derive(Debug)]
pub(super) struct Tracing {
    /// Its file, until it is written.
    to: Option<TraceFile>,
    stop: Arc<AtomicBool>,
    /// The recording thread, until it is joined.
    thread: Option<JoinHandle<Recording>>,
}

impl TraceFile {
    /// Creates the file. Called before the lab starts, so that a wrong name costs no time.
    pub(super) fn create(path: PathBuf) -> Result<Self, Failure> {
        if path == Path::new("-") {
            let what = "cannot write a trace to standard output, which has the lines of the lab";
            return Err(Failure::new(ErrorKind::Usage, what, "name a file with --trace; ./- is a file of this name"));
        }
        match Draft::create(&path, false) {
            Ok(file) => Ok(Self { path, file }),
            Err(error) => Err(Failure::new(
                ErrorKind::Refused,
                match error.kind() {
                    IoErrorKind::AlreadyExists => format!("{} already exists", path.display()),
                    _ => format!("cannot create {}: {error}", path.display()),
                },
                "name another file with --trace",
            )),
        }
    }

    /// Records the processes of `domain`, on a thread of its own.
    pub(super) fn record(self, domain: &Domain) -> Tracing {
        let mut recording = domain.record_trace(MAX_EVENTS);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                recording.poll();
            }
            recording
        });
        Tracing { to: Some(self), stop, thread: Some(thread) }
    }
}

impl Tracing {
    /// Ends the recording and writes the file. Reports it as a line of text, and as `trace` in the last line of JSON.
    pub(super) fn write(mut self, reporter: &Reporter) -> Result<(), Failure> {
        let Some(TraceFile { path, mut file }) = self.to.take() else { return Ok(()) };
        let shown = path.display();
        let failed = |why: String| {
            Failure::new(ErrorKind::Refused, format!("cannot write {shown}: {why}"), "name another file with --trace")
        };
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take();
        let joined = thread.map(JoinHandle::join).transpose().ok().flatten();
        let recording = joined.ok_or_else(|| failed("the thread that recorded has panicked".to_owned()))?;
        let trace = recording.finish(|_| true);
        let written = trace.write(&mut BufWriter::new(&mut file));
        written.and_then(|()| file.publish()).map_err(|error| failed(error.to_string()))?;
        let events = trace.events();
        let processes = trace.processes();
        let lost = trace.lost();
        reporter.remark(&format!(
            "The trace of {events} events of {processes} processes is in {shown}, {lost} lost. Open it at \
             https://ui.perfetto.dev or in chrome://tracing."
        ));
        let arrows = trace.arrows();
        reporter.result(json!({
            "trace": {
                "out": path, "events": events, "arrows": arrows, "processes": processes, "lost": lost,
            },
        }));
        Ok(())
    }
}

impl Drop for Tracing {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// How many events are kept.
const MAX_EVENTS: usize = 1_000_000;
