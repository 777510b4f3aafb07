//! Writing segments and tensors to files, and addresses that name them.

use std::{fmt, io::Write, path::Path, str::FromStr, sync::atomic::AtomicBool};

use crate::{
    domain::{Domain, check_name, parse_version},
    error::{Error, InvalidArgument, Result},
    files::{self, Content, Format, SinkError, TensorInfo},
    put::unwrap,
    segment::{Segment, Tensor},
    wait::Wait,
};

/// The text form of a segment, a version or a tensor: `NAME`, `NAME@V`, `NAME:TENSOR`, `NAME@V:TENSOR`
/// or `NAME:TENSOR@V`.
///
/// A name contains neither `:` nor `@`, so it ends at the first of them. A tensor's name may contain both: after `@V:`
/// everything is the tensor's name. In `NAME:TENSOR@V` the whole `TENSOR@V` is the tensor's name if the latest version
/// has such a tensor; [`Domain::open_address`] looks it up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    name: String,
    version: Option<u64>,
    tensor: Option<String>,
    /// In `NAME:TENSOR@V`: `TENSOR` and `V`, in case that `@V` is not part of the tensor's name.
    perhaps: Option<(String, u64)>,
}

impl Address {
    /// Returns the segment's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the tensor's name, if it names one.
    pub fn tensor(&self) -> Option<&str> {
        self.tensor.as_deref()
    }
}

impl FromStr for Address {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let end = text.find([':', '@']).unwrap_or(text.len());
        let (name, rest) = text.split_at(end);
        check_name(name)?;
        let mut address = Self { name: name.to_owned(), version: None, tensor: None, perhaps: None };
        let tensor = match rest.strip_prefix('@') {
            Some(rest) => {
                let (digits, tensor) = rest.split_once(':').map_or((rest, None), |(digits, rest)| (digits, Some(rest)));
                let bad = || InvalidArgument::Version { name: name.to_owned(), version: digits.to_owned() };
                address.version = Some(parse_version(digits).ok_or_else(bad)?);
                tensor
            }
            None => {
                let tensor = rest.strip_prefix(':');
                let split = tensor.and_then(|tensor| tensor.rsplit_once('@'));
                address.perhaps = split
                    .and_then(|(tensor, digits)| Some((tensor.to_owned(), parse_version(digits)?)))
                    .filter(|(tensor, _)| !tensor.is_empty());
                tensor
            }
        };
        if tensor == Some("") {
            return Err(InvalidArgument::name(text, "the name of a tensor must follow `:`"));
        }
        address.tensor = tensor.map(str::to_owned);
        Ok(address)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if let Some(version) = self.version {
            write!(f, "@{version}")?;
        }
        if let Some(tensor) = &self.tensor {
            write!(f, ":{tensor}")?;
        }
        Ok(())
    }
}

impl Domain {
    /// Opens the version that an address names, for reading. Returns the segment and the name of the tensor, if the
    /// address names one. Waits for a version that does not exist yet.
    ///
    /// # Errors
    /// As [`Domain::open`]; [`NotFound::Tensor`](crate::error::NotFound::Tensor).
    pub fn open_address<'w>(&self, address: &Address, wait: impl Into<Wait<'w>>) -> Result<(Segment, Option<String>)> {
        let opener = self.opener(&address.name);
        let opener = if let Some(version) = address.version { opener.version(version) } else { opener };
        let mut segment = opener.open_within(wait.into())?;
        let mut tensor = address.tensor.clone();
        if let (Some(whole), Some((stem, version))) = (&tensor, &address.perhaps)
            && segment.tensor(whole).is_err()
        {
            if segment.version() != *version {
                segment = opener.version(*version).open()?;
            }
            tensor = Some(stem.clone());
        }
        if let Some(tensor) = &tensor {
            segment.tensor(tensor)?;
        }
        Ok((segment, tensor))
    }
}

