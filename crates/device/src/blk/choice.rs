//! The engine for an image.
use super::current::Attached;
use super::engine::{self, AtOnce, EngineKind, Mapped, Pool};
use super::image::Image;
use super::present_pages::PresentPages;
use super::{BlkConfig, EngineChoice, OpenError};
use std::io;
use std::sync::Arc;

/// The immediate engine; it maps an image in memory where possible.
fn immediate(image: &Image, present: Option<PresentPages>) -> EngineKind {
    let may_map = image.in_memory && image.qcow2.is_none() && image.direct.is_none();
    EngineKind::Immediate { mapped: may_map.then(|| mapped(image, present)).flatten() }
}

/// Maps the file of an image in memory.
fn mapped(image: &Image, present: Option<PresentPages>) -> Option<Arc<Mapped>> {
    let say = |error: &io::Error| tracing::debug!(path = %image.path.display(), %error, "the image is not mapped; using system calls");
    Mapped::new(image, present).inspect_err(say).ok().map(Arc::new)
}

/// The engine for an image.
pub(super) fn choose_engine(
    image: &Arc<Image>,
    config: &BlkConfig,
    present: Option<PresentPages>,
) -> Result<EngineKind, OpenError> {
    let path = || config.path.clone();
    let pool = |at_once| Arc::new(Pool::new(image, at_once));
    let threads = |why| EngineKind::Threads { pool: pool(AtOnce::Never), why };
    // A format has workers, too.
    let over = |below| match image.qcow2 {
        Some(_) => EngineKind::Clusters { below: Box::new(below), pool: pool(AtOnce::Never) },
        None if image.larger_block().is_some() => {
            EngineKind::WholeBlocks { below: Box::new(below), pool: pool(AtOnce::Never) }
        }
        None => below,
    };
    Ok(match (config.engine, engine::probe()) {
        _ if let Some(store) = image.source.store() => over(EngineKind::Store(store.clone())),
        (EngineChoice::Threads, _) => threads(None),
        (EngineChoice::Immediate, _) => immediate(image, present),
        (EngineChoice::Auto, _) if image.qcow2.is_some() && image.in_memory => {
            let mapped = mapped(image, None);
            if let (Some(qcow2), Some(mapped)) = (&image.qcow2, &mapped) {
                let mapped = Arc::downgrade(mapped);
                qcow2.on_free(move |range| {
                    if let Some(mapped) = mapped.upgrade() {
                        mapped.forget(range);
                    }
                });
            }
            EngineKind::Threads { pool: pool(AtOnce::InFile(mapped)), why: None }
        }
        (EngineChoice::Auto, _) if image.in_memory => immediate(image, present),
        (_, Ok(_)) => over(EngineKind::Uring { registers: config.registered_buffers }),
        (EngineChoice::IoUring, Err(source)) => return Err(OpenError::Engine { path: path(), source }),
        (EngineChoice::Auto, Err(error)) => threads(Some(error.to_string())),
    })
}

/// Name of an engine; see [`Blk::engine`](super::Blk::engine).
pub(super) fn engine_name(Attached { image, engine }: &Attached) -> String {
    let name = name(engine);
    if image.direct.is_some() { name + ", direct" } else { name }
}

fn name(engine: &EngineKind) -> String {
    match engine {
        EngineKind::Uring { registers: false } => "io_uring".into(),
        EngineKind::Uring { registers: true } => "io_uring with registered buffers".into(),
        EngineKind::Immediate { mapped: None } => "immediate".into(),
        EngineKind::Immediate { mapped: Some(_) } => "immediate, mapped".into(),
        EngineKind::Threads { pool, why: None } if pool.mapped().is_some() => "threads, mapped".into(),
        EngineKind::Store(_) => "queues of the store".into(),
        EngineKind::Threads { why: None, .. } => "threads".into(),
        EngineKind::Threads { why: Some(why), .. } => format!("threads (io_uring: {why})"),
        EngineKind::Clusters { below, .. } => name(below) + ", threads",
        EngineKind::WholeBlocks { below, .. } => name(below),
    }
}
