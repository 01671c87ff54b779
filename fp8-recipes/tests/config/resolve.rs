//! What recipes resolve to, and what is refused and how it is named.

use crate::helpers::*;
use fp8_core::{AmaxCompute, Format, FormatPair, ScaleRounding};
use fp8_recipes::config::*;

#[test]
fn named_recipes_print_as_torchao() {
    let cases = [
        (
            "tensorwise",
            "i:dyn_ten_e4m3,w:dyn_ten_e4m3,go:dyn_ten_e5m2",
        ),
        ("rowwise", "i:dyn_axs_e4m3,w:dyn_axs_e4m3,go:dyn_axs_e4m3"),
        (
            "rowwise_with_gw_hp",
            "i:dyn_axs_e4m3,w:dyn_axs_e4m3,go:dyn_axs_e4m3,i_gw:dis_ten_e4m3,w_gi:dyn_ten_e4m3,go_gw:dis_ten_e4m3",
        ),
        ("delayed", "i:del_ten_e4m3,w:del_ten_e4m3,go:del_ten_e5m2"),
        ("current", "i:cur_ten_e4m3,w:cur_ten_e4m3,go:cur_ten_e5m2"),
        (
            "blockwise",
            "i:dyn_blk1x128_e4m3,w:dyn_blk128x128_e4m3,go:dyn_blk1x128_e4m3",
        ),
        ("mxfp8", "i:dyn_mx_e4m3,w:dyn_mx_e4m3,go:dyn_mx_e4m3"),
        (
            "direct",
            "i:uns_ten_e5m2_inf,w:uns_ten_e5m2_inf,go:uns_ten_e5m2_sr_inf,o:uns_ten_e5m2_inf,gi:uns_ten_e5m2_sr_inf,gw:uns_ten_e5m2_sr_inf",
        ),
        (
            "hybrid",
            "i:cur_ten_e4m3,w:cur_ten_e4m3,go:uns_ten_e5m2_sr_inf,o:cur_ten_e4m3,gi:uns_ten_e5m2_sr_inf,gw:uns_ten_e5m2_sr_inf",
        ),
    ];
    for (name, short) in cases {
        assert_eq!(resolved(name).to_string(), short);
        let recipe: Recipe = name.parse().unwrap();
        assert_eq!(recipe.to_string(), name);
        assert_eq!(recipe.name().unwrap().to_string(), name);
        assert_eq!(Recipe::try_from(name).unwrap(), recipe);
    }
    assert_eq!(cases.len(), RecipeName::ALL.len());
}

#[test]
fn named_recipes_have_the_settings_of_the_contract() {
    let tensorwise = resolved("tensorwise");
    assert!(!tensorwise.round_scales_to_power_of_two);
    assert!(tensorwise.delayed.is_none());
    assert!(tensorwise.gemm(Gemm::Output).use_fast_accum);
    assert!(!tensorwise.gemm(Gemm::GradInput).use_fast_accum);
    assert!(!tensorwise.gemm(Gemm::GradWeight).use_fast_accum);
    assert!(resolved("rowwise").round_scales_to_power_of_two);

    let gw_hp = resolved("rowwise_with_gw_hp");
    assert!(gw_hp.round_scales_to_power_of_two);
    assert_eq!(
        Gemm::ALL.map(|gemm| gw_hp.is_fp8(gemm)),
        [true, true, false]
    );

    let delayed = resolved("delayed");
    assert_eq!(delayed.delayed, Some(DelayedScaling::default()));
    assert_eq!(delayed, Recipe::default().resolve().unwrap());
    let linear = Fp8LinearConfig::from_recipe_name(RecipeName::Delayed);
    assert_eq!(linear.resolve().unwrap(), delayed);

    for name in ["blockwise", "mxfp8"] {
        let config = resolved(name);
        let fast = Gemm::ALL.map(|gemm| config.gemm(gemm).use_fast_accum);
        assert_eq!(fast, [false; 3], "{name}: peers add up in full here");
    }
    assert!(resolved("blockwise").round_scales_to_power_of_two);
    assert_eq!(resolved("current").amax_epsilon, 0.);
}

