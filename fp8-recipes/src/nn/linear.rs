//! `candle_nn::linear`: the linear layer, candle-nn's outside a guard, FP8 inside one.

use super::calibrate::calibrate;
use super::shared_state::SharedState;
use super::static_weight::is_unscaled_fp8;
use super::{StaticWeight, join};
use crate::autocast::{Context, Fp8State, Mode, current, linear_plan};
use crate::error::{Error, Result};
use crate::module::Fp8Layer;
use crate::scaled::plain_value;
use crate::{Fp8Module, Visitor};
use candle_core::{DType, Module, Tensor};
use candle_nn::VarBuilder;
use fp8_candle::{LinearPlan, LinearWeight, Role, fp8_linear};
use fp8_scaled::ScaledVar;
use std::sync::Arc;

/// How a layer computes in one call.
pub(super) enum Call {
    /// In high precision, or from the FP8 weight of a checkpoint.
    Plain,
    /// By the guard's recipe.
    Fp8(Arc<Fp8State>, Box<LinearPlan>),
}

impl Call {
    pub(super) fn plan(&self) -> Option<&LinearPlan> {
        match self {
            Self::Plain => None,
            Self::Fp8(_, plan) => Some(plan),
        }
    }
}

#[derive(Debug, Clone)]
enum Weight {
    HighPrecision(Tensor),
    Fp8(Box<StaticWeight>),
}

/// `y = x weight^T + bias`, with the name, constructors and signatures of `candle_nn::Linear`, but for
/// [`Linear::weight`], which can fail.
///
/// - Outside a guard, inside a disabled one, or when the layer was not prepared: bit-equal to candle-nn's.
/// - Prepared ([`crate::prepare_fp8`]) and inside an enabled guard: FP8 by the guard's recipe.
/// - Loaded from an FP8 checkpoint: holds the codes only and computes in FP8 (static inference), except inside a
///   disabled guard, which multiplies by the dequantized weight.
///
/// x: `[.., in_features]` of f32, bf16 or f16; the result has x's dtype. A weight or bias of another dtype is cast to
/// x's. Clones share weight and FP8 state.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Weight,
    bias: Option<Tensor>,
    path: Option<Arc<str>>,
    state: SharedState,
}

