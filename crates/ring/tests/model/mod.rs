//! Shared by the models under loom: exploration, two sides on modelled memory.
#![allow(dead_code, reason = "each test uses its part")]
use paravane_ring::device::{self, Batch, QueueConfig};
use paravane_ring::driver::poll::{Counting, Poller};
use paravane_ring::driver::{DriverConfig, Queue};
use paravane_ring::{Area, DmaArea, Order, Segment};
use paravane_spec::feature::RING_PACKED;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Device address of the queue's memory.
pub(crate) const BASE: u64 = 0x1000;

/// Explores every interleaving with few involuntary switches of threads.
///
/// At most 6, or PARAVANE_LOOM_PREEMPTIONS. Prints the number of interleavings.
pub(crate) fn explore(f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    let wish = std::env::var("PARAVANE_LOOM_PREEMPTIONS");
    builder.preemption_bound = Some(wish.map_or(6, |n| n.parse().expect("a number of switches")));
    builder.max_branches = 10_000;
    let count = Arc::new(AtomicU64::new(0));
    let executions = Arc::clone(&count);
    builder.check(move || {
        executions.fetch_add(1, Relaxed);
        f();
    });
    println!("{} executions", count.load(Relaxed));
}

/// Both sides of a queue of two descriptors, and what else has a hand in it.
pub(crate) struct Sides<O: Order, C: Counting> {
    pub(crate) driver: Queue<O, C>,
    pub(crate) device: device::Queue<O>,
    pub(crate) poller: Poller<O, C>,
    pub(crate) area: Area,
}

/// A queue in fresh memory.
///
/// With barriers towards hardware, one whose barriers must order everything.
pub(crate) fn sides<O: Order, C: Counting>(features: u64) -> Sides<O, C> {
    let layout = DriverConfig::new(2, 2, features).unwrap();
    let area = memory::<O>(features, layout.memory());
    let (mut driver, addresses) = Queue::lay_out(layout, DmaArea { area, addr: BASE }).unwrap();
    let poller = driver.poller().unwrap();
    let config = QueueConfig::new(addresses, 2, features).unwrap();
    let [desc, avail, used] =
        config.areas().map(|part| area.slice((part.addr - BASE) as usize, part.len).unwrap());
    // SAFETY: modelled memory is never given back.
    let device = unsafe { config.activate_as(desc, avail, used) }.unwrap();
    Sides { driver, device, poller, area }
}

/// Memory as the layout accesses it, and as `O` is made for.
pub(crate) fn memory<O: Order>(features: u64, len: usize) -> Area {
    let area = if features & RING_PACKED == 0 { Area::halves(len) } else { Area::words(len) };
    if O::PLATFORM { area.barriers_only() } else { area }
}

/// Segments that differ in every cell.
pub(crate) fn segment(i: u64) -> Segment {
    Segment { addr: 0x1_0001 * (i + 1), len: 0x2_0003 * (i as u32 + 1) }
}

/// Passes one buffer over and back, so that both event words are behind.
///
/// They bring nothing more. In a packed ring both sides then stand before the last descriptor, and
/// what follows goes through the change of the wrap counters.
pub(crate) fn warm_up<O: Order, C: Counting>(sides: &mut Sides<O, C>) {
    let Sides { driver, device, .. } = sides;
    driver.add(&[segment(0)], &[]).unwrap();
    assert!(driver.publish());
    let mut batch = Batch::new(2);
    assert_eq!(device.pop(&mut batch, |_, _| false), Ok(1));
    device.complete(batch.chains()[0].head, 0).unwrap();
    assert_eq!(device.publish(), Ok(true));
    assert!(driver.pop_used().unwrap().is_some());
}

/// Tests of the model with this name, for each order and set of features.
#[macro_export]
macro_rules! models {
    ($($(#[$doc:meta])* $model:ident[$($order:ident),*] { $($queue:ident: $features:expr),* $(,)? })*) => {$(
        $(#[$doc])*
        mod $model {
            $crate::models!(@orders $model [$($order)*] { $($queue: $features),* });
        }
    )*};
    (@orders $model:ident [$($order:ident)*] $queues:tt) => {$(
        $crate::models!(@queues $model $order $queues);
    )*};
    (@queues $model:ident $order:ident { $($queue:ident: $features:expr),* }) => {
        #[allow(non_snake_case, reason = "named as the type is")]
        mod $order {
            use $crate::*;
            $(#[test] fn $queue() { $crate::$model::<paravane_ring::$order>($features) })*
        }
    };
}
