//! [`Denied`](crate::Denied) as the response of a handler.

#[cfg(feature = "axum")]
mod axum {
    use axum::response::{IntoResponse, Response};

    use crate::decision::Denied;
    use crate::http::{ErrorBody, HeaderStyle, LimitReport, Refusal};

    /// The response of [`RateLimitLayer`](crate::http::RateLimitLayer): status 429 with `Retry-After`, the draft's
    /// fields and a body of `application/problem+json`.
    ///
    /// ```
    /// use axum::extract::State;
    /// use axum::response::IntoResponse;
    /// use tidegate::{ActiveLimit, Denied, Quota};
    ///
    /// async fn handler(State(api): State<ActiveLimit>) -> Result<&'static str, Denied> {
    ///     api.check_sure("user:42").await.into_result()?;
    ///     Ok("done")
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tidegate::ConfigError> {
    /// let api = tidegate::local(Quota::per_minute(1))?;
    /// assert_eq!(handler(State(api.clone())).await.into_response().status(), 200);
    /// let response = handler(State(api)).await.into_response();
    /// assert_eq!(response.status(), 429);
    /// assert_eq!(response.headers()["retry-after"], "60");
    /// # Ok(())
    /// # }
    /// ```
    impl IntoResponse for Denied {
        fn into_response(self) -> Response {
            let mut response: Response = Refusal::from(self).response(ErrorBody::Problem);
            let reports = [LimitReport::from(self.decision())];
            HeaderStyle::draft().write(&reports, response.headers_mut());
            response
        }
    }
}

#[cfg(feature = "tonic")]
mod tonic {
    use tonic::Status;
    use tonic::metadata::MetadataMap;

    use crate::decision::Denied;
    use crate::http::{HeaderStyle, LimitReport, Refusal};

    /// The status of [`RateLimitLayer::grpc`](crate::http::RateLimitLayer::grpc): `RESOURCE_EXHAUSTED` with
    /// `google.rpc.RetryInfo`, `google.rpc.QuotaFailure` and `grpc-retry-pushback-ms`, and the draft's fields as
    /// metadata.
    ///
    /// ```
    /// use tidegate::{ActiveLimit, Quota};
    /// use tonic::{Code, Request, Response, Status};
    ///
    /// async fn call(api: &ActiveLimit, _: Request<()>) -> Result<Response<()>, Status> {
    ///     api.check_sure("user:42").await.into_result()?;
    ///     Ok(Response::new(()))
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tidegate::ConfigError> {
    /// let api = tidegate::local(Quota::per_minute(1))?;
    /// assert!(call(&api, Request::new(())).await.is_ok());
    /// let status = call(&api, Request::new(())).await.unwrap_err();
    /// assert_eq!(status.code(), Code::ResourceExhausted);
    /// assert!(status.metadata().contains_key("grpc-retry-pushback-ms"));
    /// # Ok(())
    /// # }
    /// ```
    impl From<Denied> for Status {
        fn from(denied: Denied) -> Self {
            let mut status = Refusal::from(denied).grpc_status();
            let mut headers = http::HeaderMap::new();
            HeaderStyle::draft().write(&[LimitReport::from(denied.decision())], &mut headers);
            let metadata = status.metadata_mut();
            for entry in MetadataMap::from_headers(headers).iter() {
                if let tonic::metadata::KeyAndValueRef::Ascii(key, value) = entry {
                    metadata.insert(key, value.clone());
                }
            }
            status
        }
    }
}
