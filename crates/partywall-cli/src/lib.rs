//! The program `partywall`, and what the program `partywall-lab` has in common with it. Each command is a file of
//! `commands`; the library `partywall` shares the memory.
//!
//! A program calls [`main`]. `partywall` has nothing to add; `partywall-lab` is the same program with a [`Lab`], which
//! holds what nobody needs who only shares memory. `partywall` starts it for that, as [`lab`] describes. In the same way
//! `partywall-fetch` is the program that puts what a URL names: [`fetch`]; and `partywall-bridge` the one that knows
//! other hosts: [`bridge`].
//!
//! This is no library for others: nothing here is stable.

pub mod bridge;
mod columns;
mod commands;
mod describe;
pub mod device;
mod failure;
pub mod fetch;
pub mod lab;
mod output;
pub mod progress;
mod repeat;
mod signals;
pub mod simulation;
mod snapshot;
mod table;
pub mod text;

use std::{path::PathBuf, process::ExitCode, sync::Arc};

use clap::{
    Arg, ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand,
    error::{ContextKind, ContextValue},
};
use partywall::{Domain, DomainOptions, WhenSome};
use rustix::process::RawPid;

pub use crate::{commands::put::committed, failure::Failure, lab::Lab, output::Output, signals::cancel_flag};

/// Share GPU memory between processes by name, across each other's deaths.
#[derive(Debug, Parser)]
#[command(name = "partywall", bin_name = "partywall", version, propagate_version = true, after_help = failure::exit_codes_help())]
struct Cli {
    #[command(flatten)]
    context: Context,
    #[command(subcommand)]
    command: Command,
}

/// The options and the connection that every command has.
#[derive(Debug, Clone, Args)]
pub struct Context {
    /// The domain [default: $PARTYWALL_DOMAIN, else `default`]
    #[arg(long, global = true, value_name = "NAME", help_heading = GLOBAL)]
    pub domain: Option<String>,
    /// The broker's socket [default: $PARTYWALL_SOCKET, else derived from the domain]
    #[arg(long, global = true, value_name = "PATH", help_heading = GLOBAL)]
    pub socket: Option<PathBuf>,
    /// Print JSON on standard output, errors too
    #[arg(long, global = true, help_heading = GLOBAL)]
    json: bool,
    /// Print no progress and no notes on standard error; errors are still printed
    #[arg(short, long, global = true, help_heading = GLOBAL)]
    quiet: bool,
    /// End with the process of this id, which has started this one
    #[arg(long, global = true, value_name = "PID", hide = true)]
    with_parent: Option<RawPid>,
}

/// The heading in each `--help` of the options that every command has.
const GLOBAL: &str = "Global options";

impl Context {
    /// Returns the connection options. Only commands that create something start a broker.
    pub fn options(&self) -> DomainOptions {
        let options = Domain::options().when_some(self.domain.as_ref(), DomainOptions::domain);
        options.when_some(self.socket.as_ref(), DomainOptions::socket)
    }

    /// Returns the arguments with which a child process uses the same broker.
    pub(crate) fn arguments(&self) -> Vec<std::ffi::OsString> {
        let mut arguments = Vec::new();
        if let Some(domain) = &self.domain {
            arguments.extend(["--domain".into(), domain.into()]);
        }
        if let Some(socket) = &self.socket {
            arguments.extend(["--socket".into(), socket.into()]);
        }
        if self.quiet {
            arguments.push("--quiet".into());
        }
        arguments
    }

