//! The options of a dense layer.

use super::axis_rules::{AxisNames, AxisRules};
use super::init::Initializer;
use crate::error::{DenseError, Result};
use candle_nn::{Activation, Init};
use fp8_core::setters;

/// The options of a [`DenseGeneral`](super::DenseGeneral) or a [`Dense`](super::Dense): flax's, with its defaults.
///
/// ```
/// use fp8_recipes::nn::{Activation, DenseConfig};
/// let heads = DenseConfig::new([8, 64]).with_bias(false).with_kernel_axes(["embed", "heads", "kv"]);
/// let back = DenseConfig::new([512]).with_axis([-2, -1]).with_activation(Activation::Gelu);
/// # let _ = (heads, back);
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DenseConfig {
    /// Sizes of the new dimensions, which come last in the result.
    pub features: Vec<usize>,
    /// The dimensions of an input that are summed over; negative ones count from the last. The default is the last. Their order has no
    /// meaning, as in flax: the kernel has them in the order of the input.
    pub axis: Vec<isize>,
    /// The dimensions of an input that the kernel has too, so that each index has its own product; none by default. flax's `batch_dims`,
    /// which must be the first ones; here they may be any.
    pub batch_axis: Vec<isize>,
    /// Whether there is a bias; true by default.
    pub bias: bool,
    /// First values of the kernel; lecun_normal by default.
    pub kernel_init: Initializer,
    /// First values of the bias; zeros by default.
    pub bias_init: Initializer,
    /// The seed of first values; None draws one. Layers with equal seeds and sizes begin with equal values.
    pub seed: Option<u64>,
    /// Applied to the result, in high precision; none by default.
    pub activation: Option<Activation>,
    /// Whether a new kernel is stored as the matrix `[product of contracted sizes, product of features]`, as fp8layers stores it. Either
    /// form is found by itself where a file has it.
    pub stored_as_matrix: bool,
    /// The logical axes of the kernel's dimensions: of two if it is stored as a matrix. Empty where they have no names.
    pub kernel_axes: AxisNames,
    /// The logical axes of the bias' dimensions. Empty where they have no names.
    pub bias_axes: AxisNames,
    /// Which mesh axis splits each logical axis.
    pub axis_rules: Option<AxisRules>,
}

impl DenseConfig {
    /// These features, from the last dimension of the input.
    pub fn new(features: impl Into<Vec<usize>>) -> Self {
        Self {
            features: features.into(),
            axis: vec![-1],
            batch_axis: vec![],
            bias: true,
            kernel_init: Initializer::lecun_normal(),
            bias_init: Initializer::Candle(Init::Const(0.)),
            seed: None,
            activation: None,
            stored_as_matrix: false,
            kernel_axes: vec![],
            bias_axes: vec![],
            axis_rules: None,
        }
    }

    /// A copy with these logical axes of the kernel, in order; None for a dimension that is never split.
    #[must_use]
    pub fn with_kernel_axes<'a, N: Into<Option<&'a str>>>(
        mut self,
        names: impl IntoIterator<Item = N>,
    ) -> Self {
        self.kernel_axes = owned(names);
        self
    }

    /// A copy with these logical axes of the bias, in order; None for a dimension that is never split.
    #[must_use]
    pub fn with_bias_axes<'a, N: Into<Option<&'a str>>>(
        mut self,
        names: impl IntoIterator<Item = N>,
    ) -> Self {
        self.bias_axes = owned(names);
        self
    }

    /// Checks what does not depend on an input.
    pub(super) fn check(&self, path: &str) -> Result<()> {
        let refused = |what, got: String, expected: &str| {
            Err(DenseError::Option {
                path: path.to_string(),
                what,
                got,
                expected: expected.to_string(),
            }
            .into())
        };
        if self.features.is_empty() || self.features.contains(&0) {
            let got = format!("{:?}", self.features);
            return refused(
                "DenseConfig::features",
                got,
                "one or more sizes of at least 1",
            );
        }
        if self.axis.is_empty() {
            return refused("DenseConfig::axis", "[]".into(), "one or more axes");
        }
        if self.stored_as_matrix && !self.batch_axis.is_empty() {
            let expected = "false for a layer with batch axes: fp8layers has none";
            return refused("DenseConfig::stored_as_matrix", "true".into(), expected);
        }
        Ok(())
    }
}

setters! { DenseConfig:
    with_axis(axis: into Vec<isize>);
    with_batch_axis(batch_axis: into Vec<isize>);
    with_bias(bias: bool);
    with_kernel_init(kernel_init: into Initializer);
    with_bias_init(bias_init: into Initializer);
    with_seed(seed: into Option<u64>);
    with_activation(activation: into Option<Activation>);
    with_stored_as_matrix(stored_as_matrix: bool);
    with_axis_rules(axis_rules: into Option<AxisRules>);
}

fn owned<'a, N: Into<Option<&'a str>>>(names: impl IntoIterator<Item = N>) -> AxisNames {
    let names = names.into_iter().map(Into::into);
    names
        .map(|name: Option<&str>| name.map(str::to_string))
        .collect()
}
