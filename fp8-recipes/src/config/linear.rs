//! The configuration of a linear layer in FP8: torchao's surface.

use fp8_candle::ops::AttentionProducts;
use fp8_core::FormatPair;
use fp8_core::setters;
use serde::{Deserialize, Serialize};

use super::{CastConfig, CastRounding, DelayedScaling, KeptActivations};

/// How one GEMM runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct GemmConfig {
    /// Lets an accelerator sum with less precision than f32. No effect on the CPU.
    pub use_fast_accum: bool,
}

impl GemmConfig {
    /// Sums in full f32, or with less precision where the hardware is faster that way.
    pub const fn new(use_fast_accum: bool) -> Self {
        Self { use_fast_accum }
    }
}

/// How a linear layer casts the operands of its three GEMMs, and how the GEMMs run.
///
/// The default is the recipe `tensorwise`. Setters return a changed copy and check nothing; [`Fp8LinearConfig::resolve`]
/// checks the whole.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::{CastConfig, Format, Fp8LinearConfig, RecipeName};
/// let config = Fp8LinearConfig::from_recipe_name(RecipeName::Tensorwise)
///     .with_grad_output(CastConfig::dynamic_tensorwise().with_format(Format::E4M3))
///     .with_emulate(true);
/// assert_eq!(config.resolve()?.grad_output.short(), "dyn_ten_e4m3");
/// # Ok::<(), fp8_recipes::config::ConfigError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct Fp8LinearConfig {
    /// Cast of x in `output = x w^T`.
    pub input: CastConfig,
    /// Cast of x in `grad_weight = grad_output^T x`; `None`: as `input`.
    pub input_for_grad_weight: Option<CastConfig>,
    /// Cast of w in `output = x w^T`.
    pub weight: CastConfig,
    /// Cast of w in `grad_input = grad_output w`; `None`: as `weight`.
    pub weight_for_grad_input: Option<CastConfig>,
    /// Cast of grad_output in `grad_input = grad_output w`.
    pub grad_output: CastConfig,
    /// Cast of grad_output in `grad_weight = grad_output^T x`; `None`: as `grad_output`.
    pub grad_output_for_grad_weight: Option<CastConfig>,
    /// Cast of the output, bias included. Casts of results serve studies of formats: a result is quantized and dequantized at
    /// once, with a scale of its own or none. Disabled by default, as are the next two.
    pub output: CastConfig,
    /// Cast of the gradient of x.
    pub grad_input: CastConfig,
    /// Cast of the gradient of w.
    pub grad_weight: CastConfig,
    /// How `output` is computed. Fast accumulation is on by default.
    pub gemm_output: GemmConfig,
    /// How `grad_input` is computed.
    pub gemm_grad_input: GemmConfig,
    /// How `grad_weight` is computed.
    pub gemm_grad_weight: GemmConfig,
    /// The rule of the delayed casts, and the formats of those that set none. No effect without delayed casts.
    pub delayed: DelayedScaling,
    /// The least amax of casts with [`ScalingType::Current`](super::ScalingType::Current). Default 0.
    pub amax_epsilon: f32,
    /// Rounds every `quant_scale` down to a power of two, so that scaling is exact.
    pub round_scales_to_power_of_two: bool,
    /// Accepted for compatibility: the inner dimension is always padded where a GEMM needs it,
    /// after the cast, so that it never changes a scale.
    pub pad_inner_dim: bool,
    /// Dequantizes and multiplies in f32 instead of multiplying FP8: a reference for tests.
    pub emulate: bool,
    /// torchao's `enable_fsdp_float8_all_gather`: weights of which each rank holds a part
    /// ([`ShardedVarMap`](fp8_ranks::ShardedVarMap)) travel as FP8 codes, a quarter of the bytes, where the weight has one scale
    /// (tensorwise: dynamic, current, delayed, static, unscaled). Other weights travel in f32, with a warning. In a training guard a
    /// layer whose weight is whole is an error, and so are delayed scales whose amaxes are not reduced over the ranks that hold the parts. Call
    /// [`precompute_float8_dynamic_scale_for_fsdp`](fp8_ranks::precompute_float8_dynamic_scale_for_fsdp) after each step.
    pub enable_fp8_all_gather: bool,
    /// Accepted with a warning for compatibility with torchao: the weight is cast once per change.
    pub force_recompute_fp8_weight_in_bwd: bool,
    /// OCP formats, or the FNUZ ones of some AMD hardware in their place. In JSON `ocp`, `fnuz`.
    pub format_pair: FormatPair,
    /// The seed of stochastic rounding.
    pub seed: u64,
    /// Rounds to f16 before each cast, as the FP8 Emulation Toolkit does: two roundings instead of one.
    pub via_f16: bool,
    /// Also casts the tensors of operators without a GEMM of their own that [`PrepareOptions::operators`](crate::PrepareOptions)
    /// has prepared: embeddings, norms, `nn::Matmul`, `nn::Add`, ..
    pub cast_operators: bool,
    /// The products of attention in FP8, in the modules of [`nn`](crate::nn) that have attention between their layers
    /// ([`MultiheadAttention`](crate::nn::MultiheadAttention), [`TransformerLayer`](crate::nn::TransformerLayer)): none by default. A
    /// module follows the recipe of its projection of results, and computes attention in high precision if that has no FP8 state. Scales
    /// come from the operands themselves, so attention has no state and no effect on that of layers. The settings of casts above do
    /// not apply to it, but [`FormatPair::Fnuz`] does. In JSON `{"attention": {"scores": true, ..}}`.
    pub attention: AttentionProducts,
    /// How transformer modules keep what their backward pass reads besides the codes of operands. The guard's recipe decides for a
    /// whole module, also where its layers have recipes of their own. Only modules that are one node of the graph have the choice: in
    /// layers called one by one, candle's graph keeps these tensors. See [`StepSummary::kept_bytes`](crate::StepSummary::kept_bytes).
    pub kept_activations: KeptActivations,
}

