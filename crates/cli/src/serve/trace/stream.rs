//! Sends a trace to one client of the control socket.
use super::lines::{Answer, Ask, TraceRequest};
use super::{RequestTrace, TraceReader};
use crate::serve::places::{EACH, Full, MOST, Place, Places};
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// Maximum length of a client's line in bytes.
const MAX_LINE: usize = 1024;
/// Time for a client to send its line.
const ASK_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for a client to read something.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// Time between two looks at the rings.
const PERIOD: Duration = Duration::from_millis(20);
/// Requests sent together.
const BATCH: usize = 1024;

/// Finds the trace of a device, or says why there is none.
pub(crate) type Find = dyn Fn(&str) -> Result<Arc<RequestTrace>, Answer> + Send + Sync;

/// Answers a process that wants more than a trace.
pub(crate) type Give = dyn Fn(std::os::unix::net::UnixStream, Ask) -> io::Result<()> + Send + Sync;

/// Reads the client's line and sends the trace until either side ends it.
///
/// A process that wants something else is passed to `give`.
///
/// `asked` is called when the line is there.
pub(crate) async fn serve(
    mut stream: UnixStream,
    find: &Find,
    give: &Give,
    slots: &Arc<Places>,
    asked: impl FnOnce(),
) -> io::Result<()> {
    let line = timeout(ASK_TIMEOUT, read_line(&mut stream)).await??;
    asked();
    let request = match serde_json::from_slice(&line) {
        Ok(Ask::Trace(request)) => request,
        Ok(ask) => return give(stream.into_std()?, ask),
        Err(error) => return send(&mut stream, &[Answer::Error(format!("invalid request: {error}"))]).await,
    };
    let (_slot, mut reader, limit) = match begin(&stream, &request, find, slots) {
        Ok(begun) => begun,
        Err(answer) => return send(&mut stream, &[answer]).await,
    };
    let started = Answer::Started { pid: std::process::id(), queues: reader.trace.queues() };
    send(&mut stream, &[started]).await?;
    follow(&mut stream, &mut reader, limit).await
}

type Begun = (Place, TraceReader, u64);

fn begin(
    client: &UnixStream,
    request: &TraceRequest,
    find: &Find,
    slots: &Arc<Places>,
) -> Result<Begun, Answer> {
    let trace = find(&request.device)?;
    let slot = slots.take(client).map_err(|full| match full {
        Full::All => Answer::Error(format!("{MOST} traces run already: end one of them")),
        Full::Share => Answer::Error(format!("this process runs {EACH} traces already: end one of them")),
    })?;
    let reader = trace.read(request).map_err(Answer::Error)?;
    Ok((slot, reader, request.limit.unwrap_or(u64::MAX)))
}

async fn read_line(stream: &mut UnixStream) -> io::Result<Vec<u8>> {
    let mut line = Vec::with_capacity(MAX_LINE);
    loop {
        let mut part = [0; MAX_LINE];
        let count = stream.read(&mut part[..MAX_LINE - line.len()]).await?;
        line.extend_from_slice(&part[..count]);
        if let Some(end) = line.iter().position(|byte| *byte == b'\n') {
            line.truncate(end);
            return Ok(line);
        }
        if count == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        if line.len() == MAX_LINE {
            return Err(io::Error::new(ErrorKind::InvalidData, "line too long"));
        }
    }
}

/// Sends requests as they end.
async fn follow(stream: &mut UnixStream, reader: &mut TraceReader, mut left: u64) -> io::Result<()> {
    let mut dropped = 0;
    let mut more = false;
    loop {
        if more {
            tokio::task::yield_now().await;
        } else if timeout(PERIOD, stream.read(&mut [0])).await.is_ok() {
            // The client has closed its end, or sent more than its line.
            return Ok(());
        }
        // Looked at first: requests may end until then.
        let ended = reader.has_ended();
        let mut lines = Vec::new();
        more = reader.take(BATCH, &mut lines);
        lines.truncate(usize::try_from(left).unwrap_or(usize::MAX));
        left -= lines.len() as u64;
        let mut answers: Vec<_> = lines.into_iter().map(Answer::Request).collect();
        if reader.dropped() != dropped {
            dropped = reader.dropped();
            answers.push(Answer::Dropped(dropped));
        }
        let end = match (left, ended && !more) {
            (0, _) => Some("limit reached"),
            (_, true) => Some("the device has stopped"),
            _ => None,
        };
        answers.extend(end.map(|why| Answer::End(why.to_owned())));
        send(stream, &answers).await?;
        if end.is_some() {
            return Ok(());
        }
    }
}

async fn send(stream: &mut UnixStream, answers: &[Answer]) -> io::Result<()> {
    let mut text = Vec::new();
    for answer in answers {
        serde_json::to_writer(&mut text, answer)?;
        text.push(b'\n');
    }
    timeout(READ_TIMEOUT, stream.write_all(&text)).await?
}
