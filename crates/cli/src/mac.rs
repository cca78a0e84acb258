//! MAC addresses as operators write them.

/// Parses a MAC address.
///
/// # Errors
/// The text is not six bytes in hexadecimal, with colons.
pub(crate) fn mac(text: &str) -> Result<[u8; 6], String> {
    let parse = || {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|part| part.len() == 2)?;
            *byte = u8::from_str_radix(part, 16).ok()?;
        }
        parts.next().is_none().then_some(bytes)
    };
    parse().ok_or_else(|| "invalid MAC address: write six bytes as 52:54:00:00:00:01".to_owned())
}

/// A MAC address as operators write it.
pub(crate) fn text(mac: &[u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
