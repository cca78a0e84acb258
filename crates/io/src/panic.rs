//! What a thread says when it panics.
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs it. What it leaves behind when it panics is only fit to be put away.
///
/// # Errors
/// The words of a panic.
pub fn caught<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| words(&*panic))
}

fn words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("it does not say why").to_owned()
}
