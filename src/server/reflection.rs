//! What the service says of itself over gRPC: reflection, so that tools such as grpcurl need no files of protobuf.
//!
//! The names, numbers and types are those of Envoy's files. Fields that the service neither reads nor writes are left out.

use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{
    DescriptorProto, EnumDescriptorProto, EnumValueDescriptorProto, FieldDescriptorProto,
    FileDescriptorProto, FileDescriptorSet, MethodDescriptorProto, ServiceDescriptorProto,
};

use tonic_reflection::server::Builder;

const UNITS: [&str; 8] = ["UNKNOWN", "SECOND", "MINUTE", "HOUR", "DAY", "MONTH", "YEAR", "WEEK"];
const DURATION: &str = "google/protobuf/duration.proto";
const WRAPPERS: &str = "google/protobuf/wrappers.proto";
const HEADERS: &str = "envoy/config/core/v3/base.proto";
const UNIT: &str = "envoy/type/v3/ratelimit_unit.proto";
const DESCRIPTORS: &str = "envoy/extensions/common/ratelimit/v3/ratelimit.proto";
const SERVICE: &str = "envoy/service/ratelimit/v3/rls.proto";

/// What tells of Envoy's rate limit service and of the health service.
pub(super) fn builder() -> Builder<'static> {
    Builder::configure()
        .register_file_descriptor_set(files())
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
}

/// The files of Envoy's rate limit service, and those that they need.
fn files() -> FileDescriptorSet {
    let duration =
        message("Duration", [of("seconds", 1, Type::Int64), of("nanos", 2, Type::Int32)]);
    let number = message("UInt64Value", [of("value", 1, Type::Uint64)]);
    let header = message(
        "HeaderValue",
        [of("key", 1, Type::String), of("value", 2, Type::String), of("raw_value", 3, Type::Bytes)],
    );
    FileDescriptorSet {
        file: vec![
            file(DURATION, "google.protobuf", vec![duration]),
            file(WRAPPERS, "google.protobuf", vec![number]),
            file(HEADERS, "envoy.config.core.v3", vec![header]),
            FileDescriptorProto {
                enum_type: vec![numbered("RateLimitUnit", &UNITS[..7])],
                ..file(UNIT, "envoy.type.v3", Vec::new())
            },
            FileDescriptorProto {
                dependency: [UNIT, WRAPPERS].map(str::to_owned).to_vec(),
                ..file(DESCRIPTORS, "envoy.extensions.common.ratelimit.v3", vec![descriptor()])
            },
            service(),
        ],
    }
}

/// What is asked about.
fn descriptor() -> DescriptorProto {
    const ITSELF: &str = ".envoy.extensions.common.ratelimit.v3.RateLimitDescriptor";
    let entry = message("Entry", [of("key", 1, Type::String), of("value", 2, Type::String)]);
    let unit = of_type("unit", 2, Type::Enum, ".envoy.type.v3.RateLimitUnit");
    let limit = message("RateLimitOverride", [of("requests_per_unit", 1, Type::Uint32), unit]);
    let fields = [
        many(of_type("entries", 1, Type::Message, &format!("{ITSELF}.Entry"))),
        of_type("limit", 2, Type::Message, &format!("{ITSELF}.RateLimitOverride")),
        of_type("hits_addend", 3, Type::Message, ".google.protobuf.UInt64Value"),
        of("is_negative_hits", 4, Type::Bool),
    ];
    DescriptorProto { nested_type: vec![entry, limit], ..message("RateLimitDescriptor", fields) }
}

