//! The end of a rank.

use super::engine::NAME;
use crate::error::{Error, Failure, Operation, Result};
use crate::group::ProcessGroup;

/// Waits until all ranks of the job call it, with any of their groups; nothing can be called on a group after it. A rank that ends without it
/// breaks nothing as long as no other rank needs it, and gets no error itself. With it, ranks that did not make the same calls all get an error.
///
/// ```
/// use fp8_ranks::threads;
///
/// let ends = threads::Threads::new(2).run(|group| {
///     // Rank 1 has a step less.
///     for _ in group.rank()..2 {
///         group.barrier()?;
///     }
///     threads::finish(&group)
/// });
/// for end in ends {
///     let error = end.expect("no panic").expect_err("an error on both ranks").to_string();
///     assert!(error.contains("rank 0 calls barrier of group \"world\"; rank 1 calls finish"));
/// }
/// ```
///
/// # Errors
/// [`Failure::Mismatch`], at once, if a rank waits for one that has called this. The errors of any collective: another rank has failed or left, or the
/// deadline has passed. [`Failure::Unsupported`] for groups of other engines (processes end with [`crate::World::finish`]); a group of one rank
/// has nothing to wait for.
pub fn finish(group: &ProcessGroup) -> Result<()> {
    if group.engine() == NAME {
        return group.finish();
    }
    // Its engine is left alone: with a part of one process it would end MPI, which the `World` does.
    if group.size() == 1 {
        return Ok(());
    }
    Err(Error::Collective {
        rank: group.rank(),
        size: group.size(),
        group: group.name().into(),
        operation: Operation::Finish,
        failure: Failure::Unsupported {
            engine: group.engine(),
            problem: "only ranks that are threads end with this: call it with a group of Threads; processes end with World::finish"
                .to_owned(),
        },
    })
}