    /// Returns the output to which the command prints.
    #[must_use]
    pub fn output(&self) -> Output {
        Output::new(self.json, self.quiet)
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show that sharing works: two processes share an array
    Demo(commands::demo::Arguments),
    /// Run the broker
    Serve(commands::serve::Arguments),
    /// Show the broker, its limits and what it holds
    Status,
    /// Stop the broker
    Stop(commands::stop::Arguments),
    /// Put a file, a folder of shards, a URL or standard input under a name
    Put(commands::put::Arguments),
    /// Write a segment or one of its tensors to a file
    Get(commands::get::Arguments),
    /// Copy a segment to another place, under another name
    Cp(commands::cp::Arguments),
    /// List names
    Ls(commands::ls::Arguments),
    /// Show everything about a name
    Show(commands::show::Arguments),
    /// Remove names, or free what dead processes still hold
    Rm(commands::rm::Arguments),
    /// List the processes that share memory and what they hold
    Ps(commands::ps::Arguments),
    /// Print each change of a name as it happens
    Watch(commands::watch::Arguments),
    /// Take away a process's names and access, and kill it on request
    Evict(commands::evict::Arguments),
    /// End all waits for a timeline whose writer hangs
    Abandon(commands::abandon::Arguments),
    /// Show, measure, publish, record and play the samples of a topic
    Topic(commands::topic::Arguments),
    /// List, retry and purge the tasks of a queue
    Queue(commands::queue::Arguments),
    /// Watch members, names, topics and queues live, and evict processes
    Top(commands::top::Arguments),
    /// Print metrics for Prometheus, or answer its requests
    Metrics(commands::metrics::Arguments),
    /// Run NVIDIA's MPS daemon for this domain, so that kernels of several processes run at the same time
    Mps(commands::mps::Arguments),
    /// Run a command in this domain, under MPS on request
    Run(commands::run::Arguments),
    /// Write a trace of samples, tasks and timelines, across processes, for ui.perfetto.dev
    Trace(commands::trace::Arguments),
    /// Print the broker's log
    Logs(commands::logs::Arguments),
    /// Print what an error means and how to fix it, as its last line names it
    Explain(commands::explain::Arguments),
    /// Test what works on this machine, and say how to fix the rest
    Doctor(commands::doctor::Arguments),
    /// Measure what sharing costs on this machine, beside the same without sharing
    Bench,
    /// Run experiments that show how the driver shares memory and how it fails
    Lab,
    /// Share names with the bridges of other hosts
    Bridge,
    /// List the hosts that this host's bridge knows
    Hosts,
    /// Copy a segment of another host, under a name here
    Pull,
    /// Print a script that completes commands and options in a shell
    Completions(commands::completions::Arguments),
    /// Print the manual page, or write the pages of all commands
    Man(commands::man::Arguments),
}

/// Runs the command line of this process. `lab` is what the program contains beside `partywall`.
#[must_use]
pub fn main(lab: Option<&'static Lab>) -> ExitCode {
    lab::set(lab);
    // `partywall-lab` has no network, and would start these programs again.
    if fetch::contained().is_none() && bridge::contained().is_none() {
        lab::take_over_simulation();
    }
    let (Cli { context, command }, matches) = match parse() {
        Ok(parsed) => parsed,
        Err(error) => return usage(&without_hidden(error)),
    };
    // Each name takes a file descriptor. Nothing in this program uses `select`, which stops at 1,024. The doctor
    // reports the limit that other programs have, and `run` becomes another program.
    if !matches!(command, Command::Doctor(_) | Command::Run(_)) {
        partywall_os::process::raise_fd_limit();
    }
    // Without a handler, SIGXFSZ ends the process at the file size limit without a reason. With a handler, the write
    // fails and is reported. A handler does not reach the programs that this one starts, as an ignored signal would.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    let started = context.with_parent.map_or(Ok(()), signals::end_with);
    let result = started.and_then(|()| match command {
        Command::Demo(arguments) => commands::demo::run(&context, &arguments),
        Command::Serve(arguments) => commands::serve::run(&context, &arguments),
        Command::Status => commands::status::run(&context),
        Command::Stop(arguments) => commands::stop::run(&context, &arguments),
        Command::Cp(arguments) => commands::cp::run(&context, &arguments),
        Command::Put(arguments) => commands::put::run(&context, &arguments),
        Command::Get(arguments) => commands::get::run(&context, &arguments),
        Command::Ls(arguments) => commands::ls::run(&context, &arguments),
        Command::Show(arguments) => commands::show::run(&context, &arguments),
        Command::Rm(arguments) => commands::rm::run(&context, &arguments),
        Command::Ps(arguments) => commands::ps::run(&context, &arguments),
        Command::Watch(arguments) => commands::watch::run(&context, &arguments),
        Command::Evict(arguments) => commands::evict::run(&context, &arguments),
        Command::Abandon(arguments) => commands::abandon::run(&context, &arguments),
        Command::Topic(arguments) => commands::topic::run(&context, &arguments),
        Command::Queue(arguments) => commands::queue::run(&context, &arguments),
        Command::Top(arguments) => commands::top::run(&context, &arguments),
        Command::Metrics(arguments) => commands::metrics::run(&context, &arguments),
        Command::Trace(arguments) => commands::trace::run(&context, &arguments),
        Command::Explain(arguments) => commands::explain::run(&context, &arguments),
        Command::Doctor(arguments) => commands::doctor::run(&context, &arguments),
        Command::Bench => lab::run(&context, "bench", &matches, &lab::LAB_PROGRAM),
        Command::Lab => lab::run(&context, "lab", &matches, &lab::LAB_PROGRAM),
        Command::Bridge => lab::run(&context, "bridge", &matches, &bridge::BRIDGE_PROGRAM),
        Command::Hosts => lab::run(&context, "hosts", &matches, &bridge::BRIDGE_PROGRAM),
        Command::Pull => lab::run(&context, "pull", &matches, &bridge::BRIDGE_PROGRAM),
        Command::Mps(arguments) => commands::mps::run(&context, &arguments),
        Command::Run(arguments) => commands::run::run(&context, &arguments),
        Command::Logs(arguments) => commands::logs::run(&context, &arguments),
        Command::Completions(arguments) => commands::completions::run(&context, &arguments),
        Command::Man(arguments) => commands::man::run(&context, &arguments),
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            let code = failure.report(&context);
            // A command that was interrupted has undone its work by now.
            signals::end_by_received();
            code
        }
    }
}

/// Reads the command line of this process. `help COMMAND` is `COMMAND --help`, because the `help` of clap knows no
/// command of another program.
fn parse() -> Result<(Cli, ArgMatches), clap::Error> {
    let words = Arg::new("COMMAND").num_args(0..).help("Print help for the subcommand(s)");
    let help = clap::Command::new("help").about("Print this message or the help of the given subcommand(s)").arg(words);
    let root = command().disable_help_subcommand(true).subcommand(help);
    let matches = root.clone().try_get_matches()?;
    let Some(asked) = matches.subcommand_matches("help") else {
        return Ok((Cli::from_arg_matches(&matches)?, matches));
    };
    let words = asked.get_many::<String>("COMMAND").unwrap_or_default().map(String::as_str).collect();
    let arguments = asking_for_help(&root, words);
    let context = Context::from_arg_matches(&matches)?;
    let matches = root.try_get_matches_from(arguments)?;
    Ok((Cli { context, ..Cli::from_arg_matches(&matches)? }, matches))
}

/// Returns the arguments that print the help of a command: `partywall topic ls --help` for `topic ls`.
fn asking_for_help<'a>(root: &clap::Command, mut words: Vec<&'a str>) -> Vec<&'a str> {
    let mut of = root;
    let mut known = 0;
    while let Some(next) = words.get(known).and_then(|word| of.find_subcommand(word)) {
        of = next;
        known += 1;
    }
    // An unknown subcommand is an error. Any other word, such as one that `run` would execute, comes too late to count.
    words.insert(if of.has_subcommands() { words.len() } else { known }, "--help");
    words.insert(0, "partywall");
    words
}

