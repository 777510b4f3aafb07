//! Ctrl-C and `kill`: the command undoes or closes its work before the process ends.

use std::{
    io,
    sync::{Arc, atomic::AtomicBool},
};

use signal_hook::consts::{SIGINT, SIGTERM};

/// Returns a flag that the first Ctrl-C or SIGTERM sets. A second signal ends the process immediately.
///
/// # Errors
/// If the kernel refuses the handler.
pub(crate) fn cancel_flag() -> io::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // In this order, so that the first signal finds the flag unset here.
        signal_hook::flag::register_conditional_default(signal, flag.clone())?;
        signal_hook::flag::register(signal, flag.clone())?;
    }
    Ok(flag)
}
