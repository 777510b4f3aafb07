//! Files of web servers, and of repositories of the Hugging Face Hub, which are on the web.

use std::{
    env, fs,
    ops::Range,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use bytes::Bytes;
use partywall::files::FileProblem;
use partywall_cli::Failure;
use reqwest::{
    Response, StatusCode, Url,
    header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_RANGE, ETAG, LAST_MODIFIED, LOCATION, RANGE},
};
use serde_json::Value;
use tokio::time::timeout;
use tokio_stream::StreamExt;

use crate::{
    storage::{Answer, Site},
    transport::{REPORT, Rules, Trouble, Worker, failed, judge, missing, silent},
    usage,
};

/// A server, or a repository of the Hub.
#[derive(Debug)]
pub(crate) struct Web {
    /// For a server its URL, whose user and query each of its files gets; for a repository that of the Hub.
    base: Url,
    /// A token, for the host of `base` alone.
    token: Option<String>,
    hub: Option<Hub>,
}

/// A repository of the Hub at a revision.
#[derive(Debug)]
struct Hub {
    /// `ORG/MODEL`.
    repository: String,
    /// A branch, a tag or a commit.
    revision: String,
    /// What the revision meant when it was asked for, so that all files are of one commit.
    snapshot: OnceLock<Snapshot>,
}

/// A commit, and the names of its files.
#[derive(Debug)]
struct Snapshot {
    commit: String,
    files: Vec<String>,
}

/// Returns the server that a URL names, and the path of its file: the URL without what may be secret.
pub(crate) fn parse(url: &str, rules: &Rules) -> Result<(Site, PathBuf), Failure> {
    let base = Url::parse(url).map_err(|error| usage(format!("the URL cannot be read: {error}"), URL_FORM))?;
    let mut path = base.clone();
    path.set_query(None);
    path.set_fragment(None);
    let _ = path.set_username("");
    let _ = path.set_password(None);
    rules.check(&base).map_err(|problem| usage(format!("{path} {problem}"), problem.advice()))?;
    if base.path().ends_with('/') {
        let advice = "name a file, or the *.safetensors.index.json of the shards";
        return Err(usage(format!("{path} names a folder, which a web server does not list"), advice));
    }
    let token = variable("PARTYWALL_URL_TOKEN");
    Ok((Site::Web(Web { base, token, hub: None }), String::from(path).into()))
}

/// Returns the repository that a URL names, and the path of its folder or file.
pub(crate) fn parse_hub(url: &str) -> Result<(Site, PathBuf), Failure> {
    let wrong = || usage("the URL names no repository of the Hub", HUB_FORM);
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest).trim_end_matches('/');
    let mut parts = rest.splitn(3, '/');
    let (Some(organisation), Some(model)) = (parts.next(), parts.next()) else { return Err(wrong()) };
    let file = parts.next();
    let (model, revision) = model.split_once('@').unwrap_or((model, "main"));
    if [organisation, model, revision].iter().any(|part| part.is_empty() || *part == "." || *part == "..") {
        return Err(wrong());
    }
    let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned());
    let base = Url::parse(&endpoint);
    let base =
        base.map_err(|error| usage(format!("HF_ENDPOINT is no URL: {error}"), "set it to a URL, or unset it"))?;
    let repository = format!("{organisation}/{model}");
    let hub = Hub { repository, revision: revision.to_owned(), snapshot: OnceLock::new() };
    let path = hub.path(revision, file);
    Ok((Site::Web(Web { base, token: hub_token(), hub: Some(hub) }), path))
}

impl Web {
    /// Returns the files of a repository, if the path is that of its root.
    pub(crate) async fn folder(
        &self,
        worker: &Worker,
        rules: &Rules,
        path: &Path,
    ) -> Result<Option<Vec<PathBuf>>, Trouble> {
        let Some(hub) = &self.hub else { return Ok(None) };
        if hub.file(path).is_some() {
            return Ok(None);
        }
        let Snapshot { commit, files } = self.snapshot(hub, worker, rules).await?;
        // As in a folder of the file system: its subfolders hold other models.
        let files = files.iter().filter(|file| !file.contains('/'));
        Ok(Some(files.map(|file| hub.path(commit, Some(file))).collect()))
    }

