//! Tensors, layers, training, emulation, scaled arithmetic.

use crate::Done;
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::checkpoint::{self, TrainingMeta};
use fp8::config::{
    self, CastConfig, CastRounding, DelayedFormat, GemmConfig, InitialScale, ResolvedConfig,
    ScalingType,
};
use fp8::emulation::{EmulationMethod, Emulator, EmulatorOptions};
use fp8::fp8_candle::device::{Backend, ScalePolicy};
use fp8::fp8_candle::state::SlotTensors;
use fp8::fp8_candle::{self, CastSpec, FirstScale, Fp8Tensor, LinearPlan, Quantizer, ScaleSource};
use fp8::fp8_core::scaled::Pow2Round;
use fp8::fp8_core::{
    self, AmaxCompute, Contraction, CustomAmax, DelayedRule, Format, FormatPair, Granularity,
    HistoryOrder, ScaleRounding,
};
use fp8::nn::{
    self, Activation, AttentionConfig, AxisRules, DenseConfig, Init, Initializer, InputScaling,
    LayerInputs, LayerNormMlp, ModuleT, TransformerConfig,
};
use fp8::optim::scaled::ScaledAdamW;
use fp8::optim::{
    self, AdamW, AdamWConfig, LossScalerConfig, MasterDType, ResumableOptimizer, SgdConfig,
    StepReport,
};
use fp8::ranks;
use fp8::scaled::{
    Array, Direction, Norm, Pow2Rounding, Scaled, ScaledError, ScaledOptions, ScaledTree,
    as_scaled, scaled_scope,
};
use fp8::{
    Autocast, AutocastHandle, CastStats, DelayedScaling, Fp8Layer, Fp8LinearConfig, Fp8State,
    GradAccumulator, LayerFilter, PrepareOptions, PrepareReport, PtqScheme, Recipe, RecipeName,
    ReductionGroup, Role, Slot, StateTable, StatsCurves, StatsLog, StatsRow, StepSummary,
    TrainState, end_step, fp8_autocast, is_fp8_enabled, is_recomputing, load, prepare_fp8,
    quantize_model, save_calibrated, with_fp8,
};
use std::collections::BTreeSet;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;

