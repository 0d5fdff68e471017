//! What the service says of itself over gRPC, against Envoy's own files: those that come with the types it is built with.
#![cfg(feature = "server")]
#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]
#![allow(clippy::disallowed_methods, reason = "a server lives by the real clock")]

mod parts;

use std::collections::BTreeMap;
use std::process::Command;

use parts::service::service;
use prost::Message;
use prost_types::{
    DescriptorProto, EnumDescriptorProto, FileDescriptorProto, FileDescriptorSet,
    ServiceDescriptorProto,
};
use tokio::net::TcpListener;
use tonic::transport::{Channel, Endpoint};
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

/// The files that the service tells of, which Envoy has too.
const FILES: [&str; 6] = [
    "envoy/service/ratelimit/v3/rls.proto",
    "envoy/extensions/common/ratelimit/v3/ratelimit.proto",
    "envoy/config/core/v3/base.proto",
    "envoy/type/v3/ratelimit_unit.proto",
    "google/protobuf/duration.proto",
    "google/protobuf/wrappers.proto",
];

async fn ask(
    client: &mut ServerReflectionClient<Channel>,
    message: MessageRequest,
) -> MessageResponse {
    let request = ServerReflectionRequest { host: String::new(), message_request: Some(message) };
    let answers = client.server_reflection_info(tokio_stream::once(request)).await.unwrap();
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
    let service = service("[limits.api]\nquota = \"1/s\"\n").await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, service.grpc()).await });
    let channel = Endpoint::from_shared(address).unwrap().connect().await.unwrap();
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
