//! Operators on activations that a recipe may cast: products, sums, quotients.

use super::shared_state::SharedState;
use crate::module::Visitor;
use crate::operator::{Fp8Operator, LayerKind};
use crate::plan::OperatorCasts;
use crate::state::Fp8State;
use crate::{Fp8Module, Result};
use candle_core::{Device, Tensor};
use std::sync::Arc;

macro_rules! operators {
    ($(
        $(#[$doc:meta])* $name:ident { new { $(#[$new:meta])* } forward { $(#[$forward:meta])* } } $compute:expr;
    )*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone)]
            pub struct $name {
                path: Arc<str>,
                state: SharedState,
            }

            impl $name {
                /// An operator called `path` in reports, patterns and statistics. Every place of a model has its own name.
                $(#[$new])*
                pub fn new(path: impl Into<Arc<str>>) -> Self {
                    Self {
                        path: path.into(),
                        state: SharedState::default(),
                    }
                }

                /// Applies it.
                ///
                /// # Errors
                /// If the shapes or dtypes do not fit each other.
                $(#[$forward])*
                pub fn forward(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
                    let compute: fn(&Tensor, &Tensor) -> candle_core::Result<Tensor> = $compute;
                    OperatorCasts::around(self.state.get(), |casts| match casts {
                        None => Ok(compute(a, b)?),
                        Some(casts) => {
                            let y = compute(&casts.input(a)?, &casts.input(b)?)?;
                            // The toolkit leaves the result of a batched product as it is.
                            match LayerKind::$name == LayerKind::Matmul && y.rank() > 2 {
                                true => Ok(y),
                                false => casts.output(&y),
                            }
                        }
                    })
                }
            }

            impl Fp8Operator for $name {
                fn path(&self) -> Option<&str> {
                    Some(&self.path)
                }

                fn kind(&self) -> LayerKind {
                    LayerKind::$name
                }

                fn device(&self) -> Option<&Device> {
                    None
                }

                fn fp8_state(&self) -> Option<Arc<Fp8State>> {
                    self.state.get()
                }

                fn set_fp8_state(&self, state: Option<Arc<Fp8State>>) {
                    self.state.set(state);
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
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fp8_recipes::{PrepareOptions, RecipeName, nn, prepare_fp8, with_fp8};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let scores = nn::Matmul::new("attention.scores");
    /// prepare_fp8(&scores, &PrepareOptions::default().with_operators(true))?;
    /// let (q, k) = (Tensor::new(&[[1.1f32]], &Device::Cpu)?, Tensor::new(&[[1f32]], &Device::Cpu)?);
    /// let y = with_fp8(RecipeName::Direct, || scores.forward(&q, &k))?;
    /// assert_eq!(y.to_vec2::<f32>()?, [[1.0]]); // E5M2 has 1 and 1.25
    /// # Ok(()) }
    /// ```
    Matmul {
        new {
        ///
        /// ```
        /// # use fp8_recipes as fp8;
        /// use fp8::{Fp8Operator, nn};
        /// assert_eq!(nn::Matmul::new("attention.scores").path(), Some("attention.scores"));
        /// ```
        }
        forward {
        ///
        /// ```
        /// # use candle_core::{Device, Tensor};
        /// # use fp8_recipes::nn;
        /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
        /// let x = Tensor::new(&[[1f32, 2.], [3., 4.]], &Device::Cpu)?;
        /// let y = nn::Matmul::new("square").forward(&x, &x)?;
        /// assert_eq!(y.to_vec2::<f32>()?, [[7., 10.], [15., 22.]]);
        /// # Ok(()) }
        /// ```
        }
    } |a, b| a.broadcast_matmul(b);
    /// The sum of two activations, with broadcasting: both and the result are cast where a recipe casts operators.
    ///
    /// ```
    /// # use fp8_recipes as fp8;
    /// # use candle_core::{Device, Tensor};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let residual = fp8::nn::Add::new("block.residual");
    /// let x = Tensor::new(&[1f32, 2.], &Device::Cpu)?;
    /// assert_eq!(residual.forward(&x, &x)?.to_vec1::<f32>()?, [2., 4.]);
    /// # Ok(()) }
    /// ```
    Add {
        new {
        ///
        /// ```
        /// # use fp8_recipes as fp8;
        /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
        /// use fp8::{PrepareOptions, nn, prepare_fp8};
        /// let add = nn::Add::new("block.residual");
        /// let report = prepare_fp8(&add, &PrepareOptions::default().with_operators(true))?;
        /// assert_eq!(report.layers[0].path.as_deref(), Some("block.residual"));
        /// # Ok(()) }
        /// ```
        }
        forward {
        ///
        /// ```
        /// # use candle_core::{Device, Tensor};
        /// # use fp8_recipes::nn;
        /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
        /// let (x, bias) = (Tensor::new(&[[1f32], [2.]], &Device::Cpu)?, Tensor::new(&[10f32, 20.], &Device::Cpu)?);
        /// let y = nn::Add::new("bias").forward(&x, &bias)?;
        /// assert_eq!(y.to_vec2::<f32>()?, [[11., 21.], [12., 22.]]);
        /// # Ok(()) }
        /// ```
        }
    } |a, b| a.broadcast_add(b);
    /// The elementwise product of two activations, with broadcasting: both and the result are cast where a recipe casts operators.
    ///
    /// ```
    /// # use fp8_recipes as fp8;
    /// # use candle_core::{Device, Tensor};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let gate = fp8::nn::Mul::new("mlp.gate");
    /// let x = Tensor::new(&[1f32, 3.], &Device::Cpu)?;
    /// assert_eq!(gate.forward(&x, &x)?.to_vec1::<f32>()?, [1., 9.]);
    /// # Ok(()) }
    /// ```
    Mul {
        new {
        ///
        /// ```
        /// # use fp8_recipes as fp8;
        /// use fp8::{Fp8Operator, LayerKind, nn};
        /// let gates = ["up.gate", "down.gate"].map(nn::Mul::new);
        /// assert_eq!((gates[1].path(), gates[1].kind()), (Some("down.gate"), LayerKind::Mul));
        /// ```
        }
        forward {
        ///
        /// ```
        /// # use candle_core::{Device, Tensor};
        /// # use fp8_recipes::nn;
        /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
        /// let gate = nn::Mul::new("gate");
        /// let (x, y) = (Tensor::ones(3, candle_core::DType::F32, &Device::Cpu)?, Tensor::new(&[1f32, 2.], &Device::Cpu)?);
        /// assert!(gate.forward(&x, &y).is_err());
        /// assert_eq!(gate.forward(&y, &y)?.to_vec1::<f32>()?, [1., 4.]);
        /// # Ok(()) }
        /// ```
        }
    } |a, b| a.broadcast_mul(b);
    /// The elementwise quotient of two activations, with broadcasting: both and the result are cast where a recipe casts operators.
    ///
    /// ```
    /// # use fp8_recipes as fp8;
    /// # use candle_core::{Device, Tensor};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let ratio = fp8::nn::Div::new("ratio");
    /// let x = Tensor::new(&[1f32, 3.], &Device::Cpu)?;
    /// assert_eq!(ratio.forward(&x, &x)?.to_vec1::<f32>()?, [1., 1.]);
    /// # Ok(()) }
    /// ```
    Div {
        new {
        ///
        /// ```
        /// # use fp8_recipes as fp8;
        /// use fp8::{Fp8Operator, nn};
        /// // Prepared by `prepare_fp8`, not here.
        /// assert!(nn::Div::new("attention.temperature").fp8_state().is_none());
        /// ```
        }
        forward {
        ///
        /// ```
        /// # use candle_core::{Device, Tensor};
        /// # use fp8_recipes::nn;
        /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
        /// let (x, y) = (Tensor::new(&[6f32, 8.], &Device::Cpu)?, Tensor::new(&[2f32], &Device::Cpu)?);
        /// assert_eq!(nn::Div::new("ratio").forward(&x, &y)?.to_vec1::<f32>()?, [3., 4.]);
        /// # Ok(()) }
        /// ```
        }
    } |a, b| a.broadcast_div(b);
}
