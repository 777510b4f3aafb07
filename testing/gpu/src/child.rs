//! A child process in its own process group, with a time limit and captured output.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{PidfdFlags, Signal};

/// How long a killed process may take to disappear. A process that is busy in the driver takes some time; one that
/// needs longer than this never ends.
const LAST_MOMENTS: Duration = Duration::from_secs(20);
/// The number of bytes kept from the end of the output.
const MOST_OUTPUT: u64 = 64 << 10;

/// How a child ended, and its output.
pub(crate) struct Finished {
    pub(crate) end: End,
    /// Standard output and standard error, in the order in which they were written.
    pub(crate) output: String,
    pub(crate) time: Duration,
}

pub(crate) enum End {
    /// It ended by itself.
    Exited(ExitStatus),
    /// It was killed after its timeout.
    TimedOut,
    /// It was killed after its timeout, but did not end.
    Unkillable,
}

/// Runs `command` for at most `limit`. When it has ended, the rest of its process group is killed, so that no test
/// finds processes of another test.
///
/// Output goes to a memfd and not to a pipe: a surviving process that still has the pipe would keep this process
/// reading.
pub(crate) fn run(command: &mut Command, limit: Duration) -> io::Result<Finished> {
    let output = File::from(rustix::fs::memfd_create("output", rustix::fs::MemfdFlags::CLOEXEC)?);
    // In append mode a child that seeks cannot overwrite the output of others.
    rustix::fs::fcntl_setfl(&output, rustix::fs::OFlags::APPEND)?;
    let start = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output.try_clone()?)
        .process_group(0)
        .spawn()?;
    let end = finish(&mut child, limit)?;
    Ok(Finished { end, time: start.elapsed(), output: tail(output)? })
}

fn finish(child: &mut Child, limit: Duration) -> io::Result<End> {
    let pid = rustix::process::Pid::from_child(child);
    let exit = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
    let in_time = becomes_readable(&exit, limit)?;
    // The child is not reaped yet, so its pid still is the id of its group. This fails only if the group has no process
    // left.
    let _ = rustix::process::kill_process_group(pid, Signal::KILL);
    if !in_time && !becomes_readable(&exit, LAST_MOMENTS)? {
        return Ok(End::Unkillable);
    }
    let status = child.wait()?;
    Ok(if in_time { End::Exited(status) } else { End::TimedOut })
}

/// Waits until the process of a pidfd has ended.
fn becomes_readable(pidfd: impl AsFd, limit: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&left)) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn tail(mut file: File) -> io::Result<String> {
    let length = file.seek(SeekFrom::End(0))?;
    let skipped = length.saturating_sub(MOST_OUTPUT);
    file.seek(SeekFrom::Start(skipped))?;
    let mut bytes = Vec::new();
    file.take(MOST_OUTPUT).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    Ok(match skipped {
        0 => text.into_owned(),
        _ => format!("[{skipped} earlier bytes are left out]\n{text}"),
    })
}

#[cfg(test)]
mod unit {
    use super::*;

    fn sh(script: &str, limit: Duration) -> Finished {
        run(Command::new("/bin/sh").args(["-c", script]), limit).unwrap()
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn output_of_both_kinds_is_caught_in_order() {
        let finished = sh("echo one; echo two >&2; echo three; exit 3", LONG);
        assert_eq!(finished.output, "one\ntwo\nthree\n");
        assert!(matches!(finished.end, End::Exited(status) if status.code() == Some(3)));
    }

    #[test]
    fn hanging_child_is_killed_with_its_children() {
        let finished = sh("sleep 1000 & echo $!; wait", Duration::from_millis(200));
        assert!(matches!(finished.end, End::TimedOut));
        assert!(finished.time < LONG, "{:?}", finished.time);
        assert_gone(&finished.output);
    }

    #[test]
    fn leftovers_of_a_child_end_with_it() {
        let finished = sh("sleep 1000 & echo $!", LONG);
        assert!(matches!(finished.end, End::Exited(status) if status.success()));
        assert_gone(&finished.output);
    }

    #[test]
    fn the_end_of_a_long_output_is_kept() {
        let finished = sh("yes | head -c 100000; echo the end", LONG);
        assert!(finished.output.starts_with("[34472 earlier bytes"), "{}", &finished.output[..40]);
        assert!(finished.output.ends_with("y\nthe end\n"));
    }

    /// Returns whether the process that a shell printed has ended, reaped or not.
    fn assert_gone(pid: &str) {
        let stat = format!("/proc/{}/stat", pid.trim());
        let deadline = Instant::now() + LONG;
        while let Ok(text) = std::fs::read_to_string(&stat) {
            if text.contains(") Z ") || text.contains(") X ") {
                break;
            }
            assert!(Instant::now() < deadline, "still there: {text}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
