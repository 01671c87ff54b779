//! What launchers say about the number of processes that they have started.
//!
//! A program that was started N times without one group over all is N jobs of one rank, which write the same files. No library
//! says so: a program under the `mpirun` of another MPI, or one built without the feature `mpi`, sees itself alone.
//!
//! | variable | launcher |
//! |---|---|
//! | `OMPI_COMM_WORLD_SIZE` | Open MPI's `mpirun` |
//! | `PMI_SIZE` | MPICH's and Intel MPI's `mpirun`, Slurm's `srun --mpi=pmi2` |
//! | `SLURM_NTASKS` | Slurm's `srun`, if `PMI_RANK` or `PMIX_RANK` says that it starts ranks: in a batch script, which is one process, `SLURM_NTASKS` is set too |

use crate::error::{Error, Result};

/// A launcher and the number of processes that it has started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Announced {
    /// The variable that says so.
    pub variable: &'static str,
    /// Number of processes.
    pub processes: usize,
}

impl Announced {
    /// What the variables of this process say.
    ///
    /// # Errors
    /// [`Error::LauncherValue`]: a variable is not a number.
    pub fn of_this_process() -> Result<Option<Self>> {
        Self::from_variables(|name| std::env::var_os(name)?.into_string().ok())
    }

    /// What some variables say: `value` gives that of a name.
    ///
    /// # Errors
    /// [`Error::LauncherValue`]: a variable is not a number.
    pub fn from_variables(value: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let ranks_of_slurm = || {
            ["PMI_RANK", "PMIX_RANK"]
                .iter()
                .any(|name| value(name).is_some())
        };
        for variable in ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"] {
            let Some(text) = value(variable) else {
                continue;
            };
            if variable == "SLURM_NTASKS" && !ranks_of_slurm() {
                continue;
            }
            return match text.trim().parse() {
                Ok(processes) if processes > 0 => Ok(Some(Self {
                    variable,
                    processes,
                })),
                _ => Err(Error::LauncherValue {
                    variable,
                    value: text,
                }),
            };
        }
        Ok(None)
    }

    /// # Errors
    /// [`Error::Launcher`]: this process is in a group of another size.
    pub fn check(self, got: usize, remedy: impl Into<String>) -> Result<()> {
        match self.processes == got {
            true => Ok(()),
            false => Err(Error::Launcher {
                variable: self.variable,
                value: self.processes,
                got,
                remedy: remedy.into(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn announced(variables: &[(&str, &str)]) -> Result<Option<(&'static str, usize)>> {
        let value = |name: &str| {
            let found = variables.iter().find(|(variable, _)| *variable == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        let announced = Announced::from_variables(value)?;
        Ok(announced.map(|announced| (announced.variable, announced.processes)))
    }

    #[test]
    fn launchers() -> Result<()> {
        assert_eq!(announced(&[])?, None);
        let open_mpi = [
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("SLURM_NTASKS", "8"),
            ("PMIX_RANK", "0"),
        ];
        assert_eq!(announced(&open_mpi)?, Some(("OMPI_COMM_WORLD_SIZE", 4)));
        assert_eq!(announced(&[("PMI_SIZE", "1")])?, Some(("PMI_SIZE", 1)));
        assert_eq!(
            announced(&[("SLURM_NTASKS", "8"), ("SLURM_PROCID", "0")])?,
            None
        );
        let srun = [("SLURM_NTASKS", "8"), ("PMIX_RANK", "3")];
        assert_eq!(announced(&srun)?, Some(("SLURM_NTASKS", 8)));
        Ok(())
    }

    #[test]
    fn values_that_are_no_numbers_are_refused() {
        for value in ["", "two", "0", "-1"] {
            let error = announced(&[("PMI_SIZE", value)]).expect_err("no number");
            let expected = format!(
                "PMI_SIZE={value:?}: expected the number of processes that a launcher has started"
            );
            assert_eq!(error.to_string(), expected);
        }
    }
}
