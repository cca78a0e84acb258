//! Metrics for Prometheus (OpenMetrics text over HTTP), made from a report whenever they are asked for.
use super::report::{Device, Report};
use anyhow::Context;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use std::convert::Infallible;
use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// Connections at a time; those beyond wait.
const CONNECTIONS: usize = 16;
/// For how long one connection may last.
const PATIENCE: Duration = Duration::from_secs(30);

/// Makes a report.
type Source = Box<dyn Fn() -> Report + Send + Sync>;

/// Where metrics are served.
#[derive(Debug)]
pub(crate) struct Metrics {
    listener: TcpListener,
}

impl Metrics {
    /// Takes the port.
    ///
    /// # Errors
    /// It cannot be had.
    pub(crate) fn bind(address: SocketAddr) -> Result<Self, anyhow::Error> {
        let listener = TcpListener::bind(address).with_context(|| format!("metrics at {address}"))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        tracing::info!(%address, "metrics under /metrics");
        Ok(Self { listener })
    }

    /// Answers in a thread of its own, for as long as the process lives.
    ///
    /// # Errors
    /// There can be no thread, or it lacks descriptors.
    pub(crate) fn serve(
        self,
        source: impl Fn() -> Report + Send + Sync + 'static,
    ) -> Result<(), anyhow::Error> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        let mut registry = Registry::with_prefix("paravane");
        registry.register_collector(Box::new(Devices(Box::new(source))));
        let registry = Arc::new(registry);
        let serve = move || runtime.block_on(accept(self.listener, registry));
        std::thread::Builder::new().name("metrics".into()).spawn(move || {
            if let Err(error) = serve() {
                tracing::error!(%error, "metrics are served no longer");
            }
        })?;
        Ok(())
    }
}

async fn accept(listener: TcpListener, registry: Arc<Registry>) -> std::io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(seat) = Arc::clone(&room).acquire_owned().await else { return Ok(()) };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!(%error, "a connection for metrics");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let registry = Arc::clone(&registry);
        tokio::spawn(async move {
            let service = service_fn(move |request| {
                let response = answer(&request, &registry);
                async move { Ok::<_, Infallible>(response) }
            });
            let mut builder = http1::Builder::new();
            let builder =
                builder.timer(TokioTimer::new()).header_read_timeout(PATIENCE).max_buf_size(16 * 1024);
            let connection = builder.serve_connection(TokioIo::new(stream), service);
            match tokio::time::timeout(PATIENCE, connection).await {
                Ok(Ok(())) | Err(_) => {}
                Ok(Err(error)) => tracing::debug!(%error, "a connection for metrics"),
            }
            drop(seat);
        });
    }
}

fn answer(request: &Request<Incoming>, registry: &Registry) -> Response<Full<Bytes>> {
    let plain = |status, text: &'static str| {
        let mut response = Response::new(Full::new(Bytes::from_static(text.as_bytes())));
        *response.status_mut() = status;
        response
    };
    if request.uri().path() != "/metrics" {
        return plain(StatusCode::NOT_FOUND, "there is /metrics\n");
    }
    if request.method() != Method::GET && request.method() != Method::HEAD {
        let mut response = plain(StatusCode::METHOD_NOT_ALLOWED, "");
        response.headers_mut().insert(ALLOW, hyper::header::HeaderValue::from_static("GET, HEAD"));
        return response;
    }
    let mut text = String::new();
    if text::encode(&mut text, registry).is_err() {
        return plain(StatusCode::INTERNAL_SERVER_ERROR, "");
    }
    let mut response = Response::new(Full::new(Bytes::from(text)));
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    response.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(kind));
    response
}

/// All devices, as they are when somebody asks.
struct Devices(Source);

impl fmt::Debug for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Devices")
    }
}

/// Of a device: name, help, whether it only grows, value.
type Figure = (&'static str, &'static str, bool, fn(&Device) -> Option<u64>);

