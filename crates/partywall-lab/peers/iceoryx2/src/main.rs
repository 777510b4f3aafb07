//! Hand-offs between two processes by iceoryx2: one message, and as many subscribers as one wants, which a thread of
//! the other process looks after.
//!
//! Two of these are started, `DIRECTORY MODE SUBSCRIBERS first` and `… second`, and say `ready` when they have found
//! each other. Asked on standard input for so many samples, both at the same time, they hand over to each other and
//! print nanoseconds, a line each. Those of the first count.
#![forbid(unsafe_code)]

use std::{
    env,
    error::Error,
    io::{self, BufRead, Write},
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use iceoryx2::{
    node::Node,
    port::{listener::Listener, notifier::Notifier, publisher::Publisher, subscriber::Subscriber},
    prelude::{
        Config, LogLevel, NodeBuilder, Path, PortFactory, SemanticString, ServiceName, ipc::Service, set_log_level,
    },
};
use rustix::{
    process::{Signal, set_parent_process_death_signal},
    time::{ClockId, clock_gettime},
};

type Failure = Box<dyn Error>;

/// Hand-offs in one sample: reading a clock takes as long as one of them.
const EXCHANGES: u64 = 100;

/// As long as the benchmark lets its own waiters fall asleep.
const TO_FALL_ASLEEP: Duration = Duration::from_micros(500);

/// How long the other one may take to come.
const TIMEOUT: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Failure> {
    // It may poll for a message that is not sent any more.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    set_log_level(LogLevel::Error);
    let arguments: Vec<_> = env::args().skip(1).collect();
    let [directory, mode, subscribers, side] = arguments.as_slice() else {
        return Err("usage: DIRECTORY look|exchange|wake SUBSCRIBERS first|second".into());
    };
    let mut side = Side::new(directory, subscribers.parse()?, side == "first")?;
    println!("ready");
    for line in io::stdin().lock().lines() {
        let count = line?.parse()?;
        let samples = match mode.as_str() {
            "look" => side.exchange(count, By::Looking)?,
            "exchange" => side.exchange(count, By::Waiting)?,
            "wake" => side.wake(count)?,
            other => return Err(format!("no mode {other:?}").into()),
        };
        let mut out = io::stdout().lock();
        for sample in samples {
            writeln!(out, "{sample}")?;
        }
        out.flush()?;
    }
    Ok(())
}

/// How a message is waited for.
#[derive(Clone, Copy, PartialEq)]
enum By {
    Looking,
    /// With an event: a listener beside each subscriber.
    Waiting,
}

/// One of the two processes.
struct Side {
    first: bool,
    publisher: Publisher<Service, u64, ()>,
    notifier: Notifier<Service>,
    subscribers: Vec<(Subscriber<Service, u64, ()>, Listener<Service>)>,
    /// The last step of both.
    at: u64,
    _node: Node<Service>,
}

impl Side {
    /// Finds the other one, in a directory that is theirs alone.
    fn new(directory: &str, subscribers: usize, first: bool) -> Result<Self, Failure> {
        let mut config = Config::default();
        config.global.set_root_path(&Path::new(directory.as_bytes())?);
        let node = NodeBuilder::new().config(&config).create::<Service>()?;
        let (ours, theirs) = if first { ("first", "second") } else { ("second", "first") };
        let messages = |side: &str| {
            let service = node.service_builder(&name(directory, side, "messages")?).publish_subscribe::<u64>();
            let service = service.max_publishers(1).max_subscribers(subscribers);
            Ok::<_, Failure>(service.open_or_create()?)
        };
        let wakes = |side: &str| {
            let service = node.service_builder(&name(directory, side, "wakes")?).event();
            Ok::<_, Failure>(service.max_notifiers(1).max_listeners(subscribers).open_or_create()?)
        };
        let our_messages = messages(ours)?;
        let our_wakes = wakes(ours)?;
        let their_messages = messages(theirs)?;
        let their_wakes = wakes(theirs)?;
        let publisher = our_messages.publisher_builder().create()?;
        let notifier = our_wakes.notifier_builder().create()?;
        let subscribers_of = |_| {
            let subscriber = their_messages.subscriber_builder().create()?;
            Ok::<_, Failure>((subscriber, their_wakes.listener_builder().create()?))
        };
        let all = (0..subscribers).map(subscribers_of).collect::<Result<_, _>>()?;
        let deadline = Instant::now() + TIMEOUT;
        while our_messages.dynamic_config().number_of_subscribers() < subscribers
            || our_wakes.dynamic_config().number_of_listeners() < subscribers
            || their_messages.dynamic_config().number_of_publishers() < 1
            || their_wakes.dynamic_config().number_of_notifiers() < 1
        {
            if Instant::now() > deadline {
                return Err("the other process does not come".into());
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(Self { first, publisher, notifier, subscribers: all, at: 0, _node: node })
    }

    /// Nanoseconds of one hand-off, in the mean of a hundred that go there and back: until every subscriber of the
    /// other side has the message.
    fn exchange(&mut self, count: usize, by: By) -> Result<Vec<f64>, Failure> {
        let mut samples = Vec::with_capacity(count);
        for _ in 0..count {
            let start = Instant::now();
            for _ in 0..EXCHANGES / 2 {
                self.at += 1;
                if self.first {
                    self.give(self.at, by)?;
                    self.take(self.at, by)?;
                } else {
                    self.take(self.at, by)?;
                    self.give(self.at, by)?;
                }
            }
            samples.push(start.elapsed().as_nanos() as f64 / EXCHANGES as f64);
        }
        Ok(samples)
    }

    /// Nanoseconds from the second's message until the first, which sleeps, has it for every subscriber.
    fn wake(&mut self, count: usize) -> Result<Vec<f64>, Failure> {
        let mut samples = Vec::with_capacity(count);
        for _ in 0..count {
            // The other one knows when to begin, and the messages count on by the clock.
            if self.first {
                self.give(now(), By::Looking)?;
                let sent = self.take(self.at + 1, By::Waiting)?;
                samples.push(now().saturating_sub(sent) as f64);
                self.at = sent;
            } else {
                self.at = self.take(self.at + 1, By::Looking)?;
                thread::sleep(TO_FALL_ASLEEP);
                self.give(now(), By::Waiting)?;
                samples.push(0.0);
            }
        }
        Ok(samples)
    }

    fn give(&self, value: u64, by: By) -> Result<(), Failure> {
        self.publisher.loan_uninit()?.write_payload(value).send()?;
        if by == By::Waiting {
            self.notifier.notify()?;
        }
        Ok(())
    }

    /// Has every subscriber receive until it has at least `value`, and returns what the last one has.
    fn take(&self, value: u64, by: By) -> Result<u64, Failure> {
        let mut last = 0;
        for (subscriber, listener) in &self.subscribers {
            loop {
                match subscriber.receive()? {
                    Some(sample) if *sample >= value => {
                        last = *sample;
                        break;
                    }
                    Some(_) => {}
                    None if by == By::Waiting => _ = listener.blocking_wait(|_| ())?,
                    None => {}
                }
            }
        }
        Ok(last)
    }
}

fn name(directory: &str, side: &str, what: &str) -> Result<ServiceName, Failure> {
    Ok(format!("{directory}/{side}/{what}").as_str().try_into()?)
}

/// The clock that all processes share, in nanoseconds.
fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
