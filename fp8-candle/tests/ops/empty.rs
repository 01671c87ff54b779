//! Linear layers without tokens, without inputs or without outputs give what candle's own layer gives.

use candle_core::{DType, Tensor, Var};
use fp8_candle::device::{GemmOutput, backend};
use fp8_candle::{
    Fp8Tensor, GemmPlan, LinearPlan, LinearWeight, PackedWeight, Quantizer, Result, WeightCache,
    fp8_linear,
};
use fp8_core::Contraction::Cols;
use fp8_core::{Format, Granularity};
use fp8_test_support::{device, skipped_on_cuda};

const GRANULARITIES: [Granularity; 5] = [
    Granularity::Tensorwise,
    Granularity::Rowwise,
    Granularity::Blockwise { rows: 1, cols: 16 },
    Granularity::Blockwise { rows: 16, cols: 16 },
    Granularity::Mx,
];

const SIZES: [usize; 3] = [0, 1, 33];

fn empty_sizes() -> impl Iterator<Item = (usize, usize, usize)> {
    let pairs = SIZES.into_iter().flat_map(|m| SIZES.map(|k| (m, k)));
    let all = pairs.flat_map(|(m, k)| SIZES.map(|n| (m, k, n)));
    all.filter(|&(m, k, n)| m * k * n == 0)
}

/// Powers of two, which every cast keeps.
fn values(dims: &[usize]) -> Result<Tensor> {
    let count = dims.iter().product::<usize>();
    let values: Vec<f32> = (0..count).map(|i| [1., -2., 0.5, 4.][i % 4]).collect();
    Ok(Tensor::from_vec(values, dims, &device())?)
}

/// The values, read in a way that catches a tensor whose storage is too short.
fn flat(x: &Tensor) -> Result<Vec<f32>> {
    Ok(x.force_contiguous()?.flatten_all()?.to_vec1()?)
}

fn plan(granularity: Granularity, emulate: bool) -> LinearPlan {
    let gemm = || {
        let quantizer = Quantizer::dynamic(Format::E4M3, granularity);
        GemmPlan::new(quantizer.clone(), quantizer)
    };
    LinearPlan::new("layer")
        .with_output(gemm())
        .with_grad_input(gemm())
        .with_grad_weight(gemm())
        .with_emulate(emulate)
}