fn tensors(x: &Tensor, quantizer: Quantizer, slot: Slot, rule: DelayedRule) -> Done {
    let _ = (
        Role::Input,
        Role::Weight,
        Role::GradOutput,
        Format::ALL,
        Format::max,
    );
    let contractions = [
        Contraction::Cols,
        Contraction::Rows,
        fp8_core::Contraction::Cols,
    ];
    let rows_cols = Granularity::Blockwise { rows: 1, cols: 128 };
    let all = [
        Granularity::Tensorwise,
        Granularity::Rowwise,
        Granularity::Mx,
        rows_cols,
    ];
    let _ = Granularity::grid(all[0], 2, 2, contractions[0]);
    let quantized = Quantizer::quantize(&quantizer, x, Contraction::Cols)?;
    let _ = (
        quantized.quant_scale,
        CastSpec::is_symmetric(&quantizer.spec),
    );
    let dynamic = Quantizer::dynamic(Format::E5M2, Granularity::Mx).with_power_of_two(true);
    let _ = Quantizer::with_amax_bound(dynamic, 3.);
    let x8 = Fp8Tensor::quantize(x, &quantizer, Contraction::Cols)?;
    let _: fp8_candle::Fp8Tensor = Fp8Tensor::to_device(&x8, &Device::Cpu)?.clone();
    let _ = (
        Fp8Tensor::codes,
        Fp8Tensor::dequant_scale,
        Fp8Tensor::dequantize,
    );
    let _ = (
        Fp8Tensor::format,
        Fp8Tensor::contraction,
        Fp8Tensor::from_parts,
    );
    let _ = (
        fp8_candle::fake_quantize,
        fp8_candle::grad_cast,
        fp8_candle::fp8_linear,
        fp8_candle::scaled_mm,
        fp8_candle::scaled_mm_fp8,
        Fp8Tensor::quantize_with_scale,
    );
    let _ = fp8_candle::cast_values_and_gradient;
    let _ = <dyn fp8_candle::device::Backend>::gemm;
    let SlotTensors {
        quant_scale,
        dequant_scale,
        amax_history,
        ..
    } = Slot::tensors(&slot)?;
    let first = FirstScale::One;
    let _ = ScaleSource::Delayed { slot, rule, first };
    let policy = ScalePolicy::Current { eps: 0. };
    let _ = ScaleSource::Current {
        policy,
        power_of_two: true,
    };
    let _ = ScaleSource::Fixed { dequant_scale };
    let of_call = |plan: LinearPlan| {
        let LinearPlan { emulate, .. } = plan;
    };
    let _: Option<(
        fp8_candle::GemmPlan,
        fp8_candle::LinearPlan,
        fp8_candle::PackedWeight,
    )> = None;
    let _: Option<(fp8_candle::WeightCache, StateTable, nn::StaticWeight)> = None;
    let _: [InputScaling; 2] = [InputScaling::None, InputScaling::DynamicMx];
    let _ = (
        fp8_core::amax::<f32>,
        fp8_core::amax_rows::<f32>,
        fp8_core::encode::<f32>,
    );
    let _ = (
        fp8_core::decode::<f32>,
        fp8_core::dynamic_quant_scale,
        fp8_core::update_slot,
    );
    let _ = (
        fp8_core::delayed_quant_scale,
        fp8_core::floor_to_power_of_two,
    );
    let _ = (
        fp8_core::mx_dequant_scale_rceil,
        fp8_core::mx_dequant_scale_floor,
    );
    let _ = (
        fp8_core::AMAX_EPSILON,
        fp8_core::MX_BLOCK,
        candle_core::DType::F32,
    );
    let _ = (
        Tensor::is_contiguous,
        Tensor::to_dtype,
        x.reshape(4)?,
        x.index_select(x, 0)?,
    );
    #[cfg(feature = "cuda")]
    let _ = fp8_candle::device::cuda_info(x.device())?.capability;
    Ok(())
}

fn layers(x: &Tensor, vb: VarBuilder<'_>) -> Done {
    let _: (nn::Linear, nn::Linear) = (
        nn::linear(4, 4, vb.pp("a"))?,
        nn::linear_no_bias(4, 4, vb.pp("b"))?,
    );
    let _: Option<(
        nn::LayerNorm,
        nn::RmsNorm,
        nn::LayerNormLinear,
        nn::LayerNormMlp,
    )> = None;
    let _: Option<(nn::MultiheadAttention, nn::TransformerLayer)> = None;
    let _ = LayerNormMlp::with_recomputation;
    let _ = (
        nn::ops::attention,
        nn::ops::gelu,
        nn::ops::cross_entropy,
        nn::ops::rope,
    );
    let _ = (nn::ops::layer_norm, nn::ops::rms_norm);
    let _ = "swiglu".parse::<nn::ops::Activation>();
    let of = |config: TransformerConfig, inputs: LayerInputs<'_>| {
        let TransformerConfig {
            norm,
            hidden_act,
            norm_placement,
            hidden_dropout,
            bias,
            fused_qkv,
            attention,
            ..
        } = config;
        let AttentionConfig {
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            sliding_window,
            causal,
            attention_dropout,
            ..
        } = attention;
        let LayerInputs { key_lengths, .. } = inputs;
    };
    let _ = nn::checkpoint(|x| x.sqr(), x)?;
    let _ = nn::checkpoint_many(|inputs| inputs[0].sqr(), &[x])?;
    Ok(())
}

