//! How a command fails: a message, advice, and an exit code.

use std::{
    fmt::{self, Display},
    process::ExitCode,
};

use partywall::{Error, ErrorKind, Language};
use partywall_os::process;
use serde_json::{Value, json};

use crate::Context;

/// A command's failure.
#[derive(Debug)]
pub struct Failure {
    /// The class of the failure.
    pub kind: ErrorKind,
    /// What happened, and why; empty if the output has shown it already, so that only the exit code remains.
    pub message: String,
    /// What the user can do.
    pub advice: String,
    /// The entry in `docs/troubleshooting.md`, if it has one.
    entry: Option<&'static str>,
    /// The class of the exception in Python.
    class: Option<&'static str>,
    /// The library's error, if it is one.
    pub error: Option<Box<Error>>,
    /// Further members of the JSON object, beside `error`.
    details: Option<Box<Value>>,
}

impl Failure {
    /// Returns a failure of the command itself.
    pub fn new(kind: ErrorKind, message: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            advice: advice.into(),
            entry: None,
            class: None,
            error: None,
            details: None,
        }
    }

    /// Returns the failure of an operation that the operating system refused.
    pub fn system(what: &str, error: impl Display) -> Self {
        let advice = match process::has_proc() {
            true => "check the system error",
            false => "mount /proc (`mount -t proc proc /proc`), which Partywall needs, then try again",
        };
        Self::new(ErrorKind::Refused, format!("{what}: {error}"), advice)
    }

    /// Returns a failure that the command's output has shown already.
    pub fn silent(kind: ErrorKind) -> Self {
        Self::new(kind, "", "")
    }

    /// Replaces the advice.
    #[must_use]
    pub fn with_advice(mut self, advice: impl Into<String>) -> Self {
        self.advice = advice.into();
        self
    }

    /// Sets the class of the exception in Python; without one it is `BadValue` for [`ErrorKind::Usage`], else `Error`.
    #[must_use]
    pub fn with_class(self, class: &'static str) -> Self {
        Self { class: Some(class), ..self }
    }

    /// Sets the entry in `docs/troubleshooting.md`.
    #[must_use]
    pub fn with_entry(self, entry: impl Into<Option<&'static str>>) -> Self {
        Self { entry: entry.into(), ..self }
    }

    /// Adds the members of a JSON object beside `error`.
    pub(crate) fn with_details(mut self, details: Value) -> Self {
        self.details = Some(Box::new(details));
        self
    }

    /// Returns the value of `error` in the JSON output.
    pub(crate) fn to_json(&self) -> Value {
        json!({
            "code": self.code(),
            "kind": self.kind.to_string(),
            "message": self.message,
            "advice": self.advice,
            "entry": self.entry,
            "class": self.class,
        })
    }

    /// Returns the exit code, see [`EXIT_CODES`].
    pub(crate) fn code(&self) -> u8 {
        self.kind.exit_code()
    }

    /// Prints the failure on standard error, or as JSON on standard output.
    pub(crate) fn report(&self, context: &Context) -> ExitCode {
        if !self.message.is_empty() {
            let mut value = json!({ "error": self.to_json() });
            if let (Some(value), Some(Value::Object(details))) = (value.as_object_mut(), self.details.as_deref()) {
                value.extend(details.clone());
            }
            context.output().failure(&self.message, &self.advice, self.entry, &value);
        }
        ExitCode::from(self.code())
    }
}

/// The class of errors of each exit code but 0, and its meaning. `partywall --help` and `docs/cli.md` list them.
pub(crate) const EXIT_CODES: [(ErrorKind, &str); 7] = [
    (ErrorKind::CheckFailed, "a check failed: something is not as expected"),
    (ErrorKind::Usage, "usage: the arguments are invalid"),
    (ErrorKind::NotFound, "not found: a name, version, tensor, process or file"),
    (ErrorKind::Unreachable, "no broker can be reached"),
    (ErrorKind::Refused, "refused, or at a limit"),
    (ErrorKind::Device, "the GPU or its driver"),
    (ErrorKind::TimedOut, "timed out"),
];

/// Returns the class of failure of a `partywall` process that ended with this exit code; the reverse of
/// [`Failure::code`]. A process that a signal ended, or whose code is not in the table, counts as a failed check.
pub(crate) fn kind_of(code: Option<i32>) -> ErrorKind {
    let of_code = EXIT_CODES.iter().find(|(kind, _)| code == Some(kind.exit_code().into()));
    of_code.map_or(ErrorKind::CheckFailed, |(kind, _)| *kind)
}

/// Returns the table of exit codes at the end of `partywall --help`.
pub(crate) fn exit_codes_help() -> String {
    let rows = EXIT_CODES.iter().map(|(kind, meaning)| format!("\n  {}  {meaning}", kind.exit_code()));
    format!("Exit codes:\n  0  success{}", rows.collect::<String>())
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let failure = Self::new(error.kind(), error.to_string(), error.advice_in(Language::Shell));
        Self { entry: Some(error.anchor()), class: Some(error.python_class()), error: Some(error.into()), ..failure }
    }
}