#[test]
fn delayed_casts_follow_one_rule_beside_other_casts() {
    let rule = DelayedScaling::default()
        .with_amax_history_len(16)
        .with_margin(1)
        .with_format(DelayedFormat::E5m2);
    let config = Fp8LinearConfig::from_recipe_name(RecipeName::Delayed)
        .with_delayed(rule.clone())
        .with_grad_output(CastConfig::dynamic_rowwise().with_format(Format::E4M3));
    let recipe = Recipe::from(config.clone());
    let resolved = recipe.resolve().unwrap();
    assert_eq!(resolved.delayed, Some(rule.clone()));
    assert_eq!(
        resolved.to_string(),
        "i:del_ten_e5m2,w:del_ten_e5m2,go:dyn_axs_e4m3"
    );
    assert_eq!(
        recipe.to_string(),
        "linear(i:del_ten_e5m2,w:del_ten_e5m2,go:dyn_axs_e4m3; \
         delayed(margin=1,format=e5m2,amax_history_len=16))"
    );
    // One way to say it: the rule alone, and six delayed casts under it.
    let all = Fp8LinearConfig::from_recipe_name(RecipeName::Delayed).with_delayed(rule.clone());
    assert_eq!(Recipe::from(all), Recipe::from(rule.clone()));
    assert_eq!(Recipe::from(rule.clone()).to_string(), rule.to_string());
    // A rule that no cast follows is not checked for anything, one that some follow is.
    let bad = config.with_delayed(rule.with_amax_history_len(0));
    assert!(matches!(
        bad.resolve(),
        Err(ConfigError::HistoryLength { got: 0, .. })
    ));
    let unused = bad.with_casts(CastConfig::dynamic_tensorwise());
    assert!(unused.resolve().is_ok());
}

#[test]
fn a_second_use_that_is_not_set_copies_the_first() {
    let config = Fp8LinearConfig::default()
        .with_input(CastConfig::dynamic_rowwise())
        .with_grad_output(DYN.with_format(Format::E4M3));
    let resolved = config.resolve().unwrap();
    assert_eq!(resolved.input_for_grad_weight, resolved.input);
    assert_eq!(resolved.weight_for_grad_input, resolved.weight);
    assert_eq!(resolved.grad_output_for_grad_weight, resolved.grad_output);
    assert_eq!(resolved.grad_output.format, Some(Format::E4M3));
    // A second use without a format has that of the first.
    let second = config.with_grad_output_for_grad_weight(Some(DYN));
    let second = second.resolve().unwrap().grad_output_for_grad_weight;
    assert_eq!(second.format, Some(Format::E4M3));
}

#[test]
fn a_pair_of_formats_replaces_all_formats() {
    let name = RecipeName::Rowwise;
    let config = Fp8LinearConfig::from_recipe_name(name).with_format_pair(FormatPair::Fnuz);
    let short = "i:dyn_axs_e4m3fnuz,w:dyn_axs_e4m3fnuz,go:dyn_axs_e4m3fnuz";
    assert_eq!(config.resolve().unwrap().to_string(), short);
    let config = Fp8LinearConfig::default().with_format_pair(FormatPair::Fnuz);
    assert_eq!(
        config.resolve().unwrap().grad_output.format,
        Some(Format::E5M2Fnuz)
    );
}

