//! Where `tidegate serve` listens: over TLS, at sockets, and for how many connections for how long.
#![cfg(feature = "server")]
#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]
#![allow(clippy::disallowed_methods, reason = "a process lives by the real clock")]

mod parts;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use parts::serving::{SOON, Server, ask, file};
use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

const LIMITS: &str = "[limits.api]\nquota = \"5/d\"\n[server]\n";

/// A folder of a test's own, which is empty.
fn folder(test: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("listeners-{test}"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn openssl(folder: &Path, arguments: &str) {
    let run =
        Command::new("openssl").current_dir(folder).args(arguments.split_whitespace()).output();
    let run = run.expect("openssl is installed");
    assert!(run.status.success(), "{arguments}: {}", String::from_utf8_lossy(&run.stderr));
}

const KEY: &str = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2";

/// An authority: `NAME.crt` and `NAME.key`.
fn authority(folder: &Path, name: &str) {
    openssl(
        folder,
        &format!("req -x509 {KEY} -keyout {name}.key -out {name}.crt -subj /CN={name}"),
    );
}

/// A certificate of 127.0.0.1 that the authority has signed.
fn certificate(folder: &Path, name: &str, authority: &str) {
    openssl(
        folder,
        &format!(
            "req -x509 {KEY} -keyout {name}.key -out {name}.crt -subj /CN={name} -CA {authority}.crt \
             -CAkey {authority}.key -addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=CA:FALSE"
        ),
    );
}

/// The body of an answer, or the exit status of curl: 7 is no connection, 35, 56 and 60 are TLS.
fn curl(folder: &Path, arguments: &str) -> Result<String, i32> {
    let mut curl = Command::new("curl");
    curl.args(["-s", "-S", "--max-time", "20"]).args(arguments.split_whitespace());
    let run = curl.current_dir(folder).output().expect("curl is installed");
    if run.status.success() {
        return Ok(String::from_utf8(run.stdout).unwrap());
    }
    Err(run.status.code().unwrap())
}

/// What a service says that cannot begin.
fn refusal(arguments: &[&str]) -> String {
    let mut serve = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    serve.args(["serve", "--grpc", "127.0.0.1:0"]).args(arguments).stderr(Stdio::piped());
    let mut process = serve.stdout(Stdio::null()).spawn().unwrap();
    let deadline = Instant::now() + SOON;
    while process.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            process.kill().unwrap();
            panic!("{arguments:?}: it began");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let run = process.wait_with_output().unwrap();
    assert!(!run.status.success(), "{arguments:?}");
    String::from_utf8(run.stderr).unwrap()
}

fn grpc_address(server: &Server) -> &str {
    server.began.lines().nth(1).unwrap().strip_prefix("for Envoy on ").unwrap()
}

#[test]
fn tls_is_spoken_with_clients_of_the_authority_and_certificates_are_read_anew_at_sighup() {
    let folder = folder("tls");
    for name in ["one", "other"] {
        authority(&folder, name);
    }
    for (name, authority) in [("server", "one"), ("client", "one"), ("stranger", "other")] {
        certificate(&folder, name, authority);
    }
    let path = folder.join("tidegate.toml");
    let tls = "tls_cert = \"server.crt\"\ntls_key = \"server.key\"\nclient_ca = \"one.crt\"\n";
    fs::write(&path, format!("{LIMITS}{tls}")).unwrap();
    let server = Server::start_at("127.0.0.1:0", Some(&path));
    let live = format!("https://{}/health/live", server.address);
    let with = |authority: &str, client: &str| {
        format!("--cacert {authority}.crt --cert {client}.crt --key {client}.key ")
    };
    let answer = curl(&folder, &(with("one", "client") + &live));
    assert_eq!(answer.as_deref(), Ok("the service answers\n"));
    for version in ["--tls-max 1.2 ", "--tlsv1.3 "] {
        let answer = curl(&folder, &(with("one", "client") + version + &live));
        assert!(answer.is_ok(), "{version}: {answer:?}");
    }
    assert!(curl(&folder, &format!("--cacert one.crt {live}")).is_err(), "no certificate");
    assert!(curl(&folder, &(with("one", "stranger") + &live)).is_err(), "another authority");
    assert_eq!(curl(&folder, &(with("other", "client") + &live)), Err(60), "not trusted");
    assert!(curl(&folder, &live.replace("https", "http")).is_err(), "no TLS");
    // gRPC too, with HTTP/2.
    let grpc = format!("https://{}/grpc.health.v1.Health/Check", grpc_address(&server));
    let version = "-o /dev/null -w %{http_version} -X POST -H content-type:application/grpc ";
    let answer = curl(&folder, &format!("{}{version}{grpc}", with("one", "client")));
    assert_eq!(answer.as_deref(), Ok("2"));
    // A broken certificate changes nothing, and another one holds for new connections.
    let valid = fs::read(folder.join("server.crt")).unwrap();
    fs::write(folder.join("server.crt"), "no certificate").unwrap();
    server.signal("HUP");
    let metrics = live.replace("health/live", "metrics");
    server.wait_until("the refusal", |_| {
        let told = curl(&folder, &(with("one", "client") + &metrics)).unwrap();
        told.contains("tidegate_certificate_reloads_total{result=\"refused\"} 1")
    });
    assert!(curl(&folder, &(with("one", "client") + &live)).is_ok());
    fs::write(folder.join("server.crt"), valid).unwrap();
    certificate(&folder, "server", "other");
    server.signal("HUP");
    server.wait_until("the other certificate", |_| {
        curl(&folder, &(with("other", "client") + &live)).is_ok()
    });
    assert_eq!(curl(&folder, &(with("one", "client") + &live)), Err(60));
}

#[test]
fn service_that_cannot_use_its_certificates_says_which_field_and_why() {
    let folder = folder("broken-tls");
    for name in ["one", "other"] {
        authority(&folder, name);
    }
    fs::write(folder.join("empty.crt"), "").unwrap();
    let of = |cert: &str, key: &str, ca: &str| {
        let tls = format!("tls_cert = \"{cert}\"\ntls_key = \"{key}\"\n{ca}");
        let path = folder.join("tidegate.toml");
        fs::write(&path, format!("{LIMITS}{tls}")).unwrap();
        let path = path.to_str().unwrap();
        let mut check = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        let checked = check.args(["check-config", path]).output().unwrap();
        assert_eq!((checked.status.code(), checked.stdout), (Some(1), Vec::new()));
        let said = refusal(&["--http", "127.0.0.1:0", path]);
        let checked = String::from_utf8(checked.stderr).unwrap();
        let reason = checked.strip_prefix(&format!("error: {path}: ")).unwrap_or(&checked);
        assert!(said.contains(reason), "{checked}: {said}");
        said
    };
    for (said, parts) in [
        (of("empty.crt", "one.key", ""), ["tls_cert", "empty.crt"]),
        (of("one.crt", "one.crt", ""), ["tls_key", "no private key"]),
        (of("one.crt", "other.key", ""), ["tls_cert and tls_key", "key"]),
        (of("one.crt", "one.key", "client_ca = \"empty.crt\"\n"), ["client_ca", "empty.crt"]),
        (of("none.crt", "one.key", ""), ["tls_cert", "none.crt"]),
        (of("one.crt", "none.key", ""), ["tls_key", "none.key"]),
    ] {
        assert!(parts.iter().all(|part| said.contains(part)), "{parts:?}: {said}");
    }
}

#[test]
fn socket_is_listened_at_in_place_of_one_left_behind_and_goes_with_the_service() {
    let folder = folder("unix");
    let socket = folder.join("tidegate.sock");
    // One that nobody listens at any more.
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let address = format!("unix:{}", socket.display());
    let path = file("unix", LIMITS);
    let mut server = Server::start_at(&address, Some(&path));
    assert_eq!(server.address, address);
    let live = "--unix-socket tidegate.sock http://localhost/health/live";
    assert_eq!(curl(&folder, live).as_deref(), Ok("the service answers\n"));
    let said = refusal(&["--http", &address]);
    assert!(said.contains("in use"), "{said}");
    assert!(curl(&folder, live).is_ok(), "the first goes on");
    server.signal("TERM");
    assert!(server.ended().0.success());
    assert!(!socket.exists());
    assert!(curl(&folder, live).is_err(), "nobody is there");
    // A successor that begins while one answers what is under way keeps its socket.
    let mut draining = Server::start_at(&address, Some(&path));
    let mut slow = std::os::unix::net::UnixStream::connect(&socket).unwrap();
    slow.write_all(b"POST /v1/check HTTP/1.1\r\nhost: a\r\ncontent-length: 28\r\n\r\n").unwrap();
    // Its head has come once another request is answered.
    assert!(curl(&folder, live).is_ok());
    draining.signal("TERM");
    let deadline = Instant::now() + SOON;
    while std::os::unix::net::UnixStream::connect(&socket).is_ok() {
        assert!(Instant::now() < deadline, "it takes no more connections");
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut successor = Server::start_at(&address, Some(&path));
    slow.write_all(b"{\"limit\":\"api\",\"key\":\"user\"}").unwrap();
    let mut answer = String::new();
    let _ = slow.read_to_string(&mut answer);
    assert!(answer.contains("\"allowed\":true"), "{answer}");
    assert!(draining.ended().0.success());
    assert!(curl(&folder, live).is_ok(), "the successor answers");
    successor.signal("TERM");
    assert!(successor.ended().0.success() && !socket.exists());
    // A file that is no socket stays.
    fs::write(&socket, "mine").unwrap();
    let said = refusal(&["--http", &address]);
    assert!(said.contains("in use"), "{said}");
    assert_eq!(fs::read_to_string(&socket).unwrap(), "mine");
}

/// Connecting takes permission to write, which the usual umask keeps from all other users.
#[test]
fn sockets_can_be_used_by_all_users_whom_their_folder_lets_in() {
    let folder = folder("unix-mode");
    let sockets = ["http.sock", "grpc.sock"].map(|name| folder.join(name));
    // One of them is in place of one that nobody listens at any more.
    drop(std::os::unix::net::UnixListener::bind(&sockets[0]).unwrap());
    let [http, grpc] = sockets.each_ref().map(|socket| format!("unix:{}", socket.display()));
    let _server = Server::start_at_both(&http, &grpc, Some(&file("unix-mode", LIMITS)));
    for socket in &sockets {
        let mode = fs::symlink_metadata(socket).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o777, "{}: {mode:o}", socket.display());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_is_answered_at_a_socket() {
    let socket = folder("unix-grpc").join("grpc.sock");
    let address = format!("unix:{}", socket.display());
    let path = file("unix-grpc", LIMITS);
    let mut server = Server::start_at_both("127.0.0.1:0", &address, Some(&path));
    assert_eq!(grpc_address(&server), address);
    let place = socket.clone();
    let connect = tower::service_fn(move |_: tonic::codegen::http::Uri| {
        let place = place.clone();
        async move { tokio::net::UnixStream::connect(place).await.map(TokioIo::new) }
    });
    // Nobody looks at its name.
    let endpoint = Endpoint::from_static("http://localhost");
    let channel = endpoint.connect_with_connector(connect).await.unwrap();
    let mut health = HealthClient::new(channel);
    let asked = HealthCheckRequest { service: String::new() };
    let answer = health.check(asked).await.unwrap().into_inner();
    assert_eq!(answer.status(), ServingStatus::Serving);
    drop(health);
    server.signal("TERM");
    let (status, log) = server.ended();
    assert!(status.success() && !socket.exists());
    assert!(!log.contains("still under way"), "{log}");
}

/// What comes over a connection until it is closed.
fn read_to_end(mut stream: &TcpStream) -> String {
    stream.set_read_timeout(Some(SOON)).unwrap();
    let mut text = String::new();
    // It may be reset.
    let _ = stream.read_to_string(&mut text);
    text
}

#[test]
fn connections_beyond_the_most_are_closed_and_counted_and_later_ones_are_let_in() {
    let server = Server::start(Some(&file("most", &format!("{LIMITS}max_connections = 2\n"))));
    let request = b"GET /health/live HTTP/1.1\r\nhost: a\r\n\r\n";
    let open = || {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream.write_all(request).unwrap();
        stream
    };
    let answers = |mut stream: &TcpStream| stream.read(&mut [0; 12]).is_ok_and(|read| read == 12);
    let deadline = Instant::now() + SOON;
    // Connections that were answered before may not have ended yet.
    let (one, other) = loop {
        let both = (open(), open());
        if answers(&both.0) && answers(&both.1) {
            break both;
        }
        assert!(Instant::now() < deadline, "two are let in");
    };
    assert_eq!(read_to_end(&open()), "", "a third is closed");
    drop(one);
    let deadline = Instant::now() + SOON;
    while !answers(&open()) {
        assert!(Instant::now() < deadline, "another is let in");
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(other);
    server.wait_until("the count", |it| {
        // A place may not be free yet.
        let Ok(metrics) = ask(&it.address, "GET", "/metrics", "") else { return false };
        let counted = metrics.body.lines().find_map(|line| {
            line.strip_prefix("tidegate_connections_refused_total ")?.parse::<u64>().ok()
        });
        counted.is_some_and(|counted| counted > 0)
    });
}

#[test]
fn connection_whose_head_does_not_come_in_time_is_closed() {
    let server = Server::start(Some(&file("head", &format!("{LIMITS}head_timeout = \"2s\"\n"))));
    let begun = Instant::now();
    let whole = "GET /health/live HTTP/1.1\r\nhost: a\r\n\r\n";
    for sent in ["", "GET /health/live HTTP/1.1\r\nho", whole] {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        stream.write_all(sent.as_bytes()).unwrap();
        let answered = read_to_end(&stream);
        assert_eq!(answered.contains("200 OK"), sent == whole, "{sent:?}: {answered:?}");
    }
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    assert_eq!(server.ask("GET", "/health/live", "").status, 200);
}

#[test]
fn client_address_that_asks_too_often_is_refused_and_health_is_not() {
    let server =
        Server::start(Some(&file("clients", &format!("{LIMITS}client_quota = \"3/d\"\n"))));
    let check = serde_json::json!({"limit": "api", "key": "a"});
    for _ in 0..3 {
        assert_eq!(server.check(&check).status, 200);
    }
    let refused = server.check(&check);
    assert_eq!(refused.status, 429, "{refused:?}");
    for part in ["retry-after: ", "application/problem+json"] {
        assert!(refused.head.contains(part), "{refused:?}");
    }
    assert_eq!(server.ask("GET", "/v1/limits", "").status, 429);
    assert_eq!(server.ask("GET", "/health/live", "").status, 200);
    assert_eq!(server.ask("GET", "/nowhere", "").status, 404);
    assert_eq!(server.ask("GET", "/metrics", "").status, 200);
    // Clients of a socket are one.
    let folder = folder("clients");
    let socket = format!("unix:{}", folder.join("tidegate.sock").display());
    let path = file("clients-unix", &format!("{LIMITS}client_quota = \"1/d\"\n"));
    let _server = Server::start_at(&socket, Some(&path));
    let limits =
        "-o /dev/null -w %{http_code} --unix-socket tidegate.sock http://localhost/v1/limits";
    assert_eq!(curl(&folder, limits).as_deref(), Ok("200"));
    assert_eq!(curl(&folder, limits).as_deref(), Ok("429"));
}
