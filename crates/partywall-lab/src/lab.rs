//! The runner: plays the roles of a lab from their static description.
//!
//! | command | what the process does |
//! |---|---|
//! | `partywall lab NAME` | starts the first role as a child process, and plays the observer |
//! | `partywall lab NAME FIRST` | waits for the observer in another terminal, and plays the first role |
//! | `partywall lab NAME OBSERVER` | finds the first role in another terminal, and plays the observer |
//! | `partywall lab NAME ROLE --on-standard-input` | plays any other role, as a child of the process that started it |
//!
//! Every role but the observer begins by sending its process id and its place. If the lab has a broker, the observer
//! answers with the broker's socket. The messages that follow belong to the lab. The role ends when it receives `End`.
//! The observer reports the steps of all processes in order and ends the lab with its beliefs.

use std::{path::PathBuf, sync::Arc, thread};

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches, parser::ValueSource};
use partywall::{DeviceChoice, Domain, ErrorKind, Gpu, Place, WhenSome};
use partywall_cli::{
    device::{place, require_unpinned},
    lab::{Program, with_any_arguments},
};
use partywall_measure::capital;
use rustix::process::{Signal, set_parent_process_death_signal};
use serde::Serialize;

use crate::{
    Context,
    broker::{self, Broker},
    clock::TIMEOUT,
    device,
    failure::{Doing, Failure, unexpected},
    forked::{self, Forked},
    labs,
    peer::{Peer, limit_this_process},
    reporter::Reporter,
    step::{Belief, Step},
    trace::TraceFile,
};

/// The description of a lab.
#[derive(Debug)]
pub struct Lab {
    /// Its subcommand.
    pub name: &'static str,
    /// What it shows, in the list of labs and at the beginning of its output.
    pub title: &'static str,
    /// Its line in `partywall lab --help`, if that is not its title.
    pub about: Option<&'static str>,
    /// True if it also runs in host memory.
    pub on_host: bool,
    /// True if it also runs in pinned host memory.
    pub on_pinned: bool,
    /// True if the observer starts a broker that all roles connect to.
    pub broker: bool,
    /// True if its roles hand each other what a trace shows: samples, tasks, or values of timelines.
    pub traced: bool,
    /// The options with which the tour starts it, if it kills processes on request only and they may be killed.
    pub kills_by: &'static [&'static str],
    /// Adds the lab's own options.
    pub options: fn(Command) -> Command,
    /// Returns whether standard output is for what the lab makes, so that its report goes to standard error.
    pub takes_standard_output: fn(&ArgMatches) -> bool,
    /// Every role but the observer. The first one is the observer's partner if it can be started in a terminal.
    pub roles: &'static [Role],
    /// The role that reports the steps of all, and concludes.
    pub observer: Role,
    /// The remark at the end of a role in its own terminal, if the observer is not simply done.
    pub farewell: Option<&'static str>,
    /// The beliefs that the lab tests.
    pub beliefs: &'static [Belief],
    /// The program that contains the lab, unless it is this one.
    pub elsewhere: Option<&'static Program>,
}

/// A part of a lab that a process plays.
#[derive(Debug)]
pub struct Role {
    /// Its name, with which the process is started.
    pub name: &'static str,
    /// Its line in `--help`, if a user can start it in a terminal.
    pub about: Option<&'static str>,
    /// What a child does that this role forks before it opens CUDA.
    child: Option<forked::Child>,
    /// What the process does.
    pub play: Play,
}

/// Plays a role.
pub type Play = fn(&mut Session) -> Result<(), Failure>;

/// One process of a lab, playing one role.
pub struct Session {
    lab: &'static Lab,
    context: Context,
    arguments: ArgMatches,
    reporter: Reporter,
    /// Where the memory of the lab is.
    pub place: Place,
    gpu: Option<Arc<Gpu>>,
    domain: Option<Domain>,
    broker: Option<Broker>,
    /// The observer, unless this process plays it: the parent process, or a process in another terminal.
    parent: Option<Peer>,
    /// The first role, if this process plays the observer.
    partner: Option<Peer>,
    /// True if the first role has a terminal of its own, so that others may have one, too.
    in_terminals: bool,
    /// The child that this process forked before it opened CUDA.
    forked: Option<Forked>,
}

