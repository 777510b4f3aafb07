//! Memory of loans that is used after the loan is over.

use std::sync::{Arc, OnceLock};

use crate::pool::Block;

/// Keeps the block of a loan for views that outlive it, such as arrays of another language: until this is dropped, no
/// other loan uses the block, whether the loan was published or given back.
///
/// A published sample is delivered all the same, and a write through a view is then a write into that sample. Until the
/// memory is dropped, its block counts as an [in-flight sample](super::Publisher::loan) of the publisher.
///
/// In a forked child the block belongs to the parent, and dropping it does nothing.
#[derive(Debug)]
#[must_use = "the block may be used again when its memory is dropped"]
pub struct LoanMemory {
    _left: Arc<OnceLock<ViewedBlock>>,
}

/// The views of a loan.
#[derive(Default)]
pub(super) struct LoanViews(Option<Arc<OnceLock<ViewedBlock>>>);

/// A block that its loan has left to its views.
#[derive(Debug)]
struct ViewedBlock {
    _block: Block,
    /// Counts the block among those that only views keep.
    _view: Arc<()>,
}

impl LoanViews {
    pub(super) fn view(&mut self) -> LoanMemory {
        LoanMemory { _left: self.0.get_or_insert_default().clone() }
    }

    /// Returns whether there are views. While the loan makes no further one, this changes to false only.
    pub(super) fn exist(&mut self) -> bool {
        self.0.as_mut().is_some_and(|left| Arc::get_mut(left).is_none())
    }

    /// Leaves a block to the last view.
    pub(super) fn leave(&mut self, block: Block, view: Arc<()>) {
        if let Some(left) = self.0.take() {
            // Each loan leaves its block once. A second one would be given back here.
            _ = left.set(ViewedBlock { _block: block, _view: view });
        }
    }
}
