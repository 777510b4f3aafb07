//! How a command fails: a sentence that says what, why and what to do, and an exit code.

use std::process::ExitCode;

use partywall::{Error, ErrorKind};
use serde_json::{Value, json};

use crate::Context;

/// A command's failure.
#[derive(Debug)]
pub(crate) struct Failure {
    kind: ErrorKind,
    message: String,
    advice: String,
    /// Its entry in `docs/troubleshooting.md`; only errors of the library have one.
    entry: Option<&'static str>,
    /// Already shown; only the exit code is left to be told.
    silent: bool,
    /// More for programs, beside the error in the JSON object.
    details: Option<Box<Value>>,
}

impl Failure {
    /// A failure of the command itself.
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { kind, message: message.into(), advice: advice.into(), entry: None, silent: false, details: None }
    }

    /// A failure that the command's output has shown already.
    pub(crate) fn silent(kind: ErrorKind) -> Self {
        Self { kind, message: String::new(), advice: String::new(), entry: None, silent: true, details: None }
    }

    /// The same failure with other advice.
    pub(crate) fn with_advice(mut self, advice: impl Into<String>) -> Self {
        self.advice = advice.into();
        self
    }

    /// Adds the members of a JSON object to what programs get, beside `error`.
    pub(crate) fn with_details(mut self, details: Value) -> Self {
        self.details = Some(Box::new(details));
        self
    }

    /// What it is about.
    pub(crate) fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// What happened, and why.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// What to do.
    pub(crate) fn advice(&self) -> &str {
        &self.advice
    }

    /// The error as programs get it.
    pub(crate) fn to_json(&self) -> Value {
        json!({
            "code": self.code(),
            "kind": self.kind.to_string(),
            "message": self.message,
            "advice": self.advice,
            "entry": self.entry,
        })
    }

    /// The exit code: 1 check failed, 2 usage, 3 not found, 4 broker unreachable, 5 refused or limit, 6 device.
    pub(crate) fn code(&self) -> u8 {
        match self.kind {
            ErrorKind::CheckFailed => 1,
            ErrorKind::Usage => 2,
            ErrorKind::NotFound => 3,
            ErrorKind::Unreachable => 4,
            ErrorKind::Device => 6,
            _ => 5,
        }
    }

    /// Tells it on standard error, or as JSON on standard output.
    pub(crate) fn report(&self, context: &Context) -> ExitCode {
        if !self.silent {
            let mut value = json!({ "error": self.to_json() });
            if let (Some(value), Some(Value::Object(details))) = (value.as_object_mut(), self.details.as_deref()) {
                value.extend(details.clone());
            }
            context.output().failure(&self.message, &self.advice, self.entry, &value);
        }
        ExitCode::from(self.code())
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { entry: Some(error.anchor()), ..Self::new(error.kind(), error.to_string(), error.advice()) }
    }
}
