//! The terminal while the live view has it: raw, on its other screen, without a cursor.

use std::{
    io::{self, Stdout, stdin, stdout},
    mem::ManuallyDrop,
    sync::Once,
    time::Duration,
};

use ratatui::{
    Frame, Terminal,
    backend::CrosstermBackend,
    crossterm::{
        cursor, execute,
        terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode},
    },
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Signal, getpid, kill_process},
};

/// A terminal that shows the live view. It is as before once this is dropped, and before a panic prints its message.
pub(super) struct Screen {
    /// Never dropped: it would show the cursor once more, and panic where the terminal is gone and standard error with
    /// it.
    terminal: ManuallyDrop<Terminal<CrosstermBackend<Stdout>>>,
}

impl Screen {
    /// Takes the terminal.
    ///
    /// # Errors
    /// If it cannot be taken; it is then as before.
    pub(super) fn enter() -> io::Result<Self> {
        restore_before_panics();
        let screen = Self { terminal: ManuallyDrop::new(Terminal::new(CrosstermBackend::new(stdout()))?) };
        take()?;
        Ok(screen)
    }

    /// Shows a frame.
    ///
    /// # Errors
    /// The errors of the terminal.
    pub(super) fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        self.terminal.draw(draw).map(drop)
    }

    /// Returns the terminal to the shell and stops this process, as Ctrl-Z does elsewhere, until the shell continues
    /// it.
    ///
    /// # Errors
    /// The errors of the terminal.
    pub(super) fn suspend(&mut self) -> io::Result<()> {
        restore();
        kill_process(getpid(), Signal::TSTP)?;
        take()?;
        self.terminal.clear()
    }
}

/// The state of the keyboard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Keyboard {
    Silent,
    /// A key.
    Pressed,
    /// Nothing, but a signal has arrived, perhaps because the terminal has another size.
    Interrupted,
    /// Nothing any more: the terminal is gone.
    Gone,
}

/// Waits for a key.
///
/// Events may be read only after [`Keyboard::Pressed`]: asked about a terminal that is gone, crossterm reads its end
/// again and again and never returns.
///
/// # Errors
/// The errors of the kernel.
pub(super) fn wait_for_key(timeout: Duration) -> io::Result<Keyboard> {
    let stdin = stdin();
    let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
    let timeout = Timespec::try_from(timeout).map_err(|_| Errno::INVAL)?;
    match poll(&mut fds, Some(&timeout)) {
        Ok(0) => Ok(Keyboard::Silent),
        Ok(_) if fds[0].revents() == PollFlags::IN => Ok(Keyboard::Pressed),
        Ok(_) => Ok(Keyboard::Gone),
        Err(Errno::INTR) => Ok(Keyboard::Interrupted),
        Err(error) => Err(error.into()),
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

fn take() -> io::Result<()> {
    enable_raw_mode()?;
    execute!(stdout(), EnterAlternateScreen, cursor::Hide)
}

/// Restores the terminal. It is no failure if it is gone.
fn restore() {
    let _ = execute!(stdout(), LeaveAlternateScreen, cursor::Show);
    let _ = disable_raw_mode();
}

/// Restores the terminal before the message of a panic of any thread. The message would disappear together with the
/// alternate screen.
fn restore_before_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore();
            print(panic);
        }));
    });
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use partywall_harness::Terminal;

    use super::*;

    /// Names the part that the test plays in a process of its own.
    const ROLE: &str = "PARTYWALL_TOP_ROLE";

    // Holds 316.
    #[test]
    fn panic_restores_the_terminal_and_then_speaks() {
        if std::env::var_os(ROLE).is_some() {
            let mut screen = Screen::enter().unwrap();
            screen.draw(|frame| frame.render_widget("shown", frame.area())).unwrap();
            panic!("it is broken");
        }
        let this = std::thread::current().name().unwrap().to_owned();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", &this, "--nocapture", "--test-threads=1"]).env(ROLE, "1");
        let terminal = Terminal::spawn(command, 80);
        terminal.wait_for("it is broken");
        assert!(terminal.is_cooked());
        let (code, screen) = terminal.wait();
        assert_eq!(code, Some(101), "{screen}");
        let at = |part: &str| screen.find(part).unwrap_or_else(|| panic!("{part:?} is not in {screen:?}"));
        assert!(at("\x1b[?1049h") < at("shown") && at("shown") < at("\x1b[?1049l"), "{screen:?}");
        assert!(at("\x1b[?1049l") < at("it is broken") && at("\x1b[?25h") < at("it is broken"), "{screen:?}");
    }
}
