//! Metrics as Prometheus reads them.

use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder};
use tidegate::METRIC_BUCKETS;

/// An exporter with the bounds of the library's histograms.
pub(crate) fn exporter() -> Result<PrometheusBuilder, BuildError> {
    METRIC_BUCKETS.iter().try_fold(PrometheusBuilder::new(), |exporter, &(name, bounds)| {
        exporter.set_buckets_for_metric(Matcher::Full(name.to_owned()), bounds)
    })
}
