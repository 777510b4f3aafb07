//! Programs of others, and the programs in Python, in processes of their own.
//!
//! A program prints `ready`. Then it reads requests, one in each line: a number, and words that name what to measure if
//! the program measures several things. It answers with that many lines, each with one sample. It ends when its
//! standard input ends.

use std::{
    collections::VecDeque,
    fs::File,
    io::{BufRead, BufReader, Read, Seek, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use partywall_measure::{Failure, Sampler};

/// How long a program may take to start, and for each answer: several times as long as the slowest one needs.
const TIMEOUT: Duration = Duration::from_secs(90);

/// How long a program may take to end and release its GPU memory.
const FAREWELL: Duration = Duration::from_secs(10);

/// How many of a program's last lines are reported when it fails.
const REPORTED: usize = 3;

/// A program that runs. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Program {
    what: String,
    child: Child,
    /// `None` once the program has been told to end.
    requests: Option<ChildStdin>,
    replies: Receiver<String>,
    errors: File,
    taken: VecDeque<f64>,
}

impl Program {
    /// Starts a program without waiting until it is ready. Errors name it `what`.
    pub(crate) fn spawn(what: String, command: &mut Command) -> Result<Self, Failure> {
        // Without a name, so that nothing is left if this process is killed.
        let errors = tempfile::tempfile()?;
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors.try_clone()?)
            .spawn()
            .map_err(|error| format!("{}: {error}", command.get_program().display()))?;
        let (said, replies) = mpsc::channel();
        let requests = child.stdin.take();
        if let Some(stdout) = child.stdout.take() {
            // Ends with the program, or when the receiver is dropped.
            thread::spawn(move || {
                BufReader::new(stdout).lines().map_while(Result::ok).try_for_each(|line| said.send(line))
            });
        }
        Ok(Self { what, child, requests, replies, errors, taken: VecDeque::new() })
    }

    pub(crate) fn await_ready(&mut self) -> Result<(), Failure> {
        match self.reply()?.as_str() {
            "ready" => Ok(()),
            other => Err(format!("{} printed {other:?} instead of `ready`", self.what).into()),
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns one sample.
    pub(crate) fn sample(&mut self) -> Result<f64, Failure> {
        self.sample_of("", 1)
    }

    /// Returns a sampler that requests `block` samples at a time: with a request for each, the program would sleep
    /// before every sample.
    pub(crate) fn sampler(&mut self, block: usize) -> Sampler<'_> {
        self.sampler_of("", block)
    }

    /// Returns a sampler as [`Program::sampler`] does, of one of several things that the program measures.
    pub(crate) fn sampler_of<'a>(&'a mut self, what: &'a str, block: usize) -> Sampler<'a> {
        self.taken.clear();
        Box::new(move || self.sample_of(what, block))
    }

    fn sample_of(&mut self, what: &str, block: usize) -> Result<f64, Failure> {
        if self.taken.is_empty() {
            self.request(what, block)?;
            self.taken = self.answers(block)?;
        }
        self.taken.pop_front().ok_or_else(|| "no samples were asked for".into())
    }

    /// Requests samples without waiting for them.
    pub(crate) fn ask(&mut self, samples: usize) -> Result<(), Failure> {
        self.request("", samples)
    }

    fn request(&mut self, what: &str, samples: usize) -> Result<(), Failure> {
        let request = format!("{samples} {what}");
        match self.requests.as_mut().map(|requests| writeln!(requests, "{}", request.trim_end())) {
            Some(Ok(())) => Ok(()),
            _ => Err(self.failure("takes no requests", FAREWELL)),
        }
    }

    /// Returns the requested samples.
    pub(crate) fn answers(&mut self, samples: usize) -> Result<VecDeque<f64>, Failure> {
        let answer = |_| {
            let line = self.reply()?;
            Ok(line.parse().map_err(|_| format!("{} printed {line:?} instead of a number", self.what))?)
        };
        (0..samples).map(answer).collect()
    }

    fn reply(&mut self) -> Result<String, Failure> {
        self.replies.recv_timeout(TIMEOUT).map_err(|error| match error {
            RecvTimeoutError::Timeout => {
                self.failure(&format!("printed nothing for {} s", TIMEOUT.as_secs()), Duration::ZERO)
            }
            RecvTimeoutError::Disconnected => self.failure("has ended", FAREWELL),
        })
    }

    /// Ends the program within `timeout`, and returns an error with its last lines.
    fn failure(&mut self, how: &str, timeout: Duration) -> Failure {
        let status = self.end(timeout);
        let mut said = String::new();
        let _ = self.errors.rewind().and_then(|()| self.errors.read_to_string(&mut said));
        let said: Vec<_> = said.lines().filter(|line| !line.trim().is_empty()).collect();
        let said = said[said.len().saturating_sub(REPORTED)..].join(" | ");
        format!("{} {how} ({status}): {said}", self.what).into()
    }

    /// Ends the program, and kills it if it has not ended within `timeout`. Returns how it ended.
    pub(crate) fn end(&mut self, timeout: Duration) -> String {
        self.requests = None;
        let deadline = Instant::now() + timeout;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        self.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.end(FAREWELL);
    }
}
