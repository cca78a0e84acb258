//! Prometheus metrics over HTTP, made from a new report for each request.
//!
//! A connection carries one request. A client that accepts OpenMetrics gets it, others the text format
//! of Prometheus. Slow clients do not block others (see [`Connections`]).
mod buckets;
pub(crate) mod exposition;
pub(crate) mod families;
pub(crate) mod of_kind;

use super::connections::{Client, ConnectionGuard, Connections, accept_until, in_thread};
use super::report::Report;
use super::reporter::Reporter;
use anyhow::Context;
use exposition::{Exposition, Format};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

/// Maximum number of connections.
const CONNECTIONS: usize = 32;
/// Maximum time until the request has arrived.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time of a connection.
const TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum size of a request in bytes.
const MAX_REQUEST: usize = 16 * 1024;

/// The port of the metrics.
#[derive(Debug)]
pub(crate) struct Metrics {
    pub(crate) listener: TcpListener,
}

impl Metrics {
    /// Binds the port.
    ///
    /// # Errors
    /// The port cannot be bound.
    pub(crate) fn bind(address: SocketAddr) -> Result<Self, anyhow::Error> {
        let listener =
            TcpListener::bind(address).with_context(|| format!("cannot listen for metrics on {address}"))?;
        Self::from_listener(listener)
    }

    /// Uses a listening socket of another daemon.
    ///
    /// # Errors
    /// It is no such socket.
    pub(crate) fn from_listener(listener: TcpListener) -> Result<Self, anyhow::Error> {
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        tracing::info!(%address, "serving metrics at /metrics");
        Ok(Self { listener })
    }

    /// Answers clients in a new thread until the process ends.
    ///
    /// `moved` ends accepting: another daemon does.
    ///
    /// # Errors
    /// The thread or its descriptors cannot be created.
    pub(crate) fn serve(
        self,
        source: impl Fn() -> Report + Send + Sync + 'static,
        moved: Arc<Notify>,
    ) -> Result<(), anyhow::Error> {
        let make = move || Arc::new(families::exposition(&source()));
        in_thread("metrics", "metrics failed", async move { accept(self.listener, make, &moved).await })
    }
}

async fn accept(
    listener: TcpListener,
    make: impl Fn() -> Arc<Exposition> + Send + 'static,
    moved: &Notify,
) -> std::io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let connections = Connections::new(CONNECTIONS);
    let reporter = Reporter::start(CONNECTIONS, make);
    loop {
        let Some(accepted) = accept_until(moved, |context| listener.poll_accept(context)).await else {
            break;
        };
        let (stream, client) = match accepted {
            Ok((stream, address)) => (stream, Client::at(address.ip())),
            Err(error) => {
                tracing::debug!(%error, "metrics: cannot accept");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let reporter = reporter.clone();
        let serve = |connection: ConnectionGuard| async move {
            let guard = Arc::new(connection);
            let service = service_fn(move |request| {
                let (reporter, guard) = (reporter.clone(), guard.clone());
                async move { Ok::<_, Infallible>(answer(&request, &reporter, &guard).await) }
            });
            let mut builder = http1::Builder::new();
            let builder = builder.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
            let builder = builder.max_buf_size(MAX_REQUEST).keep_alive(false);
            let connection = builder.serve_connection(TokioIo::new(stream), service);
            if let Ok(Err(error)) = tokio::time::timeout(TIMEOUT, connection).await {
                tracing::debug!(%error, "metrics: connection failed");
            }
        };
        connections.serve(client, serve).await;
    }
    drop(listener);
    // The connections go on until the process ends.
    std::future::pending().await
}

async fn answer(
    request: &Request<Incoming>,
    reporter: &Reporter<Arc<Exposition>>,
    guard: &ConnectionGuard,
) -> Response<Full<Bytes>> {
    let plain = |status, text: &'static str| {
        let mut response = Response::new(Full::new(Bytes::from_static(text.as_bytes())));
        *response.status_mut() = status;
        response
    };
    if request.uri().path() != "/metrics" {
        return plain(StatusCode::NOT_FOUND, "not found: use /metrics\n");
    }
    if request.method() != Method::GET && request.method() != Method::HEAD {
        let mut response = plain(StatusCode::METHOD_NOT_ALLOWED, "");
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return response;
    }
    let format = Format::accepted(request.headers().get(ACCEPT).and_then(|accept| accept.to_str().ok()));
    guard.waits();
    let metrics = reporter.report().await;
    guard.reads();
    let Some(metrics) = metrics else {
        return plain(StatusCode::INTERNAL_SERVER_ERROR, "internal error: no report\n");
    };
    let mut response = Response::new(Full::new(metrics.text(format)));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(format.content_type()));
    response
}