#[test]
fn delayed_formats_and_rule() {
    let recipe = |format| Recipe::from(DelayedScaling::default().with_format(format));
    let short = |format| recipe(format).resolve().unwrap().to_string();
    assert_eq!(
        short(DelayedFormat::E4m3),
        "i:del_ten_e4m3,w:del_ten_e4m3,go:del_ten_e4m3"
    );
    assert_eq!(
        short(DelayedFormat::E5m2),
        "i:del_ten_e5m2,w:del_ten_e5m2,go:del_ten_e5m2"
    );

    let delayed = DelayedScaling::default()
        .with_margin(2)
        .with_amax_compute(AmaxCompute::MostRecent)
        .with_scale_rounding(ScaleRounding::PowerOfTwo)
        .with_amax_history_len(16)
        .with_initial(InitialScale::FirstBatch)
        .with_reduce_amax(false);
    let rule = delayed.rule();
    assert_eq!(
        (rule.margin, rule.amax_compute),
        (2, AmaxCompute::MostRecent)
    );
    assert_eq!(rule.scale_rounding, ScaleRounding::PowerOfTwo);
    assert_eq!(
        delayed.to_string(),
        "delayed(margin=2,amax_history_len=16,amax_compute=most_recent,\
         scale_rounding=power_of_two,initial=first_batch,reduce_amax=false)"
    );
    let resolved = delayed.resolve().unwrap();
    assert_eq!(resolved.delayed, Some(delayed));
}

/// The rules themselves are held against traces of these libraries in fp8-core.
#[test]
fn presets_of_other_libraries() {
    let defaults = DelayedScaling::default();
    assert_eq!(DelayedScaling::transformer_engine(), defaults);
    assert_eq!(DelayedScaling::flax(), defaults);
    let (fp8layers, ipex) = (DelayedScaling::fp8layers(), DelayedScaling::ipex());
    for (preset, len) in [(&fp8layers, 16), (&ipex, 1024)] {
        assert_eq!(preset.amax_history_len, len);
        let power_of_two = ScaleRounding::PowerOfTwo;
        let rule = fp8_core::DelayedRule::default().with_scale_rounding(power_of_two);
        assert_eq!(preset.rule(), rule);
        assert_eq!(preset.resolve().unwrap().delayed.as_ref(), Some(preset));
        let json = serde_json::to_string(preset).unwrap();
        assert_eq!(
            &serde_json::from_str::<DelayedScaling>(&json).unwrap(),
            preset
        );
    }
}

