//! One client for HTTP, and what its errors mean.
//!
//! A worker is a runtime of one thread with a client of its own: the thread that copies also reads the socket, so that no
//! byte waits for another thread. A worker keeps its connections from one range to the next.

use std::{
    error::Error as StdError,
    fmt, io,
    net::IpAddr,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use chrono::DateTime;
use object_store::{
    ClientConfigKey, ClientOptions,
    client::{HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService},
};
use partywall::files::FileProblem;
use partywall_cli::{Failure, fetch::Request};
use reqwest::{
    ClientBuilder, Response, StatusCode, Url,
    header::{HeaderMap, RETRY_AFTER},
};
use tokio::{
    runtime::{Builder, Runtime},
    time::timeout,
};
use tokio_stream::{Stream, StreamExt};

/// What connections must keep to.
#[derive(Debug, Clone)]
pub(crate) struct Rules {
    /// How long a connection may bring no answer, or less than [`LEAST`] bytes of one.
    pub(crate) timeout: Duration,
    /// Whether HTTP without TLS may go to other machines.
    pub(crate) allow_http: bool,
}

impl Rules {
    pub(crate) fn of(request: &Request) -> Self {
        Self { timeout: request.timeout, allow_http: request.allow_http }
    }

    /// Refuses a URL that would send or receive in plain text over a network.
    pub(crate) fn check(&self, url: &Url) -> Result<(), FileProblem> {
        let host = url.host_str().unwrap_or_default();
        match url.scheme() {
            "https" => Ok(()),
            "http" if self.allow_http || is_loopback(host) => Ok(()),
            "http" => Err(FileProblem::Remote {
                what: format!("cannot be read: http://{host} is not encrypted"),
                advice: "use https://, or pass --allow-http if the network between is trusted",
            }),
            other => Err(FileProblem::Remote {
                what: format!("cannot be read: the server points to a URL of scheme {other:?}"),
                advice: REPORT,
            }),
        }
    }
}

/// Why a request brought no answer, or an answer no more bytes.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// Another attempt may help, after the time that the server names.
    Passing(Passing),
    /// No attempt will.
    Final(FileProblem),
}

/// A failure that may pass.
#[derive(Debug, Clone)]
pub(crate) struct Passing {
    /// What happened, as the end of a sentence that begins with the file.
    pub(crate) why: String,
    /// The time that the server names.
    pub(crate) after: Option<Duration>,
    /// Whether the server has not been reached.
    pub(crate) unreached: bool,
    /// Whether the failure is known to be of the connection, or to pass.
    pub(crate) is_known: bool,
}

impl Passing {
    pub(crate) fn new(why: impl Into<String>) -> Self {
        Self { why: why.into(), after: None, unreached: false, is_known: true }
    }
}

impl fmt::Display for Passing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)
    }
}

impl StdError for Passing {}

impl From<FileProblem> for Trouble {
    fn from(problem: FileProblem) -> Self {
        Self::Final(problem)
    }
}

impl From<Passing> for Trouble {
    fn from(passing: Passing) -> Self {
        Self::Passing(passing)
    }
}

/// Runtimes and their clients, for as many threads as read.
#[derive(Debug)]
pub(crate) struct Workers {
    idle: Mutex<Vec<Worker>>,
    rules: Rules,
}

/// A runtime of one thread, and a client that only it drives.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) runtime: Runtime,
    pub(crate) clients: Clients,
    /// The client of a bucket, once one was needed.
    pub(crate) store: Option<Arc<dyn object_store::ObjectStore>>,
}

/// The clients of a worker.
#[derive(Debug, Clone)]
pub(crate) struct Clients {
    /// By the proxy of the environment, if there is one.
    proxied: reqwest::Client,
    /// For this machine, and for services that only this machine reaches.
    direct: reqwest::Client,
}

impl Clients {
    /// Returns the client for a URL.
    pub(crate) fn of(&self, url: &Url) -> &reqwest::Client {
        let stays = is_loopback(url.host_str().unwrap_or_default()) || is_metadata(url);
        if stays { &self.direct } else { &self.proxied }
    }
}