/// The options that every lab has.
#[derive(Debug, Args)]
struct Gpus {
    /// The GPU: its number here, or its UUID [default: the first; for the second role of two terminals, that of the
    /// first role]
    #[arg(long, global = true, value_name = "N|UUID", value_parser = device::parse_gpu)]
    device: Option<DeviceChoice>,
}

/// The options of labs that run in host memory, too.
#[derive(Debug, Args)]
pub(crate) struct Places {
    /// Where the memory is: auto, host, cuda, cuda:N, or a GPU's UUID; auto is the first GPU, or host memory without a
    /// GPU
    #[arg(long, global = true, value_name = "DEVICE", default_value_t)]
    pub(crate) device: DeviceChoice,
}

/// The option of labs that record a trace. Others refuse it, and do not show it.
#[derive(Debug, Args)]
struct Traced {
    /// Write what the processes hand to each other into this file, for ui.perfetto.dev
    #[arg(long, global = true, value_name = "FILE")]
    trace: Option<PathBuf>,
}

/// The option of child processes.
#[derive(Debug, Args)]
struct Child {
    /// The other role is the process that started this one, and reports its steps.
    #[arg(long, global = true, hide = true)]
    on_standard_input: bool,
    /// The tour started this process, which must not outlive it.
    #[arg(long, hide = true)]
    in_tour: bool,
}

impl Role {
    /// Returns a role that a user can start in its own terminal.
    pub const fn new(name: &'static str, about: &'static str, play: Play) -> Self {
        Self { about: Some(about), ..Self::hidden(name, play) }
    }

    /// Returns a role that only another role starts.
    pub const fn hidden(name: &'static str, play: Play) -> Self {
        Self { name, about: None, child: None, play }
    }

    /// Returns a role that only a lab without other roles has: its process forks `child` before it opens CUDA.
    pub(crate) const fn forking(name: &'static str, child: forked::Child, play: Play) -> Self {
        Self { child: Some(child), ..Self::hidden(name, play) }
    }
}

impl Lab {
    /// A lab without name, beliefs and roles, for GPUs alone. Each lab says how it differs.
    pub const DEFAULT: Self = Self {
        name: "",
        title: "",
        about: None,
        on_host: false,
        on_pinned: false,
        broker: false,
        traced: false,
        kills_by: &[],
        options: |command| command,
        takes_standard_output: |_| false,
        roles: &[],
        observer: Role::hidden("observer", |_| Ok(())),
        farewell: None,
        beliefs: &[],
        elsewhere: None,
    };

