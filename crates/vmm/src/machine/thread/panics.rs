//! Panics of the guest's threads, with their messages.
use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Once;

/// A panic that was caught.
pub(super) struct Panic {
    payload: Box<dyn Any + Send>,
    /// Its message, in one line.
    pub(super) message: String,
}

impl Panic {
    /// With this message and no payload.
    pub(super) fn new(message: String) -> Self {
        Self { payload: Box::new(()), message }
    }

    /// Whether the payload is a `T`.
    pub(super) fn is<T: 'static>(&self) -> bool {
        self.payload.is::<T>()
    }

    /// Goes on unwinding, in [`catch`].
    pub(super) fn resume(self) -> ! {
        MESSAGE.with_borrow_mut(|message| *message = Some(self.message));
        resume_unwind(self.payload)
    }
}

thread_local! {
    /// Message of this thread's panic; `None` outside of [`catch`].
    static MESSAGE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Calls `guest`; a panic is the result, and nothing is printed.
pub(super) fn catch<T>(guest: impl FnOnce() -> T) -> Result<T, Panic> {
    keep_messages();
    let outer = MESSAGE.replace(Some(String::new()));
    let result = catch_unwind(AssertUnwindSafe(guest));
    let message = MESSAGE.replace(outer).unwrap_or_default();
    result.map_err(|payload| {
        let message = message.split_whitespace().collect::<Vec<_>>().join(" ");
        Panic { payload, message }
    })
}

/// Keeps the messages of panics in [`catch`]. Those of other threads go on to the old hook.
fn keep_messages() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let ours = MESSAGE.try_with(|message| match message.try_borrow_mut() {
                Ok(mut message) => message.as_mut().map(|message| *message = info.to_string()).is_some(),
                Err(_) => false,
            });
            if ours != Ok(true) {
                others(info);
            }
        }));
    });
}
