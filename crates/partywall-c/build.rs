//! The linker's arguments for the shared library.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Programs load the library by this name: the number is that of the ABI.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libpartywall.so.0");
    // Threads of the library run its code for as long as the process has a connection, and thread-local values are
    // dropped at the end of a thread: `dlclose` leaves the code mapped.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
