//! The reserve of a publisher: the block of its next loan.
//!
//! A publisher takes it while receivers read the sample that it has just published, so that the next loan need not
//! search. The reserve takes the place of the published loan and counts among the publisher's loans, so the topic still
//! has enough blocks for everything that it promises.

use std::sync::Mutex;

use partywall_os::lock::IgnorePoison;

use super::Loan;

/// The reserve. A loan in it has a reference to the publisher, as every loan does, so the reserve is closed when the
/// publisher is dropped.
#[derive(Default)]
pub(super) struct Reserve(Mutex<ReserveState>);

#[derive(Default)]
struct ReserveState {
    loan: Option<Loan>,
    is_closed: bool,
}

impl Reserve {
    /// Takes the loan, if there is one.
    pub(super) fn take(&self) -> Option<Loan> {
        self.0.lock().ignore_poison().loan.take()
    }

    /// Keeps a loan. Drops it if there is one already, or the publisher is gone.
    pub(super) fn put(&self, loan: Loan) {
        let mut state = self.0.lock().ignore_poison();
        if state.loan.is_none() && !state.is_closed {
            state.loan = Some(loan);
        } else {
            drop(state);
            drop(loan);
        }
    }

    /// Drops the loan, and every loan that is put in later.
    pub(super) fn close(&self) {
        let mut state = self.0.lock().ignore_poison();
        state.is_closed = true;
        let loan = state.loan.take();
        drop(state);
        drop(loan);
    }
}
