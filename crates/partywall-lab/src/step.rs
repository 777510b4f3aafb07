//! A step of a lab: the calls, their results, the explanation, and the effect on the beliefs.

use partywall::cuda::{CuResult, CudaError};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// One step, which is sent to the process that reports it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Step {
    pub(super) role: String,
    pub(super) id: String,
    pub(super) title: String,
    /// The calls or observations with their results.
    pub(super) values: Vec<(String, String)>,
    pub(super) why: String,
    pub(super) outcome: Outcome,
    /// The outcome in words.
    pub(super) finding: String,
    /// Whether beliefs are true, by their ids. `None` if the step could not be tried or decides nothing.
    pub(super) beliefs: Vec<(String, Option<bool>)>,
    /// The code of the driver's refusal that the step is about.
    pub(super) refusal: Option<u32>,
}

/// The outcome of a step's own check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Outcome {
    /// The result is as the step's text states.
    AsExpected,
    /// The result differs on this machine or driver.
    Different,
    /// This machine lacks something that the step needs.
    NotTried,
}

/// A common belief about shared memory, which steps test.
#[derive(Debug, Clone, Copy)]
pub struct Belief {
    /// The name by which steps refer to it.
    pub id: &'static str,
    /// What is believed.
    pub text: &'static str,
}

/// Declares beliefs as constants, each with its id and text, and the list of all as `BELIEFS`.
#[macro_export]
macro_rules! beliefs {
    ($($name:ident = $id:literal: $text:literal,)+) => {
        $(const $name: $crate::Belief = $crate::Belief { id: $id, text: $text };)+
        const BELIEFS: &[$crate::Belief] = &[$($name),+];
    };
}

/// The conclusion about a belief.
#[derive(Debug)]
pub(super) struct Conclusion {
    pub(super) belief: Belief,
    pub(super) validity: Validity,
    /// The steps that decide it. For a belief that no step tested, the reason.
    pub(super) evidence: String,
}

/// Whether a belief is true, by all its steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Validity {
    Refuted,
    True,
    /// No step decides it: an effect that was not observed may still exist, or nothing was tried.
    Open,
}

impl Step {
    /// Returns a step that is described but not yet judged. Until it is judged, it counts as not tried.
    pub fn new(id: &str, title: impl Into<String>, why: &str) -> Self {
        Self {
            role: String::new(),
            id: id.into(),
            title: title.into(),
            values: Vec::new(),
            why: why.into(),
            outcome: Outcome::NotTried,
            finding: String::new(),
            beliefs: Vec::new(),
            refusal: None,
        }
    }

    /// Adds a value.
    pub fn value(mut self, label: impl Into<String>, value: impl Into<String>) -> Self {
        self.values.push((label.into(), value.into()));
        self
    }

    /// Adds the driver's answer to the call that the step examines.
    pub(super) fn answer(mut self, call: impl Into<String>, code: CuResult) -> Self {
        self.refusal = (!code.is_success()).then_some(code.0);
        self.value(call, code.to_string())
    }

    /// Records whether a belief is true.
    pub fn says(mut self, belief: Belief, is_true: bool) -> Self {
        self.beliefs.push((belief.id.into(), Some(is_true)));
        self
    }

    /// Records that the step decides nothing about some beliefs.
    pub fn leaves_open(mut self, beliefs: &[Belief]) -> Self {
        self.beliefs.extend(beliefs.iter().map(|belief| (belief.id.into(), None)));
        self
    }

    /// Ends the step with its outcome: `finding` if the result is as the text says, else `otherwise`.
    pub fn judge(mut self, as_expected: bool, finding: impl Into<String>, otherwise: impl Into<String>) -> Self {
        (self.outcome, self.finding) =
            if as_expected { (Outcome::AsExpected, finding.into()) } else { (Outcome::Different, otherwise.into()) };
        self
    }

    /// Ends a step about a call that should be refused, with any code or with the measured one.
    pub(super) fn judge_refusal(self, code: CuResult, measured: Option<CuResult>) -> Self {
        let otherwise = match measured {
            _ if code.is_success() => "accepted, against the vendor's documentation".to_owned(),
            Some(measured) => format!("refused with {code}; an H200 with driver 580 returned {measured}"),
            None => String::new(),
        };
        let as_expected = !code.is_success() && measured.is_none_or(|measured| measured == code);
        self.judge(as_expected, "refused, as expected", otherwise)
    }

    /// Ends a step about a call that should be refused, against the belief that it is accepted.
    pub(super) fn refused(
        self,
        call: impl Into<String>,
        code: CuResult,
        belief: Belief,
        measured: Option<CuResult>,
    ) -> Self {
        self.answer(call, code).says(belief, code.is_success()).judge_refusal(code, measured)
    }

