//! Updates of low rank of a layer with scaled parameters.

use candle_core::{DType, Device, Module};
use candle_nn::{VarBuilder, VarMap};
use fp8_recipes::nn::{self, LoraConfig, LoraLinear, LoraUpdate};
use fp8_recipes::scaled::ScaledVarMap;
use fp8_recipes::{Error, Result};
use fp8_scaled::ScaledVar;
use fp8_test_support::rounding::{roundings, two_orders};
use fp8_test_support::{assert_close, cpu_tensor, named};

const CPU: &Device = &Device::Cpu;

#[test]
fn a_merged_layer_has_the_values_of_weight_and_bias() -> Result<()> {
    let scaled = ScaledVarMap::new(DType::F32, CPU)?;
    let base = nn::linear(16, 8, scaled.var_builder().pp("fc"))?;
    let weight = base.scaled_weight().unwrap();
    let bias = ScaledVar::of(base.bias().unwrap()).unwrap();
    for var in [weight, bias] {
        assert_ne!(var.scale().to_f32(), 1., "{}", var.name());
    }
    let adapters = VarMap::new();
    let vb = VarBuilder::from_varmap(&adapters, DType::F32, CPU).pp("fc");
    let lora = LoraLinear::new(base, LoraConfig::new(4).with_alpha(8.), vb)?;
    for (i, (_, var)) in named(&adapters).iter().enumerate() {
        var.set(&cpu_tensor(i as u64, var.dims()))?;
    }
    let x = cpu_tensor(9, &[5, 16]);
    let merged = lora.merge()?;
    // Three sums of products; a product of three numbers, and two additions.
    let bound = two_orders(2 * roundings(16) + roundings(4) + 4);
    assert_close("merged", &merged.forward(&x)?, &lora.forward(&x)?, bound);
    assert_eq!(merged.path(), Some("fc"));
    let parameters = [merged.weight()?, merged.bias().cloned().unwrap()];
    for parameter in parameters {
        assert_eq!(parameter.dtype(), DType::F32);
        assert!(!parameter.track_op() && ScaledVar::of(&parameter).is_none());
    }
    Ok(())
}

#[test]
fn matrices_of_an_update_are_plain() -> Result<()> {
    let scaled = ScaledVarMap::new(DType::F16, CPU)?;
    let vb = scaled.var_builder().pp("fc");
    let error = LoraUpdate::new((8, 16), LoraConfig::new(4), vb).unwrap_err();
    assert!(
        matches!(&error, Error::NoScaledForm { path, .. } if path == "fc"),
        "{error}"
    );
    Ok(())
}
