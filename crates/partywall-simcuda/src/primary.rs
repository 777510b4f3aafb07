//! Primary contexts: made by the first reference, ended by the last, with their streams and memory.

use std::ffi::c_int;

use crate::abi::{Code, Handle, RawDevice};
use crate::entry::{entry_points, store};
use crate::{capture, context, device, ledger, memory, stream};

const CONTEXT: &str = "primary context";

/// `CU_LIMIT_STACK_SIZE`, the only limit that is simulated.
const STACK_SIZE: u32 = 0;

entry_points! {
    fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: RawDevice) {
        let (device, _) = device::numbered(device)?;
        if context.is_null() { return Err(Code::INVALID_VALUE); }
        let handle = context::all().retain(device);
        ledger::record(CONTEXT, device as u64, 0);
        store(context, handle)
    }
    fn cuDevicePrimaryCtxRelease_v2(device: RawDevice) {
        let (device, _) = device::numbered(device)?;
        let ended = context::all().release(device)?;
        ledger::remove(CONTEXT, device as u64);
        if let Some(context) = ended {
            // The memory is freed even after a fault.
            let _ = stream::synchronize(&context);
            context.destroy();
            stream::end_context(&context);
            memory::end_of_context(context.handle);
        }
        Ok(())
    }
    fn cuDevicePrimaryCtxGetState(device: RawDevice, flags: *mut u32, active: *mut c_int) {
        let (device, _) = device::numbered(device)?;
        let lives = context::all().lives(device);
        store(flags, 0)?;
        store(active, c_int::from(lives))
    }
    fn cuCtxGetLimit(value: *mut usize, limit: u32) {
        context::current()?;
        if limit == STACK_SIZE { store(value, context::LOCAL_BYTES as usize) } else { Err(Code::NOT_SUPPORTED) }
    }
    fn cuCtxSynchronize() {
        let context = context::current()?;
        capture::unsafe_call()?;
        stream::synchronize(&context)
    }
}
