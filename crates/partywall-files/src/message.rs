//! One tensor as the bytes of a safetensors file, for messages and records of other formats.

use std::path::Path;

use crate::{
    error::FileError,
    safetensors::{self, Header},
    tensor::TensorInfo,
};

/// What stands before the bytes of a tensor, so that together they are a safetensors file. `file` is named in errors.
///
/// # Errors
/// [`FileError::FormatLacksElements`], [`FileError::FormatLacksStrides`], [`FileError::ReservedName`].
pub fn safetensors_header(
    file: &Path,
    tensor: &TensorInfo,
    metadata: &[(String, String)],
) -> Result<Vec<u8>, FileError> {
    Ok(safetensors::header(file, &[tensor], metadata)?.0)
}

/// A safetensors file of one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message<'a> {
    /// The description of the tensor.
    pub tensor: TensorInfo,
    /// The metadata, in the order of the file.
    pub metadata: Vec<(String, String)>,
    /// The tensor's bytes.
    pub bytes: &'a [u8],
}

/// What `bytes` say, which are a safetensors file of one tensor. `file` is named in errors.
///
/// # Errors
/// [`FileError::Malformed`] if there is not exactly one; [`FileError::Truncated`], [`FileError::TrailingBytes`],
/// [`FileError::UnsupportedElements`], [`FileError::HeaderTooLarge`].
pub fn safetensors_message<'a>(file: &Path, bytes: &'a [u8]) -> Result<Message<'a>, FileError> {
    let Header { tensors, metadata } = safetensors::parse_bytes(file, bytes)?;
    match <[_; 1]>::try_from(tensors) {
        // Its place has been checked against the length.
        Ok([(tensor, at)]) => Ok(Message { tensor, metadata, bytes: &bytes[at as usize..] }),
        Err(tensors) => {
            Err(FileError::malformed(file, format!("a message has {} tensors, and should have one", tensors.len())))
        }
    }
}

#[cfg(test)]
mod tests {
    use partywall_shm::DType;

    use super::*;

    #[test]
    fn message_round_trips_and_damage_is_found() {
        let file = Path::new("f");
        let tensor = TensorInfo::contiguous("data", DType::F32, vec![2, 1]).unwrap();
        let metadata = [("header".to_owned(), "00ff".to_owned()), ("a".to_owned(), String::new())];
        let mut message = safetensors_header(file, &tensor, &metadata).unwrap();
        message.extend([1, 2, 3, 4, 5, 6, 7, 8]);
        let expected = Message { tensor, metadata: metadata.to_vec(), bytes: &[1, 2, 3, 4, 5, 6, 7, 8] };
        assert_eq!(safetensors_message(file, &message).unwrap(), expected);

        for end in 0..message.len() {
            assert!(matches!(safetensors_message(file, &message[..end]), Err(FileError::Truncated { .. })), "{end}");
        }
        message.push(0);
        assert!(matches!(safetensors_message(file, &message), Err(FileError::TrailingBytes { .. })));
        let none = [&2_u64.to_le_bytes()[..], b"{}"].concat();
        assert!(matches!(safetensors_message(file, &none), Err(FileError::Malformed { .. })));
        let large = TensorInfo::contiguous("data", DType::C128, vec![1]).unwrap();
        assert!(matches!(safetensors_header(file, &large, &[]), Err(FileError::FormatLacksElements { .. })));
    }
}
