//! A place for a spare value that may itself keep the place alive.
#![allow(unsafe_code)]

use std::{
    ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

/// A place for one boxed value, which threads put in and take out by one atomic operation each.
///
/// A lock would have to be borrowed from whatever keeps it alive while the value is moved in. If that is the value
/// itself, each hand-over would need a second reference for as long.
///
/// A value that keeps the place alive stays in it until it is taken, or the place is closed.
#[derive(Debug)]
pub struct Spare<T>(AtomicPtr<T>);

impl<T> Spare<T> {
    /// Returns an empty place.
    pub const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Takes the value, if there is one.
    pub fn take(&self) -> Option<Box<T>> {
        let seen = Some(self.0.load(Ordering::Relaxed)).filter(|seen| is_value(*seen))?;
        // Pairs with `put`. This may take another value than the one seen, if that was taken and one of the same address
        // was put in since: the exchange returns the one that it has taken.
        let value = self.0.compare_exchange(seen, ptr::null_mut(), Ordering::Acquire, Ordering::Relaxed).ok()?;
        // SAFETY: `put` has given the box to the place, and this call has removed it.
        Some(unsafe { Box::from_raw(value) })
    }

    /// Puts a value into the place that `place` finds, which may live only as long as the value does.
    ///
    /// # Errors
    /// The value, if there is one already, or if the place is closed.
    pub fn put(value: Box<T>, place: impl FnOnce(&T) -> &Self) -> Result<(), Box<T>> {
        let value = Box::into_raw(value);
        // SAFETY: this call owns the value until the exchange has put it into the place. Another thread may then end both
        // at once, which is allowed for an atomic that is not used afterwards, as for the counts of an `Arc`. `place`
        // returns what lives as long as any borrow of the value.
        let place = place(unsafe { &*value });
        match place.0.compare_exchange(ptr::null_mut(), value, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => Ok(()),
            // SAFETY: the value is not in the place.
            Err(_) => Err(unsafe { Box::from_raw(value) }),
        }
    }

    /// Takes the value, and refuses all later ones.
    pub fn close(&self) -> Option<Box<T>> {
        let value = self.0.swap(closed(), Ordering::Acquire);
        // SAFETY: as in `take`.
        is_value(value).then(|| unsafe { Box::from_raw(value) })
    }
}

impl<T> Default for Spare<T> {
    fn default() -> Self {
        Self::new()
    }
}

// SAFETY: a shared place hands values from thread to thread and never shows them.
unsafe impl<T: Send> Sync for Spare<T> {}

// SAFETY: the place owns its value.
unsafe impl<T: Send> Send for Spare<T> {}

fn is_value<T>(value: *mut T) -> bool {
    !value.is_null() && value != closed()
}

/// Returns the pointer in a closed place, at which there is no value.
fn closed<T>() -> *mut T {
    ptr::without_provenance_mut(usize::MAX)
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Arc, Barrier},
        thread,
    };

    use super::*;

    /// A value that keeps its place alive.
    struct Value {
        place: Arc<Spare<Value>>,
        number: u32,
    }

    #[test]
    fn place_has_one_value() {
        let place = Arc::new(Spare::new());
        let value = |number| Box::new(Value { place: place.clone(), number });
        let put = |value| Spare::put(value, |value: &Value| &value.place);
        assert!(place.take().is_none() && put(value(1)).is_ok());
        assert_eq!(put(value(2)).map_err(|refused| refused.number), Err(2));
        assert_eq!(place.take().map(|value| value.number), Some(1));
        assert!(place.take().is_none() && put(value(3)).is_ok());
        assert_eq!(place.close().map(|value| value.number), Some(3));
        assert!(put(value(4)).is_err() && place.take().is_none() && place.close().is_none());
        assert_eq!(Arc::strong_count(&place), 1);
    }

    #[test]
    fn last_reference_to_a_place_may_be_in_it() {
        let start = Barrier::new(2);
        for _ in 0..if cfg!(miri) { 10 } else { 1000 } {
            let place = Arc::new(Spare::new());
            let value = Box::new(Value { place: place.clone(), number: 0 });
            let weak = Arc::downgrade(&place);
            thread::scope(|scope| {
                scope.spawn(|| {
                    start.wait();
                    drop(Spare::put(value, |value| &value.place));
                });
                start.wait();
                drop(place.close());
                drop(place);
            });
            assert_eq!(weak.strong_count(), 0, "no value is left in a place of its own");
        }
    }
}