#[test]
fn errors_name_the_value() {
    let unknown = "rowwiese".parse::<Recipe>().unwrap_err().to_string();
    assert_eq!(
        unknown,
        "unknown recipe `rowwiese`; \
         valid recipes are tensorwise, rowwise, rowwise_with_gw_hp, delayed, current, blockwise, \
         mxfp8, direct, hybrid; did you mean rowwise?"
    );

    let base = Fp8LinearConfig::default;
    let row = CastConfig::dynamic_rowwise();
    let off = CastConfig::disabled();
    let cases = [
        (
            base().with_weight(row.with_scaling(ScalingType::Delayed)),
            "weight: rowwise scaling must be dynamic, got delayed",
        ),
        (
            base().with_input_for_grad_weight(Some(row.with_scaling(ScalingType::Static))),
            "input_for_grad_weight: rowwise scaling must be dynamic, got static",
        ),
        (
            Fp8LinearConfig::disabled().with_weight(row.with_scaling(ScalingType::Disabled)),
            "weight: rowwise scaling must be dynamic, got disabled",
        ),
        (
            base().with_input(off).with_input_for_grad_weight(Some(DYN)),
            "GEMM output: the cast of input is disabled and that of weight is not",
        ),
        (
            base().with_weight_for_grad_input(Some(off)),
            "GEMM grad_input: the cast of weight_for_grad_input is disabled \
             and that of grad_output is not",
        ),
        (
            base().with_grad_output_for_grad_weight(Some(off)),
            "GEMM grad_weight: the cast of grad_output_for_grad_weight is disabled \
             and that of input_for_grad_weight is not",
        ),
        (
            base().with_weight_for_grad_input(Some(DYN.with_format(Format::E5M2))),
            "weight is cast to e4m3 but weight_for_grad_input to e5m2; \
             an operand has one format in both GEMMs",
        ),
        (
            base().with_weight(DYN.with_format(Format::E4M3Fnuz)),
            "GEMM output: e4m3 and e4m3fnuz do not belong to the same pair of formats",
        ),
        (
            base().with_input(CastConfig::dynamic_blockwise(0, 128)),
            "input: a block of 0x128 elements is empty",
        ),
        (
            Fp8LinearConfig::from_recipe_name(RecipeName::Delayed).with_cast_operators(true),
            "input: operators are cast too (cast_operators), with dynamic, current or unscaled \
             scaling, got delayed",
        ),
        (
            Fp8LinearConfig::from(DelayedScaling::default().with_reduce_amax(false))
                .with_enable_fp8_all_gather(true),
            "weight: delayed codes travel between ranks (enable_fp8_all_gather), so all ranks must \
             have one scale, but reduce_amax = false",
        ),
    ];
    for (config, message) in cases {
        let recipe = Recipe::from(config.clone());
        assert!(recipe.to_string().contains(message), "{recipe}");
        assert_eq!(error(config).to_string(), message);
    }
    let gemm = error(base().with_weight_for_grad_input(Some(off)));
    assert!(matches!(
        gemm,
        ConfigError::HalfDisabled {
            gemm: Gemm::GradInput,
            ..
        }
    ));

    let delayed = DelayedScaling::default();
    let limit = 1 << 20;
    for got in [0, limit + 1, 100_000_000_000, usize::MAX] {
        let length = delayed.clone().with_amax_history_len(got).resolve();
        let error = length.unwrap_err();
        assert_eq!(error, ConfigError::HistoryLength { got, limit });
        let text =
            format!("amax_history_len = {got} is not allowed: it must be between 1 and {limit}");
        assert_eq!(error.to_string(), text);
    }
    assert!(
        delayed
            .clone()
            .with_amax_history_len(limit)
            .resolve()
            .is_ok()
    );
    for margin in [65, -65, i32::MIN, i32::MAX] {
        let error = delayed.clone().with_margin(margin).resolve().unwrap_err();
        assert_eq!(
            error,
            ConfigError::Margin {
                got: margin,
                limit: 64
            }
        );
    }
    assert!(delayed.clone().with_margin(64).resolve().is_ok());
    for (got, shown) in [(-1., "-1e0"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        let refused = error(base().with_amax_epsilon(got));
        assert!(matches!(refused, ConfigError::AmaxEpsilon { .. }));
        let text =
            format!("amax_epsilon = {shown} is not allowed: it must be finite and not negative");
        assert_eq!(refused.to_string(), text);
    }
    assert!(base().with_amax_epsilon(0.5).resolve().is_ok());
    let scaling = "dynamik".parse::<ScalingType>().unwrap_err();
    assert!(scaling.to_string().contains("dynamik"), "{scaling}");
}

/// Only codes with delayed scales need the reduction.
#[test]
fn codes_travel_without_a_reduction_where_no_history_makes_their_scales() {
    let unreduced = DelayedScaling::default().with_reduce_amax(false);
    let delayed = Fp8LinearConfig::from(unreduced.clone());
    assert!(delayed.resolve().is_ok());
    let dynamic = Fp8LinearConfig::default().with_delayed(unreduced);
    let only_weights = |weight| delayed.clone().with_weight(weight);
    for config in [dynamic, only_weights(CastConfig::dynamic_tensorwise())] {
        assert!(config.with_enable_fp8_all_gather(true).resolve().is_ok());
    }
}

#[test]
fn all_disabled_is_consistent() {
    let resolved = Fp8LinearConfig::disabled().resolve().unwrap();
    assert!(Gemm::ALL.iter().all(|gemm| !resolved.is_fp8(*gemm)));
    assert_eq!(
        resolved.to_string(),
        "i:dis_ten_e4m3,w:dis_ten_e4m3,go:dis_ten_e5m2"
    );
}
