//! Which builds of this program are measured: this one and, if it is named, another one beside it.
use crate::BenchError;
use std::path::PathBuf;

/// Names another build of ours, to be measured beside this one.
const OTHER: &str = "PARAVANE_BENCH_OTHER";
/// More arguments of `paravane serve`, separated by spaces, of this build and of the other one.
const SERVE: &str = "PARAVANE_BENCH_SERVE";
const OTHER_SERVE: &str = "PARAVANE_BENCH_OTHER_SERVE";
/// What it is called in results.
pub(crate) const OTHER_NAME: &str = "paravane/other";

/// A build, and what it is told besides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Build {
    /// As the rows have it.
    pub(crate) name: &'static str,
    pub(crate) program: PathBuf,
    pub(crate) extra_args: Vec<String>,
}

impl Build {
    /// This one first, then the other one, if it is named or has arguments of its own.
    ///
    /// # Errors
    /// The system does not tell which program this is.
    pub(crate) fn all() -> Result<Vec<Self>, BenchError> {
        let failed = |source| BenchError::Os { what: "find this program", source };
        let program = std::env::current_exe().map_err(failed)?;
        let mut all =
            vec![Self { name: crate::subject::PARAVANE, program: program.clone(), extra_args: more(SERVE) }];
        let (other, other_more) = (std::env::var_os(OTHER), more(OTHER_SERVE));
        if other.is_some() || !other_more.is_empty() {
            let program = other.map_or(program, PathBuf::from);
            all.push(Self { name: OTHER_NAME, program, extra_args: other_more });
        }
        Ok(all)
    }
}

/// What an environment variable holds, in words.
fn more(variable: &str) -> Vec<String> {
    let words = std::env::var(variable).unwrap_or_default();
    words.split_whitespace().map(str::to_owned).collect()
}
