//! Usage errors.

/// A usage error as one line, with what was probably meant.
#[must_use]
pub fn usage(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let first = text.lines().next().unwrap_or_default();
    let first = first.strip_prefix("error: ").unwrap_or(first);
    let listed = text.lines().skip(1).map(str::trim).take_while(|line| !line.is_empty());
    let tips = text.lines().filter_map(|line| line.trim_start().strip_prefix("tip: "));
    let line = listed.fold(first.to_owned(), |line, more| format!("{line} {more}"));
    tips.fold(line, |line, tip| format!("{line}; {tip}"))
}
