//! JSON: fields left out, errors, round trips of any configuration.

use crate::helpers::*;
use fp8_core::{AmaxCompute, CustomAmax, Format, FormatPair, Granularity, ScaleRounding};
use fp8_recipes::config::*;
use proptest::prelude::*;

#[test]
fn fields_may_be_left_out_of_json() {
    let recipe: Recipe = serde_json::from_str(r#"{"delayed": {"amax_history_len": 16}}"#).unwrap();
    assert_eq!(
        recipe,
        DelayedScaling::default().with_amax_history_len(16).into()
    );
    let json = r#"{"linear": {"input": {"granularity": "axiswise"}, "emulate": true}}"#;
    let recipe: Recipe = serde_json::from_str(json).unwrap();
    let config = Fp8LinearConfig::default().with_input(CastConfig::dynamic_rowwise());
    assert_eq!(recipe, config.with_emulate(true).into());
    for name in RecipeName::ALL {
        let recipe: Recipe = serde_json::from_str(&format!("\"{name}\"")).unwrap();
        assert_eq!(recipe, name.into());
        assert_eq!(round_trip(&recipe), recipe);
    }
    let set = CastConfig::dynamic_blockwise(1, 128).with_format(Format::E5M2);
    let text = serde_json::to_string(&set).unwrap();
    assert_eq!(serde_json::from_str::<CastConfig>(&text).unwrap(), set);
}

#[test]
fn kept_activations_are_a_part_of_a_recipe() {
    let delayed = Fp8LinearConfig::from_recipe_name(RecipeName::Delayed);
    let cases = [
        (r#""high_precision""#, KeptActivations::HighPrecision, ""),
        (
            r#"{"fp8": {"group_size": 32}}"#,
            KeptActivations::Fp8 { group_size: 32 },
            ",kept:fp8:32",
        ),
        (r#"{"fp8": {}}"#, KeptActivations::fp8(), ",kept:fp8:128"),
    ];
    for (json, kept, printed) in cases {
        let read: KeptActivations = serde_json::from_str(json).unwrap();
        assert_eq!(read, kept);
        let recipe = Recipe::from(delayed.clone().with_kept_activations(kept));
        assert_eq!(round_trip(&recipe), recipe);
        let resolved = recipe.resolve().unwrap();
        assert_eq!(resolved.kept_activations, kept);
        let text = resolved.to_string();
        assert!(
            text.ends_with(&format!("go:del_ten_e5m2{printed}")),
            "{text}"
        );
    }
    let empty = KeptActivations::Fp8 { group_size: 0 };
    let error = delayed.with_kept_activations(empty).resolve().unwrap_err();
    assert_eq!(error, ConfigError::EmptyGroup { got: 0 });
    assert!(error.to_string().contains("group_size = 0"), "{error}");
}

#[test]
fn json_errors_name_the_field_or_value() {
    let cases = [
        (r#"{"delayed": {"amax_len": 16}}"#, "amax_len"),
        (r#"{"delayed": {"format": "e3m4"}}"#, "e3m4"),
        (r#"{"delayed": {"amax_compute": "median"}}"#, "median"),
        (r#"{"delayed": {"scale_rounding": "up"}}"#, "up"),
        (r#"{"delayed": {"initial": "two"}}"#, "two"),
        (r#"{"linear": {"inputs": {}}}"#, "inputs"),
        (r#"{"linear": {"input": {"format": "bf16"}}}"#, "bf16"),
        (
            r#"{"linear": {"input": {"granularity": "columnwise"}}}"#,
            "columnwise",
        ),
        (
            r#"{"linear": {"input": {"granularity": {"blockwise": {"rows": 1, "cols": 64, "columns": 32}}}}}"#,
            "columns",
        ),
        (
            r#"{"linear": {"input": {"scaling": "sometimes"}}}"#,
            "sometimes",
        ),
        (r#"{"linear": {"input": {"scale": 1}}}"#, "scale"),
        (r#"{"linear": {"gemm_output": {"fast": true}}}"#, "fast"),
        (r#"{"linear": {"format_pair": "intel"}}"#, "intel"),
        (r#"{"linear": {"kept_activations": "fp9"}}"#, "fp9"),
        (
            r#"{"linear": {"kept_activations": {"fp8": {"group": 32}}}}"#,
            "group",
        ),
        (
            r#"{"linear": {"kept_activations": {"fp8": {"group_size": 0}}}}"#,
            "nonzero",
        ),
        (r#"{"convolution": {}}"#, "convolution"),
        (r#""rowwiese""#, "rowwiese"),
        ("17", "17"),
    ];
    for (json, named) in cases {
        let error = json_error::<Recipe>(json);
        assert!(error.contains(named), "{json}: {error}");
    }
}

#[test]
fn a_custom_amax_is_saved_by_name_and_found_again() {
    let last = CustomAmax::new("last", |history: &[f32]| history[0]);
    let custom = AmaxCompute::Custom(last.clone());
    let delayed = DelayedScaling::default().with_amax_compute(custom);
    assert_eq!(delayed.clone(), delayed);
    let json = serde_json::to_string(&delayed).unwrap();
    assert!(json.contains(r#""custom:last""#), "{json}");
    let read: DelayedScaling = serde_json::from_str(&json).unwrap();
    assert_eq!(read, delayed, "the same name");
    let error = read.resolve().unwrap_err().to_string();
    assert!(error.contains("custom:last"), "{error}");
    let bound = Recipe::from(read.clone()).bind_amax_compute(&last).unwrap();
    assert_eq!(bound, delayed.into());
    assert!(bound.resolve().is_ok());
    let other = CustomAmax::new("first", |history: &[f32]| history[0]);
    for recipe in [
        Recipe::from(read),
        Recipe::default(),
        RecipeName::Rowwise.into(),
    ] {
        let error = recipe.bind_amax_compute(&other).unwrap_err().to_string();
        assert!(error.contains("`first`"), "{error}");
    }
}

fn granularity() -> impl Strategy<Value = Granularity> {
    prop_oneof![
        Just(Granularity::Tensorwise),
        Just(Granularity::Rowwise),
        Just(Granularity::Mx),
        (1usize..300, 1usize..300).prop_map(|(rows, cols)| Granularity::Blockwise { rows, cols }),
    ]
}

fn cast() -> impl Strategy<Value = CastConfig> {
    let scaling = prop::sample::select(vec![
        ScalingType::Dynamic,
        ScalingType::Delayed,
        ScalingType::Current,
        ScalingType::Static,
        ScalingType::Disabled,
    ]);
    let format = prop::option::of(prop::sample::select(Format::ALL.to_vec()));
    (scaling, granularity(), format).prop_map(|(scaling, granularity, format)| {
        let cast = CastConfig::new(scaling, granularity);
        format.map_or(cast, |format| cast.with_format(format))
    })
}

prop_compose! {
    fn linear()(
        casts in prop::array::uniform3(cast()),
        second in prop::array::uniform3(prop::option::of(cast())),
        flags in prop::array::uniform7(any::<bool>()),
        fnuz in any::<bool>(),
        delayed in delayed(),
        amax_epsilon in 0f32..1.,
    ) -> Fp8LinearConfig {
        Fp8LinearConfig::default()
            .with_delayed(delayed)
            .with_amax_epsilon(amax_epsilon)
            .with_input(casts[0])
            .with_weight(casts[1])
            .with_grad_output(casts[2])
            .with_input_for_grad_weight(second[0])
            .with_weight_for_grad_input(second[1])
            .with_grad_output_for_grad_weight(second[2])
            .with_gemm_output(GemmConfig::new(flags[0]))
            .with_gemm_grad_input(GemmConfig::new(flags[1]))
            .with_gemm_grad_weight(GemmConfig::new(flags[2]))
            .with_round_scales_to_power_of_two(flags[3])
            .with_pad_inner_dim(flags[4])
            .with_emulate(flags[5])
            .with_force_recompute_fp8_weight_in_bwd(flags[6])
            .with_format_pair(if fnuz { FormatPair::Fnuz } else { FormatPair::Ocp })
    }
}

prop_compose! {
    fn delayed()(
        margin in -64i32..=64,
        format in prop::sample::select(vec![
            DelayedFormat::Hybrid, DelayedFormat::E4m3, DelayedFormat::E5m2,
        ]),
        length in 1usize..5000,
        flags in prop::array::uniform4(any::<bool>()),
    ) -> DelayedScaling {
        let pick = |first: bool, scale| if first { ScaleRounding::Exact } else { scale };
        DelayedScaling::default()
            .with_margin(margin)
            .with_format(format)
            .with_amax_history_len(length)
            .with_amax_compute(if flags[0] { AmaxCompute::Max } else { AmaxCompute::MostRecent })
            .with_scale_rounding(pick(flags[1], ScaleRounding::PowerOfTwo))
            .with_initial(if flags[2] { InitialScale::One } else { InitialScale::FirstBatch })
            .with_reduce_amax(flags[3])
    }
}

/// A cast with a granularity that its scaling can have.
fn enabled_cast() -> impl Strategy<Value = CastConfig> {
    let scaling = prop::sample::select(vec![
        ScalingType::Dynamic,
        ScalingType::Delayed,
        ScalingType::Current,
        ScalingType::Static,
    ]);
    (scaling, granularity()).prop_map(|(scaling, granularity)| {
        let fits = match granularity {
            Granularity::Mx => scaling == ScalingType::Dynamic,
            _ => matches!(scaling, ScalingType::Dynamic | ScalingType::Current),
        };
        let granularity = if fits {
            granularity
        } else {
            Granularity::Tensorwise
        };
        CastConfig::new(scaling, granularity)
    })
}

prop_compose! {
    /// A configuration that is accepted, and which GEMMs compute in FP8. Of those of [`linear`] nearly all are refused.
    fn accepted()(
        config in linear(),
        enabled in prop::array::uniform3(any::<bool>()),
        casts in prop::array::uniform6(enabled_cast()),
        formats in prop::array::uniform3(
            prop::option::of(prop::sample::select(vec![Format::E4M3, Format::E5M2])),
        ),
    ) -> (Fp8LinearConfig, [bool; 3]) {
        // The format of both uses of an operand is the same, and a GEMM casts both operands or neither.
        let cast = |use_of: usize, gemm: usize, operand: usize| match (enabled[gemm], formats[operand]) {
            (false, _) => CastConfig::disabled(),
            (true, None) => casts[use_of],
            (true, Some(format)) => casts[use_of].with_format(format),
        };
        let config = config
            .with_input(cast(0, 0, 0))
            .with_weight(cast(1, 0, 1))
            .with_grad_output(cast(2, 1, 2))
            .with_weight_for_grad_input(Some(cast(3, 1, 1)))
            .with_grad_output_for_grad_weight(Some(cast(4, 2, 2)))
            .with_input_for_grad_weight(Some(cast(5, 2, 0)));
        (config, enabled)
    }
}

proptest! {
    #[test]
    fn linear_configs_survive_json(config in linear()) {
        let recipe = Recipe::from(config);
        prop_assert_eq!(round_trip(&recipe), recipe);
    }

    #[test]
    fn delayed_configs_survive_json_and_resolve(delayed in delayed()) {
        let recipe = Recipe::from(delayed);
        prop_assert!(recipe.resolve().is_ok());
        prop_assert_eq!(round_trip(&recipe), recipe);
    }

    /// Every accepted configuration keeps the promises of a resolved one.
    #[test]
    fn resolved_configs_are_consistent((config, enabled) in accepted()) {
        let resolved = config.resolve().expect("an accepted configuration");
        for (gemm, enabled) in Gemm::ALL.into_iter().zip(enabled) {
            prop_assert_eq!(resolved.is_fp8(gemm), enabled);
            let [a, b] = gemm.operands().map(|operand| *resolved.cast(operand));
            prop_assert_eq!(a.is_disabled(), b.is_disabled());
            for cast in [a, b] {
                prop_assert!(cast.format.is_some());
                prop_assert!(
                    cast.is_disabled()
                        || cast.scaling.is_from_tensor()
                        || cast.granularity == Granularity::Tensorwise
                );
                let delayed = cast.scaling == ScalingType::Delayed;
                prop_assert!(!delayed || resolved.delayed.is_some());
            }
        }
    }
}

#[test]
fn products_of_attention_are_part_of_a_recipe() {
    let products = AttentionProducts::all().with_grad_inputs(false);
    let recipe = Recipe::default().with_attention(products);
    assert_eq!(round_trip(&recipe), recipe);
    assert_eq!(recipe.name(), None);
    let json = r#"{"linear": {"attention": {"scores": true, "grad_format": "e5m2"}}}"#;
    let read: Recipe = serde_json::from_str(json).unwrap();
    let scores = AttentionProducts::none().with_scores(true);
    let scores = scores.with_grad_format(Format::E5M2);
    assert_eq!(
        read,
        Fp8LinearConfig::default().with_attention(scores).into()
    );
    assert_eq!(
        read.to_string(),
        "linear(i:dyn_ten_e4m3,w:dyn_ten_e4m3,go:dyn_ten_e5m2,a:scores_e4m3_e5m2)"
    );
    let error = json_error::<Recipe>(r#"{"linear": {"attention": {"keys": true}}}"#);
    assert!(error.contains("keys"), "{error}");
    let fnuz = Fp8LinearConfig::default().with_format_pair(FormatPair::Fnuz);
    let fnuz = fnuz.with_attention(products).resolve().unwrap();
    assert_eq!(fnuz.attention, products.in_pair(FormatPair::Fnuz));
}
