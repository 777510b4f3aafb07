//! Reports steps and conclusions, as text of at most 100 columns or as one JSON object per line.

use std::{
    cell::{Cell, RefCell},
    fmt,
    iter::Sum,
    rc::Rc,
};

use partywall::{ErrorKind, Gpu, Place, bytes, cuda::CudaError};
use partywall_cli::{Output, text::count};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::{
    Context, device,
    failure::{Doing, Failure},
    lab::Lab,
    step::{Belief, Conclusion, Outcome, Step, Validity},
};

/// Reports the steps of a lab and stores them for its conclusions. Clones share the steps.
#[derive(Debug, Clone)]
pub(super) struct Reporter {
    console: Output,
    lab: &'static str,
    title: &'static str,
    role: &'static str,
    /// True if this process also reports the steps of the other roles. If not, each role has its own terminal.
    reports_all: bool,
    colour: bool,
    shared: Rc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// True if the driver is simulated. If it is, each step is marked so.
    simulated: Cell<bool>,
    steps: RefCell<Vec<Step>>,
    /// Additional values of the last line for programs.
    result: RefCell<Map<String, Value>>,
}

impl Reporter {
    pub(super) fn new(context: &Context, lab: &Lab, role: &'static str, reports_all: bool) -> Self {
        Self {
            console: context.console,
            lab: lab.name,
            title: lab.title,
            role,
            reports_all,
            colour: context.console.has_colours(),
            shared: Rc::default(),
        }
    }

    /// Prints what the lab shows and the machine that it runs on.
    pub(super) fn header(&self, place: Place, gpu: Option<&Gpu>) -> Result<(), Failure> {
        let opened = match gpu {
            None => device::that_uses(place)?.map(Gpu::open).transpose()?,
            Some(_) => None,
        };
        let mut value = json!({
            "lab": self.lab, "title": self.title, "role": self.role, "pid": std::process::id(), "device": "host",
        });
        for line in wrapped(&format!("Lab `{}`: {}", self.lab, self.title), WIDTH) {
            self.console.line(self.bold(&line));
        }
        match gpu.or(opened.as_ref()) {
            Some(gpu) => self.describe(gpu, &mut value).doing("asking about the GPU")?,
            None => self.console.line("Host memory: no GPU is involved."),
        }
        if let Place::Pinned(node) = place {
            self.console.line(format!("Pinned host memory on NUMA node {node}: the CPU and the GPU use it."));
            value["node"] = node.into();
        }
        self.console.line("");
        value["simulated"] = self.shared.simulated.get().into();
        self.console.value(&value);
        Ok(())
    }

    fn describe(&self, gpu: &Gpu, value: &mut Value) -> Result<(), CudaError> {
        let device = gpu.context().device();
        let driver = gpu.context().driver();
        let name = device.name()?;
        let version = driver.version()?;
        let total = bytes(device.total_memory()?);
        self.console.line(format!("{name}, {}, {total}, CUDA {version}", gpu.uuid()));
        if driver.is_simulated() {
            self.shared.simulated.set(true);
            self.console.line(SIMULATED);
        }
        value["device"] = name.into();
        value["uuid"] = gpu.uuid().to_string().into();
        value["cuda"] = version.to_string().into();
        Ok(())
    }

