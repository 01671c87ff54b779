//! Norms of scaled parameters.

use candle_core::{DType, Device, Module};
use candle_nn::LayerNormConfig;
use fp8_recipes::scaled::{Layer, ScaledVarMap};
use fp8_recipes::{Result, nn};
use fp8_scaled::{ScaledVar, as_scaled};
use fp8_test_support::rounding::two_orders;
use fp8_test_support::{assert_close, cpu_tensor};

/// With the mean removed or not, a norm adds its bias.
#[test]
fn the_bias_is_added() -> Result<()> {
    for remove_mean in [true, false] {
        let vars = ScaledVarMap::new(DType::F32, &Device::Cpu)?;
        let config = LayerNormConfig {
            remove_mean,
            ..Default::default()
        };
        let norm = nn::layer_norm(8, config, vars.var_builder().pp("norm"))?;
        let bias = ScaledVar::of(norm.bias().unwrap()).unwrap();
        bias.set_rescaled(&cpu_tensor(3, &[8]))?;
        let x = cpu_tensor(4, &[5, 8]);
        let y = norm.apply(&as_scaled(&x, None)?)?.to_tensor(DType::F32)?;
        assert_close("norm", &y, &norm.forward(&x)?, two_orders(24));
    }
    Ok(())
}