    /// Ends a step that cannot be tried on this machine.
    pub fn untried(self, beliefs: &[Belief], why: impl Into<String>) -> Self {
        Self { outcome: Outcome::NotTried, finding: why.into(), ..self.leaves_open(beliefs) }
    }

    /// Returns the JSON form.
    pub(super) fn to_json(&self) -> Value {
        let values: Map<_, _> = self.values.iter().map(|(label, value)| (label.clone(), json!(value))).collect();
        json!({
            "role": self.role, "step": self.id, "title": self.title, "values": values, "why": self.why,
            "verdict": self.outcome, "finding": self.finding, "refusal": self.refusal,
        })
    }
}

impl Conclusion {
    /// Returns the conclusion about a belief. One contrary step refutes it.
    pub(super) fn of(belief: Belief, steps: &[Step]) -> Self {
        let about = |step: &'_ Step| step.beliefs.iter().find(|(id, _)| id == belief.id).map(|(_, is_true)| *is_true);
        let tried = |step: &Step| step.outcome != Outcome::NotTried;
        let with = |wanted: Option<bool>| {
            // A step that was not tried is no evidence.
            let speaks = |step: &&Step| about(step) == Some(wanted) && (wanted.is_some() || tried(step));
            steps.iter().filter(speaks).map(|step| step.id.as_str()).collect::<Vec<_>>().join(", ")
        };
        let against = with(Some(false));
        let by = with(Some(true));
        let (validity, evidence) = if !against.is_empty() {
            (Validity::Refuted, against)
        } else if !by.is_empty() {
            (Validity::True, by)
        } else {
            let open = with(None);
            match steps.iter().find(|step| about(step) == Some(None)) {
                Some(_) if !open.is_empty() => (Validity::Open, open),
                Some(untried) => (Validity::Open, untried.finding.clone()),
                None => (Validity::Open, "its step was not reached".into()),
            }
        };
        Self { belief, validity, evidence }
    }

    /// Returns the JSON form.
    pub(super) fn to_json(&self) -> Value {
        let Self { belief, validity, evidence } = self;
        json!({ "belief": belief.id, "text": belief.text, "verdict": validity, "evidence": evidence })
    }
}

/// Returns the driver's code in an answer.
pub(super) fn code<T>(answer: &Result<T, CudaError>) -> CuResult {
    answer.as_ref().map_or_else(|error| error.code, |_| CuResult::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BELIEF: Belief = Belief { id: "b", text: "text" };

    #[test]
    fn one_contrary_step_refutes_a_belief() {
        let step = |id, is_true| Step::new(id, "", "").says(BELIEF, is_true);
        let conclusion = Conclusion::of(BELIEF, &[step("one", true), step("two", false), step("three", true)]);
        assert_eq!((conclusion.validity, conclusion.evidence.as_str()), (Validity::Refuted, "two"));
        let conclusion = Conclusion::of(BELIEF, &[step("one", true), Step::new("x", "", ""), step("three", true)]);
        assert_eq!((conclusion.validity, conclusion.evidence.as_str()), (Validity::True, "one, three"));
    }

    #[test]
    fn untested_belief_is_open_and_gives_the_reason() {
        let untried = Step::new("one", "", "").untried(&[BELIEF], "no such memory here");
        let conclusion = Conclusion::of(BELIEF, std::slice::from_ref(&untried));
        assert_eq!((conclusion.validity, conclusion.evidence.as_str()), (Validity::Open, "no such memory here"));
        let open = Step::new("open", "", "").leaves_open(&[BELIEF]).judge(true, "nothing was seen", "");
        let conclusion = Conclusion::of(BELIEF, &[untried.clone(), open.clone()]);
        assert_eq!((conclusion.validity, conclusion.evidence.as_str()), (Validity::Open, "open"));
        let conclusion = Conclusion::of(BELIEF, &[untried, open, Step::new("two", "", "").says(BELIEF, true)]);
        assert_eq!((conclusion.validity, conclusion.evidence.as_str()), (Validity::True, "two"));
        assert_eq!(Conclusion::of(BELIEF, &[]).evidence, "its step was not reached");
    }

    #[test]
    fn refusal_is_judged_by_its_measured_code() {
        let judge = |code, measured| Step::new("", "", "").judge_refusal(code, measured).outcome;
        assert_eq!(judge(CuResult::NOT_SUPPORTED, None), Outcome::AsExpected);
        assert_eq!(judge(CuResult::NOT_SUPPORTED, Some(CuResult::NOT_SUPPORTED)), Outcome::AsExpected);
        assert_eq!(judge(CuResult::NOT_SUPPORTED, Some(CuResult::INVALID_VALUE)), Outcome::Different);
        assert_eq!(judge(CuResult::SUCCESS, None), Outcome::Different);
    }
}
