//! The schemes: web servers with and without TLS, the Hub, and buckets.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use partywall_harness::{Output, Running, Sandbox, noise};
use rustls::pki_types::{PrivateKeyDer, pem::PemObject};
use serde_json::json;

use crate::{
    command, put,
    server::{Ask, Reply, Server},
    take,
};

const DATE: &str = "Thu, 01 Jan 2026 00:00:00 GMT";

/// Files by their paths.
type Files = BTreeMap<String, Vec<u8>>;

/// Returns a safetensors file with one tensor of bytes.
fn safetensors(name: &str, bytes: &[u8]) -> Vec<u8> {
    let header =
        json!({ name: { "dtype": "U8", "shape": [bytes.len()], "data_offsets": [0, bytes.len()] } }).to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), bytes].concat()
}

/// Returns two shards with their index, and a file that is none of them, below a path.
fn model(below: &str) -> Files {
    let index = json!({ "weight_map": { "a": "m-1.safetensors", "b": "m-2.safetensors" } }).to_string();
    [
        ("m.safetensors.index.json", index.into_bytes()),
        ("m-1.safetensors", safetensors("a", &noise(700_000, 1))),
        ("m-2.safetensors", safetensors("b", &noise(500, 2))),
        ("other.safetensors", b"broken".to_vec()),
        ("README.md", b"text".to_vec()),
    ]
    .into_iter()
    .map(|(name, bytes)| (format!("{below}{name}"), bytes))
    .collect()
}

fn answer(files: &Files, ask: &Ask) -> Reply {
    let path = ask.path.split('?').next().unwrap_or_default();
    files.get(path).map_or_else(|| Reply::new(404, ""), |file| Reply::file(file, "\"1\"", ask))
}

/// Checks that the segment `x` has the two tensors of [`model`], and removes it.
fn assert_model(sandbox: &Sandbox) {
    let file = sandbox.path().join("taken");
    for (name, bytes) in [("a", noise(700_000, 1)), ("b", noise(500, 2))] {
        let _ = std::fs::remove_file(&file);
        sandbox.run(["get", &format!("x:{name}"), file.to_str().unwrap()]).expect(0);
        assert!(std::fs::read(&file).unwrap() == bytes, "{name}");
    }
    sandbox.run(["rm", "x"]).expect(0);
}

/// Runs `partywall put URL x` in host memory, with variables.
fn put_with(sandbox: &Sandbox, url: &str, variables: &[(&str, &str)]) -> Output {
    let mut command = command(sandbox, &["put", url, "x", "--device", "host", "--timeout", "2", "--retries", "1"]);
    Running::spawn(command.envs(variables.iter().copied())).wait()
}

// Holds 400.
#[test]
fn index_on_a_web_server_names_its_shards() {
    let sandbox = Sandbox::new();
    let files = model("/models/m/");
    let server = Server::start(move |ask| answer(&files, ask));
    put(&sandbox, &server.url("models/m/m.safetensors.index.json?token=1"), &[]).expect(0);
    assert!(server.asked().iter().all(|ask| ask.path.ends_with("?token=1")), "{:?}", server.asked());
    assert_model(&sandbox);
    // One tensor of NumPy's format, as a local file of that name.
    let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }\n";
    let npy = [b"\x93NUMPY\x01\0", &(header.len() as u16).to_le_bytes()[..], header.as_bytes(), &[0; 8]].concat();
    let files = Files::from([
        ("/x.npy".to_owned(), npy),
        ("/m.safetensors.index.json".to_owned(), br#"{"weight_map":{"t":"gone.safetensors"}}"#.to_vec()),
    ]);
    let server = Server::start(move |ask| answer(&files, ask));
    put(&sandbox, &server.url("x.npy"), &[]).expect(0);
    assert!(sandbox.run(["show", "x"]).text().contains("float32"));
    let missing = put(&sandbox, &server.url("m.safetensors.index.json"), &[]).expect(3);
    assert!(missing.stderr.contains("gone.safetensors is missing"), "{missing:?}");
}

