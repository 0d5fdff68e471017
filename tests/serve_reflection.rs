//! What the service says of itself over gRPC: by reflection, against Envoy's own files, those that come with the types it is built
//! with; and of its health when it ends.
#![cfg(feature = "server")]
#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]
#![allow(clippy::disallowed_methods, reason = "a server lives by the real clock")]

mod parts;

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

use parts::service::service;
use parts::serving::{Server, file};
use prost::Message;
use prost_types::{
    DescriptorProto, EnumDescriptorProto, FileDescriptorProto, FileDescriptorSet,
    ServiceDescriptorProto,
};
use tidegate::server::Service;
use tokio::net::TcpListener;
use tokio_stream::StreamExt;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Streaming};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

const LIMITS: &str = "[limits.api]\nquota = \"1/s\"\n";

/// The files that the service tells of, which Envoy has too.
const FILES: [&str; 6] = [
    "envoy/service/ratelimit/v3/rls.proto",
    "envoy/extensions/common/ratelimit/v3/ratelimit.proto",
    "envoy/config/core/v3/base.proto",
    "envoy/type/v3/ratelimit_unit.proto",
    "google/protobuf/duration.proto",
    "google/protobuf/wrappers.proto",
];

/// A connection to the service, which is served in this process.
async fn connected(service: Service) -> Channel {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, service.grpc()).await });
    Endpoint::from_shared(address).unwrap().connect().await.unwrap()
}

/// What Envoy asks about.
fn of_ratelimit() -> HealthCheckRequest {
    HealthCheckRequest { service: "ratelimit".to_owned() }
}

/// A call that has told that the service is healthy, and goes on.
async fn watch(health: &mut HealthClient<Channel>) -> Streaming<HealthCheckResponse> {
    let mut watched = health.watch(of_ratelimit()).await.unwrap().into_inner();
    while watched.message().await.unwrap().unwrap().status() != ServingStatus::Serving {}
    watched
}

fn asked(message: MessageRequest) -> ServerReflectionRequest {
    ServerReflectionRequest { host: String::new(), message_request: Some(message) }
}

async fn ask(
    client: &mut ServerReflectionClient<Channel>,
    message: MessageRequest,
) -> MessageResponse {
    let answers = client.server_reflection_info(tokio_stream::once(asked(message))).await.unwrap();
    answers.into_inner().message().await.unwrap().unwrap().message_response.unwrap()
}