#[test]
fn every_gradient_is_that_of_the_plain_layer() -> Result<()> {
    for granularity in GRANULARITIES {
        for emulate in [false, true] {
            let plan = plan(granularity, emulate);
            for (m, k, n) in empty_sizes() {
                for leading in [vec![m], vec![m, 2], vec![0, m]] {
                    let what = format!("{granularity} emulate={emulate} {leading:?} {k} {n}");
                    let x = Var::from_tensor(&values(&[&leading[..], &[k]].concat())?)?;
                    let weight = Var::from_tensor(&values(&[n, k])?)?;
                    let bias = Var::from_tensor(&values(&[n])?)?;
                    let cache = WeightCache::default();
                    let tokens: usize = leading.iter().product();
                    for cache in [None, Some(&cache), Some(&cache)] {
                        let w = LinearWeight::HighPrecision(&weight, cache);
                        let y = fp8_linear(&x, w, Some(&bias), &plan)?;
                        assert_eq!(y.dims(), [&leading[..], &[n]].concat(), "{what}");
                        // The bias alone, and nothing if there are no elements.
                        let expected = flat(&bias)?.repeat(tokens);
                        let sums = k == 0 || tokens * n == 0;
                        assert!(sums && flat(&y)? == expected, "{what}: {y}");
                        let grads = y.sum_all()?.backward()?;
                        for (name, var) in [("x", &x), ("weight", &weight), ("bias", &bias)] {
                            let grad = grads.get(var).expect("every argument has a gradient");
                            assert_eq!(grad.dims(), var.dims(), "{what}: {name}");
                            let expected = if name == "bias" { tokens as f32 } else { 0. };
                            let grad = flat(grad)?;
                            assert!(
                                grad.iter().all(|&g| g == expected),
                                "{what}: {name} {grad:?}"
                            );
                        }
                    }
                    // The shapes are used by candle's own kernels.
                    let y =
                        fp8_linear(&x, LinearWeight::HighPrecision(&weight, None), None, &plan)?;
                    let y = y.reshape((tokens, n))?;
                    assert_eq!(flat(&y.t()?.matmul(&y)?)?, vec![0.; n * n], "{what}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn frozen_and_packed_weights() -> Result<()> {
    for granularity in GRANULARITIES {
        let quantizer = Quantizer::dynamic(Format::E4M3, granularity);
        for (m, k, n) in empty_sizes() {
            let what = format!("{granularity} {m} {k} {n}");
            let codes = Fp8Tensor::quantize(&values(&[n, k])?, &quantizer, Cols)?;
            let packed = PackedWeight::new(&codes)?;
            assert_eq!(packed.unpack()?.dims(), [n, k], "{what}");
            assert_eq!(packed.dequantize(DType::F32)?.dims(), [n, k], "{what}");
            let x = Var::from_tensor(&values(&[m, k])?)?;
            let bias = Var::from_tensor(&values(&[n])?)?;
            for weight in [LinearWeight::Fp8(&codes), LinearWeight::Packed(&packed)] {
                for emulate in [false, true] {
                    let y = fp8_linear(&x, weight, Some(&bias), &plan(granularity, emulate))?;
                    assert_eq!(y.dims(), [m, n], "{what}");
                    assert_eq!(flat(&y)?, flat(&bias)?.repeat(m), "{what}");
                    let grads = y.sum_all()?.backward()?;
                    let grad = grads.get(&x).expect("x has a gradient");
                    assert_eq!(grad.dims(), [m, k], "{what}");
                    assert!(flat(grad)?.iter().all(|&g| g == 0.), "{what}: {grad}");
                    let grad = flat(grads.get(&bias).expect("the bias has a gradient"))?;
                    assert!(grad.iter().all(|&g| g == m as f32), "{what}: {grad:?}");
                }
            }
        }
    }
    Ok(())
}

/// The device interface is public, so operands that do not fit together are refused.
#[test]
fn operands_that_are_shorter_than_their_grid_are_errors() -> Result<()> {
    if skipped_on_cuda("operands are checked by the CPU's product") {
        return Ok(());
    }
    let quantizer = Quantizer::dynamic(Format::E4M3, Granularity::Rowwise);
    let a = Fp8Tensor::quantize(&values(&[4, 32])?, &quantizer, Cols)?;
    let b = Fp8Tensor::quantize(&values(&[5, 32])?, &quantizer, Cols)?;
    let backend = backend(&device())?;
    let out = GemmOutput {
        dtype: DType::F32,
        bias: None,
        use_fast_accum: false,
    };
    let (a, b) = (a.operand(Cols), b.operand(Cols));
    let mut longer = a;
    longer.grid = Granularity::Rowwise.grid(7, 32, Cols);
    let mut more_scales = a;
    more_scales.grid = Granularity::Blockwise { rows: 1, cols: 8 }.grid(4, 32, Cols);
    for (wrong, what) in [(&longer, "codes"), (&more_scales, "dequant_scale")] {
        for (a, b) in [(wrong, &b), (&b, wrong)] {
            let error = backend
                .gemm(a, b, &out)
                .map(|_| ())
                .unwrap_err()
                .to_string();
            assert!(error.contains(what), "{error}");
        }
    }
    let bias = values(&[4])?;
    let out = GemmOutput {
        bias: Some(&bias),
        ..out
    };
    let error = backend
        .gemm(&a, &b, &out)
        .map(|_| ())
        .unwrap_err()
        .to_string();
    assert!(error.contains("bias") && error.contains("[5]"), "{error}");
    Ok(())
}
