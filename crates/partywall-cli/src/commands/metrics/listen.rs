//! Answers requests over HTTP.
//!
//! Each client has a thread, so that one that is slow or silent does not delay others. A request is read for
//! [`TIMEOUT`] at most, and only its first line counts; an answer is written for as long. Pages are made one after the
//! other: while one takes long, because the broker does not answer, other clients wait for [`TURN`] and are told to
//! come again.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Mutex, MutexGuard, TryLockError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use super::family::CONTENT_TYPE;
use crate::{failure::Failure, output::Output, signals};

/// How long a request may take to arrive, and an answer to leave.
const TIMEOUT: Duration = Duration::from_secs(1);

/// How long a client waits for the pages of others.
const TURN: Duration = Duration::from_secs(5);

/// How often the loop polls for a request and for Ctrl-C, and a client for its turn.
const PAUSE: Duration = Duration::from_millis(50);

/// The content type of everything but metrics.
const TEXT: &str = "text/plain; charset=utf-8";

/// The most clients at a time. Further ones wait until one of these is answered, or has had its time.
const MOST_CLIENTS: usize = 64;

/// The longest request that is read. The first line of each fits many times.
const LONGEST: usize = 8 << 10;

/// Answers with `page` until Ctrl-C.
pub(super) fn serve(output: Output, address: SocketAddr, page: impl FnMut() -> String + Send) -> Result<(), Failure> {
    let stop = signals::cancel_flag()?;
    let refused = |error: io::Error| {
        Failure::system(&format!("cannot listen at {address}"), error)
            .with_advice("choose another address with --listen ADDRESS:PORT; port 0 takes a free port")
    };
    let listener = TcpListener::bind(address).map_err(refused)?;
    listener.set_nonblocking(true).map_err(refused)?;
    let address = listener.local_addr().map_err(refused)?;
    let url = format!("http://{address}/metrics");
    output.announce(format!("metrics at {url}; Ctrl-C ends this"), &json!({ "listening": url }));
    let stop = &*stop;
    let page = &Mutex::new(page);
    let clients = &AtomicUsize::new(0);
    thread::scope(|scope| {
        while !stop.load(Ordering::Relaxed) {
            let is_full = clients.load(Ordering::Relaxed) >= MOST_CLIENTS;
            let client = if is_full { None } else { listener.accept().ok() };
            let Some((stream, _)) = client else {
                // No client is there, or no file can be opened. The next attempt may be lucky.
                thread::sleep(PAUSE);
                continue;
            };
            clients.fetch_add(1, Ordering::Relaxed);
            let serve = move || {
                // A client that has gone is no reason to end.
                let _ = answer(stream, page, stop);
                clients.fetch_sub(1, Ordering::Relaxed);
            };
            if thread::Builder::new().spawn_scoped(scope, serve).is_err() {
                clients.fetch_sub(1, Ordering::Relaxed);
            }
        }
    });
    Ok(())
}

fn answer(mut stream: TcpStream, page: &Mutex<impl FnMut() -> String>, stop: &AtomicBool) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    let request = read_request(&mut stream)?;
    let (status, kind, body) = match respond(&request) {
        Response::Metrics => match take_turn(page, stop, Instant::now() + TURN) {
            Some(mut page) => ("200 OK", CONTENT_TYPE, page()),
            None => ("503 Service Unavailable", TEXT, "the broker answers others slowly: try again\n".to_owned()),
        },
        Response::Refusal(status, text) => (status, TEXT, format!("{text}\n")),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    write(&mut stream, format!("{head}{body}").as_bytes())
}

/// Waits until no other page is made. Returns `None` after the deadline, and after Ctrl-C.
fn take_turn<'a, T>(page: &'a Mutex<T>, stop: &AtomicBool, deadline: Instant) -> Option<MutexGuard<'a, T>> {
    while !stop.load(Ordering::Relaxed) {
        match page.try_lock() {
            Ok(page) => return Some(page),
            Err(TryLockError::Poisoned(page)) => return Some(page.into_inner()),
            Err(TryLockError::WouldBlock) if Instant::now() >= deadline => return None,
            Err(TryLockError::WouldBlock) => thread::sleep(PAUSE),
        }
    }
    None
}

fn write(stream: &mut TcpStream, mut rest: &[u8]) -> io::Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    while !rest.is_empty() {
        stream.set_write_timeout(Some(left_until(deadline)?))?;
        let written = stream.write(rest)?;
        rest = &rest[written..];
    }
    Ok(())
}

/// Reads to the empty line that ends a request's head.
fn read_request(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let deadline = Instant::now() + TIMEOUT;
    let mut request = Vec::new();
    let mut piece = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") && request.len() < LONGEST {
        stream.set_read_timeout(Some(left_until(deadline)?))?;
        match stream.read(&mut piece)? {
            0 => break,
            read => request.extend_from_slice(&piece[..read]),
        }
    }
    Ok(request)
}

fn left_until(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

#[derive(Debug, PartialEq, Eq)]
enum Response {
    Metrics,
    Refusal(&'static str, &'static str),
}

fn respond(request: &[u8]) -> Response {
    let line = request.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let mut words = line.split(|byte| *byte == b' ');
    let method = words.next();
    let target = words.next();
    let version = words.next();
    let path = target.and_then(|target| target.split(|byte| *byte == b'?').next());
    match (method, path, version) {
        (Some(b"GET"), Some(b"/metrics" | b"/"), Some(version)) if version.starts_with(b"HTTP/1.") => Response::Metrics,
        (_, _, Some(version)) if !version.starts_with(b"HTTP/1.") => {
            Response::Refusal("505 HTTP Version Not Supported", "only HTTP/1.0 and HTTP/1.1 are answered")
        }
        (Some(b"GET"), Some(_), Some(_)) => Response::Refusal("404 Not Found", "the metrics are at /metrics"),
        (Some(_), Some(_), Some(_)) => Response::Refusal("405 Method Not Allowed", "only GET is answered"),
        _ => Response::Refusal("400 Bad Request", "this is no HTTP request"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Holds 322.
    #[test]
    fn turn_ends_with_the_deadline_and_with_a_stop() {
        let page = Mutex::new(());
        let stop = AtomicBool::new(false);
        let late = Instant::now() + Duration::from_secs(3600);
        assert!(take_turn(&page, &stop, late).is_some());
        let held = page.lock().unwrap();
        assert!(take_turn(&page, &stop, Instant::now()).is_none(), "another page is made");
        thread::scope(|scope| {
            let waiting = scope.spawn(|| take_turn(&page, &stop, late).is_none());
            stop.store(true, Ordering::Relaxed);
            assert!(waiting.join().unwrap());
        });
        drop(held);
        assert!(take_turn(&page, &stop, late).is_none(), "nothing is begun after a stop");
    }

    #[test]
    fn only_metrics_are_answered() {
        for (request, expected) in [
            (&b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"[..], None),
            (b"GET / HTTP/1.0\r\n\r\n", None),
            (b"GET /metrics?x=1 HTTP/1.1\r\n\r\n", None),
            (b"GET /other HTTP/1.1\r\n\r\n", Some("404")),
            (b"POST /metrics HTTP/1.1\r\n\r\n", Some("405")),
            (b"GET /metrics HTTP/2\r\n\r\n", Some("505")),
            (b"GET /metrics\r\n\r\n", Some("400")),
            (b"", Some("400")),
            (b"\xff\xfe\x00", Some("400")),
        ] {
            let refused = match respond(request) {
                Response::Metrics => None,
                Response::Refusal(status, _) => status.split(' ').next(),
            };
            assert_eq!(refused, expected, "{request:?}");
        }
    }
}