    /// Returns the role that this process plays.
    pub(super) fn role(&self) -> &'static str {
        self.role
    }

    /// Returns whether this process reports the steps of all roles.
    pub(super) fn reports_all(&self) -> bool {
        self.reports_all
    }

    /// Returns all steps so far.
    pub(super) fn steps(&self) -> Vec<Step> {
        self.shared.steps.borrow().clone()
    }

    /// Adds counts to the last line for programs.
    pub(super) fn result(&self, counts: impl Serialize) {
        if let Value::Object(counts) = json!(counts) {
            self.shared.result.borrow_mut().extend(counts);
        }
    }

    /// Reports a step of this process.
    pub(super) fn report(&self, step: Step) {
        self.show(&step);
        self.shared.steps.borrow_mut().push(step);
    }

    /// Stores a step of another process, and reports it unless that process has its own terminal.
    pub(super) fn take(&self, step: Step) {
        if self.reports_all {
            self.show(&step);
        }
        self.shared.steps.borrow_mut().push(step);
    }

    /// Prints a remark between steps, for people only.
    pub(super) fn remark(&self, text: &str) {
        for line in wrapped(text, WIDTH) {
            self.console.line(&line);
        }
        self.console.line("");
    }

    /// Ends the lab with its conclusion: which beliefs are refuted on this machine.
    ///
    /// # Errors
    /// If a step is not as expected: the exit code says what the last line says.
    pub(super) fn conclude(&self, beliefs: &[Belief]) -> Result<(), Failure> {
        let steps = self.steps();
        let conclusions: Vec<_> = beliefs.iter().map(|belief| Conclusion::of(*belief, &steps)).collect();
        self.console.line(self.bold(beliefs_heading(self.shared.simulated.get())));
        for Conclusion { belief, validity, evidence } in &conclusions {
            let (validity, colour) = match validity {
                Validity::Refuted => ("refuted", GREEN),
                Validity::True => ("true", YELLOW),
                Validity::Open => ("open", DIM),
            };
            let mut head = format!("{validity:<VALIDITY_WIDTH$}");
            for line in wrapped(&format!("{} ({evidence})", belief.text), WIDTH - VALIDITY_WIDTH - 4) {
                self.console.line(format!("  {}  {line}", self.paint(&head, colour)));
                head = " ".repeat(VALIDITY_WIDTH);
            }
        }
        let with = |outcome| steps.iter().filter(|step| step.outcome == outcome).count();
        let count = |validity| conclusions.iter().filter(|conclusion| conclusion.validity == validity).count();
        let counts =
            StepCounts { steps: steps.len(), different: with(Outcome::Different), not_tried: with(Outcome::NotTried) };
        let validities = [Validity::Refuted, Validity::True, Validity::Open].map(count);
        self.console.line(format!("\n{}", summary(self.shared.simulated.get(), counts, validities)));
        let conclusions: Vec<Value> = conclusions.iter().map(Conclusion::to_json).collect();
        let mut last = json!({
            "lab": self.lab, "steps": counts.steps, "different": counts.different, "not_tried": counts.not_tried,
            "beliefs": conclusions,
        });
        last.as_object_mut().expect("an object").extend(self.shared.result.take());
        self.console.value(&last);
        match counts.different {
            0 => Ok(()),
            _ => Err(Failure::silent(ErrorKind::CheckFailed)),
        }
    }

    fn show(&self, step: &Step) {
        let gutter = " ".repeat(ROLE_WIDTH);
        let mut role = step.role.as_str();
        let mut id = step.id.as_str();
        for line in wrapped(&step.title, WIDTH - ROLE_WIDTH - ID_WIDTH - 4) {
            self.console.line(format!("{role:<ROLE_WIDTH$} │ {id:<ID_WIDTH$} {}", self.bold(&line)));
            role = "";
            id = "";
        }
        let room = WIDTH - ROLE_WIDTH - 5;
        let label_width = step.values.iter().map(|(label, _)| label.chars().count()).max().unwrap_or(0);
        for (label, value) in &step.values {
            let mut head = label.as_str();
            for line in wrapped(value, room.saturating_sub(label_width + 2)) {
                self.console.line(format!("{gutter} │   {head:<label_width$}  {line}"));
                head = "";
            }
        }
        for line in wrapped(&step.why, room) {
            self.console.line(format!("{gutter} │   {}", self.paint(&line, DIM)));
        }
        let (mark, colour) = match step.outcome {
            Outcome::AsExpected => ("✓", GREEN),
            Outcome::Different => ("≠", YELLOW),
            Outcome::NotTried => ("– not tried:", DIM),
        };
        // The header scrolls away, and no screen of simulated steps must look like one of a real GPU.
        let simulated = if self.shared.simulated.get() { "SIMULATED: " } else { "" };
        for line in wrapped(&format!("{mark} {simulated}{}", step.finding), room) {
            self.console.line(format!("{gutter} │   {}", self.paint(&line, colour)));
        }
        self.console.line("");
        self.console.value(&step.to_json());
    }

    fn bold(&self, text: &str) -> String {
        self.paint(text, "1")
    }

    fn paint(&self, text: &str, code: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// Returns the heading of beliefs.
pub(super) fn beliefs_heading(simulated: bool) -> &'static str {
    if simulated {
        "Beliefs, and whether they are true in the simulation"
    } else {
        "Beliefs, and whether they are true on this machine"
    }
}

