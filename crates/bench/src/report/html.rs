//! Text in HTML and SVG, and numbers for readers.

/// Escapes text for element content and attributes.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // XML permits no other control characters.
            c if c.is_control() && !matches!(c, '\n' | '\t') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// Three significant figures, with k, M or G.
pub(super) fn number(value: f64) -> String {
    if !value.is_finite() {
        return "-".to_owned();
    }
    let (scaled, unit) = match value.abs() {
        size if size >= 999.5e6 => (value / 1e9, "G"),
        size if size >= 999.5e3 => (value / 1e6, "M"),
        size if size >= 9_999.5 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let decimals = match scaled.abs() {
        size if size >= 99.95 => 0,
        size if size >= 9.995 => 1,
        size if size >= 0.0995 || size == 0.0 => 2,
        _ => 4,
    };
    let text = format!("{scaled:.decimals$}");
    let text = if value == 0.0 { "0" } else { &text };
    format!("{text}{unit}").replace('-', "\u{2212}")
}

/// A ratio: "\u{d7}1.92".
pub(super) fn ratio(value: f64) -> String {
    format!("\u{d7}{}", number(value))
}

/// A coordinate, to a tenth.
pub(super) fn at(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").unwrap_or(&text).to_owned()
}

/// An identifier made of a name.
pub(super) fn id(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_figures() {
        for (value, text) in [
            (0.0, "0"),
            (0.012, "0.0120"),
            (1.0, "1.00"),
            (55.123, "55.1"),
            (1404.0, "1404"),
            (9_999.7, "10.0k"),
            (695_000.0, "695k"),
            (1_010_000.0, "1.01M"),
            (-3.5, "\u{2212}3.50"),
            (f64::NAN, "-"),
        ] {
            assert_eq!(number(value), text, "{value}");
        }
        assert_eq!(at(12.0), "12");
        assert_eq!(at(12.34), "12.3");
    }

    #[test]
    fn markup_is_escaped() {
        assert_eq!(escape("<a href='x'>&\"\u{1}"), "&lt;a href=&#39;x&#39;&gt;&amp;&quot;\u{fffd}");
        assert_eq!(id("dma x/y"), "dma-x-y");
    }
}
