//! What one access to guest memory moves.

/// Word that is moved in one relaxed atomic access on the guest's side.
///
/// The access on our side may be unaligned.
pub(super) trait Word: Sized {
    /// Loads one word from guest memory.
    ///
    /// # Safety
    /// `guest` is valid for atomic reads and aligned; `own` is valid for writes and not shared.
    unsafe fn load(guest: *const u8, own: *mut u8);

    /// Stores one word into guest memory.
    ///
    /// # Safety
    /// `guest` is valid for atomic writes and aligned; `own` is valid for reads and does not
    /// change.
    unsafe fn store(guest: *mut u8, own: *const u8);
}
