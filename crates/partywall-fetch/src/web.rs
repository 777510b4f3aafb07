//! Files of web servers, and of repositories of the Hugging Face Hub, which are on the web.

use std::{
    collections::HashMap,
    env, fs,
    ops::Range,
    path::{Path, PathBuf},
    sync::{Mutex, OnceLock, PoisonError},
};

use partywall::files::FileProblem;
use partywall_cli::Failure;
use reqwest::{
    Response, StatusCode, Url,
    header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_RANGE, ETAG, LAST_MODIFIED, LOCATION, RANGE},
};
use serde_json::Value;
use tokio::time::timeout;

use crate::{
    storage::{Answer, Site},
    transport::{Body, REPORT, Rules, Trouble, Worker, failed, judge, missing, silent},
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
    /// Where redirects of files have led. Only one range of a file asks the way.
    places: Mutex<HashMap<PathBuf, Url>>,
}

/// A repository of the Hub at a revision.
#[derive(Debug)]
struct Hub {
    organisation: String,
    model: String,
    /// A branch, a tag, a commit, or another reference.
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
    Ok((Site::Web(Web { base, token, hub: None, places: Mutex::default() }), String::from(path).into()))
}

/// Returns the repository that a URL names, and the path of its folder or file.
pub(crate) fn parse_hub(url: &str) -> Result<(Site, PathBuf), Failure> {
    let wrong = || usage("the URL names no repository of the Hub", HUB_FORM);
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest).trim_end_matches('/');
    let (organisation, rest) = rest.split_once('/').ok_or_else(wrong)?;
    if ["datasets", "spaces"].contains(&organisation) {
        let message = format!("the URL names one of the {organisation} of the Hub, which hold no models");
        return Err(usage(message, HUB_FORM));
    }
    let (model, rest) = rest.split_at(rest.find(['@', '/']).unwrap_or(rest.len()));
    let (revision, file) = match rest.strip_prefix('@') {
        Some(rest) => split_revision(rest),
        None => ("main", rest.strip_prefix('/')),
    };
    let revision = revision.replace("%2F", "/").replace("%2f", "/");
    let parts = [organisation, model].into_iter().chain(revision.split('/'));
    if parts.into_iter().any(|part| part.is_empty() || part == "." || part == "..") {
        return Err(wrong());
    }
    let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned());
    let base = Url::parse(&endpoint);
    let base =
        base.map_err(|error| usage(format!("HF_ENDPOINT is no URL: {error}"), "set it to a URL, or unset it"))?;
    let hub = Hub { organisation: organisation.into(), model: model.into(), revision, snapshot: OnceLock::new() };
    let path = hub.path(&hub.revision, file);
    Ok((Site::Web(Web { base, token: hub_token(), hub: Some(hub), places: Mutex::default() }), path))
}

