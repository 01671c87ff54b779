//! Configurations: what recipes resolve to, what is refused and how it is named, JSON round trips.

use fp8_core::{AmaxCompute, CustomAmax, Format, FormatPair, Granularity, ScaleRounding};
use fp8_recipes::config::*;
use proptest::prelude::*;

const DYN: CastConfig = CastConfig::dynamic_tensorwise();

fn resolved(name: &str) -> ResolvedConfig {
    name.parse::<Recipe>().unwrap().resolve().unwrap()
}

fn error(config: Fp8LinearConfig) -> ConfigError {
    config.resolve().unwrap_err()
}

fn json_error<T: serde::de::DeserializeOwned + std::fmt::Debug>(json: &str) -> String {
    serde_json::from_str::<T>(json).unwrap_err().to_string()
}

fn round_trip(recipe: &Recipe) -> Recipe {
    serde_json::from_str(&serde_json::to_string(recipe).unwrap()).unwrap()
}

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
            "i:dyn_axs_e4m3,w:dyn_axs_e4m3,go:dyn_axs_e4m3,i_gw:dis,w_gi:dyn_ten_e4m3,go_gw:dis",
        ),
        ("delayed", "i:del_ten_e4m3,w:del_ten_e4m3,go:del_ten_e5m2"),
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
fn named_recipes_have_the_extras_of_the_contract() {
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
    assert_eq!(delayed, ResolvedConfig::default());
    assert_eq!(delayed, Recipe::default().resolve().unwrap());
    let linear = Fp8LinearConfig::from_recipe_name(RecipeName::Delayed);
    assert_eq!(linear.resolve().unwrap(), delayed);
}

#[test]
fn unset_second_uses_copy_the_first() {
    let config = Fp8LinearConfig::default()
        .with_input(CastConfig::dynamic_rowwise())
        .with_grad_output(DYN.with_format(Format::E4M3));
    let resolved = config.resolve().unwrap();
    assert_eq!(resolved.input_for_grad_weight, resolved.input);
    assert_eq!(resolved.weight_for_grad_input, resolved.weight);
    assert_eq!(resolved.grad_output_for_grad_weight, resolved.grad_output);
    assert_eq!(resolved.grad_output.format, Some(Format::E4M3));
    // A second use that says nothing about the format has that of the first.
    let second = config.with_grad_output_for_grad_weight(Some(DYN));
    let second = second.resolve().unwrap().grad_output_for_grad_weight;
    assert_eq!(second.format, Some(Format::E4M3));
}

#[test]
fn the_pair_swaps_all_formats() {
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
    assert!(resolved.round_scales_to_power_of_two);
    assert_eq!(resolved.delayed, Some(delayed));
}