const FIGURES: [Figure; 15] = [
    ("device_connected", "Whether a VMM is connected", false, |device| Some(device.connected.into())),
    ("device_failed", "Whether it is served no more, for a mistake of the daemon's", false, |device| {
        Some(device.failed.is_some().into())
    }),
    ("device_sessions", "Connections of VMMs", true, |device| Some(device.sessions)),
    ("device_protocol_errors", "Connections that ended with an error", true, |device| {
        Some(device.protocol_errors)
    }),
    ("device_translations_refused", "Translations of a VMM's IOMMU that were not taken", true, |device| {
        Some(device.refused_translations)
    }),
    ("device_queues_enabled", "Queues that the driver uses", false, |device| {
        Some(device.queues.iter().filter(|queue| queue.enabled).count() as u64)
    }),
    ("device_queues_failed", "Queues that have stopped for good", false, |device| {
        Some(device.latched() as u64)
    }),
    ("device_kicks", "Notifications from the driver", true, |device| Some(device.totals()[0])),
    ("device_buffers_taken", "Buffers taken from the driver", true, |device| Some(device.totals()[1])),
    ("device_buffers_completed", "Buffers given back to the driver", true, |device| Some(device.totals()[2])),
    ("device_interrupts", "Interrupts to the driver", true, |device| Some(device.totals()[3])),
    ("net_transmitted_frames", "Frames from the driver", true, |device| {
        Some(device.net.as_ref()?.transmitted_frames)
    }),
    ("net_transmitted_bytes", "Bytes in frames from the driver", true, |device| {
        Some(device.net.as_ref()?.transmitted_bytes)
    }),
    ("net_received_frames", "Frames to the driver", true, |device| {
        Some(device.net.as_ref()?.received_frames)
    }),
    ("net_received_bytes", "Bytes in frames to the driver", true, |device| {
        Some(device.net.as_ref()?.received_bytes)
    }),
];

impl Collector for Devices {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let report = (self.0)();
        let mut build = encoder.encode_descriptor("build", "The program", None, MetricType::Info)?;
        build.encode_info(&[("version", report.version.as_str())])?;
        let mut failed = encoder.encode_descriptor(
            "devices_failed",
            "Devices of the file that could not be started",
            None,
            MetricType::Gauge,
        )?;
        failed.encode_gauge(&(report.failed.len() as u64))?;
        for (name, help, grows, value) in FIGURES {
            let kind = if grows { MetricType::Counter } else { MetricType::Gauge };
            let mut family = encoder.encode_descriptor(name, help, None, kind)?;
            for device in &report.devices {
                let Some(value) = value(device) else { continue };
                let labels = [("device", device.name.as_str()), ("kind", device.kind.as_str())];
                let mut metric = family.encode_family(&labels)?;
                if grows {
                    metric.encode_counter::<NoLabelSet, _, u64>(&value, None)?;
                } else {
                    metric.encode_gauge(&value)?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::report::{Net, Queue};

    #[test]
    fn a_report_becomes_open_metrics() {
        let queue = |kicks| Queue { kicks, enabled: true, ..Queue::default() };
        let disk = Device {
            name: "vm0".into(),
            kind: "blk".into(),
            connected: true,
            queues: vec![queue(1), queue(2)],
            ..Device::default()
        };
        let net = Some(Net { received_bytes: 7, ..Net::default() });
        let failed = Some("it panicked".into());
        let card = Device { name: "n".into(), kind: "net".into(), net, failed, ..Device::default() };
        let report = Report { version: "1".into(), devices: vec![disk, card], ..Report::default() };
        let mut registry = Registry::with_prefix("paravane");
        registry.register_collector(Box::new(Devices(Box::new(move || report.clone()))));
        let mut text = String::new();
        text::encode(&mut text, &registry).unwrap();
        for line in [
            "paravane_build_info{version=\"1\"} 1",
            "paravane_devices_failed 0",
            "# TYPE paravane_device_kicks counter",
            "paravane_device_kicks_total{device=\"vm0\",kind=\"blk\"} 3",
            "paravane_device_connected{device=\"n\",kind=\"net\"} 0",
            "paravane_device_failed{device=\"vm0\",kind=\"blk\"} 0",
            "paravane_device_failed{device=\"n\",kind=\"net\"} 1",
            "paravane_device_queues_enabled{device=\"vm0\",kind=\"blk\"} 2",
            "paravane_net_received_bytes_total{device=\"n\",kind=\"net\"} 7",
            "# EOF",
        ] {
            assert!(text.lines().any(|there| there == line), "{line:?} is not in\n{text}");
        }
        assert!(!text.contains("paravane_net_received_bytes_total{device=\"vm0\""), "{text}");
    }
}
