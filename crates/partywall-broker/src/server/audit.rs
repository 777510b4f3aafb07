//! Audit lines: which users connect, what they get of each other, and what they are refused.
//!
//! The lines have the target `audit` in the log. Each names two users: that of the process, and the owner of what it
//! asked for, or the broker's. A process of another user could fill the log with them, and so hide earlier ones: beyond
//! [`LINES`] in a second, lines of a user are only counted, and the next line says how many are missing.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use partywall_os::socket::Peer;
use partywall_wire::Refusal;

use crate::{bind::own_user, registry::effect::Audited};

/// The audit lines of a broker.
#[derive(Debug, Default)]
pub(super) struct Audit {
    /// The lines of each admitted user, and of all others together.
    written: BTreeMap<Option<u32>, Written>,
}

/// The lines of one user.
#[derive(Debug)]
struct Written {
    since: Instant,
    lines: u32,
    left_out: u64,
}

impl Audit {
    /// Notes that a process of another user than the broker's has connected.
    pub(super) fn admitted(&mut self, uid: u32, pid: u32, operator: bool) {
        if let Some(left_out) = self.line(Some(uid)) {
            tracing::info!(target: "audit", uid, pid, operator, broker = own_user(), left_out, "admitted");
        }
    }

    /// Notes that a process of another user than the broker's may not join.
    pub(super) fn not_joined(&mut self, uid: u32, pid: u32, refusal: &Refusal) {
        if let Some(left_out) = self.line(Some(uid)) {
            tracing::info!(target: "audit", uid, pid, ?refusal, broker = own_user(), left_out, "refused: it may not join");
        }
    }

    /// Notes that a process may not connect.
    pub(super) fn not_admitted(&mut self, peer: Peer) {
        let Some(left_out) = self.line(None) else { return };
        let Peer { pid, uid, gid } = peer;
        let broker = own_user();
        tracing::warn!(target: "audit", uid, gid, pid, broker, left_out, "refused: not admitted by --allow-uid or --group");
    }

    /// Notes what the registry has granted or refused.
    pub(super) fn note(&mut self, audited: &Audited) {
        match audited {
            Audited::OtherUser { uid, pid, what, owner, granted } => {
                let Some(left_out) = self.line(Some(*uid)) else { return };
                let outcome = if *granted { "granted" } else { "refused" };
                tracing::info!(target: "audit", uid, pid, owner, ?what, left_out, "{outcome}");
            }
            Audited::Quota { uid, pid, limit, allowed, needed } => {
                let Some(left_out) = self.line(Some(*uid)) else { return };
                let broker = own_user();
                tracing::info!(target: "audit", uid, pid, ?limit, allowed, needed, broker, left_out, "refused: quota of the user");
            }
        }
    }

    /// Counts a line of a user. Returns the number of lines that were left out before it, or `None` if it is to be left
    /// out as well.
    fn line(&mut self, uid: Option<u32>) -> Option<u64> {
        let now = Instant::now();
        let written = self.written.entry(uid).or_insert(Written { since: now, lines: 0, left_out: 0 });
        if now.duration_since(written.since) >= SECOND {
            written.since = now;
            written.lines = 0;
        }
        if written.lines == LINES {
            written.left_out += 1;
            return None;
        }
        written.lines += 1;
        Some(std::mem::take(&mut written.left_out))
    }
}

/// Lines of one user in a second.
const LINES: u32 = 64;

const SECOND: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    // Holds 153.
    #[test]
    fn lines_beyond_the_limit_of_a_user_are_counted() {
        let mut audit = Audit::default();
        for _ in 0..LINES {
            assert_eq!(audit.line(Some(1)), Some(0));
        }
        assert_eq!((audit.line(Some(1)), audit.line(Some(1))), (None, None));
        assert_eq!(audit.line(Some(2)), Some(0), "another user");
        assert_eq!(audit.line(None), Some(0));
        audit.written.get_mut(&Some(1)).unwrap().since -= SECOND;
        assert_eq!((audit.line(Some(1)), audit.line(Some(1))), (Some(2), Some(0)));
    }
}