    /// Asks for a range of a file.
    pub(crate) async fn get(
        &self,
        worker: &Worker,
        rules: &Rules,
        path: &Path,
        range: Range<u64>,
    ) -> Result<Answer, Trouble> {
        let url = match &self.hub {
            None => self.file(path)?,
            Some(hub) => {
                let commit = &self.snapshot(hub, worker, rules).await?.commit;
                let url = self.url(&format!("{}/{}/resolve/{commit}", self.endpoint(), hub.repository))?;
                beside(url, hub.file(path).unwrap_or_default())?
            }
        };
        let response = self.send(worker, rules, url, Some(&range)).await?;
        let header = |name| response.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let tag = header(ETAG).or_else(|| header(LAST_MODIFIED));
        let content_range = header(CONTENT_RANGE);
        let broken = |what: String| FileProblem::Remote { what: format!("cannot be read: {what}"), advice: REPORT };
        if let Some(coding) = header(CONTENT_ENCODING).filter(|coding| coding != "identity") {
            return Err(broken(format!("the server sends it compressed ({coding})")).into());
        }
        let (start, length, ranged) = match response.status() {
            StatusCode::OK => (0, response.content_length(), false),
            StatusCode::PARTIAL_CONTENT => {
                let parsed = content_range.as_deref().and_then(parse_content_range);
                let (start, length) = parsed.ok_or_else(|| {
                    let given = content_range.as_deref().unwrap_or("nothing");
                    broken(format!("the server describes a range as {given:?}"))
                })?;
                (start, length, true)
            }
            // The file is empty, or has become shorter, which the lengths show.
            StatusCode::RANGE_NOT_SATISFIABLE => {
                let length = content_range.as_deref().and_then(|text| text.strip_prefix("bytes */")?.parse().ok());
                return Ok(Answer::empty(length, tag));
            }
            status => return Err(broken(format!("the server answered {status}")).into()),
        };
        let body = response.bytes_stream().map(|chunk: reqwest::Result<Bytes>| chunk.map_err(|error| failed(&error)));
        Ok(Answer { start, length, tag, ranged, body: Box::pin(body) })
    }

    /// Sends a request, and follows redirects. Credentials go to the first host only.
    async fn send(
        &self,
        worker: &Worker,
        rules: &Rules,
        mut url: Url,
        range: Option<&Range<u64>>,
    ) -> Result<Response, Trouble> {
        let first = url.origin();
        let (user, password) = (url.username().to_owned(), url.password().map(str::to_owned));
        for _ in 0..MAX_REDIRECTS {
            rules.check(&url)?;
            let mut request = worker.clients.of(&url).get(url.clone()).header(ACCEPT_ENCODING, "identity");
            if let Some(range) = range {
                request = request.header(RANGE, format!("bytes={}-{}", range.start, range.end - 1));
            }
            if let Some(token) = self.token.as_ref().filter(|_| url.origin() == first && url.username().is_empty()) {
                request = request.bearer_auth(token);
            }
            let response = timeout(rules.timeout, request.send()).await.map_err(|_| silent(rules.timeout))?;
            let response = response.map_err(|error| failed(&error))?;
            let status = response.status();
            if status.is_redirection() {
                let to = response.headers().get(LOCATION).and_then(|to| url.join(to.to_str().ok()?).ok());
                let Some(mut to) = to else {
                    let what = format!("cannot be read: the server answered {status} without a place to go on to");
                    return Err(FileProblem::Remote { what, advice: REPORT }.into());
                };
                if url.scheme() == "https" && to.scheme() != "https" {
                    let what = "cannot be read: the server points from https:// to a URL without encryption".to_owned();
                    return Err(FileProblem::Remote { what, advice: REPORT }.into());
                }
                if to.origin() == first && to.username().is_empty() {
                    let _ = to.set_username(&user);
                    let _ = to.set_password(password.as_deref());
                }
                url = to;
                continue;
            }
            return match status {
                StatusCode::RANGE_NOT_SATISFIABLE => Ok(response),
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::PROXY_AUTHENTICATION_REQUIRED => {
                    let what = format!("cannot be read: the server answered {status}");
                    let advice = if self.hub.is_some() { HUB_CREDENTIALS } else { CREDENTIALS };
                    Err(FileProblem::Remote { what, advice }.into())
                }
                status => judge(status, response.headers()).map(|()| response),
            };
        }
        let what = format!("cannot be read: the server points on more than {MAX_REDIRECTS} times");
        Err(FileProblem::Remote { what, advice: REPORT }.into())
    }