// Holds 432.
#[test]
fn url_of_a_variable_is_in_no_command_line() {
    let sandbox = Sandbox::new();
    let files = Files::from([("/x.bin".to_owned(), b"abc".to_vec())]);
    let server = Server::start(move |ask| answer(&files, ask));
    let url = server.url("x.bin?sig=SECRET").replace("http://", "http://user:SECRET@");
    let mut command = command(&sandbox, &["put", "ENV://MODEL_URL", "x", "--device", "host", "--hold"]);
    let mut holder = Running::spawn(command.env("MODEL_URL", &url));
    assert!(holder.line().contains("holding it"));
    assert!(server.asked().iter().all(|ask| ask.path == "/x.bin?sig=SECRET" && ask.authorization.is_some()));
    let shown = std::fs::read_to_string(format!("/proc/{}/cmdline", holder.pid())).unwrap();
    assert!(shown.contains("ENV://MODEL_URL") && !shown.contains("SECRET"), "{shown}");
    assert!(sandbox.run(["ps"]).text().contains("put ENV://MODEL_URL x"));
    holder.kill();
    for (value, says) in [
        ("", "the variable \"MODEL_URL\" is not set, or is empty"),
        ("SECRET", "the variable \"MODEL_URL\" contains no URL"),
        ("env://MODEL_URL", "the variable \"MODEL_URL\" contains no URL"),
        ("SECRET SECRET://h/x", "no scheme is called"),
    ] {
        let refused = put_with(&sandbox, "env://MODEL_URL", &[("MODEL_URL", value)]).expect(2);
        assert!(refused.stderr.contains(says), "{refused:?}");
    }
}

// Holds 403.
#[test]
fn certificate_must_be_of_a_known_authority_and_of_the_host() {
    let sandbox = Sandbox::new();
    let file: Arc<[u8]> = noise(700_000, 3).into();
    let _ = rustls::crypto::ring::default_provider().install_default();
    let server = |name: &str| {
        let made = rcgen::generate_simple_self_signed([name.to_owned()]).unwrap();
        let key = PrivateKeyDer::from_pem_slice(made.signing_key.serialize_pem().as_bytes()).unwrap();
        let config = rustls::ServerConfig::builder().with_no_client_auth();
        let config = config.with_single_cert(vec![made.cert.der().clone()], key).unwrap();
        let bytes = file.clone();
        let server = Server::start_tls(Arc::new(config), move |ask| Reply::file(&bytes, "\"1\"", ask));
        let certificate = sandbox.file(&format!("{name}.pem"), made.cert.pem());
        (format!("https://localhost:{}/x.bin", server.address.port()), certificate.to_str().unwrap().to_owned())
    };
    let (url, certificate) = server("localhost");
    let (foreign, other) = server("other.example");
    for (url, certificate) in [(&url, &other), (&foreign, &other)] {
        let refused = put_with(&sandbox, url, &[("SSL_CERT_FILE", certificate)]).expect(5);
        assert!(refused.stderr.contains("the connection cannot be trusted"), "{refused:?}");
        assert!(refused.stderr.contains("SSL_CERT_FILE") && !refused.stderr.contains("trying again"), "{refused:?}");
    }
    put_with(&sandbox, &url, &[("SSL_CERT_FILE", &certificate)]).expect(0);
    assert!(take(&sandbox) == *file);

    // From TLS to a server without.
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = PrivateKeyDer::from_pem_slice(made.signing_key.serialize_pem().as_bytes()).unwrap();
    let config = rustls::ServerConfig::builder().with_no_client_auth();
    let config = config.with_single_cert(vec![made.cert.der().clone()], key).unwrap();
    let server =
        Server::start_tls(Arc::new(config), |_| Reply::new(302, "").with("Location", "http://127.0.0.1:9/x.bin"));
    let certificate = sandbox.file("third.pem", made.cert.pem());
    let url = format!("https://localhost:{}/x.bin", server.address.port());
    let refused = put_with(&sandbox, &url, &[("SSL_CERT_FILE", certificate.to_str().unwrap())]).expect(5);
    assert!(refused.stderr.contains("to a URL without encryption"), "{refused:?}");
}

