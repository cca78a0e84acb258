//! The report of a run: a folder with a page, a plot, and numbers as JSON and CSV.
//!
//! ```text
//! rows -> benchmark -> metric -> case   ([`groups`])
//!           |            |         `---- a plot: a lane for each subject, a dot for each round
//!           |            `-------------- a table of all numbers of its plots
//!           `--------------------------- a section, with its notes and its noise
//! ```
//!
//! The page loads nothing: no script, font, image or style from elsewhere, and its policy forbids
//! it. All text of rows and baselines is escaped.
use crate::compare::Comparison;
use crate::{BenchError, Results};
use std::fs;
use std::path::{Path, PathBuf};

mod changes;
mod csv;
mod groups;
mod html;
mod overview;
mod page;
mod plot;
mod scale;

/// Writes a report to `folder`, which is made if missing.
///
/// Returns the path of the page.
///
/// Existing files with the names of the report are replaced: `index.html`, `overview.svg`,
/// `results.json`, `results.csv`, `rounds.csv`, and `comparison.json` with a comparison.
///
/// # Errors
/// The folder or a file cannot be written.
pub fn report(
    folder: &Path,
    results: &Results,
    comparison: Option<&Comparison>,
) -> Result<PathBuf, BenchError> {
    prepare(folder)?;
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        fs::write(&path, text).map_err(|source| failed(&path, source)).map(|()| path)
    };
    write("results.json", &json(results))?;
    write("results.csv", &csv::figures(&results.rows))?;
    write("rounds.csv", &csv::rounds(&results.rows))?;
    write("overview.svg", &overview::file(results))?;
    if let Some(comparison) = comparison {
        write("comparison.json", &serde_json::to_string_pretty(comparison).unwrap_or_default())?;
    }
    write("index.html", &page::render(results, comparison))
}

/// Makes the folder of a report, so that a run does not fail at its end.
///
/// # Errors
/// The folder cannot be made.
pub fn prepare(folder: &Path) -> Result<(), BenchError> {
    fs::create_dir_all(folder).map_err(|source| failed(folder, source))
}

fn failed(path: &Path, source: std::io::Error) -> BenchError {
    BenchError::WriteReport { path: path.display().to_string(), source }
}

/// The results as JSON, a line for each row.
fn json(results: &Results) -> String {
    let head = Results { rows: Vec::new(), ..results.clone() };
    let head = serde_json::to_string_pretty(&head).unwrap_or_default();
    let rows: Vec<String> =
        results.rows.iter().map(|row| serde_json::to_string(row).unwrap_or_default()).collect();
    let rows = format!("\"rows\": [\n{}\n  ]", rows.join(",\n"));
    head.replace("\"rows\": []", &rows) + "\n"
}

#[cfg(test)]
mod tests;