    /// Returns the URL of the file that was asked for, or of a shard that its index names.
    fn file(&self, path: &Path) -> Result<Url, FileProblem> {
        let text = path.to_string_lossy();
        let mut folder = self.base.clone();
        folder.set_query(None);
        folder.set_fragment(None);
        let _ = folder.set_username("");
        let _ = folder.set_password(None);
        if *text == *folder.as_str() {
            return self.url(&text);
        }
        folder.path_segments_mut().map_err(|()| missing())?.pop();
        let name = text.strip_prefix(folder.as_str()).ok_or_else(missing)?;
        beside(self.url(folder.as_str())?, name.trim_start_matches('/'))
    }

    /// Returns a URL with the user and the query of the first one.
    fn url(&self, text: &str) -> Result<Url, FileProblem> {
        let mut url = Url::parse(text).map_err(|_| missing())?;
        if self.hub.is_none() {
            url.set_query(self.base.query());
            let _ = url.set_username(self.base.username());
            let _ = url.set_password(self.base.password());
        }
        Ok(url)
    }

    /// Returns the URL of the Hub, without a slash at its end.
    fn endpoint(&self) -> &str {
        self.base.as_str().trim_end_matches('/')
    }

    /// Asks once what the revision means.
    async fn snapshot<'a>(&self, hub: &'a Hub, worker: &Worker, rules: &Rules) -> Result<&'a Snapshot, Trouble> {
        if let Some(snapshot) = hub.snapshot.get() {
            return Ok(snapshot);
        }
        let Hub { repository, revision, .. } = hub;
        let url = self.url(&format!("{}/api/models/{repository}/revision/{revision}", self.endpoint()))?;
        let response = self.send(worker, rules, url, None).await?;
        let mut body = response.bytes_stream();
        let mut json = Vec::new();
        while let Some(chunk) = timeout(rules.timeout, body.next()).await.map_err(|_| silent(rules.timeout))? {
            json.extend_from_slice(&chunk.map_err(|error| failed(&error))?);
            if json.len() > MAX_LISTING {
                break;
            }
        }
        let found: Value = serde_json::from_slice(&json).unwrap_or_default();
        let name = |file: &Value| file["rfilename"].as_str().map(str::to_owned);
        let files = found["siblings"].as_array().map(|files| files.iter().filter_map(name).collect());
        match (found["sha"].as_str(), files) {
            (Some(commit), Some(files)) => {
                Ok(hub.snapshot.get_or_init(|| Snapshot { commit: commit.to_owned(), files }))
            }
            _ => {
                let what = "cannot be read: the Hub does not say which files it has".to_owned();
                Err(FileProblem::Remote { what, advice: REPORT }.into())
            }
        }
    }
}

impl Hub {
    /// Returns the path of a file, or of the root.
    fn path(&self, revision: &str, file: Option<&str>) -> PathBuf {
        let file = file.map_or_else(String::new, |file| format!("/{file}"));
        format!("hf://{}@{revision}{file}", self.repository).into()
    }

