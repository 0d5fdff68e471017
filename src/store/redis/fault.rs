//! What Redis said or did not say, as an error that says what to do.

use std::time::Duration;

use redis::{ErrorKind, RedisError};

use crate::error::StoreError;

/// The oldest server supported: the first whose HELLO has its version without being asked for a
/// protocol.
pub(super) const VERSION_NEEDED: &str = "6.2.0";

/// How the script begins an error of its own.
const FOREIGN: &str = "TIDEGATE FOREIGN ";

/// Words that decide what an error is. They are looked for anywhere in it: before 7.0 the server
/// wraps what a script ran into in "Error running script ...".
const CREDENTIALS: [&str; 2] = ["NOAUTH", "WRONGPASS"];
const DENIED: [&str; 7] = [
    "NOPERM",
    "NOSCRIPT",
    "ACL failure",
    "can't run this command",
    "Redis command is not allowed",
    "nknown command",
    "nknown Redis command",
];
const READ_ONLY: [&str; 4] = ["READONLY", "OOM ", "MISCONF", "NOREPLICAS"];

/// Turns an error of the client library into one of ours.
pub(super) fn store_error(error: &RedisError, timeout: Duration) -> StoreError {
    if error.is_timeout() {
        return StoreError::TimedOut(timeout);
    }
    match error.kind() {
        ErrorKind::Io | ErrorKind::ClusterConnectionNotFound => {
            StoreError::Unreachable(error.to_string())
        }
        ErrorKind::AuthenticationFailed => StoreError::Credentials(error.to_string()),
        ErrorKind::Parse | ErrorKind::UnexpectedReturnType => {
            StoreError::Reply { field: "resp", value: error.to_string() }
        }
        _ => said(&text(error)),
    }
}

/// Whether the connection is of no more use after this error: it broke, or it leads to a server
/// that was demoted, or it was let in with credentials that no longer hold.
pub(super) fn ends_connection(error: &RedisError) -> bool {
    let broken = match error.kind() {
        ErrorKind::Io => !error.is_timeout(),
        ErrorKind::Parse => true,
        _ => false,
    };
    let text = text(error);
    broken || text.contains("READONLY") || CREDENTIALS.iter().any(|word| text.contains(word))
}

/// The server's words: its code, and what followed.
pub(super) fn text(error: &RedisError) -> String {
    match (error.code(), error.detail()) {
        (Some(code), Some(detail)) => format!("{code} {detail}"),
        (Some(code), None) => code.to_owned(),
        (None, _) => error.to_string(),
    }
}

fn said(text: &str) -> StoreError {
    let has = |words: &[&str]| words.iter().any(|word| text.contains(word));
    if let Some((_, found)) = text.split_once(FOREIGN) {
        return foreign_key(found);
    }
    if text.contains("WRONGTYPE") {
        return StoreError::ForeignKey {
            key: "(one of the namespace's)".to_owned(),
            found: "value of another type".to_owned(),
        };
    }
    if has(&CREDENTIALS) {
        StoreError::Credentials(text.to_owned())
    } else if has(&READ_ONLY) {
        StoreError::ReadOnly(text.to_owned())
    } else if has(&DENIED) {
        StoreError::Denied(text.to_owned())
    } else {
        StoreError::Server(text.to_owned())
    }
}

/// Reads `<key> <type>`; servers may append where in the script it was.
fn foreign_key(found: &str) -> StoreError {
    let mut words = found.split_whitespace();
    let mut word = || words.next().unwrap_or("(not said)").to_owned();
    StoreError::ForeignKey { key: word(), found: word() }
}

/// Judges a server by its version in the answer to HELLO.
pub(super) fn check_version(found: &str) -> Result<(), StoreError> {
    let mut parts = found.split('.').map(|part| part.parse::<u32>().ok());
    let version = (parts.next().flatten(), parts.next().flatten());
    match version {
        (Some(major), Some(minor)) if (major, minor) < (6, 2) => Err(too_old(found)),
        // A version that cannot be read is not held against a server that got this far.
        _ => Ok(()),
    }
}

/// Judges a server by how it refused HELLO: that it may not be called is no fault.
pub(super) fn check_refusal(error: &RedisError) -> Result<(), StoreError> {
    let text = text(error);
    let said = text.to_ascii_lowercase();
    if said.contains("unknown command") {
        return Err(too_old("older than 6.0"));
    }
    if said.contains("wrong number of arguments") {
        return Err(too_old("older than 6.2"));
    }
    if CREDENTIALS.iter().any(|word| text.contains(word)) {
        return Err(StoreError::Credentials(text));
    }
    Ok(())
}

