//! Manual pages in the macros of man(7).
use std::fmt::Write;

/// A page under construction.
pub(super) struct Page(String);

impl Page {
    /// `title`: "paravane-run". `section`: its chapter. `summary`: for apropos(1).
    pub(super) fn new(title: &str, section: u8, date: &str, summary: &str) -> Self {
        let source = concat!("Paravane ", env!("CARGO_PKG_VERSION"));
        let mut page = Self(format!(".TH {title} {section} {date} \"{source}\" \"Paravane manual\"\n"));
        page.heading("NAME");
        page.line(&format!("{title} - {summary}"));
        page
    }

    pub(super) fn heading(&mut self, heading: &str) {
        self.macro_line(&format!(".SH {}", heading.to_uppercase()));
    }

    pub(super) fn subheading(&mut self, heading: &str) {
        self.macro_line(&format!(".SS \"{heading}\""));
    }

    /// A paragraph. One with indented lines keeps its lines.
    pub(super) fn paragraph(&mut self, text: &str) {
        self.macro_line(".PP");
        self.body(text);
    }

    /// A further paragraph of a tagged one.
    pub(super) fn continued(&mut self, text: &str) {
        self.macro_line(".IP");
        self.body(text);
    }

    /// Words in bold at the left margin, without hyphens or stretched blanks.
    pub(super) fn synopsis(&mut self, text: &str) {
        self.macro_line(".nh");
        self.macro_line(".ad l");
        let _ = writeln!(self.0, "\\fB{}\\fR", escaped(text));
        self.macro_line(".ad b");
        self.macro_line(".hy");
    }

    /// A paragraph with a tag: a bold and an italic part.
    pub(super) fn tagged(&mut self, bold: &str, italic: &str, text: &str) {
        self.macro_line(".TP");
        let italic = match italic {
            "" => String::new(),
            text => format!(" \\fI{}\\fR", escaped(text)),
        };
        let _ = writeln!(self.0, "\\fB{}\\fR{italic}", escaped(bold));
        self.body(text);
    }

    /// A list inside a tagged paragraph.
    pub(super) fn list(&mut self, rows: &[(String, String)]) {
        if rows.is_empty() {
            return;
        }
        self.macro_line(".RS");
        for (name, text) in rows {
            self.tagged(name, "", text);
        }
        self.macro_line(".RE");
    }

    /// Lines as they are.
    pub(super) fn verbatim(&mut self, text: &str) {
        self.macro_line(".PP");
        self.macro_line(".nf");
        text.lines().for_each(|line| self.line(line));
        self.macro_line(".fi");
    }

    pub(super) fn finish(self) -> String {
        self.0
    }

    fn body(&mut self, text: &str) {
        if !text.lines().any(|line| line.starts_with("  ")) {
            return text.lines().for_each(|line| self.line(line));
        }
        self.macro_line(".nf");
        text.lines().for_each(|line| self.line(line));
        self.macro_line(".fi");
    }

    fn macro_line(&mut self, line: &str) {
        self.0 += line;
        self.0.push('\n');
    }

    fn line(&mut self, line: &str) {
        let text = escaped(line);
        // A line that begins with a dot or an apostrophe would be a macro.
        if text.starts_with(['.', '\'']) {
            self.0 += "\\&";
        }
        self.0 += &text;
        self.0.push('\n');
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\e").replace('-', "\\-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_no_macro() {
        let mut page = Page::new("a", 1, "2026-01-01", "b");
        page.paragraph(".PP is -no- macro\\\n'nor this");
        page.continued("a:\n  b");
        let text = page.finish();
        assert!(text.starts_with(".TH a 1 2026-01-01 \"Paravane "), "{text}");
        assert!(
            text.contains(".PP\n\\&.PP is \\-no\\- macro\\e\n\\&'nor this\n.IP\n.nf\na:\n  b\n.fi\n"),
            "{text}"
        );
    }
}