/// How many steps a lab has, and how many of them were not as expected.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StepCounts {
    pub(super) steps: usize,
    pub(super) different: usize,
    pub(super) not_tried: usize,
}

impl Sum for StepCounts {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::default(), |sum, counts| Self {
            steps: sum.steps + counts.steps,
            different: sum.different + counts.different,
            not_tried: sum.not_tried + counts.not_tried,
        })
    }
}

impl fmt::Display for StepCounts {
    /// Writes `6 of 8 steps as expected, 1 different, 1 not tried`, without the parts that are 0.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { steps, different, not_tried } = self;
        write!(f, "{} of {} as expected", steps - different - not_tried, count(*steps as u64, "step"))?;
        listed(f, &[(*different, "different"), (*not_tried, "not tried")])
    }
}

/// Returns the last line for people: the steps, and how many beliefs are refuted, true and open.
pub(super) fn summary(simulated: bool, steps: StepCounts, [refuted, is_true, open]: [usize; 3]) -> String {
    let simulated = if simulated { "SIMULATED: " } else { "" };
    let mut text = format!("{simulated}{steps}; {} refuted", count(refuted as u64, "belief"));
    listed(&mut text, &[(is_true, "true"), (open, "open")]).expect("a string takes all text");
    text
}

/// Appends the numbers that are not 0.
fn listed(text: &mut impl fmt::Write, numbers: &[(usize, &str)]) -> fmt::Result {
    numbers.iter().filter(|(number, _)| *number > 0).try_for_each(|(number, what)| write!(text, ", {number} {what}"))
}

/// The notice about a simulated driver.
pub(super) const SIMULATED: &str =
    "The driver is SIMULATED: what follows shows the simulation and proves nothing about a GPU.";

/// Breaks text into lines of at most `width` characters, between words. Only a longer word is broken itself.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let options = textwrap::Options::new(width).word_splitter(textwrap::WordSplitter::NoHyphenation);
    textwrap::wrap(&words, options).into_iter().map(Into::into).collect()
}

/// The assumed width of a terminal, in columns.
const WIDTH: usize = 100;

/// The width of the longest role name.
const ROLE_WIDTH: usize = 10;

/// The width of the longest name of a step.
const ID_WIDTH: usize = 18;

/// The width of the longest validity of a belief.
const VALIDITY_WIDTH: usize = 7;

const GREEN: &str = "32";
const YELLOW: &str = "33";
const DIM: &str = "2";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_counts_the_steps_and_the_beliefs() {
        let all = StepCounts { steps: 8, different: 0, not_tried: 0 };
        assert_eq!(summary(false, all, [6, 0, 0]), "8 of 8 steps as expected; 6 beliefs refuted");
        let some = StepCounts { steps: 4, different: 2, not_tried: 1 };
        let text = "SIMULATED: 1 of 4 steps as expected, 2 different, 1 not tried; 1 belief refuted, 2 true, 3 open";
        assert_eq!(summary(true, some, [1, 2, 3]), text);
    }

    #[test]
    fn text_is_broken_between_words() {
        assert_eq!(wrapped("one two  three", 7), ["one two", "three"]);
        assert_eq!(wrapped("a 0123456789ab b", 5), ["a", "01234", "56789", "ab b"]);
        assert_eq!(wrapped("", 5), [""]);
        assert!(wrapped(&"µ ".repeat(99), 20).iter().all(|line| line.chars().count() <= 20));
    }
}
