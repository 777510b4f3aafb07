//! Answers requests over HTTP, one after the other.
//!
//! A request is read for [`REQUEST_TIMEOUT`] at most, and only its first line counts. Prometheus asks every few seconds, so there is
//! nothing to gain from answering several at once, and a client that sends slowly takes a moment from others, not more.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use serde_json::json;

use super::family::CONTENT_TYPE;
use crate::{failure::Failure, output::Output, signals};

/// How long a request may take to arrive, and an answer to leave.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);

/// How often the loop polls for a request and for Ctrl-C.
const PAUSE: Duration = Duration::from_millis(50);

/// The longest request that is read. The first line of each fits many times.
const LONGEST: usize = 8 << 10;

/// Answers with `page` until Ctrl-C.
pub(super) fn serve(output: Output, address: SocketAddr, mut page: impl FnMut() -> String) -> Result<(), Failure> {
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
    while !stop.load(Ordering::Relaxed) {
        match listener.accept() {
            // A client that has gone is no reason to end.
            Ok((stream, _)) => drop(answer(stream, &mut page)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::sleep(PAUSE),
            // Too many open files, for example. The next request may be lucky.
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
    Ok(())
}

fn answer(mut stream: TcpStream, page: &mut impl FnMut() -> String) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_write_timeout(Some(REQUEST_TIMEOUT))?;
    let request = read_request(&mut stream)?;
    let (status, kind, body) = match respond(&request) {
        Response::Metrics => ("200 OK", CONTENT_TYPE, page()),
        Response::Refusal(status, text) => (status, "text/plain; charset=utf-8", format!("{text}\n")),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())
}

/// Reads to the empty line that ends a request's head.
fn read_request(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let deadline = Instant::now() + REQUEST_TIMEOUT;
    let mut request = Vec::new();
    let mut piece = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") && request.len() < LONGEST {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut piece)? {
            0 => break,
            read => request.extend_from_slice(&piece[..read]),
        }
    }
    Ok(request)
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
