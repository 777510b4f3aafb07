//! Numbers by which the broker and its members name things. Only the broker draws them, except for a request's.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    )*};
}

ids! {
    /// A member; never used twice by one broker.
    MemberId,
    /// A request of a member, and its ticket if it has to wait. It grows with each request of the member, also across
    /// reconnections.
    RequestId,
    /// A lease on a version, timeline or semaphore.
    LeaseId,
    /// The right to build a name's version.
    ClaimId,
}