fn dense(
    x: &Tensor,
    vb: VarBuilder<'static>,
    model: nn::Linear,
    vars: VarMap,
    recipe: Option<Recipe>,
    options: PrepareOptions,
    path: &Path,
) -> Done {
    let (mesh_axes, rules) = (["model"], [("mlp", Some("model")), ("embed", None)]);
    let config = DenseConfig::new([4, 5])
        .with_axis([1, -1])
        .with_batch_axis([0])
        .with_bias(false)
        .with_stored_as_matrix(true)
        .with_kernel_init(Initializer::lecun_normal())
        .with_bias_init(Init::Const(0.))
        .with_activation(Activation::Relu)
        .with_kernel_axes(["embed", "mlp"])
        .with_bias_axes(["mlp"])
        .with_axis_rules(AxisRules::new(mesh_axes, rules)?);
    let _ = nn::Dense::new(config.clone(), vb.clone()).forward(x)?;
    let layer = nn::dense_general(&[2, 3, 6, 7], config.clone(), vb)?;
    let _ = (
        nn::DenseGeneral::kernel_mesh_axes(&layer),
        AxisRules::assign,
    );
    let _ = nn::DenseGeneral::from_matrix(x.clone(), None, &[3, 7], config)?;
    let tx = |vars: &VarMap| optim::AdamW::from_varmap(vars, AdamWConfig::default());
    let mut state = TrainState::create(model, vars, recipe, &options, tx)?;
    let of = |model: &nn::Linear| Ok::<_, fp8::Error>(model.forward(x)?.sum_all()?);
    let (_, grads) = TrainState::gradients(&state, of)?;
    TrainState::apply_gradients(&mut state, &grads)?;
    TrainState::save(&state, path)?;
    TrainState::resume(&mut state, path)?;
    let _ = (TrainState::step(&state), TrainState::vars(&state));
    let _ = TrainState::optimizer(&state);
    Ok(())
}

fn training(
    path: &Path,
    model: &nn::Linear,
    vars: &VarMap,
    meta: &TrainingMeta,
    mut optimizer: optim::AdamW,
) -> Done {
    let _: (Option<optim::Sgd>, Option<checkpoint::TrainingMeta>) = (None, None);
    let AdamWConfig {
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
        master_weights,
        moments,
        master_dtype,
        ..
    } = AdamWConfig::default();
    let sgd = SgdConfig::with_momentum(SgdConfig::default(), 0.9);
    let sgd = sgd.with_dampening(0.).with_nesterov(true);
    let _ = SgdConfig::with_masters(sgd, MasterDType::F16);
    let _ = optim::AdamW::from_varmap(vars, AdamWConfig::default())?;
    let grads = Tensor::zeros(1, DType::F32, &Device::Cpu)?.backward()?;
    let report: StepReport = optimizer.apply(&grads)?;
    let _ = StepReport::grad_norm(&report)?;
    let state = optimizer.state()?;
    optimizer.load_state(&state)?;
    let _ = GradAccumulator::new(vars);
    checkpoint::save_training(path, model, vars, &optimizer, meta)?;
    checkpoint::resume_training(path, model, vars, &mut optimizer, None)?;
    checkpoint::save_fp8_state(path, model)?;
    checkpoint::load_fp8_state(path, model)?;
    Ok(())
}

fn emulation(model: &nn::Linear, stats: &CastStats, path: &Path, loss: &Tensor) -> Done {
    let options = EmulatorOptions::with_exempt(EmulatorOptions::default(), "conv1");
    let options = EmulatorOptions::with_output_fused(options, "conv2");
    let options = EmulatorOptions::with_loss_scaler(options, LossScalerConfig::default());
    let options = EmulatorOptions::with_stats(options, stats, 100);
    let options = EmulatorOptions::with_stats_log(options, path, 100);
    let options = EmulatorOptions::with_via_f16(options, true);
    let _ = [EmulationMethod::Direct, EmulationMethod::ScaledHybrid];
    let mut emulator = Emulator::initialize(model, EmulationMethod::Direct, options)?;
    with_fp8(emulator.autocast(), || model.forward(loss))?;
    let mut optimizer = optim::Sgd::from_varmap(&VarMap::new(), SgdConfig::default())?;
    let _ = Emulator::optimizer_step(&mut emulator, &mut optimizer, loss)?;
    let _ = Emulator::optimizer_step_with_grads::<optim::Sgd>;
    Emulator::update_global_steps(&mut emulator, 3);
    let _ = (
        Emulator::cast_table(&emulator)?,
        Emulator::report(&emulator),
    );
    let _ = Emulator::with_optimizer(&mut emulator, &mut optimizer);
    Ok(())
}