    /// Returns the names of the roles, as the list of labs shows them.
    pub(crate) fn listed(&self) -> Vec<&'static str> {
        let shown = |role: &&Role| role.about.is_some() || self.partner().is_none();
        self.roles.iter().filter(shown).chain([&self.observer]).map(|role| role.name).collect()
    }

    /// Returns the lab's subcommand.
    pub(crate) fn command(&self) -> Command {
        let about = self.about.map_or_else(|| capital(self.title), str::to_owned);
        let command = Command::new(self.name);
        if self.elsewhere.is_some() {
            return with_any_arguments(command).about(about);
        }
        let command = if self.on_host { Places::augment_args(command) } else { Gpus::augment_args(command) };
        let command =
            if self.on_pinned { command.mut_arg("device", |device| device.help(WITH_PINNED)) } else { command };
        let command = Traced::augment_args(command).mut_arg("trace", |trace| trace.hide(!self.traced));
        // Adding the options replaces the description, so it is set last.
        let command = (self.options)(Child::augment_args(command)).about(about);
        if self.partner().is_none() {
            // No role can be started in a terminal, so there are no subcommands.
            let names: Vec<_> = self.roles.iter().map(|role| role.name).collect();
            return command.arg(Arg::new(ROLE).value_parser(names).hide(true));
        }
        command.subcommands(self.roles.iter().chain([&self.observer]).map(|role| {
            let command = Command::new(role.name).hide(role.about.is_none());
            command.when_some(role.about, Command::about)
        }))
    }

    /// Runs the role that the arguments name, or the whole lab.
    pub(crate) fn run(&'static self, context: &Context, arguments: &ArgMatches) -> Result<(), Failure> {
        if let Some(program) = self.elsewhere {
            return Err(program.enter(&format!("partywall lab {}", self.name)));
        }
        let argument = || arguments.try_get_one::<String>(ROLE).ok().flatten().map(String::as_str);
        let name = arguments.subcommand_name().or_else(argument);
        let role = self.roles.iter().find(|role| Some(role.name) == name);
        if read::<Child>(arguments)?.in_tour {
            set_parent_process_death_signal(Some(Signal::KILL)).doing("asking for a signal")?;
        }
        let forked = role.unwrap_or(&self.observer).child.map(Forked::start).transpose()?;
        role.map_or(Ok(()), |role| self.refuse_options(arguments, role))?;
        let trace = self.trace(arguments, role)?;
        let context =
            &if (self.takes_standard_output)(arguments) { context.on_standard_error() } else { context.clone() };
        let reporter = Reporter::new(context, self, role.unwrap_or(&self.observer).name, name.is_none());
        let own = if self.on_host { None } else { read::<Gpus>(arguments)?.device };
        let partner = match (name, role, self.partner()) {
            (Some(_), None, Some(partner)) => Some(Peer::find(context, self, partner.name, &reporter)?),
            _ => None,
        };
        let theirs = partner.as_ref().map(|partner| partner.place);
        let chosen = match own.or(theirs) {
            None if self.on_host => read::<Places>(arguments)?.device,
            None => DeviceChoice::Cuda(0),
            Some(chosen) => chosen,
        };
        let is_child = read::<Child>(arguments)?.on_standard_input || role.is_some_and(|role| role.about.is_none());
        let parent = is_child.then(|| Peer::on_standard_input(self.observer.name, &reporter)).transpose()?;
        if !is_child {
            limit_this_process();
        }
        let (place, gpu) = self.place(context, chosen).map_err(|failure| match &parent {
            Some(parent) => parent.give_up(failure),
            None => failure,
        })?;
        let mut session = Session {
            lab: self,
            context: context.clone(),
            arguments: arguments.clone(),
            reporter,
            place,
            gpu,
            domain: None,
            broker: None,
            parent,
            in_terminals: partner.is_some(),
            partner,
            forked,
        };
        match role {
            Some(role) => session.play(role),
            None => session.observe(trace),
        }
    }

    /// Creates the file of `--trace`.
    fn trace(&self, arguments: &ArgMatches, role: Option<&Role>) -> Result<Option<TraceFile>, Failure> {
        let Some(path) = read::<Traced>(arguments)?.trace else { return Ok(None) };
        if !self.traced {
            let why = format!("the lab {} records no trace: a trace shows samples, tasks and timelines", self.name);
            let traced: Vec<_> = labs().filter(|lab| lab.traced).map(|lab| lab.name).collect();
            let advice = format!("leave --trace out; it is an option of {}", traced.join(", "));
            return Err(Failure::new(ErrorKind::Usage, why, advice));
        }
        if let Some(role) = role {
            return Err(self.not_of(role, "trace", &format!(" {}", path.display())));
        }
        TraceFile::create(path).map(Some)
    }

    /// Refuses the lab's own options for a role that does not use them. They are the observer's.
    fn refuse_options(&self, arguments: &ArgMatches, role: &Role) -> Result<(), Failure> {
        let own = (self.options)(Command::new(self.name));
        let arguments = arguments.subcommand().map_or(arguments, |(_, arguments)| arguments);
        let is_given =
            |option: &&Arg| arguments.value_source(option.get_id().as_str()) == Some(ValueSource::CommandLine);
        let Some(option) = own.get_arguments().find(is_given) else { return Ok(()) };
        let value = if option.get_action().takes_values() { " …" } else { "" };
        Err(self.not_of(role, option.get_long().unwrap_or_default(), value))
    }

    /// Returns the refusal of an option of the observer that was given to another role.
    fn not_of(&self, role: &Role, option: &str, value: &str) -> Failure {
        let observer = self.observer.name;
        let why = format!("--{option} is an option of the role {observer}, not of {}", role.name);
        let command = format!("partywall lab {} {observer} --{option}{value}", self.name);
        Failure::new(ErrorKind::Usage, why, format!("start the other terminal with `{command}`"))
    }

    /// Returns the name of the directory in which a role waits for the observer.
    pub(crate) fn meeting_point(&self, role: &str) -> String {
        match self.partner() {
            Some(partner) if partner.name != role => format!("{}-{role}", self.name),
            _ => self.name.to_owned(),
        }
    }

    /// Returns the role that a user can start in another terminal than the observer's.
    fn partner(&self) -> Option<&Role> {
        self.roles.first().filter(|role| role.about.is_some())
    }

    /// Resolves the place of the lab and opens its GPU, so that one process reports a missing GPU once.
    fn place(&self, context: &Context, chosen: DeviceChoice) -> Result<(Place, Option<Arc<Gpu>>), Failure> {
        if self.on_host {
            if !self.on_pinned {
                require_unpinned(chosen)?;
            }
            return Ok((place(context.console, chosen)?, None));
        }
        let gpu = device::open(chosen)?;
        Ok((Place::Gpu(gpu.uuid()), Some(Arc::new(gpu))))
    }
}

