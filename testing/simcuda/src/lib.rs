//! `libsimcuda.so`: the simulated CUDA driver under the names of the vendor's.
//!
//! For processes that do not contain it, which choose it by `PARTYWALL_LIBCUDA=simulated` if it is beside them or on
//! `PATH`, or by its path: programs of the library and of tests, and Python. What it does is all in
//! `partywall-simcuda`; the program `partywall-lab` links that, without this.
#![allow(unsafe_code)] // exports C functions
#![allow(non_snake_case)] // the names of cuda.h

use std::arch::naked_asm;

/// Exports each function of the list: a jump, which leaves the arguments where they are.
macro_rules! export {
    ($($function:ident)*) => {
        $(
            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            extern "C" fn $function() {
                naked_asm!("jmp {function}", function = sym partywall_simcuda::functions::$function)
            }
        )*
    };
}

partywall_simcuda::for_each_function!(export);