fn scaled_function<A: Array>(x: &A) -> fp8::Result<A> {
    x.neg()
}

fn scaled(x: &Tensor, tree: ScaledTree, dtype: DType) -> Done {
    let _scope = scaled_scope(ScaledOptions::default().with_scale_rounding(Pow2Rounding::None));
    let _ = [
        Pow2Rounding::Down,
        Pow2Rounding::Up,
        Pow2Rounding::Stochastic,
    ];
    let _ = (fp8_core::scaled::constant_rule, Pow2Round::round);
    let a: fp8::scaled::Scaled = as_scaled(x, 2.)?;
    let b = Scaled::from_parts(x, 2.)?;
    let _ = (
        a.data()?,
        a.scale().is_zero(),
        a.dtype(),
        a.dims(),
        a.elem_count(),
        a.rank(),
    );
    let _ = (a.to_tensor(dtype)?, a.astype(dtype)?, a.data_and_scale()?);
    let _ = (
        Scaled::constant(3., dtype, &Device::Cpu)?,
        ScaledError::Zero { op: "div" },
    );
    let _ = (a.cast_on_forward(dtype)?, a.cast_on_backward(dtype)?);
    let _ = (
        a.dynamic_rescale_max()?,
        a.dynamic_rescale_l1()?,
        a.dynamic_rescale_l2()?,
    );
    let _ = a
        .rescale(Norm::Max, Direction::Forward)?
        .rescale(Norm::Max, Direction::Backward)?;
    let _ = a.inspect_backward(|_cotangent| Ok(()));
    let _ = (a.set_scaling(2.)?, a.stop_scaling()?, a.rebalance(2.)?);
    let _ = ScaledTree::iter(&tree).count();
    let _ = (tree.map(|x| Ok(x.clone()))?, tree.astype(dtype)?);
    let _ = (a.backward()?, None::<ScaledAdamW>);
    Ok(())
}

fn layers_in_parts(mesh: &ranks::DeviceMesh, x: &Tensor, vb: VarBuilder<'_>) -> Done {
    let _: nn::ParallelLinear = nn::column_parallel_linear(16, 8, vb.pp("up"), mesh, "model")?;
    let _ = nn::row_parallel_linear(8, 16, vb.pp("down"), mesh, "model")?;
    let _ = ranks::graph::gathered(x, mesh.group())?;
    let _ = ranks::graph::sum_of_summands(x, mesh.group())?;
    Ok(())
}

fn parameters_in_parts(group: &ranks::ProcessGroup) -> Done {
    let map = ranks::ShardedVarMap::new(group, &Device::Cpu);
    let _: Option<ranks::ShardedVar> = map.get("fc.weight");
    let _ = AdamW::from_sharded(&map, AdamWConfig::default())?;
    let _ = ranks::precompute_float8_dynamic_scale_for_fsdp(&map)?;
    Ok(())
}

fn tokens_one_by_one(layer: &nn::MultiheadAttention, x: &Tensor) -> Done {
    let mut cache = nn::KeyValues::default();
    let _: Tensor = layer.forward_cached(x, &LayerInputs::default(), &mut cache)?;
    Ok(())
}

fn casts_that_are_seen() {
    let observer = fp8::CastObserver::new(|_event| ());
    let _ = Autocast::with_cast_observer(Autocast::default(), &observer);
}

#[cfg(feature = "cuda")]
fn recorded<F>(_: fp8_candle::RecordedStep<F>) {}