impl Session {
    fn observe(&mut self, trace: Option<TraceFile>) -> Result<(), Failure> {
        if let (None, Some(partner)) = (&self.partner, self.lab.partner()) {
            self.partner = Some(self.spawn(partner.name)?);
        }
        self.reporter.header(self.place, self.gpu.as_deref())?;
        if self.lab.broker {
            let broker = Broker::start(&self.context, self.lab.name)?;
            self.domain = Some(broker::connect(broker.socket())?);
            self.partner.as_ref().map_or(Ok(()), |partner| partner.say(broker.socket()))?;
            self.broker = Some(broker);
        }
        let tracing = trace.map(|trace| trace.record(self.domain()));
        let played = (self.lab.observer.play)(self);
        // Also of a lab that fails: the trace may show why.
        let traced = tracing.map_or(Ok(()), |tracing| tracing.write(&self.reporter));
        played?;
        self.reporter.conclude(self.lab.beliefs)?;
        traced
    }

    fn play(&mut self, role: &Role) -> Result<(), Failure> {
        if self.parent.is_none() {
            self.reporter.header(self.place, self.gpu.as_deref())?;
            let observer = self.lab.observer.name;
            self.parent = Some(Peer::wait(&self.context, self.lab, role.name, observer, &self.reporter)?);
        }
        self.play_for_parent(role).map_err(|failure| self.parent().give_up(failure))?;
        let done = || format!("The {} is done, and reports which beliefs are refuted.", self.lab.observer.name);
        self.reporter.remark(&self.lab.farewell.map_or_else(done, str::to_owned));
        Ok(())
    }

    fn play_for_parent(&mut self, role: &Role) -> Result<(), Failure> {
        let place = self.place;
        self.parent().introduce(place)?;
        if self.lab.broker {
            let socket: PathBuf = self.parent().hear()?;
            self.domain = Some(broker::connect(&socket)?);
        }
        (role.play)(self)
    }

    /// Returns the lab's own options.
    pub fn options<T: FromArgMatches>(&self) -> Result<T, Failure> {
        read(&self.arguments)
    }

    /// Returns the GPU of a lab that does not run in host memory.
    pub(crate) fn gpu(&self) -> Arc<Gpu> {
        self.gpu.clone().expect("only labs that do not run in host memory use the GPU")
    }

    /// Returns the GPU of a lab that may run in host memory, or `None` there. The domain does not know of it: the death
    /// of a member that uses a GPU under MPS would prove nothing.
    pub fn gpu_if_any(&self) -> Result<Option<Arc<Gpu>>, Failure> {
        Ok(device::that_uses(self.place)?.map(Gpu::open).transpose()?.map(Arc::new))
    }

