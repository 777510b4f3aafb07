//! Telling a lab: steps and conclusions, as text that fits 100 columns or as one JSON object a line.

use std::io::IsTerminal;

use partywall::{Place, bytes, cuda::CudaError};
use serde_json::{Value, json};

use super::{
    device::{Gpu, failed},
    step::{Belief, Conclusion, Outcome, Step, Verdict},
};
use crate::{Console, failure::Failure};

/// Tells the steps of a lab, and keeps them for its conclusions.
#[derive(Debug)]
pub(super) struct Teller<'a> {
    output: &'a dyn Console,
    lab: &'static str,
    role: &'static str,
    /// Whether this process tells the steps of the other role, too; else that has a terminal of its own.
    tells_all: bool,
    colour: bool,
    /// Whether the driver is simulated, which each step then says.
    simulated: bool,
    steps: Vec<Step>,
}

impl<'a> Teller<'a> {
    pub(super) fn new(output: &'a dyn Console, lab: &'static str, role: &'static str, tells_all: bool) -> Self {
        let colour = std::io::stdout().is_terminal();
        Self { output, lab, role, tells_all, colour, simulated: false, steps: Vec::new() }
    }

    /// Says what the lab shows, and on what.
    pub(super) fn header(&mut self, title: &str, gpu: &Gpu) -> Result<(), CudaError> {
        let device = gpu.context().device();
        let name = device.name()?;
        let driver = gpu.context().driver();
        let version = driver.version()?;
        let total = device.total_memory()?;
        self.head(title, &format!("{name}, {}, {}, CUDA {version}", gpu.uuid(), bytes(total)));
        self.simulated = driver.is_simulated();
        if self.simulated {
            let notice = "The driver is SIMULATED: what follows shows the simulation and proves nothing about a GPU.";
            self.output.line(notice);
        }
        self.output.line("");
        self.output.value(&json!({
            "lab": self.lab, "title": title, "role": self.role, "pid": std::process::id(), "device": name,
            "uuid": gpu.uuid().to_string(), "cuda": version.to_string(), "simulated": self.simulated,
        }));
        Ok(())
    }

    /// The same of a lab that needs no GPU.
    pub(super) fn header_at(&mut self, title: &str, place: Place) -> Result<(), Failure> {
        if let Place::Gpu(uuid) = place {
            return self.header(title, &Gpu::open(uuid)?).map_err(failed("asking about the GPU"));
        }
        self.head(title, "Host memory: no GPU has a part in it.\n");
        self.output.value(&json!({
            "lab": self.lab, "title": title, "role": self.role, "pid": std::process::id(), "device": "host",
            "simulated": false,
        }));
        Ok(())
    }

    fn head(&self, title: &str, what: &str) {
        self.output.line(&self.bold(&format!("Lab `{}`: {title}", self.lab)));
        self.output.line(what);
    }

    /// Tells a step of this process.
    pub(super) fn tell(&mut self, mut step: Step) {
        step.role = self.role.into();
        self.show(&step);
        self.steps.push(step);
    }

    /// Takes a step of another process, which it tells if nobody else does.
    pub(super) fn take(&mut self, step: Step) {
        if self.tells_all {
            self.show(&step);
        }
        self.steps.push(step);
    }

    /// A remark between steps, for people only.
    pub(super) fn remark(&self, text: &str) {
        for line in wrapped(text, WIDTH) {
            self.output.line(&line);
        }
        self.output.line("");
    }

    /// Whether nobody else tells the steps of the other role.
    pub(super) fn tells_all(&self) -> bool {
        self.tells_all
    }