/// Envoy's files, by name.
fn files_of_envoy() -> BTreeMap<String, FileDescriptorProto> {
    let compiler = Command::new("rustc").arg("-vV").output().unwrap().stdout;
    let compiler = String::from_utf8(compiler).unwrap();
    let platform = compiler.lines().find_map(|line| line.strip_prefix("host: ")).unwrap();
    // Those of other platforms may not be here.
    let output = Command::new(env!("CARGO"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["metadata", "--locked", "--offline", "--format-version", "1"])
        .args(["--filter-platform", platform, "--features", "server"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let package = packages.iter().find(|package| package["name"] == "envoy-types").unwrap();
    let manifest = std::path::Path::new(package["manifest_path"].as_str().unwrap());
    let bytes = std::fs::read(manifest.with_file_name("src/generated/types.bin")).unwrap();
    let files = FileDescriptorSet::decode(&*bytes).unwrap().file;
    files.into_iter().map(|file| (file.name().to_owned(), file)).collect()
}

/// Everything of `own` is in `other`, with the same number and type.
fn assert_part_of(own: &DescriptorProto, other: &[DescriptorProto]) {
    let other = other.iter().find(|it| it.name == own.name).unwrap_or_else(|| panic!("{own:?}"));
    for field in &own.field {
        let same = other.field.iter().find(|it| it.name == field.name);
        let shown = |field: &prost_types::FieldDescriptorProto| {
            let kind = (field.number, field.label, field.r#type, field.type_name.clone());
            (field.name.clone(), kind)
        };
        assert_eq!(same.map(shown), Some(shown(field)), "{:?}", own.name);
    }
    for nested in &own.nested_type {
        assert_part_of(nested, &other.nested_type);
    }
    assert_values(&own.enum_type, &other.enum_type);
}

fn assert_values(own: &[EnumDescriptorProto], other: &[EnumDescriptorProto]) {
    let values = |it: &EnumDescriptorProto| -> BTreeMap<String, i32> {
        it.value.iter().map(|value| (value.name().to_owned(), value.number())).collect()
    };
    for own in own {
        let other = other.iter().find(|it| it.name == own.name);
        assert_eq!(other.map(values), Some(values(own)), "{:?}", own.name);
    }
}

fn assert_methods(own: &[ServiceDescriptorProto], other: &[ServiceDescriptorProto]) {
    let methods = |it: &ServiceDescriptorProto| -> Vec<[Option<String>; 3]> {
        let of = |it: &prost_types::MethodDescriptorProto| {
            [&it.name, &it.input_type, &it.output_type].map(Clone::clone)
        };
        it.method.iter().map(of).collect()
    };
    for own in own {
        let other = other.iter().find(|it| it.name == own.name);
        assert_eq!(other.map(methods), Some(methods(own)), "{:?}", own.name);
    }
}

#[tokio::test]
async fn reflection_tells_what_envoys_files_say() {
    let channel = connected(service(LIMITS).await).await;
    let mut client = ServerReflectionClient::new(channel);
    let listed = ask(&mut client, MessageRequest::ListServices(String::new())).await;
    let MessageResponse::ListServicesResponse(listed) = listed else { panic!("{listed:?}") };
    let mut names: Vec<String> = listed.service.into_iter().map(|service| service.name).collect();
    names.sort();
    let expected = [
        "envoy.service.ratelimit.v3.RateLimitService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
    ];
    assert_eq!(names, expected);
    let envoys = files_of_envoy();
    let mut symbols = 0;
    for name in FILES {
        let told = ask(&mut client, MessageRequest::FileByFilename(name.to_owned())).await;
        let MessageResponse::FileDescriptorResponse(told) = told else { panic!("{told:?}") };
        let own = FileDescriptorProto::decode(&*told.file_descriptor_proto[0]).unwrap();
        let other = &envoys[name];
        assert_eq!((&own.package, &own.syntax), (&other.package, &other.syntax), "{name}");
        for needed in &own.dependency {
            assert!(FILES.contains(&&**needed), "{name} needs {needed}, which is not there");
        }
        own.message_type.iter().for_each(|message| assert_part_of(message, &other.message_type));
        assert_values(&own.enum_type, &other.enum_type);
        assert_methods(&own.service, &other.service);
        symbols += own.message_type.len() + own.enum_type.len() + own.service.len();
    }
    assert_eq!(symbols, 8);
    let symbol = "envoy.service.ratelimit.v3.RateLimitService".to_owned();
    let told = ask(&mut client, MessageRequest::FileContainingSymbol(symbol)).await;
    assert!(matches!(told, MessageResponse::FileDescriptorResponse(_)), "{told:?}");
}

#[tokio::test]
async fn call_that_watches_the_health_ends_after_the_end_was_told_and_later_ones_are_answered() {
    let service = service(LIMITS).await;
    let mut health = HealthClient::new(connected(service.clone()).await);
    let mut watched = watch(&mut health).await;
    service.announce_end();
    let told = watched.message().await.unwrap().unwrap();
    assert_eq!(told.status(), ServingStatus::NotServing);
    let ended = watched.message().await.unwrap_err();
    assert_eq!(ended.code(), Code::Unavailable, "{ended}");
    for _ in 0..10 {
        let answer = health.check(of_ratelimit()).await.unwrap().into_inner();
        assert_eq!(answer.status(), ServingStatus::NotServing);
    }
}

/// Each of them held up the end for as long as the service waits for requests.
#[tokio::test(flavor = "multi_thread")]
async fn calls_that_clients_leave_open_end_soon_after_the_service_is_told_to_end() {
    let mut server = Server::start(Some(&file("open-calls", LIMITS)));
    let address = server.began.lines().nth(1).unwrap().strip_prefix("for Envoy on ").unwrap();
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    let channel = endpoint.connect().await.unwrap();
    let mut health = HealthClient::new(channel.clone());
    let mut watched = watch(&mut health).await;
    let list = asked(MessageRequest::ListServices(String::new()));
    let asks_on = tokio_stream::once(list).chain(tokio_stream::pending());
    let mut reflection = ServerReflectionClient::new(channel);
    let mut reflected = reflection.server_reflection_info(asks_on).await.unwrap().into_inner();
    assert!(reflected.message().await.unwrap().is_some());
    let told_to_end = Instant::now();
    server.signal("TERM");
    let told = watched.message().await.unwrap().unwrap();
    assert_eq!(told.status(), ServingStatus::NotServing);
    let (status, log) = server.ended();
    let took = told_to_end.elapsed();
    assert!(status.success() && !log.contains("still under way"), "{status}: {log}");
    assert!(took < Duration::from_secs(5), "{took:?}");
    drop((watched, reflected));
}