    /// Returns the connection to the lab's broker.
    pub fn domain(&self) -> &Domain {
        self.domain.as_ref().expect("only labs with a broker use the domain")
    }

    /// Returns the broker that the observer has started.
    pub fn broker(&mut self) -> &mut Broker {
        self.broker.as_mut().expect("only observers of labs with a broker use the broker")
    }

    /// Returns the role that this process plays.
    pub fn role(&self) -> &'static str {
        self.reporter.role()
    }

    /// Returns the reporter, which also stores the steps of the other roles.
    pub(crate) fn reporter(&self) -> &Reporter {
        &self.reporter
    }

    /// Returns the observer's partner, once.
    pub fn partner(&mut self) -> Peer {
        self.partner.take().expect("only observers with a partner take the partner, once")
    }

    /// Returns the child that this process forked before it opened CUDA, once.
    pub(crate) fn forked(&mut self) -> Forked {
        self.forked.take().expect("only roles that fork ask for it, once")
    }

    /// Returns the observer: the parent process, or a process in another terminal.
    pub fn parent(&mut self) -> &mut Peer {
        self.parent.as_mut().expect("only roles that are not the observer have a parent")
    }

    /// Sends the last message of this role, and waits until the observer ends it.
    pub fn finish(&mut self, last: impl Serialize) -> Result<(), Failure> {
        self.parent().say(last)?;
        while self.parent().next::<()>()?.is_some() {}
        Ok(())
    }

    /// Says that this process can be killed now, and waits for that.
    pub(crate) fn await_kill(&mut self, instead: &str) -> Result<(), Failure> {
        self.parent().say(())?;
        thread::sleep(TIMEOUT);
        Err(unexpected(instead))
    }

    /// Returns a role that waits in another terminal, or starts it as a child process. The first role is
    /// [`partner`](Self::partner).
    pub fn enlist(&self, role: &'static str) -> Result<Peer, Failure> {
        let waiting =
            if self.in_terminals { Peer::waiting(&self.context, self.lab, role, &self.reporter)? } else { None };
        let Some(peer) = waiting else { return self.spawn(role) };
        self.introduce_broker(peer)
    }

    /// Starts another role as a child process.
    pub fn spawn(&self, role: &'static str) -> Result<Peer, Failure> {
        self.spawn_on(role, self.place, &[])
    }

    /// Starts another role in a place, with additional environment variables.
    pub(crate) fn spawn_on(
        &self,
        role: &'static str,
        place: Place,
        environment: &[(&str, &str)],
    ) -> Result<Peer, Failure> {
        self.introduce_broker(Peer::spawn(self.lab.name, role, place, environment, &self.reporter)?)
    }

    fn introduce_broker(&self, peer: Peer) -> Result<Peer, Failure> {
        self.broker.as_ref().map_or(Ok(()), |broker| peer.say(broker.socket()))?;
        Ok(peer)
    }

    /// Adds counts to the last line for programs.
    pub fn result(&self, counts: impl Serialize) {
        self.reporter.result(counts);
    }

    /// Reports a step here and to the observer.
    pub fn report(&self, mut step: Step) -> Result<(), Failure> {
        step.role = self.reporter.role().into();
        self.parent.as_ref().map_or(Ok(()), |parent| parent.send_step(&step))?;
        self.reporter.report(step);
        Ok(())
    }
}

pub(crate) fn read<T: FromArgMatches>(arguments: &ArgMatches) -> Result<T, Failure> {
    T::from_arg_matches(arguments).map_err(|error| Failure::new(ErrorKind::Usage, error.to_string(), "see --help"))
}

/// The help of `--device` for labs that run in pinned memory, too.
const WITH_PINNED: &str = "Where the memory is: auto, host, pinned, pinned:N (on NUMA node N), cuda, cuda:N, or a GPU's UUID; \
    auto is the first GPU, or host memory without a GPU";

/// The option with which the tour starts a lab.
pub(crate) const IN_TOUR: &str = "--in-tour";

/// The argument that names the role if the roles are not subcommands.
const ROLE: &str = "role";