impl Workers {
    /// Returns the workers. The first is made now, so that certificates which cannot be read are an error at once.
    pub(crate) fn new(rules: Rules) -> Result<Self, Failure> {
        // An error says that there is a provider already, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let workers = Self { idle: Mutex::default(), rules };
        let first = workers.make().map_err(|error| {
            Failure::new(partywall::ErrorKind::Refused, format!("cannot prepare connections: {error}"), CERTIFICATES)
        })?;
        workers.give_back(first);
        Ok(workers)
    }

    pub(crate) fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Takes a worker that no other thread uses.
    pub(crate) fn take(&self) -> Result<Worker, FileProblem> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        idle.map_or_else(|| self.make().map_err(FileProblem::Open), Ok)
    }

    /// Gives a worker back, with its connections.
    pub(crate) fn give_back(&self, worker: Worker) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(worker);
    }

    fn make(&self) -> io::Result<Worker> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let make = |client: ClientBuilder| client.build().map_err(|error| io::Error::other(chain(&error)));
        let clients = Clients { proxied: make(self.client())?, direct: make(self.client().no_proxy())? };
        Ok(Worker { runtime, clients, store: None })
    }

    fn client(&self) -> ClientBuilder {
        reqwest::Client::builder()
            .user_agent(concat!("partywall/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(self.rules.timeout)
            // For bodies that a client of a cloud reads. What is read here has a time limit with a better sentence.
            .read_timeout(self.rules.timeout + Duration::from_secs(1))
            // Several connections are several streams of bytes; HTTP/2 would put all into one.
            .http1_only()
            // `web` follows redirects itself, because it decides which of them get credentials.
            .redirect(reqwest::redirect::Policy::none())
    }
}

/// The body of an answer.
pub(crate) struct Body {
    stream: Pin<Box<dyn Stream<Item = Result<Bytes, Trouble>> + Send>>,
    /// What has come, and how long that was waited for, since [`LEAST`] bytes had come last.
    bytes: usize,
    waited: Duration,
}

impl Body {
    pub(crate) fn new(stream: impl Stream<Item = Result<Bytes, Trouble>> + Send + 'static) -> Self {
        Self { stream: Box::pin(stream), bytes: 0, waited: Duration::ZERO }
    }

    pub(crate) fn of(response: Response) -> Self {
        Self::new(response.bytes_stream().map(|chunk| chunk.map_err(|error| failed(&error.without_url()))))
    }

    /// Returns the next bytes. Fails if [`LEAST`] bytes take longer than `limit`, for a server that sends a byte now and
    /// then would keep its reader for ever. The time between two calls does not count.
    pub(crate) async fn next(&mut self, limit: Duration) -> Result<Option<Bytes>, Trouble> {
        let start = Instant::now();
        let next = timeout(limit.saturating_sub(self.waited), self.stream.next()).await;
        self.waited += start.elapsed();
        let next = next.map_err(|_| match self.bytes {
            0 => silent(limit),
            bytes => Passing::new(format!("the server sent only {bytes} bytes in {} s", limit.as_secs_f64())),
        })?;
        let next = next.transpose().map_err(|trouble| match trouble {
            Trouble::Passing(Passing { why, .. }) => Passing::new(format!("the connection was cut: {why}")).into(),
            trouble => trouble,
        })?;
        self.bytes += next.as_ref().map_or(0, Bytes::len);
        if self.bytes >= LEAST {
            self.bytes = 0;
            self.waited = Duration::ZERO;
        }
        Ok(next)
    }
}

/// Returns what an answer with this status means; `Ok` if it has bytes.
pub(crate) fn judge(status: StatusCode, headers: &HeaderMap) -> Result<(), Trouble> {
    let passes = [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_EARLY, StatusCode::TOO_MANY_REQUESTS];
    match status {
        status if status.is_success() => Ok(()),
        status if (status.is_server_error() && status != StatusCode::NOT_IMPLEMENTED) || passes.contains(&status) => {
            let after =
                headers.get(RETRY_AFTER).and_then(|value| delay(value.to_str().ok()?.trim(), SystemTime::now()));
            Err(Passing { after, ..Passing::new(format!("the server answered {status}")) }.into())
        }
        StatusCode::NOT_FOUND | StatusCode::GONE => Err(missing().into()),
        status => Err(FileProblem::Remote {
            what: format!("cannot be read: the server answered {status}"),
            advice: "check the URL; what the server refuses once it refuses again",
        }
        .into()),
    }
}

/// Reads `Retry-After`: seconds, or a date.
fn delay(text: &str, now: SystemTime) -> Option<Duration> {
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date: SystemTime = DateTime::parse_from_rfc2822(text).ok()?.into();
    Some(date.duration_since(now).unwrap_or_default())
}

/// Returns the problem of a file that the server does not have.
pub(crate) fn missing() -> FileProblem {
    FileProblem::Open(io::Error::new(io::ErrorKind::NotFound, "the server has no such file"))
}

/// Returns what an error of a client means.
pub(crate) fn failed(error: &(dyn StdError + 'static)) -> Trouble {
    let mut unreached = false;
    let mut is_known = false;
    let mut next = Some(error);
    while let Some(source) = next {
        if let Some(passing) = source.downcast_ref::<Passing>() {
            return passing.clone().into();
        }
        if let Some(Refusal { what, advice }) = source.downcast_ref::<Refusal>() {
            return FileProblem::Remote { what: what.clone(), advice }.into();
        }
        if is_of_tls(source) {
            let what = format!("cannot be read: the connection cannot be trusted: {}", chain(source));
            return FileProblem::Remote { what, advice: CERTIFICATES }.into();
        }
        is_known |= source.is::<reqwest::Error>() || source.is::<HttpError>();
        unreached |= source.downcast_ref::<reqwest::Error>().is_some_and(reqwest::Error::is_connect)
            || source.downcast_ref::<HttpError>().is_some_and(|error| error.kind() == HttpErrorKind::Connect);
        next = source.source();
    }
    Passing { unreached, is_known, ..Passing::new(chain(error)) }.into()
}

/// Returns whether an error is of TLS. An error of a socket may contain another one, which is no source of it.
fn is_of_tls(error: &(dyn StdError + 'static)) -> bool {
    let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
    error.is::<rustls::Error>() || inner.is_some_and(|inner| is_of_tls(inner))
}

/// Returns the innermost reasons of an error. The outer ones repeat the URL, which may contain a signature.
pub(crate) fn chain(error: &(dyn StdError + 'static)) -> String {
    let mut reasons = vec![error.to_string()];
    let mut next = error.source();
    while let Some(source) = next {
        reasons.push(source.to_string());
        next = source.source();
    }
    reasons.dedup();
    reasons.split_off(reasons.len().saturating_sub(2)).join(": ")
}

/// Makes the clients of object stores, which sign their requests and send them here.
#[derive(Debug)]
pub(crate) struct Connector {
    pub(crate) clients: Clients,
    pub(crate) rules: Rules,
}

/// Sends the requests of an object store.
#[derive(Debug)]
struct Service {
    clients: Clients,
    rules: Rules,
}

/// Why a request was not sent, or brought no credentials.
#[derive(Debug)]
struct Refusal {
    what: String,
    advice: &'static str,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let mut rules = self.rules.clone();
        // The variables of the clouds may allow it, and their metadata services are reached so.
        rules.allow_http |= options.get_config_value(&ClientConfigKey::AllowHttp).is_some_and(|value| value == "true");
        Ok(HttpClient::new(Service { clients: self.clients.clone(), rules }))
    }
}

impl HttpService for Service {
    fn call<'a, 'b>(
        &'a self,
        request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(async move {
            let refused = |what: String, advice| HttpError::new(HttpErrorKind::Unknown, Refusal { what, advice });
            // The URL itself may contain a signature.
            let url = request.uri().to_string().parse();
            let url: Url = url.map_err(|error| refused(format!("cannot be read: its URL: {error}"), REPORT))?;
            self.rules.check(&url).map_err(|problem| match problem {
                FileProblem::Remote { what, advice } => refused(what, advice),
                problem => refused(problem.to_string(), CREDENTIALS),
            })?;
            let is_metadata = is_metadata(&url);
            let limit = if is_metadata { METADATA_TIMEOUT } else { self.rules.timeout };
            let answer = timeout(limit, HttpService::call(self.clients.of(&url), request)).await;
            let answer = match answer {
                Ok(Ok(answer)) if is_metadata && answer.status().is_success() => return Ok(answer),
                _ if is_metadata => {
                    return Err(refused("cannot be read: no credentials were found".to_owned(), CREDENTIALS));
                }
                Ok(answer) => answer?,
                Err(_) => return Err(HttpError::new(HttpErrorKind::Timeout, silent(limit))),
            };
            match judge(answer.status(), answer.headers()) {
                Err(Trouble::Passing(passing)) => Err(HttpError::new(HttpErrorKind::Unknown, passing)),
                _ => Ok(answer),
            }
        })
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl StdError for Refusal {}

/// Returns the failure of a connection that has brought nothing for so long.
pub(crate) fn silent(limit: Duration) -> Passing {
    Passing::new(format!("the server sent nothing for {} s", limit.as_secs_f64()))
}

fn is_loopback(host: &str) -> bool {
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    host == "localhost" || host.ends_with(".localhost") || address.is_ok_and(|address| address.is_loopback())
}

/// Returns whether a host is the service that gives a machine or container of a cloud its credentials.
fn is_metadata(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let chosen = std::env::var("AWS_METADATA_ENDPOINT").ok().filter(|chosen| !chosen.is_empty());
    host.starts_with("169.254.")
        || host == "[fd00:ec2::254]"
        || host == "metadata.google.internal"
        || chosen.is_some_and(|chosen| url.as_str().starts_with(&chosen))
}

/// How many bytes count as progress.
pub(crate) const LEAST: usize = 16 << 10;

/// A metadata service answers from the same machine, or there is none.
const METADATA_TIMEOUT: Duration = Duration::from_secs(2);

const CERTIFICATES: &str = "check the host's name; install the certificates of authorities (`apt-get install \
                            ca-certificates`), or set SSL_CERT_FILE to a file with that of your own";

/// What to do without credentials. The schemes differ in the variables, and all of them are in one page.
pub(crate) const CREDENTIALS: &str = "set the credentials in the environment: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, \
                           GOOGLE_APPLICATION_CREDENTIALS, or AZURE_STORAGE_ACCOUNT_NAME and \
                           AZURE_STORAGE_ACCOUNT_KEY; AWS_SKIP_SIGNATURE=true for a public bucket; AWS_REGION if it \
                           is elsewhere";

/// What to do about a server that does not keep to its protocol.
pub(crate) const REPORT: &str = "ask who runs the server, or download the file by another program and put that";

#[cfg(test)]
mod tests {
    use super::*;

    // Holds 401.
    #[test]
    fn retry_after_is_seconds_or_a_date() {
        // 08:49:35 of that day.
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_775);
        for (text, seconds) in [
            ("0", Some(0)),
            ("120", Some(120)),
            ("Sun, 06 Nov 1994 08:49:37 GMT", Some(2)),
            ("Sun, 06 Nov 1994 08:49:30 GMT", Some(0)),
            ("-1", None),
            ("1.5", None),
            ("", None),
            ("soon", None),
            ("Mon, 06 Nov 1994 08:49:37 GMT", None),
            ("99999999999999999999", None),
        ] {
            assert_eq!(delay(text, now), seconds.map(Duration::from_secs), "{text}");
        }
    }
}
