//! Errors of groups: where something failed ([`Error`]), and what failed ([`Failure`]).

use candle_core::DType;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Short for a result with [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What a rank called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Operation {
    /// Sum or maximum of tensors, on every rank.
    AllReduce,
    /// Maximum of amaxes, [`fp8_candle::state::ReductionGroup::all_reduce_max`].
    AllReduceMax,
    /// The rows of all ranks, on every rank.
    AllGather,
    /// Sum or maximum, of which every rank gets some rows.
    ReduceScatter,
    /// Some rows from every rank to every rank.
    AllToAll,
    /// A tensor of one rank, on every rank.
    Broadcast,
    /// No rank continues before all have arrived.
    Barrier,
    /// Groups within a group.
    Split,
    /// The end of a rank: [`crate::World::finish`] or [`crate::threads::finish()`].
    Finish,
}

impl Operation {
    /// The operations that move data, in the order of [`crate::Traffic`].
    pub const ALL: [Self; 7] = [
        Self::AllReduce,
        Self::AllReduceMax,
        Self::AllGather,
        Self::ReduceScatter,
        Self::AllToAll,
        Self::Broadcast,
        Self::Barrier,
    ];

    /// The name of the method.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllReduceMax => "all_reduce_max",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllToAll => "all_to_all",
            Self::Broadcast => "broadcast",
            Self::Barrier => "barrier",
            Self::Split => "split",
            Self::Finish => "finish",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What went wrong on this rank, and where.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A collective failed. The group cannot be used after it.
    #[error("rank {rank} of {size}: {operation} of group {group:?}: {failure}")]
    Collective {
        /// This rank.
        rank: usize,
        /// Ranks of the group.
        size: usize,
        /// Name of the group.
        group: Arc<str>,
        /// What was called.
        operation: Operation,
        /// What went wrong.
        failure: Failure,
    },
    /// This rank gave up for a reason of its own: [`crate::ProcessGroup::give_up`].
    #[error("rank {rank} of {size} of group {group:?}: {reason}")]
    GaveUp {
        /// This rank.
        rank: usize,
        /// Ranks of the group.
        size: usize,
        /// Name of the group.
        group: Arc<str>,
        /// The caller's reason.
        reason: String,
    },
    /// The engine did not start.
    #[error("the ranks cannot be joined: {0}")]
    Join(Failure),
    /// A launcher started several processes that are not one group. Each would do all of the work and write the same files.
    #[error(
        "{variable}={value} says that a launcher started {value} processes, but this process is in a group of {got}: {remedy}"
    )]
    Launcher {
        /// The variable of the launcher.
        variable: &'static str,
        /// Its value.
        value: usize,
        /// Size of the group that this process is in.
        got: usize,
        /// What to do.
        remedy: String,
    },
    /// A variable of a launcher is not a number.
    #[error("{variable}={value:?}: expected the number of processes that a launcher has started")]
    LauncherValue {
        /// The variable of the launcher.
        variable: &'static str,
        /// Its value.
        value: String,
    },
    /// The sizes of a mesh do not multiply to the group's size.
    #[error(
        "a mesh with axes {axes:?} has {product} places, but group {group:?} has {size} ranks; change an axis or the number of ranks"
    )]
    MeshSize {
        /// Name of the group.
        group: Arc<str>,
        /// Names and sizes of the axes.
        axes: Vec<(String, usize)>,
        /// Product of the sizes.
        product: usize,
        /// Ranks of the group.
        size: usize,
    },
    /// A mesh has no axes, or the name of one is empty or was given twice.
    #[error("a mesh with axes {axes:?}: {problem}")]
    MeshNames {
        /// Names of the axes.
        axes: Vec<String>,
        /// What is wrong with them.
        problem: &'static str,
    },
    /// A parameter in parts has another shape.
    #[error("parameter `{name}`: got shape {got:?}, expected {expected:?}")]
    ParameterShape {
        /// The parameter.
        name: String,
        /// Its shape, or that of this rank's range.
        expected: Vec<usize>,
        /// What was given.
        got: Vec<usize>,
    },
    /// There is no parameter of this name.
    #[error("there is no parameter `{name}` in the map of sharded parameters")]
    NoParameter {
        /// What was asked for.
        name: String,
    },
    /// Parameters in parts are f32, on the device of their map.
    #[error(
        "parameter `{name}`: sharded parameters are F32 on the device of their map, but {dtype:?} or another device was asked for; \
         cast inputs of the model instead of the `VarBuilder`"
    )]
    ParameterKind {
        /// The parameter.
        name: String,
        /// What was asked for.
        dtype: DType,
    },
    /// A parameter of several layers was asked for as FP8 codes.
    #[error(
        "parameter `{name}` belongs to {layers} layers and cannot travel as FP8 codes (enable_fp8_all_gather): untie it, or leave the \
         option off"
    )]
    TiedCodes {
        /// The parameter.
        name: String,
        /// Layers that gather it.
        layers: usize,
    },
    /// A parameter has changed since its amax was reduced.
    #[error(
        "parameter `{name}` has changed since precompute_float8_dynamic_scale_for_fsdp: call it after each change, or \
         `ShardedVarMap::forget_amaxes` on all ranks"
    )]
    StaleAmax {
        /// The parameter.
        name: String,
    },
    /// No layer gathers these parameters.
    #[error(
        "no layer gathers the sharded parameters {names:?}: their layers do not know parameters in parts and would compute NaN"
    )]
    Unclaimed {
        /// Their names.
        names: Vec<String>,
    },
    /// The ranks have built different models.
    #[error(
        "the ranks have different sharded parameters: rank 0 has {first:?}, rank {rank} has {there:?}; build the same model on all ranks"
    )]
    OtherParameters {
        /// The first rank that differs from rank 0.
        rank: usize,
        /// A parameter with shape and number of layers that this rank has and rank 0 has not.
        there: Option<String>,
        /// One that rank 0 has and this rank has not.
        first: Option<String>,
    },
    /// A mesh has no axis of this name, or it was asked for twice.
    #[error(
        "no axes {asked:?} in a mesh with axes {axes:?}: each must be one of them and be named once"
    )]
    MeshAxis {
        /// What was asked for.
        asked: Vec<String>,
        /// Names of the axes.
        axes: Vec<String>,
    },
}

