//! A process in a terminal of its own.

use std::{
    fs::File,
    io::{Read, Write},
    os::fd::OwnedFd,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    thread::JoinHandle,
    time::Instant,
};

use partywall_os::{
    process,
    socket::{self, Ready},
};
use rustix::{
    process::Signal,
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize},
};

use crate::{WATCHDOG, eventually, signals::reset_in_children};

/// A process whose standard streams are a terminal. It is killed when this is dropped.
#[derive(Debug)]
pub struct Terminal {
    child: Child,
    pidfd: OwnedFd,
    keyboard: File,
    screen: Arc<Mutex<Vec<u8>>>,
    reader: Option<JoinHandle<()>>,
}

impl Terminal {
    /// Starts the command in a terminal with `columns` columns.
    ///
    /// # Panics
    /// If no terminal can be opened, or the command cannot be started.
    pub fn spawn(mut command: Command, columns: u16) -> Self {
        let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&ours).unwrap();
        unlockpt(&ours).unwrap();
        tcsetwinsize(&ours, size(columns, 24)).unwrap();
        let path = ptsname(&ours, Vec::new()).unwrap();
        let theirs = File::options().read(true).write(true).open(path.to_str().unwrap()).unwrap();
        let stream = || Stdio::from(theirs.try_clone().unwrap());
        reset_in_children();
        let child = command.stdin(stream()).stdout(stream()).stderr(stream()).spawn();
        let child = child.unwrap_or_else(|error| panic!("{command:?}: {error}"));
        // The command keeps the child's side open; with it the reader would never end.
        drop(command);
        drop(theirs);
        let pidfd = process::pidfd(child.id()).expect("a child that was not reaped has a pidfd");
        let keyboard = File::from(ours);
        let screen = Arc::new(Mutex::new(Vec::new()));
        let mut from = keyboard.try_clone().unwrap();
        let to = screen.clone();
        let reader = std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // Reading fails once no process has the other side open.
            while let Ok(n @ 1..) = from.read(&mut buffer) {
                to.lock().unwrap().extend_from_slice(&buffer[..n]);
            }
        });
        Self { child, pidfd, keyboard, screen, reader: Some(reader) }
    }

    /// Types a text.
    ///
    /// # Panics
    /// If the terminal accepts no input.
    pub fn type_in(&mut self, text: &str) {
        self.keyboard.write_all(text.as_bytes()).unwrap();
    }

    /// Returns everything that was printed so far.
    ///
    /// # Panics
    /// If the reader has panicked.
    pub fn screen(&self) -> String {
        String::from_utf8_lossy(&self.screen.lock().unwrap()).into_owned()
    }

    /// Waits until `part` has been printed.
    ///
    /// # Panics
    /// If the watchdog ends it.
    pub fn wait_for(&self, part: &str) {
        eventually(&format!("{part:?} is printed"), || self.screen().contains(part));
    }

    /// Returns whether the terminal echoes keys and collects them to lines, as a shell expects it.
    ///
    /// # Panics
    /// If the terminal cannot be asked.
    pub fn is_cooked(&self) -> bool {
        let modes = tcgetattr(&self.keyboard).unwrap().local_modes;
        modes.contains(LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG)
    }

    /// Gives it another size, in characters.
    ///
    /// # Panics
    /// If the terminal takes no size.
    pub fn resize(&self, columns: u16, rows: u16) {
        tcsetwinsize(&self.keyboard, size(columns, rows)).unwrap();
    }

    /// Returns its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        let _ = process::kill(&self.pidfd, signal);
    }

    /// Waits until the process has ended. Returns its exit code, and everything that was printed.
    ///
    /// # Panics
    /// If the watchdog ends it.
    pub fn wait(mut self) -> (Option<i32>, String) {
        let ended = socket::wait(&self.pidfd, Ready::Read, Some(Instant::now() + WATCHDOG)).unwrap();
        assert!(ended, "watchdog: process {} does not end: {}", self.child.id(), self.screen());
        let code = self.child.wait().unwrap().code();
        let _ = self.reader.take().map(JoinHandle::join);
        (code, self.screen())
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn size(columns: u16, rows: u16) -> Winsize {
    Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 }
}
