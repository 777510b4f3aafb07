//! `partywall bench`: measures what sharing costs on this machine, by [`crate::bench`].

use std::{
    cell::Cell,
    fs, io,
    path::{Path, PathBuf},
};

use clap::{
    Args, Subcommand,
    builder::{PossibleValue, PossibleValuesParser, TypedValueParser},
};
use partywall::{
    DeviceChoice, ErrorKind,
    files::{Draft, write_file},
};
use partywall_cli::{Context, Failure, Output, progress, simulation};
use partywall_measure::{Measurement, Report, Unit, bytes, capital, figure};
use serde_json::{Value, json};

use crate::bench::{self, Choice, Observer, Options, Outcome, SUBJECTS, Subject};

/// The arguments of the command.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Arguments {
    /// What to measure
    #[arg(value_parser = subjects(), default_value = "all", value_name = "SUBJECT", num_args = 1..)]
    subjects: Vec<Chosen>,
    /// Where the memory is: auto, host, cuda, cuda:N, or a GPU's UUID; auto is the first GPU, or host memory where
    /// there is none
    #[arg(long, value_name = "DEVICE", default_value_t)]
    device: DeviceChoice,
    /// Write report.json, and report.html with plots, into this folder
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Replace the report in the folder of --out, if there is one
    #[arg(long, requires = "out")]
    force: bool,
    /// Write the report after each subject, too, so that an interrupted run leaves what it has measured
    #[arg(long, requires = "out")]
    save_each: bool,
    /// Use small sizes and few samples, to check that the benchmark works
    #[arg(long)]
    quick: bool,
    /// Also measure iceoryx2 beside the subject `topics`. It is built with cargo, or PARTYWALL_ICEORYX2 names it
    #[arg(long)]
    peers: bool,
    /// Exit with 1 if a goal is missed
    #[arg(long)]
    strict: bool,
    /// List all subjects without measuring them
    #[arg(long)]
    list: bool,
    /// Use GPUs that are simulated in software; the numbers describe the simulation, not a GPU
    #[arg(long)]
    simulated: bool,
    #[command(subcommand)]
    compare: Option<Compare>,
}

#[derive(Debug, Subcommand)]
enum Compare {
    /// Show what has changed beyond noise between two reports of one machine
    Compare {
        /// The earlier report
        #[arg(value_name = "A.json")]
        before: PathBuf,
        /// The later report
        #[arg(value_name = "B.json")]
        after: PathBuf,
        /// Compare the reports even if they are of two machines
        #[arg(long)]
        force: bool,
    },
}

