//! Models, recipes and guards.

use crate::Done;
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::checkpoint::{self, TrainingMeta};
use fp8::config::{
    self, AttentionProducts, CastConfig, CastRounding, DelayedFormat, GemmConfig, InitialScale,
    ResolvedConfig, ScalingType,
};
use fp8::emulation::{EmulationMethod, Emulator, EmulatorOptions};
use fp8::fp8_candle::device::{Backend, ScalePolicy};
use fp8::fp8_candle::state::SlotTensors;
use fp8::fp8_candle::{self, FirstScale, Fp8Tensor, LinearPlan, Quantizer, ScaleSource};
use fp8::fp8_core::scaled::Pow2Round;
use fp8::fp8_core::{
    self, AmaxCompute, Contraction, CustomAmax, DelayedRule, Format, FormatPair, Granularity,
    HistoryOrder, ScaleRounding,
};
use fp8::nn::{
    self, AttentionConfig, InputScaling, LayerInputs, LayerNormMlp, ModuleT, TransformerConfig,
};
use fp8::optim::scaled::ScaledAdamW;
use fp8::optim::{
    self, AdamWConfig, LossScalerConfig, MasterDType, ResumableOptimizer, SgdConfig, StepReport,
};
use fp8::scaled::{
    Array, Direction, Norm, Pow2Rounding, Scaled, ScaledError, ScaledOptions, ScaledTree,
    as_scaled, scaled_scope,
};
use fp8::{
    Autocast, AutocastHandle, CastStats, DelayedScaling, Fp8Layer, Fp8LinearConfig, Fp8State,
    GradAccumulator, LayerFilter, PrepareOptions, PrepareReport, PtqScheme, Recipe, RecipeName,
    ReductionGroup, Role, Slot, StateTable, StatsCurves, StatsLog, StatsRow, StepSummary, end_step,
    fp8_autocast, is_fp8_enabled, is_recomputing, load, prepare_fp8, quantize_model,
    save_calibrated, with_fp8,
};
use std::collections::BTreeSet;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;

fn preparing(model: &nn::Linear, config: Fp8LinearConfig, path: &Path, vb: VarBuilder<'_>) -> Done {
    let options = PrepareOptions::default();
    let options = PrepareOptions::with_recipe(options, "*", config)?;
    let options = PrepareOptions::with_off(options, "head")?;
    let report: PrepareReport = prepare_fp8(model, &options)?;
    let filter = LayerFilter::new().with_auto(RecipeName::Rowwise);
    let filter = filter.skip_paths(["head"]).with_custom(|_path, n, k| n > k);
    let _ = (config::auto_filter, Fp8State::own_recipe, Fp8State::slots);
    let _ = (
        nn::Linear::forward,
        Module::forward as fn(&nn::Linear, &Tensor) -> _,
    );
    let _ = (
        <nn::Linear as Fp8Layer>::roles,
        Fp8Layer::roles as fn(&nn::Linear) -> _,
    );
    save_calibrated(model, path)?;
    let _ = load::var_builder(&[path], DType::F32, &Device::Cpu)?;
    let _ = (checkpoint::fp8_state(model)?, nn::Linear::fp8_state(model));
    let _ = VarBuilder::get_with_hints(&vb, 3, "bias", candle_nn::Init::Const(0.))?;
    quantize_model(model, PtqScheme::E4m3, &options, || Ok(()))?;
    let pairs = nn::adjacent_batch_norms(model);
    let _ = nn::fold_batch_norms(model, &pairs)?;
    Ok(())
}