/// Returns the definition of the whole command line.
fn command() -> clap::Command {
    take_negative_numbers(lab::complete(Cli::command()))
}

/// Lets every option take a value such as `-1`, so that the option's own parser can name the accepted numbers. By
/// default clap reads `-1` as an unknown option.
fn take_negative_numbers(command: clap::Command) -> clap::Command {
    let takes_value = |arg: &Arg| arg.get_long().is_some() && arg.get_action().takes_values();
    let command = command.mut_args(|arg| if takes_value(&arg) { arg.allow_negative_numbers(true) } else { arg });
    command.mut_subcommands(take_negative_numbers)
}

/// Removes suggestions of subcommands that the help does not list.
fn without_hidden(mut error: clap::Error) -> clap::Error {
    let Some(ContextValue::Strings(mut names)) = error.remove(ContextKind::SuggestedSubcommand) else { return error };
    let root = command();
    // The unknown word is no subcommand, so this ends at the command that it was given to.
    let words = std::env::args_os().skip(1);
    let of = words.fold(&root, |command, word| command.find_subcommand(word).unwrap_or(command));
    names.retain(|name| of.find_subcommand(name).is_none_or(|command| !command.is_hide_set()));
    if !names.is_empty() {
        error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(names));
    }
    error
}

/// Prints the help, the version, or the error in the arguments; with `--json` the error is JSON.
fn usage(error: &clap::Error) -> ExitCode {
    if std::env::args_os().len() < 2 {
        // `partywall` without arguments prints the help, which is not an error here.
        Output::new(false, false).line(error.render().to_string().trim_end());
        return ExitCode::SUCCESS;
    }
    // Parsing failed, so `--json` is searched for in the raw arguments.
    let json = std::env::args_os().skip(1).take_while(|argument| argument != "--").any(|argument| argument == "--json");
    if !json || !error.use_stderr() {
        let _ = error.print();
        return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
    }
    let text = error.render().to_string();
    let (message, rest) = text.split_once("\n\n").unwrap_or((&text, ""));
    let message = message.trim_start_matches("error: ").split_whitespace().collect::<Vec<_>>().join(" ");
    let advice = rest.split_whitespace().collect::<Vec<_>>().join(" ");
    let failure = Failure::new(partywall::ErrorKind::Usage, message, advice);
    failure.report(&Context { domain: None, socket: None, json: true, quiet: false, with_parent: None })
}