/// What was chosen: a subject, or all subjects of a choice.
#[derive(Debug, Clone, Copy)]
enum Chosen {
    One(&'static Subject),
    All(Choice),
}

impl Chosen {
    fn contains(self, subject: &Subject) -> bool {
        match self {
            Self::One(one) => one.name == subject.name,
            Self::All(choice) => choice == subject.choice,
        }
    }
}

/// Returns a parser of a subject or a choice. Help lists the subjects that are measured by default.
fn subjects() -> impl TypedValueParser<Value = Chosen> {
    let subject = |subject: &'static Subject| {
        PossibleValue::new(subject.name).help(subject.about).hide(subject.choice != Choice::All)
    };
    let choices = Choice::EACH.map(|(_, name, about)| PossibleValue::new(name).help(about));
    PossibleValuesParser::new(SUBJECTS.iter().map(subject).chain(choices)).map(|name| {
        let one = SUBJECTS.iter().find(|subject| subject.name == name).map(Chosen::One);
        let choice = Choice::EACH.into_iter().find(|(_, known, _)| *known == name);
        one.unwrap_or(Chosen::All(choice.map_or(Choice::All, |(choice, ..)| choice)))
    })
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    if let Some(Compare::Compare { before, after, force }) = &arguments.compare {
        return compare(context.output(), before, after, *force);
    }
    if arguments.list {
        list(context.output());
        return Ok(());
    }
    if arguments.simulated {
        simulation::enter(context)?;
    }
    let output = context.output();
    if let Some(out) = &arguments.out {
        check(out, arguments.force)?;
    }
    let is_chosen = |subject: &&Subject| arguments.subjects.iter().any(|chosen| chosen.contains(subject));
    let options = Options {
        subjects: SUBJECTS.iter().filter(is_chosen).collect(),
        named: arguments.subjects.iter().all(|chosen| matches!(chosen, Chosen::One(_))),
        device: arguments.device,
        quick: arguments.quick,
        peers: arguments.peers,
    };
    let bar = progress::bar(output, PARTS, "{bar:30} {elapsed} {msg}");
    let saved = Cell::new(arguments.force);
    let save = |report: &Report| -> Result<Option<[PathBuf; 2]>, Failure> {
        // What this run has written, it may replace.
        arguments.out.as_ref().map(|out| write(out, saved.replace(true), report)).transpose()
    };
    let observer = Observer {
        progress: &|what, done| {
            bar.set_message(what.to_owned());
            bar.set_position((done * PARTS as f64) as u64);
        },
        measured: &|report| if arguments.save_each { save(report).map(drop) } else { Ok(()) },
    };
    let measured = bench::run(&context.into(), &options, &observer);
    bar.finish_and_clear();
    let Outcome { report, failed } = measured?;
    if let (Some((_, failure)), true) = (failed.first(), failed.len() == options.subjects.len()) {
        return Err(Failure::new(failure.kind, failure.message.clone(), failure.advice.clone()));
    }
    // Files first: a reader of the tables that closes the pipe (`| head`) ends the program.
    let written = save(&report)?;
    show(output, &report);
    output.value(&serde_json::to_value(&report).unwrap_or_default());
    if let Some([data, page]) = written {
        output.note(format!("The report is {}, with plots in {}.", data.display(), page.display()));
    }
    if !failed.is_empty() {
        let what: Vec<_> = failed.iter().map(|(name, failure)| format!("{name}: {failure}")).collect();
        let what = format!("not all was measured: {}", what.join("; "));
        return Err(Failure::new(ErrorKind::CheckFailed, what, "run the named subjects alone"));
    }
    if arguments.strict && !report.all_met() {
        let missed = report.comparisons.iter().filter(|result| !result.met()).map(|r| r.measured.case.to_string());
        let missed = format!("goals are missed: {}", missed.collect::<Vec<_>>().join("; "));
        return Err(Failure::new(ErrorKind::CheckFailed, missed, "see the report for the medians and the goals"));
    }
    Ok(())
}

fn list(output: Output) {
    let of = |subject: &Subject| Choice::EACH.into_iter().find(|(choice, ..)| *choice == subject.choice);
    let rows = SUBJECTS.iter().map(|subject| {
        let needs = if subject.needs_gpu { "a GPU" } else { "" };
        [subject.name, of(subject).map_or("", |(_, name, _)| name), subject.about, needs].map(str::to_owned).to_vec()
    });
    output.table(&["SUBJECT", "OF", "MEASURES", "NEEDS"], &rows.collect::<Vec<_>>(), &["NEEDS"]);
    let value = |subject: &Subject| {
        let of = of(subject).map(|(_, name, _)| name);
        json!({ "name": subject.name, "of": of, "about": subject.about, "needs_gpu": subject.needs_gpu })
    };
    output.value(&json!({ "subjects": SUBJECTS.iter().map(value).collect::<Vec<Value>>() }));
}

/// Reports an unusable folder before a measurement that takes minutes. Removes again what it makes, so that an
/// interrupted measurement leaves nothing.
fn check(out: &Path, force: bool) -> Result<(), Failure> {
    let is_missing = |folder: &&Path| !folder.as_os_str().is_empty() && !folder.exists();
    let missing: Vec<_> = out.ancestors().take_while(is_missing).collect();
    let made = fs::create_dir_all(out).map_err(unwritable(out)).and_then(|()| {
        let begin = |path: PathBuf| Draft::create(&path, force).map(drop).map_err(unwritable(&path));
        reports(out).into_iter().try_for_each(begin)
    });
    // Another run may use the folders by now, and `a/..` is a folder that was there. Neither is empty, so both stay.
    for folder in missing {
        let _ = fs::remove_dir(folder);
    }
    made
}

/// Returns the paths of the data and of the page in the folder.
fn reports(out: &Path) -> [PathBuf; 2] {
    ["report.json", "report.html"].map(|name| out.join(name))
}

