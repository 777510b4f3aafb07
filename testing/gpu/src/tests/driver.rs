//! The driver itself.

use crate::gpu;

/// The driver's library opens in a process that has not used it before.
pub(crate) fn driver_loads() -> Result<(), String> {
    gpu::open_driver().map(drop)
}
