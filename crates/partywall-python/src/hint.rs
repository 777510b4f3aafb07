//! Python objects with the types that type checkers see.

use std::{convert::Infallible, marker::PhantomData};

use pyo3::{inspect::PyStaticExpr, prelude::*};

/// A type for type checkers.
pub(crate) trait Hint {
    /// The type, as stubs name it.
    const TYPE: PyStaticExpr;
}

/// An object that type checkers see as `H`, whatever its Rust type says.
pub(crate) struct Hinted<'py, H>(Bound<'py, PyAny>, PhantomData<H>);

impl<'py, H> Hinted<'py, H> {
    pub(crate) fn new<T>(object: Bound<'py, T>) -> Self {
        Self(object.into_any(), PhantomData)
    }
}

impl<'py, H: Hint> IntoPyObject<'py> for Hinted<'py, H> {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = Infallible;

    const OUTPUT_TYPE: PyStaticExpr = H::TYPE;

    fn into_pyobject(self, _: Python<'py>) -> Result<Bound<'py, PyAny>, Infallible> {
        Ok(self.0)
    }
}
