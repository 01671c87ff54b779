//! ModelOpt: the names of its methods, old configurations, and mixtures whose list is in the other file or has other paths.

use super::*;
use fp8_files::Error;

const CHANNEL: &str = "FP8_PER_CHANNEL_PER_TOKEN";

/// A layer with a scale for each row.
fn by_channel(path: &str) -> [Entry; 2] {
    let scale = floats(&format!("{path}.weight_scale"), &[N], &scales(N));
    [weight(&format!("{path}.weight"), N, K), scale]
}

fn values_by_channel() -> Vec<f32> {
    expected(N, K, |row, _| scales(N)[row])
}

fn check_channels(case: &str, model: &Model, path: &str) {
    let checkpoint = opened(case, model);
    let family = FamilyName::MODEL_OPT;
    check(case, &checkpoint, path, family, TOKEN, &values_by_channel());
}

/// Older writers name a mixture in `config.json`, and list its layers in their own file only.
#[test]
fn the_list_of_a_mixture_may_be_in_the_other_file() {
    const SECOND: &str = "hf_quant_config.json";
    let first =
        json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["lm_head"]});
    let listed = json!({"fc": {"quant_algo": CHANNEL}, "other": {"quant_algo": "FP8"}});
    let second = |algo: &str, listed: &Value, excluded: &str| {
        let quantization =
            json!({"quant_algo": algo, "quantized_layers": listed, "exclude_modules": [excluded]});
        json!({"producer": {"name": "modelopt"}, "quantization": quantization}).to_string()
    };
    let model = Model::new(quantized(first.clone()), &by_channel("fc"));
    let unlisted = |model: &Model, file: &str| {
        let error = model.open().unwrap_err();
        let is_typed = matches!(&error, Error::UnsupportedScheme { path, key, value, .. }
            if path.ends_with(file) && key.ends_with("quantized_layers") && value == "null");
        assert!(is_typed, "{error}");
    };
    unlisted(&model, "config.json");
    model.file(SECOND, &second("MIXED_PRECISION", &Value::Null, "lm_head"));
    unlisted(&model, SECOND);
    model.file(SECOND, &second("MIXED_PRECISION", &listed, "lm_head"));
    check_channels("listed there", &model, "fc");
    // The modules that it leaves out count as well.
    model.file(SECOND, &second("MIXED_PRECISION", &listed, "f*"));
    let error = model.open().unwrap_err();
    assert!(matches!(error, Error::SchemeMismatch { .. }), "{error}");
    // A list of its own decides, as in engines, whatever the other file says; so does one algorithm for all.
    let mut own = first;
    own["quantized_layers"] = listed.clone();
    let one = json!({"quant_method": "modelopt", "quant_algo": CHANNEL});
    for config in [own, one] {
        let model = Model::new(quantized(config), &by_channel("fc"));
        let of_other = json!({"fc": {"quant_algo": "MXFP8"}});
        model.file(SECOND, &second("MIXED_PRECISION", &of_other, "fc"));
        check_channels("listed in config.json", &model, "fc");
        // Where it is not needed it need not be valid.
        model.file(SECOND, "[}");
        check_channels("a broken second file", &model, "fc");
    }
}

/// The prefix of a language model within another model depends on the version of transformers.
#[test]
fn lists_of_mixtures_may_have_other_prefixes() {
    let model = |listed: &str, stored: &str| {
        let config = json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {listed: {"quant_algo": CHANNEL}, "other": {"quant_algo": "FP8"}}});
        Model::new(quantized(config), &by_channel(stored))
    };
    let (one, other) = (
        "model.language_model.layers.0.fc",
        "language_model.model.layers.0.fc",
    );
    for (listed, stored) in [
        (one, other),
        (other, one),
        ("lm_head", "language_model.lm_head"),
        ("lm_head", "model.lm_head"),
        ("language_model.lm_head", "lm_head"),
    ] {
        check_channels(stored, &model(listed, stored), stored);
    }
    for (listed, stored) in [
        (one, "model.layers.0.fc"),
        ("layers.0.fc", "model.layers.0.fc"),
        ("lm_head", "head"),
    ] {
        let error = model(listed, stored).open().unwrap_err();
        let is_typed = matches!(&error, Error::SchemeMismatch { layer, .. } if layer == stored);
        assert!(is_typed, "{listed} {stored}: {error}");
    }
}

#[test]
fn methods_and_old_configurations() {
    let scale = |shape: &[usize]| floats("fc.weight_scale", shape, &[0.02]);
    let fc = || weight("fc.weight", N, K);
    let input = || floats("fc.input_scale", &[], &[0.5]);
    let (bytes, power) = powers(N * K / 32);
    let exponents = entry("fc.weight_scale", Dtype::U8, &[N, K / 32], bytes);
    let by_tensor = || expected(N, K, |_, _| 0.02);
    let by_power = expected(N, K, |row, col| power[row * K / 32 + col / 32]);
    let [weights, rows] = by_channel("fc");
    let cases = [
        (
            "modelopt_fp8",
            json!({"quant_method": "modelopt_fp8", "quant_algo": "FP8"}),
            vec![fc(), scale(&[]), input()],
            "Static",
            by_tensor(),
        ),
        (
            "modelopt_mxfp8",
            json!({"quant_method": "modelopt_mxfp8", "quant_algo": "MXFP8"}),
            vec![fc(), exponents],
            "DynamicMx",
            by_power,
        ),
        (
            "modelopt_mixed",
            json!({"quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"fc": {"quant_algo": CHANNEL}}}),
            vec![weights, rows],
            TOKEN,
            values_by_channel(),
        ),
        (
            "quant_library, a cache by name",
            json!({"quant_library": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": "FP8",
                "exclude_modules": ["lm_head"]}),
            vec![fc(), scale(&[1]), input()],
            "Static",
            by_tensor(),
        ),
    ];
    for (case, config, tensors, input, values) in cases {
        let model = Model::new(quantized(config), &tensors);
        let checkpoint = opened(case, &model);
        let family = FamilyName::MODEL_OPT;
        check(case, &checkpoint, "fc", family, input, &values);
    }
    // The fp4 tests have the values of such weights.
    let config = json!({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"});
    let tensors = [
        entry("fc.weight", Dtype::U8, &[N, K / 2], vec![0x21; N * K / 2]),
        entry(
            "fc.weight_scale",
            Dtype::F8_E4M3,
            &[N, K / 16],
            vec![0x38; N * K / 16],
        ),
        floats("fc.weight_scale_2", &[], &[0.25]),
    ];
    let model = Model::new(quantized(config), &tensors);
    let checkpoint = opened("modelopt_fp4", &model);
    assert!(checkpoint.is_fp4("fc"));
    // 1 for the code 2, 0.5 for the code 1.
    assert_eq!(value(&checkpoint, "fc"), [0.125, 0.25].repeat(N * K / 2));
}
