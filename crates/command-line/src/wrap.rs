//! Text that wraps at words.
use std::io::IsTerminal;

/// Columns of text if the terminal has as many.
const COLUMNS: usize = 80;

/// Columns of the terminal on stdout; `None`: stdout is no terminal.
#[must_use]
pub fn terminal() -> Option<usize> {
    let stdout = std::io::stdout();
    if !stdout.is_terminal() {
        return None;
    }
    let columns = rustix::termios::tcgetwinsize(&stdout).ok()?.ws_col;
    (columns > 0).then_some(columns.into())
}

/// Columns for reports: 80, or those of a narrower terminal.
#[must_use]
pub fn columns() -> usize {
    terminal().map_or(COLUMNS, |columns| columns.min(COLUMNS))
}

/// Lines of at most `width` characters, broken at blanks.
///
/// A longer word has a line for itself.
#[must_use]
pub fn lines(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.len() - 1;
        let line = &mut lines[last];
        if line.is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() <= width {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

/// A row: `head`, padded to `indent` characters, then `text` in its column.
///
/// Ends with a newline.
#[must_use]
pub fn row(head: &str, indent: usize, text: &str, width: usize) -> String {
    // A very narrow terminal breaks lines by itself.
    let room = width.saturating_sub(indent).max(20);
    let mut out = String::new();
    let mut head = head;
    for line in lines(text, room) {
        out += format!("{head:indent$}{line}").trim_end();
        out.push('\n');
        head = "";
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_wraps_at_words_in_its_column() {
        let text = "five words that need room";
        assert_eq!(lines(text, 10), ["five words", "that need", "room"]);
        assert_eq!(lines("", 10), [""]);
        assert_eq!(lines("unbreakable/path here", 5), ["unbreakable/path", "here"]);
        assert_eq!(row("  a", 6, "µ word and another one", 26), "  a   µ word and another\n      one\n");
    }
}
