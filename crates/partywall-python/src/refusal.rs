//! Why an object of another library cannot be taken as a tensor, and what to pass instead.

use partywall::DType;
use pyo3::{
    exceptions::{PyException, PyMemoryError},
    intern,
    prelude::*,
};

use crate::errors::{self, bad_source};

/// Why an object is refused, and what to do.
type Reason = (String, &'static str);

/// The type of the elements of an array, if another library has added it to NumPy, as ml_dtypes does.
pub(crate) struct AddedType {
    name: String,
    bytes: u64,
}

impl AddedType {
    /// Returns the added type of an array's elements; `None` if NumPy itself has the type.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> Option<Self> {
        let py = object.py();
        let dtype = object.getattr(intern!(py, "dtype")).ok()?;
        let origin: i32 = dtype.getattr(intern!(py, "isbuiltin")).ok()?.extract().ok()?;
        if origin != ADDED {
            return None;
        }
        let name = dtype.getattr(intern!(py, "name")).ok()?.extract().ok()?;
        let bytes = dtype.getattr(intern!(py, "itemsize")).ok()?.extract().ok()?;
        Some(Self { name, bytes })
    }

    /// Returns the type that has the same name here and the same bytes, and the unsigned integer of that size.
    pub(crate) fn known(&self) -> Option<(DType, DType)> {
        let dtype = DType::ALL.iter().find(|dtype| dtype.name() == self.name && dtype.bits() == self.bytes * 8)?;
        let integer = [DType::U8, DType::U16].into_iter().find(|integer| integer.bits() == dtype.bits())?;
        Some((*dtype, integer))
    }
}

/// Returns the exception for a tensor of a type that its library knows, and that is not taken.
pub(crate) fn unknown_type(object: &Bound<'_, PyAny>) -> PyErr {
    let py = object.py();
    let name = object.getattr(intern!(py, "dtype")).and_then(|dtype| dtype.str());
    let name = name.map_or_else(|_| "of another type".to_owned(), |name| name.to_string_lossy().into_owned());
    let (why, advice) = not_taken(&name);
    bad_source(py, &why, advice)
}

/// Returns why a tensor with elements of this type is refused.
fn not_taken(name: &str) -> Reason {
    let why = match DType::ALL.iter().any(|dtype| dtype.name() == name) {
        true => format!("its elements are {name}, and those of other libraries are not packed as Partywall packs them"),
        false => format!("its elements are {name}, which Partywall does not have"),
    };
    (why, "give its bytes: .view(\"uint8\"), or .view(torch.uint8)")
}

/// Returns the exception for a tensor that its library does not give away, with the library's own as its cause.
///
/// An exception that says more stays as it is: one of Partywall, a lack of memory, or Ctrl-C.
pub(crate) fn not_given(object: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    let py = object.py();
    if !error.is_instance_of::<PyException>(py)
        || error.is_instance_of::<PyMemoryError>(py)
        || errors::is_own(py, &error)
    {
        return error;
    }
    let reason = match AddedType::of(object) {
        Some(added) => added.known().is_none().then(|| not_taken(&added.name)),
        None => not_numbers(object).or_else(|| not_strided(object)),
    };
    let (why, advice) =
        reason.unwrap_or_else(|| (format!("its library does not give it away: {}", said(py, &error)), NOT_GIVEN));
    let refused = bad_source(py, &why, advice);
    refused.set_cause(py, Some(error));
    refused
}

/// Returns why a NumPy array of other elements than numbers cannot be taken.
fn not_numbers(object: &Bound<'_, PyAny>) -> Option<Reason> {
    let dtype = object.getattr(intern!(object.py(), "dtype")).ok()?;
    let kind: char = dtype.getattr(intern!(object.py(), "kind")).ok()?.extract().ok()?;
    let (what, advice) = match kind {
        'U' | 'S' | 'T' => ("strings", "give its bytes: np.frombuffer(text.encode(), np.uint8)"),
        'M' => ("dates and times", "give its numbers: a.view(np.int64)"),
        'm' => ("spans of time", "give its numbers: a.view(np.int64)"),
        'O' => ("Python objects", "convert it to numbers: a.astype(np.float32)"),
        'V' => ("records", "put each field by itself: a[\"field\"].copy()"),
        _ => return None,
    };
    Some((format!("its elements are {what} ({dtype}), not numbers"), advice))
}

/// Returns why a tensor of torch that is not plain memory cannot be taken.
fn not_strided(object: &Bound<'_, PyAny>) -> Option<Reason> {
    let py = object.py();
    let layout = object.getattr(intern!(py, "layout")).ok()?.str().ok()?.to_string();
    let layout = layout.strip_prefix("torch.")?;
    let is = |attribute| object.getattr(attribute).and_then(|is| is.extract::<bool>()).unwrap_or(false);
    let (why, advice) = if object.hasattr(intern!(py, "get_mask")).unwrap_or(false) {
        (MASKED, "give its numbers without the mask: t.to_tensor(0), or put the mask beside them: t.get_mask()")
    } else if is(intern!(py, "is_meta")) {
        ("it is on meta and has no data", "load it first, or create it on a device")
    } else if is(intern!(py, "is_nested")) {
        ("it is a nested tensor", "give its numbers as a plain tensor: t.to_padded_tensor(0), or t.values()")
    } else if is(intern!(py, "is_quantized")) {
        ("it is a quantized tensor", "give its integers, and put its scales beside them: t.int_repr()")
    } else if layout != "strided" {
        return Some((format!("its layout is {layout}, not strided memory"), "make it dense first: t.to_dense()"));
    } else {
        return None;
    };
    Some((why.to_owned(), advice))
}

/// Returns the first line of what an exception says, or its class if it says nothing.
fn said(py: Python<'_>, error: &PyErr) -> String {
    let text = error.value(py).to_string();
    match text.lines().next().map(|line| line.trim_end_matches('.')) {
        Some(line) if !line.is_empty() => line.to_owned(),
        _ => error.get_type(py).name().map_or_else(|_| "an exception".to_owned(), |name| name.to_string()),
    }
}

/// How `numpy.dtype.isbuiltin` describes a type that another library has added.
const ADDED: i32 = 2;

const MASKED: &str = "it has a mask, which would be lost";

const NOT_GIVEN: &str = "give it as plain numbers in this machine's byte order, as a type that DLPack has (numpy: \
                         .astype(…)), on the current device, and without lazy operations";