/// Divides what is after the `@`: a revision, and the name of a file. The Hub's own references have slashes; in those of
/// others `%2F` stands for them.
fn split_revision(text: &str) -> (&str, Option<&str>) {
    let is_of_the_hub = text.starts_with("refs/pr/") || text.starts_with("refs/convert/");
    let mut slashes = text.match_indices('/').map(|(at, _)| at);
    match slashes.nth(if is_of_the_hub { 2 } else { 0 }) {
        Some(at) => (&text[..at], Some(&text[at + 1..])),
        None => (text, None),
    }
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
                let url = self.of_hub(&[&hub.organisation, &hub.model, "resolve", commit])?;
                beside(url, hub.file(path).unwrap_or_default())?
            }
        };
        let response = self.follow(worker, rules, path, url, &range).await?;
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
        Ok(Answer { start, length, tag, ranged, body: Body::of(response) })
    }

    /// Asks for a range where the last redirect has led, and anew if that refuses: its signature has expired, say.
    async fn follow(
        &self,
        worker: &Worker,
        rules: &Rules,
        path: &Path,
        url: Url,
        range: &Range<u64>,
    ) -> Result<Response, Trouble> {
        let places = || self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let known = places().get(path).cloned();
        if let Some(known) = known.filter(|known| *known != url) {
            match self.send(worker, rules, known, Some(range)).await {
                Err(Trouble::Final(_)) => {}
                answered => return answered.map(|(response, _)| response),
            }
        }
        let (response, place) = self.send(worker, rules, url, Some(range)).await?;
        places().insert(path.to_owned(), place);
        Ok(response)
    }

    /// Sends a request, and follows redirects. Credentials go to the host of `base` only. Returns the answer with the
    /// URL that has given it.
    async fn send(
        &self,
        worker: &Worker,
        rules: &Rules,
        mut url: Url,
        range: Option<&Range<u64>>,
    ) -> Result<(Response, Url), Trouble> {
        let first = self.base.origin();
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
            let response = response.map_err(|error| failed(&error.without_url()))?;
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
                    let _ = to.set_username(self.base.username());
                    let _ = to.set_password(self.base.password());
                }
                url = to;
                continue;
            }
            return match status {
                StatusCode::RANGE_NOT_SATISFIABLE => Ok((response, url)),
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::PROXY_AUTHENTICATION_REQUIRED => {
                    let what = format!("cannot be read: the server answered {status}");
                    let advice = if self.hub.is_some() { HUB_CREDENTIALS } else { CREDENTIALS };
                    Err(FileProblem::Remote { what, advice }.into())
                }
                status => judge(status, response.headers()).map(|()| (response, url)),
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
        url.set_query(self.base.query());
        let _ = url.set_username(self.base.username());
        let _ = url.set_password(self.base.password());
        Ok(url)
    }

    /// Returns a URL of the Hub. The parts may have any characters, also slashes.
    fn of_hub(&self, parts: &[&str]) -> Result<Url, FileProblem> {
        let mut url = self.base.clone();
        url.path_segments_mut().map_err(|()| missing())?.pop_if_empty().extend(parts);
        Ok(url)
    }

    /// Asks once what the revision means.
    async fn snapshot<'a>(&self, hub: &'a Hub, worker: &Worker, rules: &Rules) -> Result<&'a Snapshot, Trouble> {
        if let Some(snapshot) = hub.snapshot.get() {
            return Ok(snapshot);
        }
        let Hub { organisation, model, revision, .. } = hub;
        let url = self.of_hub(&["api", "models", organisation, model, "revision", revision])?;
        let (response, _) = self.send(worker, rules, url, None).await?;
        let mut body = Body::of(response);
        let mut json = Vec::new();
        while let Some(chunk) = body.next(rules.timeout).await? {
            json.extend_from_slice(&chunk);
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
        format!("hf://{}/{}@{}{file}", self.organisation, self.model, revision.replace('/', "%2F")).into()
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

const HUB_FORM: &str = "write hf://ORG/MODEL, hf://ORG/MODEL@REVISION, or hf://ORG/MODEL@REVISION/FILE, with %2F for a \
                        slash in a revision";

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

    // Holds 434.
    #[test]
    fn revisions_with_slashes_and_the_files_after_them_are_told_apart() {
        let parse = |url: &str| {
            let Ok((Site::Web(Web { hub: Some(hub), .. }), path)) = parse_hub(url) else { return None };
            let file = hub.file(&path).map(str::to_owned);
            Some(([hub.organisation, hub.model, hub.revision], file, path.to_str()?.to_owned()))
        };
        for (url, parts, file, path) in [
            ("hf://o/m", ["o", "m", "main"], None, "hf://o/m@main"),
            ("hf://o/m/", ["o", "m", "main"], None, "hf://o/m@main"),
            ("hf://o/m/a/b@c", ["o", "m", "main"], Some("a/b@c"), "hf://o/m@main/a/b@c"),
            ("hf://o/m@v1/a/b", ["o", "m", "v1"], Some("a/b"), "hf://o/m@v1/a/b"),
            ("hf://o/m@refs/pr/1", ["o", "m", "refs/pr/1"], None, "hf://o/m@refs%2Fpr%2F1"),
            ("hf://o/m@refs/pr/1/a/b", ["o", "m", "refs/pr/1"], Some("a/b"), "hf://o/m@refs%2Fpr%2F1/a/b"),
            ("hf://o/m@refs/convert/X/a", ["o", "m", "refs/convert/X"], Some("a"), "hf://o/m@refs%2Fconvert%2FX/a"),
            ("hf://o/m@dev%2fx%2Fy/a", ["o", "m", "dev/x/y"], Some("a"), "hf://o/m@dev%2Fx%2Fy/a"),
            ("hf://o/m@refs/heads/x", ["o", "m", "refs"], Some("heads/x"), "hf://o/m@refs/heads/x"),
        ] {
            assert_eq!(parse(url), Some((parts.map(str::to_owned), file.map(str::to_owned), path.to_owned())), "{url}");
        }
        for bad in [
            "hf://",
            "hf://o",
            "hf://o/",
            "hf:///m",
            "hf://o/m@",
            "hf://o/@v1",
            "hf://o/m@..",
            "hf://o/m@a%2F..%2Fb",
            "hf://o/m@refs/pr//a",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
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
