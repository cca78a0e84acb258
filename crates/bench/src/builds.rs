//! The builds of `paravane` that are measured: this one, and another one if named.
use crate::BenchError;
use crate::subject::OTHER_BUILD;
use std::path::PathBuf;

/// Environment variable with another build to measure.
const OTHER: &str = "PARAVANE_BENCH_OTHER";
/// Environment variable: more arguments for `paravane serve`, by spaces.
const SERVE: &str = "PARAVANE_BENCH_SERVE";
/// The same for the other build.
const OTHER_SERVE: &str = "PARAVANE_BENCH_OTHER_SERVE";

/// A build and its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Build {
    /// Name in results.
    pub(crate) name: &'static str,
    pub(crate) program: PathBuf,
    pub(crate) extra_args: Vec<String>,
}

impl Build {
    /// This build, then the other one if it has a name or arguments.
    ///
    /// # Errors
    /// The path of this program is unknown.
    pub(crate) fn all() -> Result<Vec<Self>, BenchError> {
        let failed = |source| BenchError::Os { what: "find this program", source };
        let program = std::env::current_exe().map_err(failed)?;
        let mut all =
            vec![Self { name: crate::subject::PARAVANE, program: program.clone(), extra_args: more(SERVE) }];
        let (other, other_more) = (std::env::var_os(OTHER), more(OTHER_SERVE));
        if other.is_some() || !other_more.is_empty() {
            let program = other.map_or(program, PathBuf::from);
            all.push(Self { name: OTHER_BUILD, program, extra_args: other_more });
        }
        Ok(all)
    }
}

/// The words of an environment variable.
fn more(variable: &str) -> Vec<String> {
    let words = std::env::var(variable).unwrap_or_default();
    words.split_whitespace().map(str::to_owned).collect()
}