    /// The steps so far.
    pub(super) fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Ends the lab: which beliefs held on this machine.
    pub(super) fn conclude(&self, beliefs: &[Belief]) {
        let conclusions: Vec<_> = beliefs.iter().map(|belief| Conclusion::of(*belief, &self.steps)).collect();
        let different = self.steps.iter().filter(|step| step.verdict == Verdict::Different).count();
        let whereabouts = if self.simulated { "in the simulation" } else { "on this machine" };
        self.output.line(&self.bold(&format!("Common beliefs, and whether they held {whereabouts}")));
        for Conclusion { belief, outcome, evidence } in &conclusions {
            let (verdict, colour) = match outcome {
                Outcome::Held => ("held", GREEN),
                Outcome::DidNotHold => ("did not hold", YELLOW),
                Outcome::Open => ("open", DIM),
                Outcome::NotTried => ("not tried", DIM),
            };
            let mut head = format!("{verdict:<12}");
            for line in wrapped(&format!("{} ({evidence})", belief.text), WIDTH - VERDICT_WIDTH) {
                self.output.line(&format!("  {}  {line}", self.paint(&head, colour)));
                head = " ".repeat(12);
            }
        }
        let count = |outcome| conclusions.iter().filter(|conclusion| conclusion.outcome == outcome).count();
        self.output.line(&format!(
            "\n{}{} steps, {different} of them not as expected. {} beliefs: {} held, {} did not, {} open, {} not tried.",
            if self.simulated { "SIMULATED: " } else { "" },
            self.steps.len(),
            beliefs.len(),
            count(Outcome::Held),
            count(Outcome::DidNotHold),
            count(Outcome::Open),
            count(Outcome::NotTried)
        ));
        let conclusions: Vec<Value> = conclusions.iter().map(Conclusion::to_json).collect();
        self.output.value(&json!({
            "lab": self.lab, "steps": self.steps.len(), "different": different, "beliefs": conclusions,
        }));
    }

    fn show(&self, step: &Step) {
        let gutter = " ".repeat(ROLE_WIDTH);
        self.output.line(&format!("{:<ROLE_WIDTH$} │ {:<20} {}", step.role, step.id, self.bold(&step.title)));
        let room = WIDTH - ROLE_WIDTH - 5;
        let label_width = step.values.iter().map(|(label, _)| label.chars().count()).max().unwrap_or(0);
        for (label, value) in &step.values {
            let mut head = label.as_str();
            for line in wrapped(value, room.saturating_sub(label_width + 2)) {
                self.output.line(&format!("{gutter} │   {head:<label_width$}  {line}"));
                head = "";
            }
        }
        for line in wrapped(&step.why, room) {
            self.output.line(&format!("{gutter} │   {}", self.paint(&line, DIM)));
        }
        let (mark, colour) = match step.verdict {
            Verdict::AsExpected => ("✓", GREEN),
            Verdict::Different => ("≠", YELLOW),
            Verdict::NotTried => ("– not tried:", DIM),
        };
        // Steps scroll away from the header: no screen of them shall look like one of a real GPU.
        let simulated = if self.simulated { "SIMULATED: " } else { "" };
        for line in wrapped(&format!("{mark} {simulated}{}", step.finding), room) {
            self.output.line(&format!("{gutter} │   {}", self.paint(&line, colour)));
        }
        self.output.line("");
        self.output.value(&step.to_json());
    }

    fn bold(&self, text: &str) -> String {
        self.paint(text, "1")
    }

    fn paint(&self, text: &str, code: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// Wraps a text into lines of at most `width` characters, broken between words, and inside a word only if it is longer.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let options = textwrap::Options::new(width).word_splitter(textwrap::WordSplitter::NoHyphenation);
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    textwrap::wrap(&words, options).into_iter().map(Into::into).collect()
}

/// Columns that a terminal is taken to have.
const WIDTH: usize = 100;

/// Columns of the longest role.
const ROLE_WIDTH: usize = 8;

/// Columns before a belief: two spaces, its verdict, two spaces.
const VERDICT_WIDTH: usize = 16;

const GREEN: &str = "32";
const YELLOW: &str = "33";
const DIM: &str = "2";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_broken_between_words() {
        assert_eq!(wrapped("one two  three", 7), ["one two", "three"]);
        assert_eq!(wrapped("a 0123456789ab b", 5), ["a", "01234", "56789", "ab b"]);
        assert_eq!(wrapped("", 5), [""]);
        assert!(wrapped(&"µ ".repeat(99), 20).iter().all(|line| line.chars().count() <= 20));
    }
}
