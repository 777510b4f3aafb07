//! Files in buckets of S3, Google Cloud Storage and Azure, by their usual variables.

use std::{
    error::Error as StdError,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use object_store::{
    Error, GetOptions, GetRange, GetResultPayload, ObjectStore, ObjectStoreExt, RetryConfig, aws::AmazonS3Builder,
    azure::MicrosoftAzureBuilder, gcp::GoogleCloudStorageBuilder, path::Path as Key,
};
use partywall::files::FileProblem;
use partywall_cli::Failure;
use tokio_stream::StreamExt;

use crate::{
    storage::{Answer, Site, is_strong},
    transport::{Body, CREDENTIALS, Connector, REPORT, Rules, Trouble, Worker, chain, failed, missing},
    usage,
};

/// A bucket.
#[derive(Debug)]
pub(crate) struct Bucket {
    scheme: Scheme,
    name: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scheme {
    S3,
    Google,
    Azure,
}

/// Returns the bucket that a URL names, and the path of its folder or file.
pub(crate) fn parse(url: &str) -> Result<(Site, PathBuf), Failure> {
    let (scheme, rest) = url.split_once("://").unwrap_or_default();
    let (name, _) = rest.split_once('/').unwrap_or((rest, ""));
    if name.is_empty() || name.contains('@') {
        return Err(usage("the URL names no bucket", "write s3://BUCKET/KEY, gs://… or az://CONTAINER/…"));
    }
    let scheme = match scheme.to_ascii_lowercase().as_str() {
        "s3" => Scheme::S3,
        "gs" => Scheme::Google,
        _ => Scheme::Azure,
    };
    Ok((Site::Bucket(Bucket { scheme, name: name.to_owned() }), url.into()))
}

impl Bucket {
    /// Gives a worker a client of the bucket.
    pub(crate) fn prepare(&self, worker: &mut Worker, rules: &Rules) -> Result<(), FileProblem> {
        if worker.store.is_none() {
            let connector = Connector { clients: worker.clients.clone(), rules: rules.clone() };
            let failed =
                |error| FileProblem::Remote { what: format!("cannot be read: {}", chain(&error)), advice: CREDENTIALS };
            worker.store = Some(self.store(connector).map_err(failed)?);
        }
        Ok(())
    }

    fn store(&self, connector: Connector) -> object_store::Result<Arc<dyn ObjectStore>> {
        // The reader tries again itself.
        let once = RetryConfig { max_retries: 0, ..RetryConfig::default() };
        let name = &self.name;
        Ok(match self.scheme {
            Scheme::S3 => {
                let builder = AmazonS3Builder::from_env().with_bucket_name(name).with_retry(once);
                Arc::new(builder.with_http_connector(connector).build()?)
            }
            Scheme::Google => {
                let builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(name).with_retry(once);
                Arc::new(builder.with_http_connector(connector).build()?)
            }
            Scheme::Azure => {
                let builder = MicrosoftAzureBuilder::from_env().with_container_name(name).with_retry(once);
                Arc::new(builder.with_http_connector(connector).build()?)
            }
        })
    }

    /// Returns the files of a folder; `None` if the path is that of a file.
    pub(crate) async fn folder(&self, worker: &Worker, path: &Path) -> Result<Option<Vec<PathBuf>>, Trouble> {
        let store = store_of(worker)?;
        let key = key_of(path)?;
        let is_folder = key.as_ref().is_empty() || path.to_string_lossy().ends_with('/');
        if !is_folder {
            match store.head(&key).await {
                Ok(_) => return Ok(None),
                Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(trouble(error)),
            }
        }
        let listed = store.list_with_delimiter(Some(&key)).await.map_err(trouble)?;
        if listed.objects.is_empty() && !is_folder {
            return Err(missing().into());
        }
        let text = path.to_string_lossy();
        let root = text.trim_end_matches('/');
        let names = listed.objects.iter().filter_map(|object| object.location.filename());
        Ok(Some(names.map(|name| format!("{root}/{name}").into()).collect()))
    }

    /// Asks for a range of a file that should still have the tag.
    pub(crate) async fn get(
        &self,
        worker: &Worker,
        path: &Path,
        range: Range<u64>,
        tag: Option<&str>,
    ) -> Result<Answer, Trouble> {
        let store = store_of(worker)?;
        let key = key_of(path)?;
        let is_first = range.start == 0;
        let options = GetOptions {
            range: Some(GetRange::Bounded(range)),
            // No other tag may be compared so: RFC 9110, 13.1.1. A server would find none that matches.
            if_match: tag.filter(|tag| is_strong(tag)).map(str::to_owned),
            ..GetOptions::default()
        };
        let found = match store.get_opts(&key, options).await {
            Ok(found) => found,
            // An empty file has no range.
            Err(error @ Error::Generic { .. }) if is_first => match store.head(&key).await {
                Ok(meta) if meta.size == 0 => return Ok(Answer::empty(Some(0), meta.e_tag)),
                _ => return Err(trouble(error)),
            },
            Err(error) => return Err(trouble(error)),
        };
        // 1970 stands for an answer without a date.
        let date = Some(found.meta.last_modified).filter(|date| date.timestamp() != 0);
        let tag = found.meta.e_tag.clone().or_else(|| Some(date?.to_rfc3339()));
        let (start, length) = (found.range.start, Some(found.meta.size));
        let GetResultPayload::Stream(body) = found.payload;
        let body = Body::new(body.map(|chunk| chunk.map_err(trouble)));
        Ok(Answer { start, length, tag, ranged: true, body })
    }
}

fn store_of(worker: &Worker) -> Result<&dyn ObjectStore, FileProblem> {
    worker.store.as_deref().ok_or_else(missing)
}

/// Returns the key that a path names. Keys are written as they are, without `%20`.
fn key_of(path: &Path) -> Result<Key, FileProblem> {
    let text = path.to_string_lossy();
    let (_, rest) = text.split_once("://").unwrap_or_default();
    let (_, key) = rest.split_once('/').unwrap_or_default();
    Key::parse(key).map_err(|error| FileProblem::Remote {
        what: format!("cannot be read: {error}"),
        advice: "write the key as the bucket lists it",
    })
}

/// Returns what an error of a bucket means.
fn trouble(error: Error) -> Trouble {
    let refused = |what: String| FileProblem::Remote { what: format!("cannot be read: {what}"), advice: CREDENTIALS };
    match &error {
        Error::NotFound { .. } => missing().into(),
        Error::Precondition { .. } => FileProblem::Changed { why: "it was written".to_owned() }.into(),
        Error::PermissionDenied { source, .. } => refused(reason("the server forbids it", &**source)).into(),
        Error::Unauthenticated { source, .. } => refused(reason("the server wants credentials", &**source)).into(),
        Error::NotSupported { .. } => {
            let what = "cannot be read: the server does not give ranges of it".to_owned();
            FileProblem::Remote { what, advice: REPORT }.into()
        }
        Error::Generic { source, .. } => match failed(&**source) {
            // A status that no other variant has, and that the transport did not find passing.
            Trouble::Passing(passing) if !passing.is_known => match reason("the server refuses it", &**source) {
                what if what.ends_with("NotFound)") => missing().into(),
                what => refused(what).into(),
            },
            other => other,
        },
        _ => refused(chain(&error)).into(),
    }
}

/// Returns the reason with the code of the server's answer, such as `AccessDenied`, if it has one.
fn reason(what: &str, source: &(dyn StdError + 'static)) -> String {
    let text = source.to_string();
    let code = text.split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>")).map(|(code, _)| code);
    code.map_or_else(|| format!("{what}: {}", chain(source)), |code| format!("{what} ({code})"))
}
