//! Ctrl-C and `kill`: the command undoes or closes its work before the process ends.

use std::sync::{Arc, atomic::AtomicBool};

use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
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

/// Returns a flag that Ctrl-C, SIGTERM and the end of the terminal set. No number of signals ends the process: it has
/// the terminal to restore first.
///
/// # Errors
/// If the kernel refuses the handler.
pub(crate) fn end_flag() -> Result<Arc<AtomicBool>, Failure> {
    let end = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        flag::register(signal, end.clone()).map_err(|error| Failure::system("handling signals", error))?;
    }
    Ok(end)
}