impl Linear {
    /// `weight`: `[out_features, in_features]`; `bias`: `[out_features]`.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self {
            weight: Weight::HighPrecision(weight),
            bias,
            path: None,
            state: SharedState::default(),
        }
    }

    /// [`Linear::new`] under the name that `with_tracing::Linear` gives it.
    pub fn from_weights(weights: Tensor, bias: Option<Tensor>) -> Self {
        Self::new(weights, bias)
    }

    /// A layer whose weight is FP8 codes.
    pub fn from_static(
        weight: StaticWeight,
        bias: Option<Tensor>,
        path: impl Into<Arc<str>>,
    ) -> Self {
        Self {
            weight: Weight::Fp8(weight.into()),
            bias,
            path: Some(path.into()),
            state: SharedState::default(),
        }
    }

    /// Names the layer as in a checkpoint. Layers built from a VarBuilder know their name.
    ///
    /// It is another layer then than those that it was cloned from: it has no FP8 state and shares none.
    pub fn with_path(mut self, path: impl Into<Arc<str>>) -> Self {
        self.path = Some(path.into());
        self.state = SharedState::default();
        self
    }

    /// The value of the weight, `[out_features, in_features]`.
    ///
    /// The tensor itself, which an optimizer may hold as a variable. Of a layer loaded in FP8, the dequantized value in
    /// f32, computed at every call and not kept; its codes and scales are in [`Linear::static_weight`]. Of a scaled parameter
    /// ([`Linear::scaled_weight`]) the value in f32, computed at every call.
    ///
    /// # Errors
    /// If a device fails to dequantize.
    pub fn weight(&self) -> Result<Tensor> {
        match &self.weight {
            Weight::HighPrecision(weight) => plain_value(weight, DType::F32),
            Weight::Fp8(weight) => Ok(weight.weight().dequantize(DType::F32)?),
        }
    }

    /// The scaled parameter of a layer that was built on a [`ScaledVarMap`](crate::scaled::ScaledVarMap), None of others.
    ///
    /// ```
    /// # use fp8_recipes as fp8;
    /// use candle_core::{DType, Device};
    /// use fp8::{nn, scaled::ScaledVarMap};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let vars = ScaledVarMap::new(DType::F16, &Device::Cpu)?;
    /// let fc = nn::linear(4, 8, vars.var_builder().pp("fc"))?;
    /// let weight = fc.scaled_weight().unwrap();
    /// assert_eq!(weight.name(), "fc.weight");
    /// assert_eq!(fc.weight()?.flatten_all()?.to_vec1::<f32>()?, weight.value().reshape(&[32])?.to_vec1()?);
    /// # Ok(()) }
    /// ```
    pub fn scaled_weight(&self) -> Option<ScaledVar> {
        match &self.weight {
            Weight::HighPrecision(weight) => ScaledVar::of(weight),
            Weight::Fp8(_) => None,
        }
    }

    /// The FP8 weight of a layer loaded from an FP8 checkpoint.
    pub fn static_weight(&self) -> Option<&StaticWeight> {
        match &self.weight {
            Weight::HighPrecision(_) => None,
            Weight::Fp8(weight) => Some(weight),
        }
    }

    /// The bias, `[out_features]`. Of a scaled parameter its data, from which [`ScaledVar::of`] finds the value.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Path in the checkpoint: empty at its root, None if unknown.
    pub fn path(&self) -> Option<&str> {
        self.path.as_deref()
    }

    /// FP8 state, if the layer is prepared.
    pub fn fp8_state(&self) -> Option<Arc<Fp8State>> {
        self.state.get()
    }

    /// (out_features, in_features).
    pub fn features(&self) -> (usize, usize) {
        let dims = match &self.weight {
            Weight::HighPrecision(weight) => weight.dims(),
            Weight::Fp8(weight) => weight.weight().dims(),
        };
        match *dims {
            [out_features, in_features] => (out_features, in_features),
            _ => (0, 0),
        }
    }

    /// Bytes that the weight and its scales hold.
    pub fn weight_bytes(&self) -> usize {
        Fp8Layer::weight_bytes(self)
    }

    /// The path in messages.
    fn shown_path(&self) -> &str {
        self.path().unwrap_or("without a path")
    }

    fn check_input(&self, dims: &[usize], dtype: DType) -> Result<()> {
        let (_, in_features) = self.features();
        let got = dims.last().copied().unwrap_or(0);
        if got != in_features {
            return Err(fp8_candle::Error::InFeatures {
                path: self.shown_path().to_string(),
                expected: in_features,
                got,
                shape: dims.to_vec(),
            }
            .into());
        }
        if !dtype.is_float() || dtype == DType::F8E4M3 {
            return Err(Error::TensorDType {
                tensor: join(self.shown_path(), "input"),
                got: dtype.as_str().into(),
                expected: "f32, bf16, f16 or f64".into(),
            });
        }
        Ok(())
    }

    /// The bias, or its value where it is a scaled parameter.
    fn plain_bias(&self, dtype: DType) -> Result<Option<Tensor>> {
        let value = |bias| plain_value(bias, dtype);
        self.bias.as_ref().map(value).transpose()
    }

    /// candle-nn's layer.
    fn plain(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let weight = weight.to_dtype(x.dtype())?;
        let bias = self.plain_bias(x.dtype())?;
        let bias = bias.map(|bias| bias.to_dtype(x.dtype())).transpose()?;
        let inner = candle_nn::Linear::new(weight, bias);
        if x.rank() == 1 {
            return Ok(inner.forward(&x.unsqueeze(0)?)?.squeeze(0)?);
        }
        Ok(inner.forward(x)?)
    }

    /// How this layer computes here: it signs in with the step, or is calibrated.
    pub(super) fn call(&self, x: &Tensor) -> Result<Call> {
        self.call_of(x.dims(), x.dtype(), || Ok(x.clone()))
    }

    /// [`Linear::call`] with an input of these sizes, which is computed where its values matter.
    pub(super) fn call_of(
        &self,
        dims: &[usize],
        dtype: DType,
        x: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Call> {
        self.check_input(dims, dtype)?;
        let Some(context) = current() else {
            return Ok(Call::Plain);
        };
        if let Weight::Fp8(_) = &self.weight {
            return Ok(Call::Plain);
        }
        let signed_in = match self.state.get() {
            Some(state) => context.sign_in(&state)?.map(|step| (state, step)),
            None => {
                context.note_unprepared(self.path());
                None
            }
        };
        let Some((state, step)) = signed_in else {
            return Ok(Call::Plain);
        };
        if context.settings.mode == Mode::Calibrate {
            // In f32, as an export reads the weight: its value need not fit in the dtype of the input.
            calibrate(&state, &step, &x()?, || self.weight())?;
            return Ok(Call::Plain);
        }
        let plan = linear_plan(&state, &step)?;
        Ok(Call::Fp8(state, Box::new(plan)))
    }

    /// The weight, unless it is FP8 codes or a scaled parameter.
    pub(super) fn plain_weight(&self) -> Option<&Tensor> {
        match &self.weight {
            Weight::HighPrecision(weight) => Some(weight),
            Weight::Fp8(_) => None,
        }
    }

    /// How a layer whose weight is FP8 codes computes here, as a function that gives the same outside of the guard as well; None for
    /// other weights.
    pub(super) fn static_forward(
        &self,
    ) -> Option<impl Fn(&Tensor, Option<&Tensor>) -> Result<Tensor> + Send + Sync + use<>> {
        let Weight::Fp8(weight) = &self.weight else {
            return None;
        };
        let context = current();
        let mode = context.as_ref().map(|context| context.settings.mode);
        if let Some(context) = context.filter(|_| mode != Some(Mode::HighPrecision)) {
            context.count_static_cast();
        }
        let (own, weight) = (self.clone(), weight.clone());
        Some(move |x: &Tensor, bias: Option<&Tensor>| match mode {
            Some(Mode::HighPrecision) => {
                let bias = bias.cloned();
                let own = Self {
                    bias,
                    ..own.clone()
                };
                own.plain(x, &weight.weight().dequantize(x.dtype())?)
            }
            _ => weight.forward(x, bias),
        })
    }

    fn in_context(&self, x: &Tensor, context: &Context) -> Result<Tensor> {
        match &self.weight {
            Weight::Fp8(weight) if context.settings.mode == Mode::HighPrecision => {
                return self.plain(x, &weight.weight().dequantize(x.dtype())?);
            }
            Weight::Fp8(weight) => {
                context.count_static_cast();
                return weight.forward(x, self.bias.as_ref());
            }
            Weight::HighPrecision(_) => {}
        }
        let weight = match &self.weight {
            Weight::HighPrecision(weight) => &plain_value(weight, x.dtype())?,
            Weight::Fp8(weight) => return weight.forward(x, self.bias.as_ref()),
        };
        match self.call(x)? {
            Call::Plain => self.plain(x, weight),
            Call::Fp8(state, plan) => {
                let weight = LinearWeight::HighPrecision(weight, Some(&state.cache));
                let bias = self.plain_bias(x.dtype())?;
                Ok(fp8_linear(x, weight, bias.as_ref(), &plan)?)
            }
        }
    }

    /// The same layer without gradients for its weight and bias; scaled parameters stay as they are.
    pub(super) fn frozen(mut self) -> Self {
        if self.scaled_weight().is_none() {
            self.bias = self.bias.map(|bias| bias.detach());
            if let Weight::HighPrecision(weight) = &mut self.weight {
                *weight = weight.detach();
            }
        }
        self
    }

    /// The outputs of layers that read the same input, in their order: what each gives alone.
    ///
    /// # Errors
    /// Those of the first layer that fails.
    pub fn forward_joint(layers: &[Self], x: &Tensor) -> candle_core::Result<Vec<Tensor>> {
        layers.iter().map(|layer| layer.forward(x)).collect()
    }

    /// [`Module::forward`] with an error that can be matched: candle's `Result` carries only the message of ours.
    ///
    /// # Errors
    /// [`fp8_candle::Error::InFeatures`] if the last dimension of `x` is another one, [`Error::TensorDType`] if `x` is not of
    /// a floating point dtype, and what the guard's recipe finds wrong.
    pub fn try_forward(&self, x: &Tensor) -> Result<Tensor> {
        let _span = tracing::trace_span!("linear", path = self.path()).entered();
        let context = current();
        let y =
            self.check_input(x.dims(), x.dtype())
                .and_then(|()| match (&context, &self.weight) {
                    (Some(context), _) => self.in_context(x, context),
                    (None, Weight::HighPrecision(weight)) => {
                        self.plain(x, &plain_value(weight, x.dtype())?)
                    }
                    (None, Weight::Fp8(weight)) => weight.forward(x, self.bias.as_ref()),
                });
        if let (Err(_), Some(context)) = (&y, &context) {
            context.note_failure();
        }
        y
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        Ok(self.try_forward(x)?)
    }
}

