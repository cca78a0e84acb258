//! What is called when something happens.
use std::fmt;
use std::sync::OnceLock;

/// A callback `F` that is set once.
pub(crate) struct Callback<F: ?Sized>(OnceLock<Box<F>>);

impl<F: ?Sized> Callback<F> {
    /// Sets it. The first one stays.
    pub(crate) fn set(&self, call: Box<F>) {
        let _ = self.0.set(call);
    }

    pub(crate) fn get(&self) -> Option<&F> {
        self.0.get().map(Box::as_ref)
    }
}

impl<F: ?Sized> Default for Callback<F> {
    fn default() -> Self {
        Self(OnceLock::new())
    }
}

impl<F: ?Sized> fmt::Debug for Callback<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Callback").finish_non_exhaustive()
    }
}