// Holds 400.
#[test]
fn repository_of_the_hub_is_read_at_one_commit() {
    let sandbox = Sandbox::new();
    // Large files are elsewhere, where the token must not go.
    let store = Server::start({
        let files = model("/");
        move |ask| answer(&files, ask)
    });
    let to = store.url("");
    let server = Server::start(move |ask| {
        if ask.authorization.as_deref() != Some("Bearer hf_abc") {
            return Reply::new(401, "");
        }
        let names = ["m.safetensors.index.json", "m-1.safetensors", "m-2.safetensors", "old/other.safetensors"];
        match ask.path.as_str() {
            "/api/models/org/model/revision/v1" => {
                let siblings: Vec<_> = names.iter().map(|name| json!({ "rfilename": name })).collect();
                Reply::new(200, json!({ "sha": "c0ffee", "siblings": siblings }).to_string())
            }
            path => match path.strip_prefix("/org/model/resolve/c0ffee/") {
                Some(name) => Reply::new(302, "").with("Location", format!("{to}{name}")),
                None => Reply::new(404, ""),
            },
        }
    });
    let endpoint = server.url("");
    let variables = [("HF_ENDPOINT", endpoint.as_str()), ("HF_TOKEN", "hf_abc")];
    put_with(&sandbox, "hf://org/model@v1", &variables).expect(0);
    assert_model(&sandbox);
    assert!(store.asked().iter().all(|ask| ask.authorization.is_none()));
    put_with(&sandbox, "hf://org/model@v1/m-2.safetensors", &variables).expect(0);
    sandbox.run(["rm", "x"]).expect(0);
    let other = put_with(&sandbox, "hf://org/model@v2", &variables).expect(3);
    assert!(other.stderr.contains("hf://org/model@v2 cannot be opened"), "{other:?}");
    let refused = put_with(&sandbox, "hf://org/model@v1", &variables[..1]).expect(5);
    assert!(refused.stderr.contains("set HF_TOKEN"), "{refused:?}");
    sandbox.file("home/.cache/huggingface/token", "hf_abc\n");
    put_with(&sandbox, "hf://org/model@v1", &variables[..1]).expect(0);
}

// Holds 434.
#[test]
fn hub_is_asked_once_for_the_place_of_a_file_and_again_if_that_refuses() {
    let sandbox = Sandbox::new();
    let file: Arc<[u8]> = noise(2 << 20, 5).into();
    let bytes = file.clone();
    // The first signature serves for three requests, the second from then on.
    let store = Server::start(move |ask| match (ask.path.as_str(), ask.number) {
        ("/1", 0) | ("/2", 4..) => Reply::file(&bytes, "\"1\"", ask),
        ("/1", 1..3) => Reply::file(&bytes, "\"1\"", ask).cut(100_000),
        _ => Reply::new(403, ""),
    });
    let to = store.url("");
    let signatures = AtomicUsize::new(0);
    let server = Server::start(move |ask| match ask.path.as_str() {
        "/hub/api/models/o%3Fx/m%23y/revision/refs%2Fpr%2F1" => {
            Reply::new(200, json!({ "sha": "c0ffee", "siblings": [] }).to_string())
        }
        "/hub/o%3Fx/m%23y/resolve/c0ffee/a%3Fb.bin" => {
            let number = signatures.fetch_add(1, Ordering::Relaxed) + 1;
            Reply::new(302, "").with("Location", format!("{to}{number}"))
        }
        _ => Reply::new(404, ""),
    });
    let endpoint = server.url("hub/");
    let arguments = ["put", "hf://o?x/m#y@refs/pr/1/a?b.bin", "x", "--device", "host"];
    let mut command = command(&sandbox, &arguments);
    Running::spawn(command.env("HF_ENDPOINT", &endpoint).env("HF_TOKEN", "hf_abc")).wait().expect(0);
    assert!(take(&sandbox) == *file);
    let asked = server.asked();
    assert_eq!(asked.len(), 3, "{asked:?}");
    assert!(asked.iter().all(|ask| ask.authorization.as_deref() == Some("Bearer hf_abc")), "{asked:?}");
    let (paths, tokens): (Vec<_>, Vec<_>) = store.asked().into_iter().map(|ask| (ask.path, ask.authorization)).unzip();
    assert_eq!(paths, ["/1", "/1", "/1", "/1", "/2"]);
    assert!(tokens.iter().all(Option::is_none), "{tokens:?}");
    // A place that refuses at once is the server's last word.
    let refused = put_with(&sandbox, "hf://o?x/m#y@refs/pr/1/a?b.bin", &[("HF_ENDPOINT", endpoint.as_str())]).expect(5);
    assert!(refused.stderr.contains("403 Forbidden"), "{refused:?}");
}

