//! Panics as values.
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Calls `run`, and catches a panic. After one, only drop what `run` has changed.
///
/// # Errors
/// The panic's message.
pub fn caught<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| words(&*panic))
}

fn words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("(no message)").to_owned()
}
