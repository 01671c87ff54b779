//! Inputs of weights that are held as codes.

use candle_core::{DType, Tensor};
use fp8_candle::{Fp8Tensor, InputScaling, Quantizer, Result, StaticWeight};
use fp8_core::{Contraction, Format, Granularity};
use fp8_test_support::{device, rounding, tensor};

#[test]
fn what_is_multiplied_is_what_the_layer_multiplies() -> Result<()> {
    let (n, k) = (24, 64);
    let x = tensor(3, &[2, 5, k]);
    let scale = Tensor::from_slice(&[0.01f32], 1, &device())?;
    for (input, granularity) in [
        (InputScaling::None, Granularity::Rowwise),
        (InputScaling::Static(scale), Granularity::Tensorwise),
        (InputScaling::per_token(), Granularity::Rowwise),
        (InputScaling::per_tensor(), Granularity::Tensorwise),
        (InputScaling::per_group(32), Granularity::Rowwise),
        (InputScaling::DynamicMx, Granularity::Mx),
    ] {
        let quantizer = Quantizer::dynamic(Format::E4M3, granularity);
        let codes = Fp8Tensor::quantize(&tensor(4, &[n, k]), &quantizer, Contraction::Cols)?;
        let served = StaticWeight::new(&codes, input.clone(), "fc")?.forward(&x, None)?;
        let values = input.multiplied(&x)?;
        assert_eq!(values.dims(), x.dims());
        let weight = codes.dequantize(DType::F32)?.t()?;
        let product = values
            .reshape(((), k))?
            .matmul(&weight)?
            .reshape(served.dims())?;
        // The same products of the same values, in another order of sums; on a GPU one is computed by FP8 tensor cores.
        let largest = |x: &Tensor| x.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>();
        let difference = largest(&(&product - &served)?)?;
        assert!(
            difference <= rounding::two_products(&[k]) as f32 * largest(&product)?,
            "{granularity}: {difference}"
        );
        let kept = largest(&(&values - &x)?)? == 0.;
        assert_eq!(kept, matches!(input, InputScaling::None));
    }
    Ok(())
}
