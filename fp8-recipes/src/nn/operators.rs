//! Operators on activations that a recipe may cast: products, sums, quotients.

use super::identity::{SharedState, path_and_state};
use crate::autocast::{Fp8State, OperatorCasts};
use crate::module::{Fp8Operator, LayerKind, Visitor};
use crate::{Fp8Module, Result};
use candle_core::{Device, Tensor};
use std::sync::Arc;

macro_rules! operators {
    ($(
        $(#[$doc:meta])* $name:ident = $compute:expr;
    )*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone)]
            pub struct $name {
                path: Option<Arc<str>>,
                state: SharedState,
            }

            impl $name {
                /// An operator called `path` in reports, patterns and statistics. Every place of a model has its own name.
                pub fn new(path: impl Into<Arc<str>>) -> Self {
                    Self {
                        path: Some(path.into()),
                        state: SharedState::default(),
                    }
                }

                /// Applies it.
                ///
                /// # Errors
                /// If the shapes or dtypes are incompatible.
                pub fn forward(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
                    let (kind, path) = (LayerKind::$name, self.path.as_deref());
                    let _span = tracing::trace_span!("operator", %kind, path).entered();
                    let compute: fn(&Tensor, &Tensor) -> candle_core::Result<Tensor> = $compute;
                    OperatorCasts::around(self.state.prepared(), path, |casts| match casts {
                        None => Ok(compute(a, b)?),
                        Some(casts) => {
                            let y = compute(&casts.input(a)?, &casts.input(b)?)?;
                            // The FP8 Emulation Toolkit does not cast the result of a batched product either.
                            match LayerKind::$name == LayerKind::Matmul && y.rank() > 2 {
                                true => Ok(y),
                                false => casts.output(&y),
                            }
                        }
                    })
                }
            }

            impl Fp8Operator for $name {
            path_and_state!();

                fn kind(&self) -> LayerKind {
                    LayerKind::$name
                }

                fn device(&self) -> Option<&Device> {
                    None
                }

            }

            impl Fp8Module for $name {
                fn visit(&self, visitor: &mut dyn Visitor) {
                    visitor.operator(self);
                }
            }
        )*
    };
}

operators! {
    /// The matrix product of two activations, with candle's broadcasting of leading dimensions: both are cast, and the result of a
    /// product of plain matrices, where a recipe casts operators.
    Matmul = |a, b| a.broadcast_matmul(b);
    /// The sum of two activations, with broadcasting: both and the result are cast where a recipe casts operators.
    Add = |a, b| a.broadcast_add(b);
    /// The elementwise product of two activations, with broadcasting: both and the result are cast where a recipe casts operators.
    Mul = |a, b| a.broadcast_mul(b);
    /// The elementwise quotient of two activations, with broadcasting: both and the result are cast where a recipe casts operators.
    Div = |a, b| a.broadcast_div(b);
}