impl Default for Fp8LinearConfig {
    fn default() -> Self {
        Self {
            input: CastConfig::dynamic_tensorwise(),
            input_for_grad_weight: None,
            weight: CastConfig::dynamic_tensorwise(),
            weight_for_grad_input: None,
            grad_output: CastConfig::dynamic_tensorwise(),
            grad_output_for_grad_weight: None,
            gemm_output: GemmConfig::new(true),
            gemm_grad_input: GemmConfig::new(false),
            gemm_grad_weight: GemmConfig::new(false),
            delayed: DelayedScaling::default(),
            amax_epsilon: 0.,
            round_scales_to_power_of_two: false,
            pad_inner_dim: false,
            emulate: false,
            enable_fp8_all_gather: false,
            force_recompute_fp8_weight_in_bwd: false,
            format_pair: FormatPair::Ocp,
            output: CastConfig::disabled(),
            grad_input: CastConfig::disabled(),
            grad_weight: CastConfig::disabled(),
            seed: 0,
            via_f16: false,
            cast_operators: false,
            attention: AttentionProducts::none(),
            kept_activations: KeptActivations::HighPrecision,
        }
    }
}

impl Fp8LinearConfig {
    /// All casts of operands disabled: every GEMM in high precision.
    pub fn disabled() -> Self {
        Self::default().with_casts(CastConfig::disabled())
    }

    /// A copy that casts every operand like this, in both of its GEMMs.
    #[must_use]
    pub fn with_casts(self, cast: CastConfig) -> Self {
        Self {
            input: cast,
            input_for_grad_weight: None,
            weight: cast,
            weight_for_grad_input: None,
            grad_output: cast,
            grad_output_for_grad_weight: None,
            ..self
        }
    }

    /// A copy that rounds weights like this, in both of their GEMMs.
    ///
    /// Named recipes round them to the nearest code. The errors of the codes then stay the same for many steps, and training makes up for
    /// them, to the disadvantage of the weights themselves. With [`CastRounding::Stochastic`] any change of a weight draws new random
    /// bits (from [`Fp8LinearConfig::seed`] and the weight's values on the CPU, by a count of its casts on a GPU), so that the errors cancel out
    /// over the steps. Losses under FP8 are higher then, but a model that is written in high precision has learned more.
    ///
    /// ```
    /// # use fp8_recipes as fp8;
    /// use fp8::config::CastRounding;
    /// use fp8::{Fp8LinearConfig, RecipeName};
    /// let config = Fp8LinearConfig::from_recipe_name(RecipeName::Delayed)
    ///     .with_weight_rounding(CastRounding::Stochastic);
    /// assert_eq!(config.weight.rounding, CastRounding::Stochastic);
    /// assert_eq!(config.input.rounding, CastRounding::NearestEven);
    /// ```
    #[must_use]
    pub fn with_weight_rounding(self, rounding: CastRounding) -> Self {
        let other = self.weight_for_grad_input;
        Self {
            weight: self.weight.with_rounding(rounding),
            weight_for_grad_input: other.map(|cast| cast.with_rounding(rounding)),
            ..self
        }
    }
}

setters! { Fp8LinearConfig:
    with_input(input: CastConfig);
    with_input_for_grad_weight(input_for_grad_weight: Option<CastConfig>);
    with_weight(weight: CastConfig);
    with_weight_for_grad_input(weight_for_grad_input: Option<CastConfig>);
    with_grad_output(grad_output: CastConfig);
    with_grad_output_for_grad_weight(grad_output_for_grad_weight: Option<CastConfig>);
    with_output(output: CastConfig);
    with_grad_input(grad_input: CastConfig);
    with_grad_weight(grad_weight: CastConfig);
    with_gemm_output(gemm_output: GemmConfig);
    with_gemm_grad_input(gemm_grad_input: GemmConfig);
    with_gemm_grad_weight(gemm_grad_weight: GemmConfig);
    with_delayed(delayed: DelayedScaling);
    with_amax_epsilon(amax_epsilon: f32);
    with_round_scales_to_power_of_two(round_scales_to_power_of_two: bool);
    with_pad_inner_dim(pad_inner_dim: bool);
    with_emulate(emulate: bool);
    with_enable_fp8_all_gather(enable_fp8_all_gather: bool);
    with_force_recompute_fp8_weight_in_bwd(force_recompute_fp8_weight_in_bwd: bool);
    with_format_pair(format_pair: FormatPair);
    with_seed(seed: u64);
    with_via_f16(via_f16: bool);
    with_cast_operators(cast_operators: bool);
    with_attention(attention: AttentionProducts);
    with_kept_activations(kept_activations: KeptActivations);
}
