//! Reports the steps of the demo, one per line: aligned for people, an object for programs.

use std::time::Duration;

use crate::text::micros;
use serde_json::{Value, json};

use crate::output::Output;

/// Reports the steps of one role.
#[derive(Debug, Clone, Copy)]
pub(super) struct Narrator {
    output: Output,
    role: &'static str,
    /// What each line for people begins with. The demo adds it to the lines of the other roles.
    prefix: &'static str,
}

impl Narrator {
    pub(super) fn new(output: Output, role: &'static str) -> Self {
        Self { output, role, prefix: "" }
    }

    /// Returns the narrator of the demo itself.
    pub(super) fn of_demo(output: Output) -> Self {
        Self { prefix: "demo     │ ", ..Self::new(output, "demo") }
    }

    /// Reports a finished step. `text` may have several lines.
    pub(super) fn step(&self, step: &str, took: Option<Duration>, text: &str, fields: Value) {
        let mut head = step;
        let mut time = took.map_or_else(String::new, micros);
        for line in text.lines() {
            self.output.line(format!("{}{head:<12}{time:>12}   {line}", self.prefix));
            head = "";
            time = String::new();
        }
        self.value(step, took, fields);
    }

    /// Reports the end of the demo.
    pub(super) fn ending(&self, step: &str, took: Duration, text: &str, fields: Value) {
        self.output.line(text);
        self.value(step, Some(took), fields);
    }

    fn value(&self, step: &str, took: Option<Duration>, fields: Value) {
        let mut value = json!({ "role": self.role, "step": step });
        if let Some(took) = took {
            value["micros"] = json!(took.as_nanos() as f64 / 1000.0);
        }
        if let (Some(object), Value::Object(fields)) = (value.as_object_mut(), fields) {
            object.extend(fields);
        }
        self.output.value(&value);
    }
}
