//! Numbers and wrapped lines.

/// Columns of a terminal that text fits into.
pub(crate) const WIDTH: usize = 80;

/// Three significant figures or so.
pub(crate) fn number(value: f64) -> String {
    let decimals = match value.abs() {
        size if size < 10.0 => 2,
        size if size < 100.0 => 1,
        _ => 0,
    };
    format!("{value:.decimals$}")
}

/// Appends a paragraph, wrapped at words; lines after the first one are indented.
pub(crate) fn wrap(out: &mut String, text: &str) {
    let mut column = 0;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if column > 0 && column + 1 + length > WIDTH {
            out.push_str("\n  ");
            column = 2;
        } else if column > 0 {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += length;
    }
    out.push('\n');
}
