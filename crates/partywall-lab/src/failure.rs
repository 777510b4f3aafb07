//! The failures of a lab. A refuted belief is not a failure.

use std::io;

use partywall::{
    Error, ErrorKind,
    cuda::{AccessError, CudaError},
    error::{DeviceFault, InvalidArgument},
};
pub(crate) use partywall_cli::Failure;
use partywall_os::Errno;

/// Returns the class of a failure to use a file.
pub fn kind_of(error: &io::Error) -> ErrorKind {
    if error.kind() == io::ErrorKind::NotFound { ErrorKind::NotFound } else { ErrorKind::Refused }
}

/// Adds the failed operation to errors that are not part of the experiment.
pub trait Doing<T> {
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

/// Returns the failure of a lab whose other role, or whose own files, are not as expected.
pub fn unexpected(what: impl Into<String>) -> Failure {
    Failure::new(ErrorKind::CheckFailed, what, "start the lab again; if it fails again, report it")
}