/// What can go wrong in a collective.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// Other ranks, or their data, did not arrive.
    #[error(
        "no answer within {waited:?}{}: a rank is stuck, has ended, or calls something else; start again from the last checkpoint",
        from(missing)
    )]
    Deadline {
        /// How long this rank has waited.
        waited: Duration,
        /// Ranks that have not called it, as far as the engine knows.
        missing: Vec<usize>,
    },
    /// A dimension cannot be cut into equal parts.
    #[error("a dimension of {len} cannot be divided evenly over {ranks} ranks")]
    Uneven {
        /// Its length.
        len: usize,
        /// Ranks of the group.
        ranks: usize,
    },
    /// The ranks called different operations, or the same one with sizes that do not fit.
    #[error("the ranks disagree: {}", calls.join("; "))]
    Mismatch {
        /// What each rank called, in the order of ranks. If one of them called `finish`, only the ranks known to disagree, by
        /// their numbers in the whole job.
        calls: Arc<[String]>,
    },
    /// Another rank failed.
    #[error("rank {rank} failed: {message}")]
    Rank {
        /// That rank, counted in the whole job.
        rank: usize,
        /// What it said.
        message: Arc<str>,
    },
    /// There must be one count for each rank.
    #[error("{got} counts for {ranks} ranks; give one for each")]
    Counts {
        /// Number of counts.
        got: usize,
        /// Ranks of the group.
        ranks: usize,
    },
    /// The tensor does not have the rows that the counts say.
    #[error("a tensor of shape {shape:?} with {got} rows, but the counts say {expected}")]
    Rows {
        /// Shape of the tensor.
        shape: Vec<usize>,
        /// Its rows.
        got: usize,
        /// What the counts say.
        expected: usize,
    },
    /// The tensor has a dtype that the operation does not take.
    #[error("a tensor of {got:?}, expected {expected}")]
    DType {
        /// Dtype of the tensor.
        got: DType,
        /// What the operation takes.
        expected: &'static str,
    },
    /// There is no such rank.
    #[error("root {root} of {ranks} ranks; ranks count from 0")]
    Root {
        /// What was given.
        root: usize,
        /// Ranks of the group.
        ranks: usize,
    },
    /// The rank whose data the others get has given none.
    #[error("the root, rank {root}, has given no data")]
    NoData {
        /// The root.
        root: usize,
    },
    /// A call of the engine's library failed.
    #[error("{call}: {message} (code {code})")]
    Library {
        /// The function.
        call: &'static str,
        /// What it returned.
        code: i32,
        /// The library's text for it.
        message: String,
    },
    /// The engine does not do this.
    #[error("{engine} cannot do this: {problem}")]
    Unsupported {
        /// Name of the engine.
        engine: &'static str,
        /// What it cannot do.
        problem: String,
    },
    /// The engine has ended: [`crate::World::finish`] or [`crate::threads::finish()`] was called, or an earlier call failed.
    #[error(
        "the engine has ended; nothing can be called after `World::finish` or `threads::finish`, or after an error"
    )]
    Ended,
    /// A fault that a test has asked for.
    #[error("the fault that the test asked for")]
    Injected,
    /// An operation on tensors failed.
    #[error(transparent)]
    Candle(Arc<candle_core::Error>),
}

fn from(ranks: &[usize]) -> String {
    if ranks.is_empty() {
        String::new()
    } else {
        format!(" from ranks {ranks:?}")
    }
}

impl From<candle_core::Error> for Failure {
    fn from(error: candle_core::Error) -> Self {
        Self::Candle(Arc::new(error))
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        Self::wrap(error)
    }
}

impl From<Error> for fp8_candle::Error {
    fn from(error: Error) -> Self {
        Self::Group(Box::new(error))
    }
}
