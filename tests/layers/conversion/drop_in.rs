//! The drop-in layers compute the same as those of candle-nn.

use super::*;
use candle_core::{DType, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::nn::{self};
use fp8_test_support::rounding::two_orders;
use fp8_test_support::{
    assert_close, assert_same, assert_text, device, fill, flat, prepare, skipped_on_cuda, tensor,
};

#[test]
fn norms_and_embedding_equal_candle_nns() {
    if skipped_on_cuda("candle-nn has no such operation there without its own cuda feature") {
        return;
    }
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let (size, eps) = (33, 1e-5);
    let ours = nn::layer_norm(size, eps, vb.pp("layer_norm")).unwrap();
    let ours_no_bias = nn::layer_norm_no_bias(size, eps, vb.pp("no_bias")).unwrap();
    let ours_rms = nn::rms_norm(size, eps, vb.pp("rms")).unwrap();
    let ours_embed = nn::embedding(11, size, vb.pp("embed")).unwrap();
    let mut names: Vec<String> = vars.data().lock().unwrap().keys().cloned().collect();
    names.sort();
    let expected = [
        "embed.weight",
        "layer_norm.bias",
        "layer_norm.weight",
        "no_bias.weight",
        "rms.weight",
    ];
    assert_eq!(names, expected, "candle-nn's names");
    fill(&vars, 41);
    // candle-nn's layers over the same variables.
    let stock = candle_nn::layer_norm(size, eps, vb.pp("layer_norm")).unwrap();
    let stock_no_bias = candle_nn::layer_norm_no_bias(size, eps, vb.pp("no_bias")).unwrap();
    let stock_rms = candle_nn::rms_norm(size, eps, vb.pp("rms")).unwrap();
    let stock_embed = candle_nn::embedding(11, size, vb.pp("embed")).unwrap();
    for dims in [vec![size], vec![4, size], vec![2, 3, size]] {
        let x = ((tensor(42, &dims) * 5.).unwrap() + 2.).unwrap();
        // candle-nn's norms refuse 1-D input.
        let stock_x = if dims.len() == 1 {
            x.unsqueeze(0).unwrap()
        } else {
            x.clone()
        };
        let pairs: [(&str, &dyn Module, &dyn Module); 3] = [
            ("layer_norm", &ours, &stock),
            ("layer_norm_no_bias", &ours_no_bias, &stock_no_bias),
            ("rms_norm", &ours_rms, &stock_rms),
        ];
        for (name, ours, stock) in pairs {
            let expected = stock
                .forward(&stock_x)
                .unwrap()
                .reshape(dims.as_slice())
                .unwrap();
            assert_close(
                &format!("{name} {dims:?}"),
                &ours.forward(&x).unwrap(),
                &expected,
                two_orders(size + 8),
            );
        }
    }
    for ids in [
        Tensor::new(&[3u32, 0, 10], &device()),
        Tensor::new(&[[3u32, 0], [10, 3]], &device()),
    ] {
        let ids = ids.unwrap();
        let (got, expected) = (ours_embed.forward(&ids), stock_embed.forward(&ids));
        assert_same("embedding", &got.unwrap(), &expected.unwrap());
    }
    assert_eq!(
        (ours_embed.hidden_size(), ours_embed.path()),
        (size, Some("embed"))
    );
    let beyond = Tensor::new(&[11u32], &device()).unwrap();
    let error = ours_embed.forward(&beyond).unwrap_err();
    assert_text("out of range", error, &["index 11"]);
}

#[test]
fn the_constructors_of_linear_equal_candle_nns() {
    let (vars, stock_vars) = (VarMap::new(), VarMap::new());
    for (map, ours) in [(&vars, true), (&stock_vars, false)] {
        let vb = VarBuilder::from_varmap(map, DType::F32, &device());
        if ours {
            nn::linear(4, 3, vb.pp("a")).unwrap();
            nn::linear_no_bias(4, 3, vb.pp("b")).unwrap();
            nn::linear_b(4, 3, true, vb.pp("c")).unwrap();
            let root = nn::linear_b(4, 3, false, vb.clone()).unwrap();
            assert_eq!(root.path(), Some(""), "at the root");
            let deep = nn::linear(4, 3, vb.pp("x").pp(0).pp("fc")).unwrap();
            assert_eq!(deep.path(), Some("x.0.fc"));
        } else {
            candle_nn::linear(4, 3, vb.pp("a")).unwrap();
            candle_nn::linear_no_bias(4, 3, vb.pp("b")).unwrap();
            candle_nn::linear_b(4, 3, true, vb.pp("c")).unwrap();
            candle_nn::linear_b(4, 3, false, vb.clone()).unwrap();
            candle_nn::linear(4, 3, vb.pp("x").pp(0).pp("fc")).unwrap();
        }
    }
    let shapes = |vars: &VarMap| {
        let vars = vars.data().lock().unwrap();
        let mut all: Vec<_> = vars
            .iter()
            .map(|(n, v)| (n.clone(), v.dims().to_vec()))
            .collect();
        all.sort();
        all
    };
    assert_eq!(shapes(&vars), shapes(&stock_vars));
    // The values lie within the bounds of candle-nn's initialization.
    let vars = vars.data().lock().unwrap();
    assert!(
        flat(vars["a.bias"].as_tensor())
            .iter()
            .all(|b| b.abs() <= 0.5),
        "bias bound"
    );
    assert!(
        flat(vars["a.weight"].as_tensor()).iter().any(|w| *w != 0.),
        "weight not zero"
    );
}

/// `VarBuilder::zeros` claims to have a tensor of every name, those of FP8 scales included.
#[test]
fn a_layer_can_be_built_from_zeros() {
    for (in_dim, out_dim, bias) in [(4, 3, true), (4, 3, false)] {
        let vb = VarBuilder::zeros(DType::F32, &device());
        let layer = nn::linear_b(in_dim, out_dim, bias, vb.pp("fc")).unwrap();
        assert_eq!(layer.features(), (out_dim, in_dim));
        assert!(layer.static_weight().is_none(), "not an FP8 weight");
        let y = layer.forward(&tensor(50, &[2, in_dim])).unwrap();
        assert_eq!(flat(&y), vec![0.; 2 * out_dim]);
    }
}

#[test]
fn a_weight_that_happens_to_be_exact_in_fp8_is_not_taken_for_an_fp8_weight() {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    nn::linear_no_bias(4, 4, vb.pp("identity")).unwrap();
    let identity = Tensor::eye(4, DType::F32, &device()).unwrap();
    vars.data().lock().unwrap()["identity.weight"]
        .set(&identity)
        .unwrap();
    let layer = nn::linear_no_bias(4, 4, vb.pp("identity")).unwrap();
    assert_same("identity", &layer.weight().unwrap(), &identity);
}

#[test]
fn errors_of_a_layer_name_it() {
    let (_vars, mut mlp) = new_mlp(51);
    prepare(&mut mlp);
    let error = mlp.forward(&tensor(52, &[2, 5])).unwrap_err();
    assert_text("width", error, &["`up`", "5 features", "expected 12"]);
}