    /// Returns the name of the file that a path names; `None` for the root.
    fn file<'a>(&self, path: &'a Path) -> Option<&'a str> {
        path.to_str()?.strip_prefix("hf://")?.splitn(3, '/').nth(2)
    }
}

/// Adds the parts of a file's name to a URL. A server chooses the names of shards, and none of them may lead elsewhere.
fn beside(mut url: Url, name: &str) -> Result<Url, FileProblem> {
    if name.split(['/', '\\']).any(|part| part.is_empty() || part == "." || part == "..") {
        return Err(missing());
    }
    url.path_segments_mut().map_err(|()| missing())?.extend(name.split('/'));
    Ok(url)
}

/// Reads `bytes 0-99/1000`: where the bytes begin, and the length of the file, which may be `*`.
fn parse_content_range(text: &str) -> Option<(u64, Option<u64>)> {
    let (range, length) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (start, end) = range.split_once('-')?;
    let start = start.trim().parse().ok()?;
    end.trim().parse::<u64>().ok().filter(|end| *end >= start)?;
    let length = length.trim();
    if length == "*" { Some((start, None)) } else { Some((start, Some(length.parse().ok()?))) }
}

/// Returns the token of the Hub, from where its own programs look for it.
fn hub_token() -> Option<String> {
    let file = || {
        let home = || variable("HOME").map(|home| Path::new(&home).join(".cache"));
        let cache = || variable("XDG_CACHE_HOME").map(PathBuf::from).or_else(home);
        let folder = || variable("HF_HOME").map(PathBuf::from).or_else(|| Some(cache()?.join("huggingface")));
        let file = variable("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| Some(folder()?.join("token")))?;
        fs::read_to_string(file).ok().map(|token| token.trim().to_owned()).filter(|token| !token.is_empty())
    };
    variable("HF_TOKEN").or_else(|| variable("HUGGING_FACE_HUB_TOKEN")).or_else(file)
}

fn variable(name: &str) -> Option<String> {
    env::var(name).ok().map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
}

const MAX_REDIRECTS: usize = 10;

/// The longest list of files of a repository.
const MAX_LISTING: usize = 64 << 20;

const URL_FORM: &str = "write https://HOST/PATH";

const HUB_FORM: &str = "write hf://ORG/MODEL, hf://ORG/MODEL@REVISION, or hf://ORG/MODEL@REVISION/FILE";

const CREDENTIALS: &str = "set PARTYWALL_URL_TOKEN to a token, write https://USER:PASSWORD@HOST/PATH, or use a signed URL that has not expired";

const HUB_CREDENTIALS: &str = "check the name; for a private or gated model set HF_TOKEN to a token that has access, and \
                               accept the model's conditions on its page";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_a_shard_leads_nowhere_else() {
        let beside = |name: &str| beside("https://h/models/llm".parse().unwrap(), name).ok().map(String::from);
        assert_eq!(beside("a/b.safetensors").as_deref(), Some("https://h/models/llm/a/b.safetensors"));
        let encoded = "https://h/models/llm/%252e%252e/a%23b%3Fc.safetensors";
        assert_eq!(beside("%2e%2e/a#b?c.safetensors").as_deref(), Some(encoded));
        for bad in ["", "..", "../a", "a/../b", "/a", "a//b", "..\\a", "a/."] {
            assert_eq!(beside(bad), None, "{bad}");
        }
    }

    #[test]
    fn content_ranges_are_read_or_refused() {
        assert_eq!(parse_content_range("bytes 5-9/10"), Some((5, Some(10))));
        assert_eq!(parse_content_range("bytes 5-9/*"), Some((5, None)));
        for bad in ["", "bytes", "5-9/10", "bytes 9-5/10", "bytes a-b/c", "bytes 5-9", "bytes 5-9/x", "items 5-9/10"] {
            assert_eq!(parse_content_range(bad), None, "{bad}");
        }
    }
}
