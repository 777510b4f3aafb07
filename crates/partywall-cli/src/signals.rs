//! Ctrl-C and `kill`: the command undoes or closes its work before the process ends.

use std::sync::{Arc, atomic::AtomicBool};

use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};

use crate::failure::Failure;

/// Returns a flag that the first Ctrl-C or SIGTERM sets. A second signal ends the process immediately.
///
/// # Errors
/// If the kernel refuses the handler.
pub(crate) fn cancel_flag() -> Result<Arc<AtomicBool>, Failure> {
    let refused = |error| Failure::system("handling signals", error);
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // Registered before the handler that sets the flag: the first signal must find the flag unset.
        flag::register_conditional_default(signal, stop.clone()).map_err(refused)?;
        flag::register(signal, stop.clone()).map_err(refused)?;
    }
    Ok(stop)
}
