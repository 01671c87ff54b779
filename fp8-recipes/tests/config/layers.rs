//! Which layers are converted, and with what history.

use fp8_recipes::config::*;

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
        let decision = filter.decide(path, n, k);
        let got = decision.reason().map(ToString::to_string);
        assert_eq!(got.as_deref(), reason, "{path} {n} {k}");
    }
    assert_eq!(
        LayerFilter::default().decide("", 1, 1),
        FilterDecision::Take
    );
    let auto = LayerFilter::new()
        .with_auto(RecipeName::Rowwise)
        .decide("x", 2048, 4096);
    assert_eq!(
        auto.reason().map(ToString::to_string).as_deref(),
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

#[test]
fn histories_too_large_for_memory_are_refused() {
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
        let options = PrepareOptions::default().with_amax_history_len(amax_history_len);
        let error = prepare_fp8(&model, &options).unwrap_err().to_string();
        assert!(error.contains(&amax_history_len.to_string()), "{error}");
        assert!(model.l.fp8_state().is_none());
    }
}

#[test]
fn options_have_the_documented_defaults() {
    use fp8_recipes::{Autocast, PrepareOptions};

    let options = PrepareOptions::default();
    assert_eq!(options.amax_history_len, 1024);
    assert_eq!(DelayedScaling::default().amax_history_len, 1024);
    assert!(!options.operators && options.convolutions);
    assert_eq!(options.filter.decide("l", 1, 1), FilterDecision::Take);

    let autocast = Autocast::default();
    assert!(autocast.enabled && autocast.training && !autocast.calibrating);
    assert_eq!(autocast.recipe.name(), Some(RecipeName::Delayed));
    assert_eq!(autocast.micro_batch, 0);
    assert!(autocast.reduction_group.is_none() && autocast.stats.is_none());
    assert!(autocast.cast_observer.is_none());
    assert!(!Autocast::disabled().enabled);
}
