//! A web server that does what a test says, also what no server should.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

/// A request.
#[derive(Debug, Clone)]
pub(crate) struct Ask {
    /// Whether it asks for the headers alone.
    pub(crate) is_head: bool,
    /// How many requests came before it.
    pub(crate) number: usize,
    /// Its path, with the query.
    pub(crate) path: String,
    /// The first and the last byte that it asks for.
    pub(crate) range: Option<(usize, usize)>,
    pub(crate) authorization: Option<String>,
    pub(crate) if_match: Option<String>,
}

/// An answer.
#[derive(Debug, Clone)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Vec<u8>,
    /// The connection ends after so many bytes of the body.
    pub(crate) cut: Option<usize>,
    /// Nothing more is sent after the cut, and the connection stays.
    pub(crate) stall: bool,
    /// The rest is sent after the cut, a byte at a time.
    pub(crate) drip: bool,
}

/// A server on the loopback, for as long as the test runs.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    asked: Arc<Mutex<Vec<Ask>>>,
}

impl Server {
    /// Starts a server that answers by `answer`.
    pub(crate) fn start(answer: impl Fn(&Ask) -> Reply + Send + Sync + 'static) -> Self {
        Self::over(|stream, serve| serve(&mut BufReader::new(stream)), answer)
    }

    /// Starts a server that answers by `answer`, over TLS.
    pub(crate) fn start_tls(
        config: Arc<rustls::ServerConfig>,
        answer: impl Fn(&Ask) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let over = move |stream, serve: &mut dyn FnMut(&mut dyn Connection)| {
            let session = rustls::ServerConnection::new(config.clone()).unwrap();
            serve(&mut BufReader::new(rustls::StreamOwned::new(session, stream)));
        };
        Self::over(over, answer)
    }

    fn over(
        over: impl Fn(TcpStream, &mut dyn FnMut(&mut dyn Connection)) + Send + Sync + 'static,
        answer: impl Fn(&Ask) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let shared = Arc::new((over, answer, asked.clone(), AtomicUsize::new(0)));
        thread::spawn(move || {
            for stream in listener.incoming() {
                let shared = shared.clone();
                thread::spawn(move || {
                    let (over, answer, asked, count) = &*shared;
                    over(stream.unwrap(), &mut |connection| {
                        while let Some(mut ask) = read(connection) {
                            ask.number = count.fetch_add(1, Ordering::Relaxed);
                            asked.lock().unwrap().push(ask.clone());
                            let mut reply = answer(&ask);
                            if ask.is_head {
                                reply.body.clear();
                            }
                            if !write(connection, &reply) {
                                return;
                            }
                        }
                    });
                });
            }
        });
        Self { address, asked }
    }

    /// Returns the URL of a path.
    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}/{path}", self.address)
    }

    /// Returns the requests so far.
    pub(crate) fn asked(&self) -> Vec<Ask> {
        self.asked.lock().unwrap().clone()
    }
}

/// Both directions of a connection.
pub(crate) trait Connection: BufRead {
    fn out(&mut self) -> &mut dyn Write;
}

impl<T: Read + Write> Connection for BufReader<T> {
    fn out(&mut self) -> &mut dyn Write {
        self.get_mut()
    }
}

fn read(connection: &mut dyn Connection) -> Option<Ask> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if connection.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let line = line.trim_end().to_owned();
        if line.is_empty() {
            break;
        }
        lines.push(line);
    }
    let header = |name: &str| {
        let mut named = lines.iter().filter_map(|line| line.split_once(": "));
        named.find(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value.to_owned())
    };
    let range = header("range").and_then(|range| {
        let (from, to) = range.strip_prefix("bytes=")?.split_once('-')?;
        Some((from.parse().ok()?, to.parse().ok()?))
    });
    let (method, rest) = lines[0].split_once(' ')?;
    Some(Ask {
        is_head: method == "HEAD",
        number: 0,
        path: rest.split(' ').next()?.to_owned(),
        range,
        authorization: header("authorization"),
        if_match: header("if-match"),
    })
}

/// Writes an answer. Returns whether the connection may be used again.
fn write(connection: &mut dyn Connection, reply: &Reply) -> bool {
    let mut head = format!("HTTP/1.1 {} As Asked\r\n", reply.status);
    for (name, value) in &reply.headers {
        head += &format!("{name}: {value}\r\n");
    }
    head += "\r\n";
    let out = connection.out();
    let body = &reply.body[..reply.cut.unwrap_or(reply.body.len()).min(reply.body.len())];
    let written = out.write_all(head.as_bytes()).and_then(|()| out.write_all(body)).and_then(|()| out.flush());
    if reply.drip {
        let mut rest = reply.body[body.len()..].chunks(1);
        while rest.next().is_some_and(|byte| out.write_all(byte).and_then(|()| out.flush()).is_ok()) {
            thread::sleep(Duration::from_millis(50));
        }
    }
    if reply.stall {
        thread::sleep(Duration::from_secs(3600));
    }
    written.is_ok() && reply.cut.is_none()
}

impl Reply {
    /// Returns an answer without headers but the length.
    pub(crate) fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        let body = body.into();
        let headers = vec![("Content-Length", body.len().to_string())];
        Self { status, headers, body, cut: None, stall: false, drip: false }
    }

    /// Returns the right answer for a file.
    pub(crate) fn file(file: &[u8], tag: &str, ask: &Ask) -> Self {
        let Some((from, to)) = ask.range else {
            return Self::new(200, file).with("ETag", tag);
        };
        if from >= file.len() {
            return Self::new(416, "").with("Content-Range", format!("bytes */{}", file.len())).with("ETag", tag);
        }
        let to = to.min(file.len() - 1);
        Self::new(206, &file[from..=to])
            .with("ETag", tag)
            .with("Content-Range", format!("bytes {from}-{to}/{}", file.len()))
    }

    /// Returns the whole file, as a server without ranges answers.
    pub(crate) fn whole(file: &[u8]) -> Self {
        Self::new(200, file).with("ETag", "\"1\"")
    }

    pub(crate) fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.retain(|(other, _)| *other != name);
        self.headers.push((name, value.into()));
        self
    }

    pub(crate) fn without(mut self, name: &str) -> Self {
        self.headers.retain(|(other, _)| *other != name);
        self
    }

    pub(crate) fn cut(self, after: usize) -> Self {
        Self { cut: Some(after), ..self }
    }

    pub(crate) fn stall(self, after: usize) -> Self {
        Self { stall: true, ..self.cut(after) }
    }

    pub(crate) fn drip(self, after: usize) -> Self {
        Self { drip: true, ..self.cut(after) }
    }
}
