//! Options that may be missing.

/// Sets options that may be missing, in a chain of setters.
///
/// ```
/// use partywall::{Domain, DomainOptions, WhenSome};
///
/// let name = std::env::args().nth(1);
/// let options = Domain::options().when_some(name, DomainOptions::domain).start(false);
/// ```
pub trait WhenSome: Sized {
    /// Returns `set(self, value)` if there is a value, else `self`.
    #[must_use]
    fn when_some<T>(self, value: Option<T>, set: impl FnOnce(Self, T) -> Self) -> Self {
        match value {
            Some(value) => set(self, value),
            None => self,
        }
    }
}

impl<T> WhenSome for T {}