fn too_old(found: &str) -> StoreError {
    StoreError::TooOld { found: found.to_owned(), needed: VERSION_NEEDED }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_millis(100);

    /// The error that the client library makes of a line that a server sends.
    fn refused(line: &str) -> RedisError {
        redis::parse_redis_value(format!("-{line}\r\n").as_bytes())
            .and_then(redis::Value::extract_error)
            .expect_err("a line that begins with '-' is an error")
    }

    fn mapped(line: &str) -> StoreError {
        store_error(&refused(line), TIMEOUT)
    }

    fn name_of(error: &StoreError) -> &'static str {
        match error {
            StoreError::Credentials(_) => "credentials",
            StoreError::Denied(_) => "denied",
            StoreError::ReadOnly(_) => "read only",
            StoreError::ForeignKey { .. } => "foreign key",
            StoreError::Server(_) => "server",
            _ => "another",
        }
    }

    #[test]
    fn errors_of_a_server_become_advice_to_users() {
        // How Redis 6.2 wraps what a script ran into.
        const WRAPPED: &str = "ERR Error running script (call to f_1): @user_script:9:";
        let wrapped_replica = format!("{WRAPPED} -READONLY You can't write against a replica.");
        let wrapped_unknown = format!("{WRAPPED} @user_script: 9: Unknown Redis command called");
        let cases = [
            ("credentials", "NOAUTH Authentication required."),
            ("credentials", "WRONGPASS invalid username-password pair"),
            ("denied", "NOPERM this user has no permissions to run the 'evalsha' command"),
            ("denied", "NOSCRIPT No matching script. Please use EVAL."),
            ("denied", "ERR unknown command 'EVALSHA', with args beginning with: "),
            ("denied", wrapped_unknown.as_str()),
            ("denied", "ERR This Redis command is not allowed from script"),
            ("read only", "READONLY You can't write against a read only replica."),
            ("read only", wrapped_replica.as_str()),
            ("read only", "OOM command not allowed when used memory > 'maxmemory'."),
            ("read only", "MISCONF Redis is configured to save RDB snapshots"),
            ("read only", "NOREPLICAS Not enough good replicas to write."),
            ("foreign key", "WRONGTYPE Operation against a key holding the wrong kind of value"),
            ("server", "LOADING Redis is loading the dataset in memory"),
            ("server", "TRYAGAIN Multiple keys request during rehashing of slot"),
            ("server", "ERR something else"),
        ];
        for (expected, line) in cases {
            assert_eq!(name_of(&mapped(line)), expected, "{line}");
        }
    }

    #[test]
    fn foreign_record_is_named_with_its_type() {
        let foreign = StoreError::ForeignKey { key: "tg2:{a/1}:lane".into(), found: "list".into() };
        assert_eq!(mapped("TIDEGATE FOREIGN tg2:{a/1}:lane list"), foreign);
        assert_eq!(
            mapped("TIDEGATE FOREIGN tg2:{a/1}:lane list script: 1f, on @user_script:1."),
            foreign
        );
    }

    #[test]
    fn broken_connection_is_distinguished_from_a_slow_one() {
        let io = |kind: std::io::ErrorKind| RedisError::from(std::io::Error::from(kind));
        let slow = io(std::io::ErrorKind::TimedOut);
        assert_eq!(store_error(&slow, TIMEOUT), StoreError::TimedOut(TIMEOUT));
        assert!(!ends_connection(&slow));
        let broken = io(std::io::ErrorKind::BrokenPipe);
        assert!(matches!(store_error(&broken, TIMEOUT), StoreError::Unreachable(_)));
        assert!(ends_connection(&broken));
    }

    #[test]
    fn demoted_server_and_expired_credentials_end_the_connection_and_a_full_memory_does_not() {
        assert!(ends_connection(&refused("READONLY You can't write against a read only replica.")));
        assert!(ends_connection(&refused("NOAUTH Authentication required.")));
        assert!(!ends_connection(&refused("OOM command not allowed")));
    }

    #[test]
    fn versions_below_6_2_are_too_old() {
        for found in ["2.8.0", "5.0.14", "6.0.16"] {
            assert_eq!(check_version(found), Err(too_old(found)));
        }
        for found in ["6.2.0", "6.2.14", "7.0.15", "8.4.0", "255.255.255", "unstable"] {
            assert_eq!(check_version(found), Ok(()));
        }
    }

    #[test]
    fn server_without_a_usable_hello_is_too_old_and_one_that_denies_it_is_not() {
        let hello = |line: &str| check_refusal(&refused(line));
        let unknown = "ERR unknown command `HELLO`, with args beginning with: ";
        assert_eq!(hello(unknown), Err(too_old("older than 6.0")));
        let arity = "ERR wrong number of arguments for 'hello' command";
        assert_eq!(hello(arity), Err(too_old("older than 6.2")));
        assert_eq!(hello("NOPERM this user has no permissions to run the 'hello' command"), Ok(()));
        assert!(matches!(hello("NOAUTH HELLO must be called"), Err(StoreError::Credentials(_))));
    }
}
