//! What both transports do with the state of their device.
use crate::Effect;
use crate::state::DeviceState;
use crate::violation::Violation;

/// Access to the state that every transport has, and to the registers that only one has.
pub trait Common {
    /// State of the device.
    fn state(&self) -> &DeviceState;

    /// State of the device, to change it.
    fn state_mut(&mut self) -> &mut DeviceState;

    /// Returns registers outside of the device state to their defaults with it.
    fn set_defaults(&mut self);

    /// Returns registers of `queue` outside of the device state to their defaults with it.
    fn set_queue_defaults(&mut self, queue: u16);
}

/// Writes the device status.
pub(crate) fn write_status(device: &mut impl Common, value: u32) -> Result<Option<Effect>, Violation> {
    let effect = device.state_mut().write_status(value)?;
    if device.state().status.bits == 0 {
        device.set_defaults();
    }
    Ok(effect)
}

/// Resets the selected queue, if `value` is 1.
pub(crate) fn reset_queue(device: &mut impl Common, value: u32) -> Result<Option<Effect>, Violation> {
    let effect = device.state_mut().reset_queue(value)?;
    if let Some(queue) = device.state().selected_index()
        && device.state().selected().is_some_and(|queue| !queue.resetting())
    {
        device.set_queue_defaults(queue);
    }
    Ok(effect)
}