impl Segment {
    /// Writes all tensors, or only `tensor`, to a file in the format of the file's suffix; see
    /// [`files::write_to_path`]. Only `replace` replaces an existing file. Returns the number of bytes written.
    ///
    /// Calls `progress` with the number of bytes written since its last call. Setting `cancel` ends the writing.
    ///
    /// # Errors
    /// [`NotFound::Tensor`](crate::error::NotFound::Tensor), [`Error::File`],
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda).
    pub fn write_to_path(
        &self,
        tensor: Option<&str>,
        path: &Path,
        replace: bool,
        progress: &dyn Fn(u64),
        cancel: &AtomicBool,
    ) -> Result<u64> {
        files::write_to_path(&Tensors::of(self, tensor)?, tensor, path, replace, progress, cancel).map_err(unwrap)
    }

    /// Writes all tensors, or only `tensor`, to a stream; see [`files::write_to`]. Returns the number of bytes written.
    ///
    /// # Errors
    /// As [`Segment::write_to_path`].
    pub fn write_to(
        &self,
        tensor: Option<&str>,
        format: Format,
        out: &mut dyn Write,
        progress: &dyn Fn(u64),
        cancel: &AtomicBool,
    ) -> Result<u64> {
        files::write_to(&Tensors::of(self, tensor)?, tensor, format, out, progress, cancel).map_err(unwrap)
    }
}

/// The contents of a segment, as writers of files need them.
struct Tensors<'a> {
    segment: &'a Segment,
    tensors: Vec<Tensor<'a>>,
}

impl<'a> Tensors<'a> {
    /// Returns all tensors, after checking that `wanted` is one of them.
    fn of(segment: &'a Segment, wanted: Option<&str>) -> Result<Self> {
        wanted.map_or(Ok(()), |tensor| segment.tensor(tensor).map(drop))?;
        Ok(Self { segment, tensors: segment.tensors() })
    }
}

impl Content for Tensors<'_> {
    fn tensors(&self) -> Vec<TensorInfo> {
        let info = |tensor: &Tensor<'_>| TensorInfo {
            name: tensor.name().to_owned(),
            dtype: tensor.dtype(),
            shape: tensor.shape(),
            strides: tensor.strides(),
            bytes: tensor.bytes(),
        };
        self.tensors.iter().map(info).collect()
    }

    fn metadata(&self) -> Vec<(String, String)> {
        self.segment.metadata().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
    }

    fn read(&self, tensor: usize, offset: u64, out: &mut [u8]) -> Result<(), SinkError> {
        Ok(self.tensors[tensor].read_at(offset, out)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Parts<'a> = (&'a str, Option<u64>, Option<&'a str>, Option<(&'a str, u64)>);

    #[test]
    fn name_ends_at_the_first_colon_or_at_sign() {
        let cases: [(&str, Parts<'_>); 9] = [
            ("llm", ("llm", None, None, None)),
            ("llm@3", ("llm", Some(3), None, None)),
            ("a/b:w", ("a/b", None, Some("w"), None)),
            ("a:w.0:x", ("a", None, Some("w.0:x"), None)),
            ("a@2:w@9", ("a", Some(2), Some("w@9"), None)),
            ("a:w@9", ("a", None, Some("w@9"), Some(("w", 9)))),
            ("a:w@x", ("a", None, Some("w@x"), None)),
            ("a:w@0", ("a", None, Some("w@0"), None)),
            ("a:@4", ("a", None, Some("@4"), None)),
        ];
        for (text, (name, version, tensor, perhaps)) in cases {
            let address: Address = text.parse().expect(text);
            assert_eq!(address.name(), name);
            assert_eq!(address.version, version, "{text}");
            assert_eq!(address.tensor.as_deref(), tensor, "{text}");
            assert_eq!(address.perhaps.as_ref().map(|(t, v)| (t.as_str(), *v)), perhaps, "{text}");
            assert_eq!(address.to_string(), text);
        }
    }

    #[test]
    fn malformed_addresses_are_refused() {
        for text in ["", ":w", "@3", "a b", "a@", "a@x", "a@0", "a@+1", "a@-1", "a:", "a@3:", "a@3@4"] {
            let error = text.parse::<Address>().expect_err(text);
            assert!(
                matches!(error, Error::InvalidArgument(InvalidArgument::Name { .. } | InvalidArgument::Version { .. })),
                "{text}: {error}"
            );
        }
    }
}
