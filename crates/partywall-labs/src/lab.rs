//! The runner: plays the roles of a lab, from a static description of them.
//!
//! | command | what the process does |
//! |---|---|
//! | `partywall lab NAME` | starts the first role as a child process, and plays the observer |
//! | `partywall lab NAME FIRST` | waits for the observer in another terminal, and plays the first role |
//! | `partywall lab NAME OBSERVER` | finds the first role in another terminal, and plays the observer |
//! | `partywall lab NAME ROLE --on-standard-input` | plays any other role, as a child of the process that started it |
//!
//! A role that is not the observer begins with its process id and its place; where the lab has a broker, the answer is
//! the broker's socket. From then on the two roles say what the lab wants. The role ends when it hears `End`. The
//! observer tells the steps of all processes in order, and ends the lab with the claims.

use std::{path::PathBuf, sync::Arc};

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use partywall::{DeviceChoice, Domain, ErrorKind, Gpu, Place};

use crate::{
    Context,
    broker::{self, Broker},
    device,
    failure::Failure,
    peer::Peer,
    reporter::Reporter,
    step::{Claim, Step},
};

/// What the runner knows of a lab.
pub(crate) struct Lab {
    /// Its subcommand.
    pub(crate) name: &'static str,
    /// Its line in `partywall lab --help`.
    pub(crate) about: &'static str,
    /// What it shows, in the list of labs and at the beginning of its output.
    pub(crate) title: &'static str,
    /// Whether it runs in host memory, too.
    pub(crate) on_host: bool,
    /// Whether the observer starts a broker that all roles connect to.
    pub(crate) broker: bool,
    /// Adds the lab's own options.
    pub(crate) options: fn(Command) -> Command,
    /// Every role but the observer. The first one is the observer's partner if it can be played in a terminal.
    pub(crate) roles: &'static [Role],
    pub(crate) observer: Role,
    /// What the lab puts to the test.
    pub(crate) claims: &'static [Claim],
}

pub(crate) struct Role {
    pub(crate) name: &'static str,
    /// Its line in `--help`, if a person can play it in a terminal.
    pub(crate) about: Option<&'static str>,
    /// What a terminal of its own shows at the end of the role.
    pub(crate) farewell: &'static str,
    pub(crate) play: Play,
}

type Play = fn(&mut Session) -> Result<(), Failure>;

/// One process of a lab, playing one role.
pub(crate) struct Session {
    lab: &'static Lab,
    context: Context,
    arguments: ArgMatches,
    reporter: Reporter,
    pub(crate) place: Place,
    gpu: Option<Arc<Gpu>>,
    domain: Option<Domain>,
    broker: Option<Broker>,
    /// The observer, unless this process plays it: the process that started this one, or another terminal.
    parent: Option<Peer>,
    /// The first role, if this process plays the observer.
    partner: Option<Peer>,
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
struct Places {
    /// Where the memory is: auto, host, cuda, cuda:N, or a GPU's UUID; auto is the first GPU, or host memory where there is
    /// none
    #[arg(long, global = true, value_name = "DEVICE", default_value_t)]
    device: DeviceChoice,
}

/// The option of child processes.
#[derive(Debug, Args)]
struct Child {
    /// The other role is the process that started this one, which tells our steps.
    #[arg(long, global = true, hide = true)]
    on_standard_input: bool,
}

impl Role {
    /// A role that a person can play in a terminal of its own, which ends with a remark there.
    pub(crate) const fn new(name: &'static str, about: &'static str, farewell: &'static str, play: Play) -> Self {
        Self { name, about: Some(about), farewell, play }
    }

    /// A role that only another one starts.
    pub(crate) const fn hidden(name: &'static str, play: Play) -> Self {
        Self { name, about: None, farewell: "", play }
    }
}

impl Lab {
    /// Returns the names of the roles, as the list of labs shows them.
    pub(crate) fn listed(&self) -> Vec<&'static str> {
        let shown = |role: &&Role| role.about.is_some() || self.partner().is_none();
        self.roles.iter().filter(shown).chain([&self.observer]).map(|role| role.name).collect()
    }

    /// Returns the lab's subcommand.
    pub(crate) fn command(&self) -> Command {
        let command = Command::new(self.name);
        let command = if self.on_host { Places::augment_args(command) } else { Gpus::augment_args(command) };
        // The options set the text of their own documentation.
        let command = (self.options)(Child::augment_args(command)).about(self.about);
        if self.partner().is_none() {
            // Nobody plays its roles in a terminal: it has no subcommands.
            let names: Vec<_> = self.roles.iter().map(|role| role.name).collect();
            return command.arg(Arg::new(ROLE).value_parser(names).hide(true));
        }
        command.subcommands(self.roles.iter().chain([&self.observer]).map(|role| {
            let command = Command::new(role.name).hide(role.about.is_none());
            role.about.iter().fold(command, |command, about| command.about(*about))
        }))
    }

