//! Growths: what a version gets at its end, in one step.

use std::ffi::c_char;

use partywall::DType;

use crate::{
    argument::{array, dtype, text},
    error::{call, pw_status},
    handle::{self, object},
    segment::{OpenSegment, pw_segment},
};

/// What a segment is to get at its end. One thread may use it at a time.
pub struct pw_growth {
    _opaque: (),
}

/// A growth borrows its segment, which C cannot promise for long: the parts are collected until the commit.
#[derive(Default)]
struct Parts {
    longer: Option<(String, u64)>,
    tensors: Vec<(String, DType, Vec<u64>)>,
    spare: u64,
}

object!(Parts, pw_growth, 9, "growth");

/// Begins a growth. The caller owns `*growth`, and commits or closes it. Does not block.
///
/// # Safety
/// `growth` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_growth_create(growth: *mut *mut pw_growth) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe { handle::give(growth, || Ok(Parts::default())) })
}

/// Gives the last tensor of the version, which must be `tensor`, a first axis of `length`.
///
/// # Safety
/// No other thread uses `growth`; `tensor` ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_growth_extend(growth: *mut pw_growth, tensor: *const c_char, length: u64) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::get_mut::<Parts>(growth)?.longer = Some((text(tensor, "tensor")?.to_owned(), length));
        Ok(())
    })
}

/// Adds a tensor after the others, its elements without gaps.
///
/// # Safety
/// As `pw_growth_extend`; `shape` has `rank` lengths.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_growth_tensor(
    growth: *mut pw_growth,
    tensor: *const c_char,
    element: u32,
    shape: *const u64,
    rank: usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let added = (text(tensor, "tensor")?.to_owned(), dtype(element)?, array(shape, rank, "shape")?.to_vec());
        handle::get_mut::<Parts>(growth)?.tensors.push(added);
        Ok(())
    })
}

/// Leaves this many bytes free after the tensors. Later growths that fit there map no memory.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_growth_spare(growth: *mut pw_growth, bytes: u64) -> pw_status {
    call(|| {
        // SAFETY: the caller's promise.
        unsafe { handle::get_mut::<Parts>(growth) }?.spare = bytes;
        Ok(())
    })
}

/// Makes a version longer, in one step: processes that open it later see the new length, others after
/// `pw_segment_refresh`. `segment` is the one that has committed the version, with `is_mutable`. New memory reads as
/// zero. Blocks while the kernel or the driver allocates.
///
/// On success the growth is closed. On failure the segment is unchanged, and the growth still the caller's.
///
/// # Safety
/// No other thread uses `growth` or closes `segment`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_growth_commit(growth: *mut pw_growth, segment: *const pw_segment) -> pw_status {
    call(|| {
        // SAFETY: the caller's promise.
        let OpenSegment { segment, .. } = unsafe { handle::get::<OpenSegment>(segment) }?;
        handle::consume(growth, |parts: Parts| {
            let mut grown = segment.grow().spare(parts.spare);
            if let Some((tensor, length)) = &parts.longer {
                grown = grown.extend(tensor, *length);
            }
            for (tensor, dtype, shape) in &parts.tensors {
                grown = grown.tensor(tensor, *dtype, shape);
            }
            grown.commit().map_err(|error| (error.into(), parts))
        })
    })
}

/// Drops a growth that is not to be committed. Null is ignored.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_growth_close(growth: *mut pw_growth) -> pw_status {
    call(|| handle::close::<Parts>(growth))
}
