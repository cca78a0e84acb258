//! Sizes on the command line: bytes, or with suffix k, M, G, T (powers of 1024).
use std::str::FromStr;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size(pub(crate) u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
        let number: u64 = digits
            .parse()
            .map_err(|_| "invalid size: write bytes, or a number with k, M, G or T".to_owned())?;
        let shift = match &text[digits.len()..] {
            "" => 0,
            "k" | "K" | "KiB" => 10,
            "m" | "M" | "MiB" => 20,
            "g" | "G" | "GiB" => 30,
            "t" | "T" | "TiB" => 40,
            unit => return Err(format!("unknown unit {unit:?}: use k, M, G or T")),
        };
        number
            .checked_shl(shift)
            .filter(|n| n >> shift == number)
            .map(Self)
            .ok_or("size exceeds 64 bits".to_owned())
    }
}

/// A number of bytes in a suitable unit.
pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} bytes") } else { format!("{value:.1} {}", UNITS[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_powers_of_1024() {
        assert_eq!("512".parse(), Ok(Size(512)));
        assert_eq!("4k".parse(), Ok(Size(4096)));
        assert_eq!("64M".parse(), Ok(Size(64 << 20)));
        assert_eq!("2GiB".parse(), Ok(Size(2 << 30)));
        assert_eq!("1T".parse(), Ok(Size(1 << 40)));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "k", "-1", "4 kk", "4x", "1.5G", "99999999999G", "18446744073709551616"] {
            assert!(text.parse::<Size>().is_err(), "{text:?} was taken");
        }
    }
}