    /// Runs the role that the arguments name, or the whole lab.
    pub(crate) fn run(&'static self, context: &Context, arguments: &ArgMatches) -> Result<(), Failure> {
        let argument = || arguments.try_get_one::<String>(ROLE).ok().flatten().map(String::as_str);
        let name = arguments.subcommand_name().or_else(argument);
        let role = self.roles.iter().find(|role| Some(role.name) == name);
        let reporter = Reporter::new(context, self, role.unwrap_or(&self.observer).name, name.is_none());
        let own = if self.on_host { None } else { read::<Gpus>(arguments)?.device };
        let partner = match (name, role, self.partner()) {
            (Some(_), None, Some(partner)) => Some(Peer::find(context, self.name, partner.name, &reporter)?),
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
            partner,
        };
        match role {
            Some(role) => session.play(role),
            None => session.observe(),
        }
    }

    /// Returns the role that a person can play in another terminal than the observer.
    fn partner(&self) -> Option<&Role> {
        self.roles.first().filter(|role| role.about.is_some())
    }

    /// Resolves the place of the lab, and opens its GPU: a machine without one is told so once, and by this process.
    fn place(&self, context: &Context, chosen: DeviceChoice) -> Result<(Place, Option<Arc<Gpu>>), Failure> {
        if self.on_host {
            return Ok((context.console.place(chosen)?, None));
        }
        let gpu = device::open(chosen)?;
        Ok((Place::Gpu(gpu.uuid()), Some(Arc::new(gpu))))
    }
}

impl Session {
    fn observe(&mut self) -> Result<(), Failure> {
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
        (self.lab.observer.play)(self)?;
        self.reporter.conclude(self.lab.claims);
        Ok(())
    }

    fn play(&mut self, role: &Role) -> Result<(), Failure> {
        if self.parent.is_none() {
            self.reporter.header(self.place, self.gpu.as_deref())?;
            let observer = self.lab.observer.name;
            self.parent = Some(Peer::wait(&self.context, self.lab.name, observer, &self.reporter)?);
        }
        self.play_for_parent(role).map_err(|failure| self.parent().give_up(failure))?;
        self.reporter.remark(role.farewell);
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
    pub(crate) fn options<T: FromArgMatches>(&self) -> Result<T, Failure> {
        read(&self.arguments)
    }

    /// Returns the GPU of a lab that runs on nothing else.
    pub(crate) fn gpu(&self) -> Arc<Gpu> {
        self.gpu.clone().expect("only labs that do not run in host memory ask for it")
    }

    /// Returns the connection to the lab's broker.
    pub(crate) fn domain(&self) -> &Domain {
        self.domain.as_ref().expect("only labs with a broker ask for it")
    }

    /// Returns the broker that the observer has started.
    pub(crate) fn broker(&mut self) -> &mut Broker {
        self.broker.as_mut().expect("only observers of labs with a broker ask for it")
    }

    /// Returns what tells the steps of this process, and keeps those of all.
    pub(crate) fn reporter(&self) -> &Reporter {
        &self.reporter
    }

    /// Returns the observer's partner, once.
    pub(crate) fn partner(&mut self) -> Peer {
        self.partner.take().expect("only observers with a partner ask for it, once")
    }

    /// Returns the observer, which started this process or has a terminal of its own.
    pub(crate) fn parent(&mut self) -> &mut Peer {
        self.parent.as_mut().expect("only roles that are not the observer ask for it")
    }

    /// Starts another role as a child process.
    pub(crate) fn spawn(&self, role: &'static str) -> Result<Peer, Failure> {
        self.spawn_with(role, &[])
    }

    /// Starts another role with something added to its environment.
    pub(crate) fn spawn_with(&self, role: &'static str, environment: &[(&str, &str)]) -> Result<Peer, Failure> {
        let peer = Peer::spawn(self.lab.name, role, self.place, environment, &self.reporter)?;
        self.broker.as_ref().map_or(Ok(()), |broker| peer.say(broker.socket()))?;
        Ok(peer)
    }

    /// Tells a step here, and to the observer.
    pub(crate) fn tell(&self, mut step: Step) -> Result<(), Failure> {
        step.role = self.reporter.role().into();
        self.parent.as_ref().map_or(Ok(()), |parent| parent.send_step(&step))?;
        self.reporter.tell(step);
        Ok(())
    }
}

fn read<T: FromArgMatches>(arguments: &ArgMatches) -> Result<T, Failure> {
    T::from_arg_matches(arguments).map_err(|error| Failure::new(ErrorKind::Usage, error.to_string(), "see --help"))
}

/// The argument that names the role where roles are no subcommands.
const ROLE: &str = "role";
