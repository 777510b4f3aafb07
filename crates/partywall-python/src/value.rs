//! Values for Python: instances of its dataclasses, created with a keyword for each field.

use pyo3::{
    inspect::{PyStaticConstant, PyStaticExpr},
    prelude::*,
    type_hint_identifier, type_hint_subscript,
    types::PyTuple,
};

/// Any number of values, as a tuple.
pub(crate) struct Tuple<T>(pub(crate) Vec<T>);

impl<'py, T: IntoPyObject<'py>> IntoPyObject<'py> for Tuple<T> {
    type Target = PyTuple;
    type Output = Bound<'py, PyTuple>;
    type Error = PyErr;

    const OUTPUT_TYPE: PyStaticExpr = type_hint_subscript!(
        type_hint_identifier!("builtins", "tuple"),
        T::OUTPUT_TYPE,
        PyStaticExpr::Constant { value: PyStaticConstant::Ellipsis }
    );

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Self::Output> {
        PyTuple::new(py, self.0)
    }
}

/// Defines the struct whose conversion to Python creates an instance of a dataclass with the same fields.
macro_rules! value {
    ($(#[$doc:meta])* $name:ident, $module:literal, $class:literal, { $($field:ident: $type:ty,)+ }) => {
        $(#[$doc])*
        pub(crate) struct $name {
            $(pub(crate) $field: $type,)+
        }

        impl<'py> pyo3::IntoPyObject<'py> for $name {
            type Target = pyo3::PyAny;
            type Output = pyo3::Bound<'py, pyo3::PyAny>;
            type Error = pyo3::PyErr;

            const OUTPUT_TYPE: pyo3::inspect::PyStaticExpr = pyo3::type_hint_identifier!($module, $class);

            fn into_pyobject(self, py: pyo3::Python<'py>) -> pyo3::PyResult<Self::Output> {
                use pyo3::types::{PyAnyMethods, PyDictMethods};

                let fields = pyo3::types::PyDict::new(py);
                $(fields.set_item(pyo3::intern!(py, stringify!($field)), self.$field)?;)+
                py.import(pyo3::intern!(py, $module))?.getattr(pyo3::intern!(py, $class))?.call((), Some(&fields))
            }
        }
    };
}

pub(crate) use value;