/// Writes the report into the folder. Returns the paths of its data and of its page.
fn write(out: &Path, force: bool, report: &Report) -> Result<[PathBuf; 2], Failure> {
    let [data, page] = reports(out);
    let text = report.page().map_err(|error| Failure::new(ErrorKind::Refused, error.to_string(), WRITING))?;
    fs::create_dir_all(out).map_err(unwritable(out))?;
    let json = serde_json::to_string_pretty(report).map_err(|error| unwritable(&data)(error.into()))?;
    write_file(&data, format!("{json}\n").as_bytes(), force).map_err(unwritable(&data))?;
    write_file(&page, text.as_bytes(), force).map_err(unwritable(&page))?;
    Ok([data, page])
}

fn unwritable(path: &Path) -> impl Fn(io::Error) -> Failure {
    move |error| {
        if error.kind() == io::ErrorKind::AlreadyExists {
            let message = format!("{} already exists", path.display());
            let advice = "choose another folder with --out, or add --force to replace the report in this one";
            return Failure::new(ErrorKind::Refused, message, advice);
        }
        Failure::new(ErrorKind::Refused, format!("cannot write {}: {error}", path.display()), WRITING)
    }
}

const WRITING: &str = "choose another folder with --out";

/// The length of the progress bar, in steps.
const PARTS: u64 = 1000;

/// Prints the numbers for people, a table for each question: the measured case, its floor and its rivals below it.
fn show(output: Output, report: &Report) {
    for (question, results) in report.questions() {
        output.line(capital(question.unwrap_or("Beside floors and rivals")));
        let mut rows = Vec::new();
        let has_goals = results.iter().any(|result| result.verdict.is_some());
        for result in results {
            let ratio = result.ratio.map_or(String::new(), |ratio| format!("{ratio:.2} x"));
            let goal = has_goals.then(|| result.judgement().unwrap_or_default());
            rows.push(row("", &result.measured, ratio, goal));
            let beside = result.floor.iter().map(|floor| ("  floor: ", floor));
            for (role, beside) in beside.chain(result.rivals.iter().map(|rival| ("  rival: ", rival))) {
                rows.push(row(role, beside, String::new(), has_goals.then(String::new)));
            }
        }
        let headings =
            ["", ">FOR", ">P25", ">MEDIAN", ">P75", ">P90", ">P99", ">MAX", ">N", "UNIT", ">OF FLOOR", "GOAL"];
        let headings = &headings[..headings.len() - usize::from(!has_goals)];
        output.table(headings, &rows, &["N", "MAX", "P99", "P90", "P25", "P75"]);
        output.line("");
    }
    for note in &report.notes {
        output.line(note);
    }
}

fn row(role: &str, measurement: &Measurement, ratio: String, goal: Option<String>) -> Vec<String> {
    let Measurement { case, percentiles: p } = measurement;
    let mut row = vec![format!("{role}{}", case.line()), case.point()];
    // Bytes have a unit by their number.
    let in_bytes = case.unit == Unit::Bytes;
    row.extend(
        [p.p25, p.p50, p.p75, p.p90, p.p99, p.max].map(|value| if in_bytes { bytes(value) } else { figure(value) }),
    );
    row.extend([p.n.to_string(), if in_bytes { String::new() } else { case.unit.to_string() }, ratio]);
    row.extend(goal);
    row
}

fn compare(output: Output, before: &Path, after: &Path, force: bool) -> Result<(), Failure> {
    let read = |path| {
        Report::read_json(path).map_err(|error| {
            let kind = if path.exists() { ErrorKind::Refused } else { ErrorKind::NotFound };
            Failure::new(kind, error.to_string(), "name a report.json that `partywall bench --out DIR` has written")
        })
    };
    let before = read(before)?;
    let after = read(after)?;
    if let Some(why) = before.other_machine(&after).filter(|_| !force) {
        let advice = "measure both on one machine, or add --force if the machines are what you compare";
        return Err(Failure::new(ErrorKind::Refused, format!("the reports are of two machines: {why}"), advice));
    }
    let differences = after.differences(&before);
    output.line(differences.to_string());
    output.value(&json!(differences));
    Ok(())
}
