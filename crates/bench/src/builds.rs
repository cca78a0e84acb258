//! The builds of `paravane` that are measured: the one beside this program, and another one if named.
use crate::BenchError;
use crate::subject::OTHER_BUILD;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

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
    /// The build beside this program, then the other one if it has a name or arguments.
    ///
    /// # Errors
    /// There is no program `paravane`.
    pub(crate) fn all() -> Result<Vec<Self>, BenchError> {
        let failed = |source| BenchError::Os { what: "find this program", source };
        let this = std::env::current_exe().map_err(failed)?;
        let path = std::env::var_os("PATH").unwrap_or_default();
        let program = find(&this, &path).ok_or(BenchError::NoProgram)?;
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

/// The program `paravane` in the folder of `this`, else in one of the folders of `path`.
fn find(this: &Path, path: &OsStr) -> Option<PathBuf> {
    let folders = this.parent().map(Path::to_path_buf).into_iter().chain(std::env::split_paths(path));
    folders.map(|folder| folder.join("paravane")).find(|program| program.is_file())
}

/// The words of an environment variable.
fn more(variable: &str) -> Vec<String> {
    let words = std::env::var(variable).unwrap_or_default();
    words.split_whitespace().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_beside_this_one_comes_before_those_in_path() {
        let folder = tempfile::tempdir().unwrap();
        let of = |name: &str| folder.path().join(name);
        for name in ["beside", "path", "empty"] {
            std::fs::create_dir(of(name)).unwrap();
        }
        let path = std::env::join_paths([of("empty"), of("path")]).unwrap();
        let find = || find(&of("beside/paravane-bench"), &path);
        assert_eq!(find(), None);
        std::fs::write(of("path/paravane"), "").unwrap();
        assert_eq!(find(), Some(of("path/paravane")));
        std::fs::write(of("beside/paravane"), "").unwrap();
        assert_eq!(find(), Some(of("beside/paravane")));
    }
}