impl Fp8Layer for Linear {
    fn path(&self) -> Option<&str> {
        Linear::path(self)
    }

    fn roles(&self) -> &'static [Role] {
        &[Role::Input, Role::Weight, Role::GradOutput]
    }

    fn fp8_state(&self) -> Option<Arc<Fp8State>> {
        self.state.get()
    }

    fn set_fp8_state(&self, state: Option<Arc<Fp8State>>) {
        self.state.set(state);
    }

    fn held_weight(&self) -> &Tensor {
        match &self.weight {
            Weight::HighPrecision(weight) => weight,
            Weight::Fp8(weight) => weight.weight().held(),
        }
    }

    fn static_weight(&self) -> Option<&StaticWeight> {
        Linear::static_weight(self)
    }

    fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    fn features(&self) -> (usize, usize) {
        Linear::features(self)
    }
}

impl Fp8Module for Linear {
    fn visit(&self, visitor: &mut dyn Visitor) {
        visitor.layer(self);
    }
}

/// Creates a linear layer with a bias, with candle-nn's initialization, or loads it. Where `vb` holds an FP8 weight
/// with its `weight_scale`, the layer keeps the codes only.
///
/// # Errors
/// If a tensor is missing or has another shape, or holds FP8 values without their scale.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use fp8::nn;
///
/// # fn main() -> candle_core::Result<()> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let layer = nn::linear(64, 32, vb.pp("fc"))?;
/// assert_eq!(layer.path(), Some("fc")); // its name in reports, patterns and files
/// let x = Tensor::randn(0f32, 1., (8, 64), &Device::Cpu)?;
/// assert_eq!(layer.forward(&x)?.dims(), [8, 32]);
/// # Ok(()) }
/// ```
pub fn linear(in_dim: usize, out_dim: usize, vb: VarBuilder<'_>) -> candle_core::Result<Linear> {
    linear_b(in_dim, out_dim, true, vb)
}

