//! The linker's arguments for the shared library.

use std::{env, fs, path::PathBuf};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Programs load the library by this name: the number is that of the ABI.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libpartywall.so.0");
    // Threads of the library run its code for as long as the process has a connection, and thread-local values are
    // dropped at the end of a thread: `dlclose` leaves the code mapped.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Rust's standard library asks for the shared unwinder. The linker finds this script in its place, which names the
    // static one, so that the library depends on the C library alone. No panic leaves the library, so that the two
    // unwinders of a C++ program never meet.
    let directory = PathBuf::from(env::var_os("OUT_DIR").expect("Cargo sets it"));
    fs::write(directory.join("libgcc_s.so"), "INPUT(-lgcc_eh -lgcc)\n").expect("the directory is Cargo's for this");
    println!("cargo::rustc-cdylib-link-arg=-L{}", directory.display());
}