/// Answers as S3 does, for a bucket `b` with a model below `m/`.
fn bucket(files: &Files, ask: &Ask) -> Reply {
    let signed = ask.authorization.as_deref().is_some_and(|text| text.starts_with("AWS4-HMAC-SHA256 Credential=key/"));
    if !signed {
        return Reply::new(403, "<Error><Code>AccessDenied</Code></Error>");
    }
    if ask.path.contains("list-type=2") {
        let name = |path: &String| path.trim_start_matches("/b/").to_owned();
        let entry = |path| {
            let key = name(path);
            format!(
                "<Contents><Key>{key}</Key><Size>1</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            )
        };
        let found: String =
            if ask.path.contains("prefix=m") { files.keys().map(entry).collect() } else { String::new() };
        return Reply::new(200, format!("<ListBucketResult>{found}</ListBucketResult>"));
    }
    answer(files, ask).with("Last-Modified", DATE)
}

// Holds 400.
#[test]
fn bucket_is_read_by_its_usual_variables() {
    let sandbox = Sandbox::new();
    let mut files = model("/b/m/");
    files.insert("/b/empty.bin".to_owned(), Vec::new());
    let server = Server::start(move |ask| bucket(&files, ask));
    let endpoint = format!("http://{}", server.address);
    let variables =
        [("AWS_ENDPOINT_URL", endpoint.as_str()), ("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")];
    for url in ["s3://b/m", "s3://b/m/", "s3://b/m/m.safetensors.index.json"] {
        put_with(&sandbox, url, &variables).expect(0);
        assert_model(&sandbox);
    }
    put_with(&sandbox, "s3://b/m/README.md", &variables).expect(0);
    assert_eq!(take(&sandbox), b"text");
    put_with(&sandbox, "s3://b/empty.bin", &variables).expect(0);
    assert_eq!(take(&sandbox), b"");
    let missing = put_with(&sandbox, "s3://b/gone.bin", &variables).expect(3);
    assert!(missing.stderr.contains("s3://b/gone.bin cannot be opened"), "{missing:?}");
    let mut wrong = variables;
    wrong[1].1 = "other";
    let refused = put_with(&sandbox, "s3://b/m/README.md", &wrong).expect(5);
    assert!(refused.stderr.contains("AWS_ACCESS_KEY_ID"), "{refused:?}");
    let without =
        put_with(&sandbox, "s3://b/m/README.md", &[variables[0], ("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")]);
    assert!(without.expect(5).stderr.contains("no credentials were found"));
}

// Holds 400, 402.
#[test]
fn bucket_is_asked_for_a_state_only_by_a_strong_tag() {
    let sandbox = Sandbox::new();
    let file: Arc<[u8]> = noise(700_000, 4).into();
    // An ETag, a weak one, and none but a date.
    for (tag, sent) in [("\"1\"", Some("\"1\"")), ("W/\"1\"", None), ("", None)] {
        for changes in [false, true] {
            let bytes = file.clone();
            let server = Server::start(move |ask| {
                if ask.if_match.as_deref().is_some_and(|tag| tag != "\"1\"") {
                    return Reply::new(412, "");
                }
                match ask.range {
                    Some((1.., _)) if changes => Reply::file(&bytes, "W/\"2\"", ask),
                    _ if tag.is_empty() => Reply::file(&bytes, tag, ask).without("ETag").with("Last-Modified", DATE),
                    _ => Reply::file(&bytes, tag, ask),
                }
            });
            let endpoint = format!("http://{}", server.address);
            let variables = [("AWS_ENDPOINT_URL", endpoint.as_str()), ("AWS_SKIP_SIGNATURE", "true")];
            let output = put_with(&sandbox, "s3://b/x.bin", &variables);
            if changes {
                assert!(output.expect(5).stderr.contains("has changed while it was read: its ETag or date"), "{tag}");
            } else {
                output.expect(0);
                assert!(take(&sandbox) == *file, "{tag}");
            }
            let asked = server.asked();
            let mut conditions: Vec<_> = asked.iter().filter(|ask| !ask.is_head).map(|ask| &ask.if_match).collect();
            assert_eq!(conditions.remove(0), &None, "{asked:?}");
            assert!(!conditions.is_empty() && conditions.iter().all(|one| one.as_deref() == sent), "{asked:?}");
        }
    }
}
