//! `partywall demo`: two processes share an array by name, and report each step. Then one of them is killed.
//!
//! | name | committed by | means |
//! |---|---|---|
//! | `PREFIX/data` | the producer | the array, frozen |
//! | `PREFIX/data-read` | the consumer | it has read the array and found it right |
//! | `PREFIX/shared` | the producer | the array once more, mutable |
//! | `PREFIX/shared-doubled` | the consumer | it has doubled every element in place |
//! | `PREFIX/data-held` | the consumer | it reads the array on and on, and the producer may be killed |
//! | `PREFIX/producer-killed` | the demo | the producer is dead |
//! | `PREFIX/data-reopened` | the observer | a third process has opened the array after that |
//!
//! No name outlives the demo, so an interrupted one leaves nothing behind. `PREFIX/data` ends with the last process
//! that has it open, and each of the others with the process that committed it. The producer keeps its names until it
//! has read the first two acknowledgements; the consumer keeps those until `PREFIX/shared` is withdrawn. The metadata
//! `run` distinguishes the names of a run from those of a run that is just ending.
//!
//! Without a role, `partywall demo` starts the roles as child processes under a prefix of its own, `demo/PID`, relays
//! what they print, and kills the producer (SIGKILL). A producer in its own terminal is not killed, and there the demo
//! ends after the second round. With `--json` each step is one line, an object with
//!
//! - `role`: `demo`, `producer`, `consumer` or `observer`;
//! - `step`: `connect`, `device`, `allocate`, `write`, `commit`, `wait`, `open`, `verify`, `verify-copy`, `double`,
//!   `acknowledge`, `kill`, `read-on`, `release`, `memory`, and finally `passed`;
//! - `micros`: how long the step took, if that is meaningful;
//! - the facts of the step as fields of their own (`name`, `version`, `requested_bytes`, `fds`, …).
//!
//! A failure is a line with `error`, as for every command.
//!
//! Hidden flags for tests: `--corrupt INDEX` flips a bit of one element before the commit, `--crash-at POINT` makes the
//! producer kill itself at a point.

mod consumer;
mod narrator;
mod observer;
mod pattern;
mod producer;
mod session;
mod supervisor;

use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use partywall::{DType, DeviceChoice, Error, Place, cuda::Driver, error::DeviceFault, gpu};
use rustix::process::Signal;
use serde_json::json;

use self::{
    narrator::Narrator,
    session::{Names, Session},
    supervisor::DemoSupervisor,
};
use crate::text::grouped;

use crate::{Context, device, failure::Failure, simulation};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    role: Option<DemoRole>,
}

#[derive(Debug, Clone, Args)]
struct Options {
    /// Use two GPUs that are simulated in software, and the domain `simulated`
    #[arg(long, global = true)]
    simulated: bool,
    /// Where the memory is: auto, host, cuda, cuda:N or a GPU's UUID
    #[arg(long, global = true, value_name = "DEVICE", default_value = "auto")]
    device: DeviceChoice,
    /// Seconds that each wait for the other process may take
    #[arg(long, global = true, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    timeout: Duration,
    /// The prefix of the names [default: demo/PID, and demo for a single role]
    #[arg(long, global = true, value_name = "PREFIX")]
    name: Option<String>,
    #[arg(long, global = true, hide = true, value_name = "INDEX", value_parser = clap::value_parser!(u64).range(..pattern::ELEMENTS))]
    corrupt: Option<u64>,
    #[arg(long, global = true, hide = true, value_name = "POINT")]
    crash_at: Option<CrashPoint>,
}

#[derive(Debug, Clone, Copy, Subcommand)]
enum DemoRole {
    /// Allocate, write and commit the array; then check the consumer's changes
    Producer,
    /// Open the array by name and check it; then double it in place
    Consumer,
    /// Open the array by name after the death of its producer.
    #[command(hide = true)]
    Observer,
}

/// The points at which the producer can kill itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum CrashPoint {
    /// After the commit of the frozen array.
    Committed,
    /// After its acknowledgement, before the commit of the mutable array.
    Acknowledged,
    /// After the commit of the mutable array.
    Shared,
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let Arguments { options, role } = arguments;
    if options.simulated {
        simulation::enter(context)?;
    }
    match role {
        None => both(context, options),
        Some(DemoRole::Producer) => {
            let session = Session::start(context, options, "producer", place(context, options.device)?)?;
            producer::run(&session, options.corrupt, options.crash_at)
        }
        Some(DemoRole::Consumer) => {
            let session = Session::start(context, options, "consumer", place(context, options.device)?)?;
            consumer::run(&session, options.device)
        }
        Some(DemoRole::Observer) => {
            let session = Session::start(context, options, "observer", place(context, options.device)?)?;
            observer::run(&session, options.device)
        }
    }
}

