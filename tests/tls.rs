//! The binary over TLS, against a server whose certificate the system does or does not trust.

#![cfg(feature = "cli")]

use std::path::Path;
use std::process::{Command, Output};

#[path = "parts/redis_server.rs"]
mod redis_server;

use redis_server::RedisServer;

fn openssl(folder: &Path, arguments: &str) {
    let run = Command::new("openssl")
        .current_dir(folder)
        .args(arguments.split_whitespace())
        .output()
        .expect("openssl is installed");
    assert!(run.status.success(), "{arguments}: {}", String::from_utf8_lossy(&run.stderr));
}

/// A certificate of 127.0.0.1 and the authority that signed it: `server.crt`, `server.key`, `authority.crt`.
fn make_certificates(folder: &Path) {
    std::fs::create_dir_all(folder).expect("the temporary folder is writable");
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2";
    openssl(
        folder,
        &format!("req -x509 {key} -keyout authority.key -out authority.crt -subj /CN=test"),
    );
    openssl(
        folder,
        &format!(
            "req -x509 {key} -keyout server.key -out server.crt -subj /CN=server -CA authority.crt \
             -CAkey authority.key -addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=CA:FALSE"
        ),
    );
}

fn demo(url: &str, trusted: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["demo", "--nodes", "2", "--seconds", "2", "--rate", "200", "--store", url])
        .env("SSL_CERT_FILE", trusted)
        .env_remove("SSL_CERT_DIR")
        .output()
        .expect("the binary runs")
}

#[test]
fn store_is_reached_over_tls_if_its_certificate_is_trusted_and_refused_if_not() {
    let folder = std::env::temp_dir().join(format!("tidegate-tls-{}", std::process::id()));
    make_certificates(&folder);
    let file = |name: &str| folder.join(name).display().to_string();
    let server = RedisServer::start_with(&[
        "--tls-port",
        "{port}",
        "--tls-auth-clients",
        "no",
        "--tls-cert-file",
        &file("server.crt"),
        "--tls-key-file",
        &file("server.key"),
        "--tls-ca-cert-file",
        &file("authority.crt"),
    ]);
    let trusted = demo(&server.url(), &folder.join("authority.crt"));
    let errors = String::from_utf8_lossy(&trusted.stderr);
    assert!(trusted.status.success(), "{errors}");
    // An authority that has signed something else.
    let strangers = folder.join("strangers");
    make_certificates(&strangers);
    let refused = demo(&server.url(), &strangers.join("authority.crt"));
    let errors = String::from_utf8_lossy(&refused.stderr).to_lowercase();
    assert!(!refused.status.success(), "{errors}");
    assert!(errors.contains("certificate"), "{errors}");
    std::fs::remove_dir_all(&folder).expect("the folder is there");
}