fn recipes(cast: CastConfig, gemm: GemmConfig, rule: DelayedScaling) -> Done {
    let _ = "rowwise".parse::<Recipe>()?;
    let _ = (Recipe::default(), Recipe::name, Recipe::resolve);
    let _ = [
        RecipeName::Tensorwise,
        RecipeName::Rowwise,
        RecipeName::RowwiseWithGwHp,
    ];
    let config = Fp8LinearConfig::from_recipe_name(RecipeName::Rowwise)
        .with_input(cast)
        .with_input_for_grad_weight(Some(cast))
        .with_weight(cast)
        .with_weight_for_grad_input(Some(cast))
        .with_grad_output(cast)
        .with_grad_output_for_grad_weight(Some(cast))
        .with_gemm_output(gemm)
        .with_gemm_grad_input(gemm)
        .with_gemm_grad_weight(gemm)
        .with_enable_fp8_all_gather(false)
        .with_force_recompute_fp8_weight_in_bwd(true)
        .with_pad_inner_dim(true)
        .with_emulate(true)
        .with_round_scales_to_power_of_two(true)
        .with_amax_epsilon(0.)
        .with_format_pair(FormatPair::Ocp)
        .with_format_pair(FormatPair::Fnuz)
        .with_grad_input(cast)
        .with_delayed(rule);
    let attention = AttentionProducts::all()
        .with_grad_probabilities(false)
        .with_grad_inputs(false);
    let config = Fp8LinearConfig::with_output(config, cast).with_attention(attention);
    let Fp8LinearConfig {
        enable_fp8_all_gather,
        input,
        weight,
        output,
        grad_output,
        grad_input,
        grad_weight,
        ..
    } = &config;
    let _ = Fp8LinearConfig::disabled();
    let resolved: ResolvedConfig = Fp8LinearConfig::resolve(&config)?;
    let _ = (
        resolved.to_string(),
        ResolvedConfig::cast,
        ResolvedConfig::gemm,
    );
    let _ = (
        ScalingType::Dynamic,
        ScalingType::Disabled,
        ScalingType::Static,
    );
    let _ = (
        CastConfig::dynamic_tensorwise,
        CastConfig::dynamic_rowwise,
        CastConfig::disabled,
    );
    let _ = (
        CastConfig::dynamic_blockwise,
        CastConfig::dynamic_mx,
        CastConfig::short,
    );
    let _ = (
        CastConfig::delayed_tensorwise,
        CastConfig::current_tensorwise,
        ScalingType::short,
    );
    let cast = cast
        .with_scaling(ScalingType::Dynamic)
        .with_granularity(Granularity::Rowwise);
    let cast = CastConfig::with_format(cast, Format::E4M3);
    let CastConfig {
        scaling,
        granularity,
        format,
        ..
    } = CastConfig::with_rounding(cast, CastRounding::Stochastic);
    let _ = (
        GemmConfig::new(true).use_fast_accum,
        config::Gemm::Output,
        config::Operand::Input,
    );
    let _: config::CastConfig = cast;
    let _: config::GemmConfig = gemm;
    Ok(())
}

fn delayed_scaling() {
    let named = (DelayedScaling::transformer_engine(), DelayedScaling::ipex());
    let _ = (named, DelayedScaling::fp8layers());
    let formats = [
        DelayedFormat::Hybrid,
        DelayedFormat::E4m3,
        DelayedFormat::E5m2,
    ];
    let of = CustomAmax::new("newest", |history: &[f32]| history[0]);
    let _ = DelayedScaling::flax()
        .with_margin(0)
        .with_format(formats[0])
        .with_amax_history_len(1024)
        .with_amax_compute(AmaxCompute::Max)
        .with_amax_compute(AmaxCompute::MostRecent)
        .with_amax_compute(AmaxCompute::Custom(of))
        .with_scale_rounding(ScaleRounding::PowerOfTwo)
        .with_reduce_amax(true)
        .with_initial(InitialScale::FirstBatch)
        .with_initial(InitialScale::One);
    let _ = (
        DelayedFormat::forward(formats[0]).max(),
        formats[0].backward().max(),
    );
    let _ = (
        Recipe::bind_amax_compute,
        HistoryOrder::Ring,
        DelayedRule::default(),
    );
}

fn guards(recipe: Recipe, group: Arc<dyn ReductionGroup>, stats: &CastStats) -> Done {
    let autocast = Autocast::new(recipe.clone()).training(false);
    let autocast = Autocast::enabled(Autocast::calibrating(autocast, true), true);
    let autocast = Autocast::with_stats(Autocast::reduction_group(autocast, group), stats);
    let guard = fp8_autocast(autocast)?;
    let summary: StepSummary = guard.close()?;
    let _ = StepSummary::non_finite(&summary)?;
    with_fp8(Autocast::disabled(), || Ok::<_, fp8::Error>(()))?;
    let handle = AutocastHandle::current();
    let _ = handle.open()?;
    let _ = (end_step()?, is_fp8_enabled(), is_recomputing());
    let _ = ReductionGroup::all_reduce_max as fn(&fp8::SingleProcess, &Tensor) -> _;
    let (report, taken) = (CastStats::report(stats), CastStats::take(stats));
    let StatsRow {
        amax,
        sqnr_db,
        saturated,
        saturated_share,
        underflowed,
        underflowed_share,
        quant_scale_min,
        quant_scale_max,
        ..
    } = &report.rows[0];
    let _: (Option<StatsLog>, Option<StatsCurves>) = (None, None);
    Ok(())
}
