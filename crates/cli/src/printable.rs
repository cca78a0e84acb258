//! Text of another process, which must not control the terminal.
use std::borrow::Cow;

/// Control characters, and those that change the direction of text.
fn controls(c: char) -> bool {
    let turns = matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || turns
}

/// Text without control characters.
pub(crate) fn printable(text: &str) -> String {
    text.replace(char::is_control, "?")
}

/// Makes the strings of a JSON text printable.
///
/// Numbers and structure stay. A text that is no JSON is none afterwards, too.
pub(crate) fn printable_json(text: &[u8]) -> Cow<'_, [u8]> {
    let text = match String::from_utf8_lossy(text) {
        // Most reports.
        Cow::Borrowed(whole) if !whole.contains('\\') && !whole.chars().any(is_foreign) => {
            return Cow::Borrowed(text);
        }
        text => text,
    };
    let mut out = String::with_capacity(text.len());
    let mut rest = &*text;
    while let Some(c) = rest.chars().next() {
        let (len, shown) = match c {
            '\\' => escape(rest),
            c if is_foreign(c) => (c.len_utf8(), "?"),
            c => (c.len_utf8(), &rest[..c.len_utf8()]),
        };
        out.push_str(shown);
        rest = rest.get(len..).unwrap_or_default();
    }
    Cow::Owned(out.into_bytes())
}

/// Whether a character may stand in a string only. The others separate, or are no JSON there.
fn is_foreign(c: char) -> bool {
    controls(c) && !matches!(c, '\n' | '\r' | '\t')
}

/// Length of an escape sequence in a string, and what takes its place.
fn escape(text: &str) -> (usize, &str) {
    match text.as_bytes().get(1) {
        Some(b'b' | b'f' | b'n' | b'r' | b't') => (2, "?"),
        Some(b'u') => {
            let digits = text.get(2..6);
            let code = digits.and_then(|digits| u32::from_str_radix(digits, 16).ok());
            match code.and_then(char::from_u32) {
                Some(c) if controls(c) => (6, "?"),
                _ => (2, &text[..2]),
            }
        }
        // A backslash or a quote.
        Some(next) if next.is_ascii() => (2, &text[..2]),
        _ => (1, &text[..1]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn strings_of_json_lose_what_controls_a_terminal() {
        let foreign = "a\u{1b}[31mb\u{7}\r\n\t\u{8}\u{7f}\u{9b}\u{202e}c\\n\\u001b \"é\u{1f600}";
        let value = json!({"k\u{1b}": [foreign, 1.5, null, true], "n": {"x": -7}});
        let made: [fn(&Value) -> String; 2] =
            [|value| value.to_string(), |value| serde_json::to_string_pretty(value).unwrap()];
        for make in made {
            let text = make(&value);
            let escaped: String = text
                .chars()
                .map(|c| {
                    if c.is_ascii() || c > '\u{ffff}' {
                        c.to_string()
                    } else {
                        format!("\\u{:04x}", c as u32)
                    }
                })
                .collect();
            for text in [text, escaped] {
                let shown: Value = serde_json::from_slice(&printable_json(text.as_bytes())).unwrap();
                let wanted = "a?[31mb????????c\\n\\u001b \"é\u{1f600}";
                assert_eq!(shown, json!({"k?": [wanted, 1.5, null, true], "n": {"x": -7}}));
            }
        }
        let plain = b"{\"a\": [1, \"b\"]}\n";
        assert!(matches!(printable_json(plain), Cow::Borrowed(_)));
        for cut in ["\"\\", "\"\\u", "\"\\u00", "\"\\u00é", "\"\\é"] {
            assert!(serde_json::from_slice::<Value>(&printable_json(cut.as_bytes())).is_err());
        }
    }
}
