//! All processes of a job: how it begins and ends.

use crate::error::{Error, Result};
use crate::failure;
use crate::group::{GroupOptions, ProcessGroup};
use crate::launcher::Announced;
#[cfg(feature = "mpi")]
use crate::mpi;
use std::fmt::Display;

/// How a process joins the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorldOptions {
    /// Options of the group of all.
    pub group: GroupOptions,
    /// Whether a panic on any thread ends the process (after its message), when there are several ranks. Unwinding would leave the
    /// others waiting until their deadline. True unless set. Without it, a program that handles panics of its threads goes on, and one
    /// that unwinds from where the [`World`] lives ends the job as an error does.
    pub end_on_panic: bool,
    /// The most elements in one call of MPI, which counts with 32 bits; longer data goes in several. Smaller only in tests.
    pub largest_message: usize,
}

impl Default for WorldOptions {
    fn default() -> Self {
        Self {
            group: GroupOptions::default(),
            end_on_panic: true,
            largest_message: i32::MAX as usize,
        }
    }
}

impl WorldOptions {
    /// With other options of the group.
    #[must_use]
    pub fn with_group(mut self, group: GroupOptions) -> Self {
        self.group = group;
        self
    }

    /// With another deadline, [`GroupOptions::deadline`].
    #[must_use]
    pub fn with_deadline(mut self, deadline: std::time::Duration) -> Self {
        self.group.deadline = deadline;
        self
    }

    /// With another [`WorldOptions::end_on_panic`].
    #[must_use]
    pub fn with_end_on_panic(mut self, end_on_panic: bool) -> Self {
        self.end_on_panic = end_on_panic;
        self
    }

    /// With another [`WorldOptions::largest_message`], from 1 to 2^31 - 1.
    #[must_use]
    pub fn with_largest_message(mut self, elements: usize) -> Self {
        self.largest_message = elements.clamp(1, i32::MAX as usize);
        self
    }
}

/// All processes of a job. One process without a launcher; with the feature `mpi`, as many as `mpirun -n` has started.
///
/// **A job of several ranks ends in one of two ways**: all ranks call [`World::finish`], or one of them fails and ends all. Whatever
/// goes wrong in a collective ends this process with one line on stderr and code [`crate::EXIT_CODE`], and the launcher ends
/// the others. So does a `World` that is dropped without `finish`, by a `?` or an early return. As it is dropped before
/// `main` prints an error, give the result of the work to [`World::finish_with`], which prints it. A job that has ended is started
/// again from its last checkpoint.
///
/// ```
/// use fp8_ranks::{ProcessGroup, World, WorldOptions};
///
/// fn work(group: &ProcessGroup) -> Result<(), Box<dyn std::error::Error>> {
///     if group.rank() == 0 {
///         println!("{} ranks", group.size());
///     }
///     Ok(())
/// }
///
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     let world = World::join(WorldOptions::default())?;
///     let result = work(world.group());
///     world.finish_with(result)
/// }
/// ```
///
/// Join before anything is read or written, and write files on rank 0 alone.
#[derive(Debug)]
pub struct World {
    group: ProcessGroup,
    finished: bool,
}

impl World {
    /// Joins the processes that a launcher has started ([`Announced`]), or makes a job of one process. The group's name is
    /// "world".
    ///
    /// # Errors
    /// A launcher has started several processes, and this one is not in a group of as many: built without the feature `mpi`, or with
    /// another MPI than that of the launcher. The MPI library does not start.
    pub fn join(options: WorldOptions) -> Result<Self> {
        let announced = Announced::of_this_process()?;
        match announced.filter(|announced| announced.processes > 1) {
            Some(announced) => several(announced, options),
            None => Ok(Self {
                group: ProcessGroup::single().with_options(options.group),
                finished: false,
            }),
        }
    }

    /// The group of all.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Waits for all ranks and ends the engine. Nothing can be called on any group after it.
    ///
    /// Ranks that do not come end the process, as in any collective. If one rank is here while another waits for it elsewhere, because
    /// they did not take the same number of steps, say, the job ends soon after every rank either is here or waits (half a second, and
    /// longer for large tensors), and the message has both calls. Where the other waits in a [`ProcessGroup::split`] or for its GPU
    /// (NCCL), it ends at the deadline.
    ///
    /// # Errors
    /// The engine failed.
    pub fn finish(mut self) -> Result<()> {
        self.group.finish()?;
        self.finished = true;
        Ok(())
    }

    /// [`World::finish`] after work that went well; otherwise prints the error with this rank and ends the job.
    ///
    /// # Errors
    /// In a job of one rank, the error of the work.
    pub fn finish_with<T, E: Display + From<Error>>(self, result: Result<T, E>) -> Result<T, E> {
        match result {
            Ok(value) => {
                self.finish()?;
                Ok(value)
            }
            Err(error) => {
                // Does not return if there are other ranks.
                self.group.give_up(format_args!("{error:#}"));
                Err(error)
            }
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if !self.finished && self.group.size() > 1 {
            failure::left(self.group.rank(), self.group.size());
        }
    }
}

/// Without an engine for processes.
#[cfg(not(feature = "mpi"))]
fn several(announced: Announced, _: WorldOptions) -> Result<World> {
    announced.check(
        1,
        "build the program with the feature `mpi`, or start it without a launcher",
    )?;
    unreachable!("more than one process was announced")
}

/// The processes of MPI.
#[cfg(feature = "mpi")]
fn several(announced: Announced, options: WorldOptions) -> Result<World> {
    let (engine, library) = mpi::join(options.largest_message).map_err(Error::Join)?;
    let remedy =
        format!("start it with the mpirun of the library that it was built with, {library}");
    announced.check(engine.size(), remedy)?;
    if options.end_on_panic {
        failure::end_on_panic(engine.rank(), engine.size());
    }
    let group = ProcessGroup::new(engine, "world", options.group)?;
    Ok(World {
        group,
        finished: false,
    })
}
