//! Parameters made by the constructors of layers.

use candle_core::{DType, Device, Tensor};
use candle_nn::Init;
use fp8_recipes::nn;
use fp8_recipes::scaled::ScaledVarMap;
use fp8_scaled::ScaledVar;
use fp8_test_support::assert_text;

fn map() -> ScaledVarMap {
    ScaledVarMap::new(DType::F16, &Device::Cpu).unwrap()
}

#[test]
fn layers_find_their_parameters() {
    let map = map();
    let vb = map.var_builder();
    nn::layer_norm(64, 1e-5, vb.pp("norm")).unwrap();
    let weight = Init::Randn {
        mean: 0.,
        stdev: 0.02,
    };
    let data = vb
        .pp("fc")
        .get_with_hints((64, 64), "weight", weight)
        .unwrap();
    let names = ["fc.weight", "norm.bias", "norm.weight"];
    assert_eq!(map.names(), names);
    let found = ScaledVar::of(&data).unwrap();
    assert_eq!(found.name(), "fc.weight");
    // The root mean square, 0.02, lies between 2^-6 and 2^-5.
    assert_eq!(found.scale().to_f32(), 2f32.powi(-6));
    assert_eq!(data.dtype(), DType::F16);
    let again = vb.pp("fc").get((64, 64), "weight").unwrap();
    assert_eq!(again.id(), data.id());
    let shape = vb.pp("fc").get((64, 32), "weight").unwrap_err();
    let parts = ["`fc.weight` has shape [64, 64]", "[64, 32]"];
    assert_text("another shape", shape, &parts);
    let wide = vb.pp("fc").to_dtype(DType::F32);
    let dtype = wide.get((64, 64), "weight").unwrap_err();
    let parts = ["`fc.weight` has dtype f16", "f32"];
    assert_text("another dtype", dtype, &parts);
    let missing = vb.get_unchecked("nobody").unwrap_err();
    assert_text("no parameter", missing, &["no tensor `nobody`"]);
}

#[test]
fn values_are_set_with_a_scale_of_their_own() {
    let map = map();
    let data = map.var_builder().get(3, "w").unwrap();
    for (dtype, size) in [(DType::F64, 1e-3), (DType::F32, 1e20), (DType::BF16, 3.)] {
        let x = (Tensor::new(&[1f64, -1., 1.5], &Device::Cpu).unwrap() * size).unwrap();
        let x = x.to_dtype(dtype).unwrap();
        map.set("w", &x).unwrap();
        let value = map
            .get("w")
            .unwrap()
            .value()
            .detach()
            .to_tensor(DType::F64)
            .unwrap();
        let value = value.to_vec1::<f64>().unwrap();
        let expected = x.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
        for (got, x) in value.iter().zip(expected) {
            assert!((got - x).abs() <= x.abs() / 2048., "{got} {x}");
        }
    }
    assert_eq!(ScaledVar::of(&data).unwrap().version(), 3);
    let zeros = |len: usize| Tensor::zeros(len, DType::F32, &Device::Cpu).unwrap();
    let shape = map.set("w", &zeros(4)).unwrap_err();
    assert_text("another shape", shape, &["shape [4]", "[3], as `w` has"]);
    let missing = map.set("v", &zeros(3)).unwrap_err();
    assert_text("no parameter", missing, &["no tensor `v`"]);
}

#[test]
fn any_size_gets_its_own_scale_and_zeros_get_none() {
    let map = map();
    let vb = map.var_builder();
    vb.get_with_hints(4, "w", Init::Const(0.)).unwrap();
    let w = map.get("w").unwrap();
    assert!(w.scale().is_zero());
    let one = Tensor::new(&[1f32, -1.5, 2.0, 1.25], &Device::Cpu).unwrap();
    let mut first = None;
    for exponent in [-100, -45, -16, 0, 30, 100] {
        map.set("w", &(&one * 2f64.powi(exponent)).unwrap())
            .unwrap();
        assert_eq!(w.scale().exponent(), Some(exponent), "2^{exponent}");
        let data = w.data_var().to_dtype(DType::F32).unwrap();
        let data = data.to_vec1::<f32>().unwrap();
        assert_eq!(*first.get_or_insert(data.clone()), data, "2^{exponent}");
    }
    map.set("w", &Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap())
        .unwrap();
    assert!(w.scale().is_zero());
    // Data that cannot be sized are kept as they are.
    let bad = Tensor::new(&[f32::NAN, 1.0, 2.0, 3.0], &Device::Cpu).unwrap();
    map.set("w", &bad).unwrap();
    assert!(w.value().to_vec1().unwrap()[0].is_nan());
}
