//! The failures of a lab. A refuted belief is not a failure.

use std::io;

use partywall::{
    Error, ErrorKind, Language,
    cuda::{AccessError, CudaError},
    error::{DeviceFault, InvalidArgument},
};
use partywall_os::Errno;

/// Why a lab could not be run to its end.
#[derive(Debug)]
#[non_exhaustive]
pub enum Failure {
    /// An error of the library.
    Library {
        /// The error.
        error: Box<Error>,
        /// Replaces the error's own advice.
        advice: Option<&'static str>,
    },
    /// An error of the lab itself.
    Lab {
        /// The class of the failure.
        kind: ErrorKind,
        /// What happened, and why.
        message: String,
        /// What to do.
        advice: String,
    },
    /// A failure that the parent process reports. This process only exits with its code.
    Reported(ErrorKind),
}

impl Failure {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::Lab { kind, message: message.into(), advice: advice.into() }
    }

    /// Returns the class of the failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Library { error, .. } => error.kind(),
            Self::Lab { kind, .. } | Self::Reported(kind) => *kind,
        }
    }

    /// Returns the message: what happened, and why.
    #[must_use]
    pub fn message(&self) -> String {
        match self {
            Self::Library { error, .. } => error.to_string(),
            Self::Lab { message, .. } => message.clone(),
            Self::Reported(_) => String::new(),
        }
    }

    /// Returns the advice: what to do.
    #[must_use]
    pub fn advice(&self) -> String {
        match self {
            Self::Library { advice: Some(advice), .. } => (*advice).to_owned(),
            Self::Library { error, advice: None } => error.advice_in(Language::Shell),
            Self::Lab { advice, .. } => advice.clone(),
            Self::Reported(_) => String::new(),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Library { error: Box::new(error), advice: None }
    }
}

/// Returns the class of a failure to use a file.
pub(crate) fn kind_of(error: &io::Error) -> ErrorKind {
    if error.kind() == io::ErrorKind::NotFound { ErrorKind::NotFound } else { ErrorKind::Refused }
}

/// Adds the failed operation to errors that are not part of the experiment.
pub(super) trait Doing<T> {
    /// Converts an error of the driver or of the system into a failure of the lab during `what`.
    fn doing(self, what: &str) -> Result<T, Failure>;
}

impl<T> Doing<T> for Result<T, CudaError> {
    fn doing(self, what: &str) -> Result<T, Failure> {
        self.map_err(|source| Error::DeviceFault(DeviceFault::Cuda { what: what.to_owned(), source }).into())
    }
}

impl<T> Doing<T> for Result<T, AccessError> {
    fn doing(self, what: &str) -> Result<T, Failure> {
        self.or_else(|error| match error {
            AccessError::Driver(source) => Err(source).doing(what),
            other => {
                let range = InvalidArgument::Range { tensor: what.to_owned(), why: other.to_string() };
                Err(Error::InvalidArgument(range).into())
            }
        })
    }
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, what: &str) -> Result<T, Failure> {
        self.map_err(|source| Error::System { what: what.to_owned(), source }.into())
    }
}

impl<T> Doing<T> for Result<T, Errno> {
    fn doing(self, what: &str) -> Result<T, Failure> {
        self.map_err(io::Error::from).doing(what)
    }
}
