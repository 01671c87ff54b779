//! Errors of dense layers with any axes, and of the names of their axes.

/// Why a [`DenseGeneral`](crate::nn::DenseGeneral) or [`Dense`](crate::nn::Dense) cannot be built or called, or names of axes cannot be
/// given to a mesh.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DenseError {
    /// Axes that an input does not have, or that are named twice.
    #[error("layer `{path}`: {what} {axes:?} for an input of shape {shape:?}, {expected}")]
    Axes {
        /// Path of the layer.
        path: String,
        /// Which axes.
        what: &'static str,
        /// The axes as they are configured.
        axes: Vec<isize>,
        /// Shape of the input.
        shape: Vec<usize>,
        /// What they have to be.
        expected: String,
    },
    /// The sizes of an input along its axes are not those of the kernel.
    #[error(
        "layer `{path}`: an input of shape {shape:?} has sizes {got:?} along its {what} axes {axes:?}, the kernel has {expected:?}"
    )]
    Sizes {
        /// Path of the layer.
        path: String,
        /// Which axes.
        what: &'static str,
        /// The axes, counted from the first.
        axes: Vec<usize>,
        /// Shape of the input.
        shape: Vec<usize>,
        /// Its sizes.
        got: Vec<usize>,
        /// The kernel's.
        expected: Vec<usize>,
    },
    /// An option does not fit.
    #[error("layer `{path}`: {what} is {got}, expected {expected}")]
    Option {
        /// Path of the layer.
        path: String,
        /// Which option.
        what: &'static str,
        /// Its value.
        got: String,
        /// Values that fit.
        expected: String,
    },
    /// A number of an initializer is negative or not finite.
    #[error("{what} of an initializer is {value}, expected a finite number, 0 or more")]
    Initializer {
        /// Which number.
        what: &'static str,
        /// Its value.
        value: f64,
    },
    /// A stored parameter has a shape that the layer cannot read.
    #[error("tensor `{tensor}` has shape {got:?}, expected {expected}")]
    StoredShape {
        /// Name of the tensor.
        tensor: String,
        /// Its shape.
        got: Vec<usize>,
        /// Shapes that are read.
        expected: String,
    },
    /// A file holds the weight of a layer twice.
    #[error(
        "layer `{path}` is stored both as `{first}` and as `{second}`: remove the one that is out of date"
    )]
    Ambiguous {
        /// Path of the layer.
        path: String,
        /// Name of a tensor.
        first: String,
        /// Name of another.
        second: String,
    },
    /// A layer that takes its sizes from its first input has not seen one yet.
    #[error(
        "layer `{path}` has no parameters yet: before `prepare_fp8`, the optimizer and the first FP8 guard, give it an input outside a \
         guard, or call `Dense::initialize` with the shape of one"
    )]
    NotInitialized {
        /// Path of the layer.
        path: String,
    },
    /// There are not as many names of axes as the tensor has dimensions.
    #[error("`{tensor}` has {rank} dimensions and {} names of axes: {}", names.len(), names.join(", "))]
    AxisCount {
        /// Name of the tensor.
        tensor: String,
        /// The names; `-` for an axis without one.
        names: Vec<String>,
        /// Dimensions of the tensor.
        rank: usize,
    },
    /// A logical axis has no rule.
    #[error("`{tensor}` has the logical axis `{name}`, which has no rule; the rules name {known}")]
    UnknownAxis {
        /// Name of the tensor.
        tensor: String,
        /// The logical axis.
        name: String,
        /// Logical axes with a rule.
        known: String,
    },
    /// One mesh axis would split two dimensions of a tensor.
    #[error(
        "the mesh axis `{mesh}` would split two dimensions of `{tensor}`: its logical axes `{first}` and `{second}`"
    )]
    MeshAxisTwice {
        /// Name of the tensor.
        tensor: String,
        /// The mesh axis.
        mesh: String,
        /// The first logical axis.
        first: String,
        /// The second logical axis.
        second: String,
    },
    /// A table of rules is inconsistent.
    #[error("the rule for the logical axis `{name}`: {reason}")]
    Rule {
        /// The logical axis.
        name: String,
        /// What is wrong.
        reason: String,
    },
}