/// [`linear`] without a bias.
pub fn linear_no_bias(
    in_dim: usize,
    out_dim: usize,
    vb: VarBuilder<'_>,
) -> candle_core::Result<Linear> {
    linear_b(in_dim, out_dim, false, vb)
}

/// [`linear`] with or without a bias.
pub fn linear_b(
    in_dim: usize,
    out_dim: usize,
    bias: bool,
    vb: VarBuilder<'_>,
) -> candle_core::Result<Linear> {
    let path: Arc<str> = vb.prefix().into();
    if let Some(weight) = StaticWeight::load(out_dim, in_dim, &vb)? {
        let bias = if bias {
            Some(vb.get(out_dim, "bias")?)
        } else {
            None
        };
        return Ok(Linear::from_static(weight, bias, path));
    }
    // Our own VarBuilder has looked at the dtypes of the file.
    let checked = crate::load::is_checked(&vb);
    let inner = candle_nn::linear_b(in_dim, out_dim, bias, vb)?;
    if !checked && is_unscaled_fp8(inner.weight())? {
        return Err(Error::MissingScale {
            tensor: join(&path, "weight"),
            missing: join(&path, "weight_scale"),
            path: None,
        }
        .into());
    }
    Ok(Linear::new(inner.weight().clone(), inner.bias().cloned()).with_path(path))
}
