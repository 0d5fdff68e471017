//! What a real server has charged.

#![allow(dead_code, reason = "not every test file looks")]

use std::collections::BTreeMap;

use super::{Record, RedisServer};

/// Tokens charged to a limit, by key.
pub(crate) fn charged_to(server: &RedisServer, limit: &str) -> BTreeMap<String, u64> {
    let client = redis::Client::open(server.url()).expect("a good address");
    let mut connection = client.get_connection().expect("the server runs");
    let names: Vec<String> = redis::cmd("KEYS")
        .arg(format!("tg2:{{*}}:key:{limit}:*"))
        .query(&mut connection)
        .expect("KEYS is answered");
    let mut charged = BTreeMap::new();
    for name in names {
        let bytes: Vec<u8> =
            redis::cmd("GET").arg(&name).query(&mut connection).expect("GET is answered");
        let record = Record::decode(&bytes).expect("a record of version 2");
        let key_follows = format!(":key:{limit}:");
        let (_, key) = name.split_once(&*key_follows).expect("a bucket of the limit");
        let another = charged.insert(key.to_owned(), record.charged());
        assert_eq!(another, None, "{key} has two buckets");
    }
    charged
}
