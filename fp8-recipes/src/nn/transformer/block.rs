//! A transformer module: one body, computed layer by layer or as a single node of candle's graph.

use super::inputs::LayerInputs;
use super::key_values::KeyValues;
use super::{LayerNorm, Linear};
use crate::array::{Array, InNode};
use crate::autocast::{Mode, current};
use crate::error::Result;
use crate::nn::call::noting_failure;
use candle_core::{DType, Tensor};
use fp8_candle::WideNode;

/// A module made of norms and linear layers.
pub(super) trait Block {
    /// The name of its node.
    const NAME: &'static str;

    fn norms(&self) -> Vec<&LayerNorm>;

    fn linears(&self) -> Vec<&Linear>;

    /// Whether it becomes a single node where that is possible.
    fn wants_single_node(&self) -> bool;

    /// Whether its node computes inner tensors again in the backward pass.
    fn recomputes(&self) -> bool {
        false
    }

    /// What it computes, on arrays of any kind.
    fn body<A: Array>(
        &self,
        x: &A,
        inputs: &LayerInputs<'_>,
        cache: Option<&mut KeyValues<A>>,
    ) -> Result<A>;

    /// The result for `x`: a plain tensor goes through a single node where that is possible.
    fn run<A: Array>(&self, x: &A, inputs: &LayerInputs<'_>) -> Result<A> {
        let y = x.by_kind(
            |x| match self.fits_in_node(x) {
                false => self.body(x, inputs, None),
                true => {
                    let groups = current().and_then(|context| context.kept_groups());
                    let node = WideNode::new(Self::NAME)
                        .with_recomputation(self.recomputes())
                        .with_kept_groups(groups);
                    InNode::run(node, x, |x| self.body(x, inputs, None))
                }
            },
            |x| self.body(x, inputs, None),
            |x| self.body(x, inputs, None),
        );
        noting_failure(current().as_ref(), y)
    }

    /// The result for `x`, whose tokens follow those in `cache`; after a failure the cache is as before.
    fn run_cached<A: Array>(
        &self,
        x: &A,
        inputs: &LayerInputs<'_>,
        cache: &mut KeyValues<A>,
    ) -> Result<A> {
        let y = cache.extended(|cache| self.body(x, inputs, Some(cache)));
        noting_failure(current().as_ref(), y)
    }

    /// Whether a single node can compute this: its products have results up to f32, its parameters are plain tensors, and it
    /// casts nothing around norms.
    fn fits_in_node(&self, x: &Tensor) -> bool {
        let casts = current().is_some_and(|context| context.settings.mode == Mode::Fp8);
        let norm_fits = |norm: &LayerNorm| !(casts && norm.is_prepared()) && norm.is_plain();
        let linear_fits = |linear: &Linear| linear.scaled_weight().is_none();
        self.wants_single_node()
            && x.dtype() != DType::F64
            && self.norms().into_iter().all(norm_fits)
            && self.linears().into_iter().all(linear_fits)
    }
}

/// The methods that run a module: `tokens` for modules that read the inputs of a call, `features` for those that need none.
macro_rules! calls {
    (tokens $type:ident) => {
        impl $type {
            /// Computes the module: `x` and result are `[batch, tokens, hidden_size]` of one dtype.
            ///
            /// # Errors
            /// If x has another shape, or heads and features of the layers are incompatible; errors of the layers.
            pub fn forward(&self, x: &Tensor, inputs: &LayerInputs<'_>) -> Result<Tensor> {
                self.run(x, inputs)
            }

            /// [`Self::forward`] on plain or scaled tensors.
            ///
            /// # Errors
            /// As [`Self::forward`].
            pub fn forward_array<A: Array>(&self, x: &A, inputs: &LayerInputs<'_>) -> Result<A> {
                self.run(x, inputs)
            }

            /// [`Self::forward_array`] for tokens that follow those in `cache`, to which their keys and values are appended.
            /// [`LayerInputs::key_lengths`] count from the first token that the cache holds; with a sliding window it holds the
            /// last ones.
            ///
            /// # Errors
            /// As [`Self::forward`]; the cache then stays as it was.
            pub fn forward_cached<A: Array>(
                &self,
                x: &A,
                inputs: &LayerInputs<'_>,
                cache: &mut KeyValues<A>,
            ) -> Result<A> {
                self.run_cached(x, inputs, cache)
            }
        }
    };
    (features $type:ident) => {
        impl $type {
            /// [`Module::forward`] with an error that can be matched.
            ///
            /// # Errors
            /// Those of its layers.
            pub fn try_forward(&self, x: &Tensor) -> Result<Tensor> {
                self.forward_array(x)
            }

            /// [`Self::try_forward`] on plain or scaled tensors.
            ///
            /// # Errors
            /// Those of its layers.
            pub fn forward_array<A: Array>(&self, x: &A) -> Result<A> {
                self.run(x, &LayerInputs::default())
            }
        }

        impl Module for $type {
            fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
                Ok(self.try_forward(x)?)
            }
        }

        fp8_core::setters! { $type:
            /// A copy that is one node of the graph, or one node per layer.
            with_single_node(single_node: bool);
        }
    };
}
pub(super) use calls;

/// The error of a module with other layers than it is made of: a bug.
pub(super) fn missing<T>(what: &'static str) -> Result<T> {
    Err(candle_core::Error::Msg(what.into()).into())
}