#[test]
fn errors_name_the_value() {
    let unknown = "rowwiese".parse::<Recipe>().unwrap_err().to_string();
    assert_eq!(
        unknown,
        "unknown recipe `rowwiese`; \
         valid recipes are tensorwise, rowwise, rowwise_with_gw_hp, delayed"
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
            base().with_enable_fp8_all_gather(true).with_weight(row),
            "enable_fp8_all_gather needs a tensorwise weight, got rowwise",
        ),
        (
            Fp8LinearConfig::disabled().with_enable_fp8_all_gather(true),
            "enable_fp8_all_gather needs a weight in FP8, but its cast is disabled",
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
    let scaling = "dynamik".parse::<ScalingType>().unwrap_err();
    assert!(scaling.to_string().contains("dynamik"), "{scaling}");
}

#[test]
fn all_disabled_is_consistent() {
    let resolved = Fp8LinearConfig::disabled().resolve().unwrap();
    assert!(Gemm::ALL.iter().all(|gemm| !resolved.is_fp8(*gemm)));
    assert_eq!(resolved.to_string(), "i:dis,w:dis,go:dis");
}

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
            r#"{"linear": {"input": {"scaling": "sometimes"}}}"#,
            "sometimes",
        ),
        (r#"{"linear": {"input": {"scale": 1}}}"#, "scale"),
        (r#"{"linear": {"gemm_output": {"fast": true}}}"#, "fast"),
        (r#"{"linear": {"format_pair": "intel"}}"#, "intel"),
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
fn a_custom_amax_is_written_by_name_and_bound_again() {
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

#[test]
fn layer_filter_gives_reasons() {
    let filter = LayerFilter::new()
        .skip_paths(["lm_head", ""])
        .skip_paths(vec![String::from("embed")])
        .with_min_dims(32, 64)
        .with_multiple_of(16)
        .with_custom(|path, n, k| !(path.ends_with("odd") && n == k));
    let cases = [
        ("blocks.0.up", 128, 64, None),
        ("model.lm_head", 128, 64, Some("path contains `lm_head`")),
        ("embedding.proj", 128, 64, Some("path contains `embed`")),
        ("a", 16, 64, Some("N = 16 is below 32")),
        ("a", 32, 48, Some("K = 48 is below 64")),
        ("a", 40, 64, Some("N = 40 is not a multiple of 16")),
        ("a", 48, 72, Some("K = 72 is not a multiple of 16")),
        ("odd", 64, 64, Some("custom filter")),
    ];
    for (path, n, k, reason) in cases {
        assert_eq!(filter.decide(path, n, k).reason(), reason, "{path} {n} {k}");
    }
    assert_eq!(
        LayerFilter::default().decide("", 1, 1),
        FilterDecision::Take
    );
    let auto = LayerFilter::new()
        .with_auto(RecipeName::Rowwise)
        .decide("x", 2048, 4096);
    assert_eq!(
        auto.reason(),
        Some("N = 2048, K = 4096 is too small to gain from `rowwise`")
    );
}

#[test]
fn auto_filter_has_torchaos_thresholds() {
    use RecipeName::*;
    let cases = [
        (Tensorwise, 1024, 4096, false),
        (Tensorwise, 1040, 4096, true),
        (Tensorwise, 1024, 4112, true),
        (Tensorwise, 8200, 8192, false),
        (Tensorwise, 8192, 8200, false),
        (Rowwise, 2048, 8192, false),
        (Rowwise, 8192, 1024, false),
        (Rowwise, 4096, 2048, false),
        (Rowwise, 4112, 2048, true),
        (Rowwise, 4096, 2064, true),
        (RowwiseWithGwHp, 4096, 2048, false),
        (Delayed, 1024, 4096, false),
    ];
    for (recipe, n, k, take) in cases {
        assert_eq!(
            auto_filter(recipe, n, k).is_take(),
            take,
            "{recipe} N={n} K={k}"
        );
    }
}

fn cast() -> impl Strategy<Value = CastConfig> {
    let scaling = prop::sample::select(vec![
        ScalingType::Dynamic,
        ScalingType::Delayed,
        ScalingType::Static,
        ScalingType::Disabled,
    ]);
    let granularity = prop_oneof![
        Just(Granularity::Tensorwise),
        Just(Granularity::Rowwise),
        Just(Granularity::Mx),
        (1usize..300, 1usize..300).prop_map(|(rows, cols)| Granularity::Blockwise { rows, cols }),
    ];
    let format = prop::option::of(prop::sample::select(Format::ALL.to_vec()));
    (scaling, granularity, format).prop_map(|(scaling, granularity, format)| CastConfig {
        scaling,
        granularity,
        format,
    })
}

prop_compose! {
    fn linear()(
        casts in prop::array::uniform3(cast()),
        second in prop::array::uniform3(prop::option::of(cast())),
        flags in prop::array::uniform7(any::<bool>()),
        fnuz in any::<bool>(),
    ) -> Fp8LinearConfig {
        Fp8LinearConfig::default()
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
            .with_enable_fp8_all_gather(flags[6])
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
        DelayedScaling {
            margin,
            format,
            amax_history_len: length,
            amax_compute: if flags[0] { AmaxCompute::Max } else { AmaxCompute::MostRecent },
            scale_rounding:
                if flags[1] { ScaleRounding::Exact } else { ScaleRounding::PowerOfTwo },
            initial: if flags[2] { InitialScale::One } else { InitialScale::FirstBatch },
            reduce_amax: flags[3],
        }
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

    /// Whatever is accepted keeps the promises of a resolved configuration.
    #[test]
    fn resolved_configs_are_consistent(config in linear()) {
        let Ok(resolved) = config.resolve() else { return Ok(()) };
        for gemm in Gemm::ALL {
            let [a, b] = gemm.operands().map(|operand| *resolved.cast(operand));
            prop_assert_eq!(a.is_disabled(), b.is_disabled());
            for cast in [a, b] {
                prop_assert!(cast.format.is_some());
                prop_assert!(
                    cast.is_disabled()
                        || cast.scaling == ScalingType::Dynamic
                        || cast.granularity == Granularity::Tensorwise
                );
                let delayed = cast.scaling == ScalingType::Delayed;
                prop_assert!(!delayed || resolved.delayed.is_some());
            }
        }
    }
}

#[test]
fn a_model_is_not_prepared_with_histories_that_no_memory_holds() {
    use candle_core::{DType, Device, Tensor};
    use fp8_recipes::nn::Linear;
    use fp8_recipes::{Fp8Module, PrepareOptions, prepare_fp8};

    #[derive(Fp8Module)]
    struct Model {
        l: Linear,
    }

    let weight = Tensor::ones((2, 2), DType::F32, &Device::Cpu).unwrap();
    let model = Model {
        l: Linear::new(weight, None).with_path("l"),
    };
    for amax_history_len in [0, (1 << 20) + 1, 100_000_000_000] {
        let options = PrepareOptions {
            amax_history_len,
            ..Default::default()
        };
        let error = prepare_fp8(&model, &options).unwrap_err().to_string();
        assert!(error.contains(&amax_history_len.to_string()), "{error}");
        assert!(model.l.fp8_state().is_none());
    }
}
