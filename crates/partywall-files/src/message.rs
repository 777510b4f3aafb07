//! One tensor as the bytes of a safetensors file, for messages and records of other formats.

use crate::{
    error::FileProblem,
    safetensors::{self, Header},
    tensor::TensorInfo,
};

/// Returns a header that makes a safetensors file together with the bytes of a tensor behind it.
///
/// # Errors
/// [`FileProblem::FormatLacksElements`], [`FileProblem::FormatLacksStrides`], [`FileProblem::ReservedName`].
pub fn safetensors_header(tensor: &TensorInfo, metadata: &[(String, String)]) -> Result<Vec<u8>, FileProblem> {
    Ok(safetensors::header(&[tensor], metadata)?.0)
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

/// Reads a safetensors file of one tensor.
///
/// # Errors
/// [`FileProblem::Malformed`] if there is not exactly one; [`FileProblem::Truncated`], [`FileProblem::TrailingBytes`],
/// [`FileProblem::UnsupportedElements`], [`FileProblem::HeaderTooLarge`].
pub fn safetensors_message(bytes: &[u8]) -> Result<Message<'_>, FileProblem> {
    let Header { tensors, metadata } = safetensors::parse_bytes(bytes)?;
    match <[_; 1]>::try_from(tensors) {
        // The position of the tensor was checked against the length.
        Ok([(tensor, at)]) => Ok(Message { tensor, metadata, bytes: &bytes[at as usize..] }),
        Err(tensors) => {
            Err(FileProblem::malformed(format!("a message has {} tensors, and should have one", tensors.len())))
        }
    }
}

#[cfg(test)]
mod tests {
    use partywall_shm::DType;

    use super::*;

    #[test]
    fn message_round_trips_and_damage_is_found() {
        let tensor = TensorInfo::contiguous("data", DType::F32, vec![2, 1]).unwrap();
        let metadata = [("header".to_owned(), "00ff".to_owned()), ("a".to_owned(), String::new())];
        let mut message = safetensors_header(&tensor, &metadata).unwrap();
        message.extend([1, 2, 3, 4, 5, 6, 7, 8]);
        let expected = Message { tensor, metadata: metadata.to_vec(), bytes: &[1, 2, 3, 4, 5, 6, 7, 8] };
        assert_eq!(safetensors_message(&message).unwrap(), expected);

        for end in 0..message.len() {
            assert!(matches!(safetensors_message(&message[..end]), Err(FileProblem::Truncated { .. })), "{end}");
        }
        message.push(0);
        assert!(matches!(safetensors_message(&message), Err(FileProblem::TrailingBytes { .. })));
        let none = [&2_u64.to_le_bytes()[..], b"{}"].concat();
        assert!(matches!(safetensors_message(&none), Err(FileProblem::Malformed(_))));
        let large = TensorInfo::contiguous("data", DType::C128, vec![1]).unwrap();
        assert!(matches!(safetensors_header(&large, &[]), Err(FileProblem::FormatLacksElements { .. })));
    }
}
