//! Codes that are made and read beside casts of the same rows.

use super::{Error, GROUP, bits, inputs, parameters, run};
use candle_core::{DType, Device, Tensor};
use fp8_candle::ops::Activation;
use fp8_candle::{CastHook, GemmPlan, LinearPlan, LinearWeight, Quantized, Quantizer, ScaleSource};
use fp8_core::{Cast, Format, Granularity};
use std::sync::Arc;

/// A hook that needs each tensor as a whole, so that no rows are cast as they are made.
#[derive(Debug)]
struct Sees;

impl CastHook for Sees {
    fn on_cast(&self, _: &Tensor, _: &Quantized) -> fp8_candle::Result<()> {
        Ok(())
    }
}

/// Casts under scales that are known before.
fn known_scales(whole: bool) -> Result<LinearPlan, Error> {
    let scale = |value: f32| Tensor::full(value, 1, &Device::Cpu);
    let (quant_scale, dequant_scale) = (scale(8.)?, scale(0.125)?);
    let source = ScaleSource::Known {
        quant_scale,
        dequant_scale,
    };
    let hook = whole.then(|| Arc::new(Sees) as Arc<dyn CastHook>);
    let cast = Quantizer::new(Cast::new(Format::E4M3), Granularity::Tensorwise, source);
    let cast = cast.with_hook(hook);
    let gemm = || GemmPlan::new(cast.clone(), cast.clone());
    Ok(LinearPlan::new("layer")
        .with_output(gemm())
        .with_grad_input(gemm())
        .with_grad_weight(gemm()))
}

/// Where a norm or an activation casts its rows for the next layer, it makes the codes of its input beside that, and in the backward pass it
/// decodes them a few rows at a time. Results and gradients are those of separate passes.
#[test]
fn codes_made_and_read_beside_casts_are_those_of_separate_passes() -> Result<(), Error> {
    for (dtype, activation, last) in [
        (DType::BF16, Activation::Gelu, 48),
        (DType::F32, Activation::SwiGlu, 24),
        (DType::F16, Activation::Silu, 48),
    ] {
        // More rows than one task has; the last group of a row is partial.
        let x = inputs(1, &[3, 300, 40], dtype)?;
        let vars = parameters(&[&[40], &[48, 40], &[48], &[40, last], &[40]], dtype)?;
        let all = |whole, groups| {
            let plan = known_scales(whole)?;
            run(&x, &vars, groups, &|node, x, vars| {
                let linear = |weight| LinearWeight::HighPrecision(weight, None);
                let y = node.rms_norm(&x[0], &vars[0], 1e-5)?;
                let y = node.linear(&y, linear(&vars[1]), Some(&vars[2]), Some(&plan))?;
                let y = node.activation(&y, activation)?;
                Ok(node.linear(&y, linear(&vars[3]), Some(&vars[4]), Some(&plan))?)
            })
        };
        let (beside, bytes) = all(false, Some(GROUP))?;
        let (separate, same_bytes) = all(true, Some(GROUP))?;
        let (exact, _) = all(false, None)?;
        let rows = 3 * 300;
        assert_eq!(bytes, rows * (40 + 4 * 3) + rows * (48 + 4 * 3));
        assert_eq!(same_bytes, bytes);
        assert_eq!(beside.len(), separate.len());
        for (i, (got, want)) in beside.iter().zip(&separate).enumerate() {
            assert_eq!(bits(got)?, bits(want)?, "{dtype:?} {i}");
        }
        assert_eq!(bits(&beside[0])?, bits(&exact[0])?, "the result");
        for i in [1, 2, 3] {
            let same = bits(&beside[i])? == bits(&exact[i])?;
            assert!(!same, "{dtype:?}: gradient {i} of exact values");
        }
    }
    Ok(())
}
