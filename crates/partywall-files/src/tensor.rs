//! The description of a tensor in a file or in memory, without its bytes.

use partywall_shm::DType;

/// A tensor's description.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// Elements along each dimension.
    pub shape: Vec<u64>,
    /// Elements from one index to the next along each dimension.
    pub strides: Vec<u64>,
    /// Bytes from its first element to the end of its last.
    pub bytes: u64,
}

impl TensorInfo {
    /// A tensor whose elements follow each other without gaps, last dimension fastest; `None` if it is larger than 2⁶³
    /// bytes or does not fill whole bytes.
    pub fn contiguous(name: &str, dtype: DType, shape: Vec<u64>) -> Option<Self> {
        Self::dense(name, dtype, shape, Order::C)
    }

    /// A tensor whose elements follow each other without gaps, in `order`; `None` if it is larger than 2⁶³ bytes or
    /// does not fill whole bytes.
    pub(crate) fn dense(name: &str, dtype: DType, shape: Vec<u64>, order: Order) -> Option<Self> {
        let strides = order.strides(&shape)?;
        let elements = if shape.contains(&0) { 0 } else { shape.iter().try_fold(1_u64, |n, d| n.checked_mul(*d))? };
        let bytes = dtype.bytes_for(elements)?;
        Some(Self { name: name.to_owned(), dtype, shape, strides, bytes })
    }

    /// Returns whether its elements follow each other without gaps, last dimension fastest.
    pub fn is_contiguous(&self) -> bool {
        self.lies_in(Order::C)
    }

    /// Returns whether its elements follow each other without gaps in `order`. Strides that are never taken do not
    /// count.
    pub(crate) fn lies_in(&self, order: Order) -> bool {
        let Some(expected) = order.strides(&self.shape) else {
            return false;
        };
        self.shape.len() == self.strides.len()
            && (self.shape.contains(&0)
                || self.shape.iter().zip(&self.strides).zip(&expected).all(|((n, has), wants)| *n == 1 || has == wants))
    }
}

/// Which dimension is the fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// The last.
    C,
    /// The first.
    Fortran,
}

impl Order {
    /// The strides of a dense tensor, in elements; `None` if they exceed 2⁶⁴. An empty dimension counts as one, as in
    /// the tensor table.
    fn strides(self, shape: &[u64]) -> Option<Vec<u64>> {
        let mut strides = vec![1; shape.len()];
        match self {
            Self::C => {
                for i in (1..shape.len()).rev() {
                    strides[i - 1] = shape[i].max(1).checked_mul(strides[i])?;
                }
            }
            Self::Fortran => {
                for i in 1..shape.len() {
                    strides[i] = shape[i - 1].max(1).checked_mul(strides[i - 1])?;
                }
            }
        }
        Some(strides)
    }
}

/// The name of the only tensor of a file that holds no names.
pub const SINGLE_TENSOR: &str = "data";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_follow_the_order() {
        assert_eq!(Order::C.strides(&[2, 3, 4]), Some(vec![12, 4, 1]));
        assert_eq!(Order::Fortran.strides(&[2, 3, 4]), Some(vec![1, 2, 6]));
        assert_eq!(Order::C.strides(&[]), Some(vec![]));
        assert_eq!(Order::C.strides(&[1, 1 << 40, 1 << 40]), None);
    }

    #[test]
    fn unused_strides_do_not_matter() {
        let mut tensor = TensorInfo::dense("t", DType::F32, vec![1, 5], Order::Fortran).unwrap();
        assert!(tensor.is_contiguous() && tensor.lies_in(Order::Fortran));
        tensor.strides = vec![77, 1];
        assert!(tensor.is_contiguous());
        tensor.strides = vec![1, 2];
        assert!(!tensor.is_contiguous());
        tensor.strides = vec![1];
        assert!(!tensor.is_contiguous());
        let fortran = TensorInfo::dense("t", DType::F32, vec![2, 5], Order::Fortran).unwrap();
        assert!(!fortran.is_contiguous());
        assert_eq!(fortran.bytes, 40);
    }

    #[test]
    fn impossible_sizes_are_refused() {
        assert_eq!(TensorInfo::dense("t", DType::F64, vec![1 << 62, 2], Order::C), None);
        assert_eq!(TensorInfo::dense("t", DType::F4, vec![3], Order::C), None);
        assert_eq!(TensorInfo::dense("t", DType::F64, vec![0, 7], Order::C).unwrap().bytes, 0);
    }
}
