//! Metrics for Prometheus over HTTP, made from a report whenever they are asked for.
//!
//! Each connection is for one request. A client that is slow to ask, or to read, keeps no other one out
//! ([`Connections`]).
mod families;

use super::connections::{Client, Connections, Place};
use super::report::Report;
use super::reporter::Reporter;
use anyhow::Context;
use families::Devices;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;
use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

/// Connections at a time.
const CONNECTIONS: usize = 32;
/// How long a client may take to send its request.
const HEADER: Duration = Duration::from_secs(5);
/// How long a connection may last.
const PATIENCE: Duration = Duration::from_secs(15);
/// Bytes of a request, at most.
const REQUEST: usize = 16 * 1024;

/// The text of all metrics; `None`: it cannot be made.
type Text = Option<Bytes>;

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
        let make = move || {
            let mut text = String::new();
            text::encode(&mut text, &registry).ok().map(|()| Bytes::from(text))
        };
        let serve = move || runtime.block_on(accept(self.listener, make));
        std::thread::Builder::new().name("metrics".into()).spawn(move || {
            if let Err(error) = serve() {
                tracing::error!(%error, "metrics closed");
            }
        })?;
        Ok(())
    }
}

async fn accept(listener: TcpListener, make: impl Fn() -> Text + Send + 'static) -> std::io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let connections = Connections::new(CONNECTIONS);
    let reporter = Reporter::start(CONNECTIONS, make);
    loop {
        let (stream, client) = match listener.accept().await {
            Ok((stream, address)) => (stream, Client::at(address.ip())),
            Err(error) => {
                tracing::debug!(%error, "a connection for metrics");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let reporter = reporter.clone();
        let serve = |place: Place| async move {
            let place = Arc::new(place);
            let service = service_fn(move |request| {
                let (reporter, place) = (reporter.clone(), place.clone());
                async move { Ok::<_, Infallible>(answer(&request, &reporter, &place).await) }
            });
            let mut builder = http1::Builder::new();
            let builder = builder.timer(TokioTimer::new()).header_read_timeout(HEADER);
            let builder = builder.max_buf_size(REQUEST).keep_alive(false);
            let connection = builder.serve_connection(TokioIo::new(stream), service);
            if let Ok(Err(error)) = tokio::time::timeout(PATIENCE, connection).await {
                tracing::debug!(%error, "a connection for metrics");
            }
        };
        connections.serve(client, serve).await;
    }
}

async fn answer(
    request: &Request<Incoming>,
    reporter: &Reporter<Text>,
    place: &Place,
) -> Response<Full<Bytes>> {
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
    place.waits();
    let text = reporter.report().await.flatten();
    place.reads();
    let Some(text) = text else {
        return plain(StatusCode::INTERNAL_SERVER_ERROR, "cannot make a report\n");
    };
    let mut response = Response::new(Full::new(text));
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    response.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(kind));
    response
}