/// Runs the roles as child processes, and kills the producer.
fn both(context: &Context, options: &Options) -> Result<(), Failure> {
    let output = context.output();
    let place = place(context, options.device)?;
    let device = match (options.device, place.gpu()) {
        (_, None) => DeviceChoice::Host,
        // `auto` means the first GPU in every process with this environment.
        (DeviceChoice::Auto, Some(_)) => DeviceChoice::Cuda(0),
        (device, Some(_)) => device,
    };
    let prefix = options.name.clone().unwrap_or_else(|| format!("demo/{}", std::process::id()));
    let memory = match place.gpu() {
        None => "host memory".to_owned(),
        Some(_) if is_simulated() => format!("memory of the SIMULATED GPU {device}"),
        Some(_) => format!("memory of the GPU {device}"),
    };
    output.line(format!("Two processes share an array by name, without copying it, in {memory}."));
    output.line("Then one of them is killed, the other one goes on, and a third one opens the name.\n");

    let narrator = Narrator::of_demo(output);
    let names = Names::under(&prefix);
    let supervisor = DemoSupervisor::new(context, options.timeout);
    let producer = supervisor.spawn("producer", device, &prefix, options)?;
    let consumer = supervisor.spawn("consumer", device, &prefix, options)?;
    let domain = context.options().connect()?;
    if !supervisor.wait_for(&domain.opener(&names.data_held), &producer, &consumer)? {
        // A role that has ended by now has failed: the producer waits to be killed, and the consumer for its death.
        return supervisor.run(producer, consumer).map(drop);
    }
    let pid = producer.kill();
    let text = format!("the producer, process {pid}, with SIGKILL");
    narrator.step("kill", None, &text, json!({ "pid": pid, "signal": Signal::KILL.as_raw() }));
    let killed = domain.create(&names.producer_killed, Place::Host).tensor("pid", DType::U32, &[1]);
    let killed = killed.if_absent(true).allocate()?.commit()?;
    let observer = supervisor.spawn("observer", device, &prefix, options)?;
    let took = supervisor.run(consumer, observer)?;
    drop(killed);

    let command = command_line(context);
    output.line("\nWithout the kill, in two terminals and in either order:");
    for role in ["producer", "consumer"] {
        output.line(format!("  {command} demo {role}{} --device {device}", simulation::flag()));
    }
    output.line("");
    let text = format!(
        "demo passed: {} integers in {memory}, shared without a copy. Their producer was killed; one process read on, and \
         another one opened the name, in {:.2} s",
        grouped(pattern::ELEMENTS),
        took.as_secs_f64()
    );
    let simulated = place != Place::Host && is_simulated();
    let fields = json!({ "device": device.to_string(), "simulated": simulated, "elements": pattern::ELEMENTS });
    narrator.ending("passed", took, &text, fields);
    Ok(())
}

/// Returns the command line of this program, with the options that select the same broker.
fn command_line(context: &Context) -> String {
    let mut words =
        vec![std::env::args_os().next().map_or_else(|| "partywall".into(), |it| it.to_string_lossy().into_owned())];
    words.extend(context.arguments().iter().map(|argument| argument.to_string_lossy().into_owned()));
    words.join(" ")
}

/// Returns the place that a choice means. Prints a remark if `auto` is not a GPU.
fn place(context: &Context, device: DeviceChoice) -> Result<Place, Failure> {
    device::require_unpinned(device)?;
    let (place, why) = gpu::resolve(device).map_err(|error| match error {
        Error::DeviceFault(DeviceFault::NoDevice { .. }) => {
            let advice = format!("{}; {SIMULATED}", error.advice());
            Failure::from(error).with_advice(advice)
        }
        error => error.into(),
    })?;
    if let Some(why) = why {
        context.output().remark(format!("no GPU is usable, so the demo uses host memory ({why}); {SIMULATED}"));
    }
    Ok(place)
}

/// Returns whether the driver of this process is simulated.
fn is_simulated() -> bool {
    Driver::load().is_ok_and(Driver::is_simulated)
}

/// The advice for a machine without a GPU.
const SIMULATED: &str = "`partywall demo --simulated` shows it on a simulated GPU";

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "use a number of seconds".to_owned())?;
    if (0.001..=1e6).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err("use 0.001 to 1000000 seconds".into())
    }
}