fn service() -> FileDescriptorProto {
    const PACKAGE: &str = "envoy.service.ratelimit.v3";
    let descriptor = ".envoy.extensions.common.ratelimit.v3.RateLimitDescriptor";
    let request = message(
        "RateLimitRequest",
        [
            of("domain", 1, Type::String),
            many(of_type("descriptors", 2, Type::Message, descriptor)),
            of("hits_addend", 3, Type::Uint32),
        ],
    );
    let method = MethodDescriptorProto {
        name: Some("ShouldRateLimit".to_owned()),
        input_type: Some(format!(".{PACKAGE}.RateLimitRequest")),
        output_type: Some(format!(".{PACKAGE}.RateLimitResponse")),
        ..MethodDescriptorProto::default()
    };
    let service = ServiceDescriptorProto {
        name: Some("RateLimitService".to_owned()),
        method: vec![method],
        ..ServiceDescriptorProto::default()
    };
    FileDescriptorProto {
        dependency: [DESCRIPTORS, HEADERS, DURATION].map(str::to_owned).to_vec(),
        service: vec![service],
        ..file(SERVICE, PACKAGE, vec![request, response()])
    }
}

/// What is answered.
fn response() -> DescriptorProto {
    const ITSELF: &str = ".envoy.service.ratelimit.v3.RateLimitResponse";
    let own = |name: &str| format!("{ITSELF}.{name}");
    let limit = DescriptorProto {
        enum_type: vec![numbered("Unit", &UNITS)],
        ..message(
            "RateLimit",
            [
                of("requests_per_unit", 1, Type::Uint32),
                of_type("unit", 2, Type::Enum, &own("RateLimit.Unit")),
                of("name", 3, Type::String),
            ],
        )
    };
    let status = message(
        "DescriptorStatus",
        [
            of_type("code", 1, Type::Enum, &own("Code")),
            of_type("current_limit", 2, Type::Message, &own("RateLimit")),
            of("limit_remaining", 3, Type::Uint32),
            of_type("duration_until_reset", 4, Type::Message, ".google.protobuf.Duration"),
        ],
    );
    let header = ".envoy.config.core.v3.HeaderValue";
    let fields = [
        of_type("overall_code", 1, Type::Enum, &own("Code")),
        many(of_type("statuses", 2, Type::Message, &own("DescriptorStatus"))),
        many(of_type("response_headers_to_add", 3, Type::Message, header)),
    ];
    DescriptorProto {
        nested_type: vec![limit, status],
        enum_type: vec![numbered("Code", &["UNKNOWN", "OK", "OVER_LIMIT"])],
        ..message("RateLimitResponse", fields)
    }
}

fn file(name: &str, package: &str, messages: Vec<DescriptorProto>) -> FileDescriptorProto {
    FileDescriptorProto {
        name: Some(name.to_owned()),
        package: Some(package.to_owned()),
        message_type: messages,
        syntax: Some("proto3".to_owned()),
        ..FileDescriptorProto::default()
    }
}

fn message<const N: usize>(name: &str, fields: [FieldDescriptorProto; N]) -> DescriptorProto {
    DescriptorProto {
        name: Some(name.to_owned()),
        field: fields.into(),
        ..DescriptorProto::default()
    }
}

/// Values that are numbered from 0.
fn numbered(name: &str, values: &[&str]) -> EnumDescriptorProto {
    let value = |(number, name): (i32, &&str)| EnumValueDescriptorProto {
        name: Some((*name).to_owned()),
        number: Some(number),
        ..EnumValueDescriptorProto::default()
    };
    EnumDescriptorProto {
        name: Some(name.to_owned()),
        value: (0..).zip(values).map(value).collect(),
        ..EnumDescriptorProto::default()
    }
}

/// A field of a type that has no name.
fn of(name: &str, number: i32, kind: Type) -> FieldDescriptorProto {
    FieldDescriptorProto {
        name: Some(name.to_owned()),
        number: Some(number),
        label: Some(Label::Optional.into()),
        r#type: Some(kind.into()),
        ..FieldDescriptorProto::default()
    }
}

fn of_type(name: &str, number: i32, kind: Type, type_name: &str) -> FieldDescriptorProto {
    FieldDescriptorProto { type_name: Some(type_name.to_owned()), ..of(name, number, kind) }
}

fn many(field: FieldDescriptorProto) -> FieldDescriptorProto {
    FieldDescriptorProto { label: Some(Label::Repeated.into()), ..field }
}
