//! The CUDA kernels of the differentiable building blocks against the CPU: results and gradients for the same arguments.

mod exact_attention;
mod special;

use candle_core::{DType, Device, Tensor, Var};
use fp8_candle::Result;
use fp8_candle::ops::{
    CrossEntropyOptions, LinearCrossEntropyOptions, causal_softmax, cross_entropy_with, embedding,
    gelu, layer_norm, linear_cross_entropy, rms_norm, rope, rope_i, softmax_last_dim,
};
use fp8_test_support::{device, flat64, skipped_on_cpu};

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Row lengths: shorter than a chunk, odd, the longest for a warp, longer, and odd for a block.
const LENGTHS: [usize; 8] = [1, 3, 67, 1000, 1024, 1032, 4096 + 3, 9001];

/// Values in (-2, 2) without a pattern, on the CPU.
fn wave(shape: &[usize], seed: usize) -> Tensor {
    (fp8_test_support::wave(shape, seed) * 2.).unwrap()
}

/// A weight for each element of `y`, exact in its dtype.
fn weights(y: &Tensor) -> Result<Tensor> {
    let weights = (wave(y.dims(), 11) * 32.0)?.round()?;
    Ok(weights
        .affine(1.0 / 32.0, 0.0)?
        .to_dtype(y.dtype())?
        .to_device(y.device())?)
}

type Op<'a> = &'a dyn Fn(&[Tensor]) -> Result<Tensor>;

/// The result and the gradient of every argument, with a different weight for each element of the result.
fn run(op: Op<'_>, args: &[Tensor], device: &Device) -> Result<Vec<Tensor>> {
    let vars = args
        .iter()
        .map(|a| Var::from_tensor(&a.to_device(device)?))
        .collect::<candle_core::Result<Vec<_>>>()?;
    let args: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let y = op(&args)?;
    let weights = weights(&y)?;
    let grads = (&y * weights)?.sum_all()?.backward()?;
    let mut out = vec![y.detach()];
    for (i, var) in vars.iter().enumerate() {
        match grads.get(var) {
            Some(grad) => out.push(grad.clone()),
            None => panic!("argument {i} has no gradient"),
        }
    }
    Ok(out)
}

/// Compares f32 on the GPU with f64 on the CPU, to a few roundings of the largest value; 16-bit dtypes to their roundings of
/// values up to 1, since some gradients are made from rounded results. NaN and Inf must be in the same places.
#[track_caller]
fn assert_like_cpu(name: &str, op: Op<'_>, args: &[Tensor]) -> Result<()> {
    assert_near_cpu(name, op, args, 4e-6)
}

/// [`assert_like_cpu`] with a bound of its own for f32.
#[track_caller]
fn assert_near_cpu(name: &str, op: Op<'_>, args: &[Tensor], tolerance: f64) -> Result<()> {
    for dtype in DTYPES {
        let (tolerance, smallest) = match dtype {
            DType::F32 => (tolerance, 0.0),
            DType::F16 => (2e-3, 1.0),
            _ => (1.2e-2, 1.0),
        };
        let args = args
            .iter()
            .map(|a| a.to_dtype(dtype))
            .collect::<candle_core::Result<Vec<_>>>()?;
        let exact = args
            .iter()
            .map(|a| a.to_dtype(DType::F64))
            .collect::<candle_core::Result<Vec<_>>>()?;
        let (got, expected) = (run(op, &args, &device())?, run(op, &exact, &Device::Cpu)?);
        for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let what = format!("{name}, {dtype:?}, result {i} (0: forward)");
            let scalar = i == 0 && got.rank() == 0; // The loss is f32.
            assert_eq!(
                got.dtype(),
                if scalar { DType::F32 } else { dtype },
                "{what}"
            );
            assert_eq!(got.dims(), expected.dims(), "{what}");
            let (got, expected) = (flat64(got), flat64(expected));
            let finite = expected.iter().filter(|e| e.is_finite());
            let largest = finite.fold(smallest, |a: f64, b| a.max(b.abs()));
            for (at, (got, expected)) in got.iter().zip(&expected).enumerate() {
                let same = got == expected || (got.is_nan() && expected.is_nan());
                assert!(
                    same || (got - expected).abs() <= tolerance * largest,
                    "{what}, element {at}: got {got}, CPU {expected}, largest {largest}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn rows_of_every_length() -> Result<()> {
    if skipped_on_cpu() {
        return Ok(());
    }
    for d in LENGTHS {
        // A mean that would cancel in a variance computed from squares.
        let x = (wave(&[2, 3, d], 1) + 5.0)?;
        let args = [x, wave(&[d], 2), wave(&[d], 3)];
        let name = |op: &str| format!("{op} of rows of {d}");
        assert_like_cpu(
            &name("layer_norm"),
            &|a| layer_norm(&a[0], &a[1], Some(&a[2]), 1e-2),
            &args,
        )?;
        assert_like_cpu(
            &name("layer_norm without bias"),
            &|a| layer_norm(&a[0], &a[1], None, 1e-2),
            &args[..2],
        )?;
        // With a small eps, the gradients of the shortest rows would be rounding errors only.
        let eps = if d < 4 { 0.5 } else { 1e-5 };
        let rms = |a: &[Tensor]| rms_norm(&a[0], &a[1], eps);
        assert_like_cpu(&name("rms_norm"), &rms, &args[..2])?;
        let x = [(wave(&[2, 3, d], 1) * 4.0)?];
        assert_like_cpu(&name("softmax"), &|a| softmax_last_dim(&a[0]), &x)?;
        assert_like_cpu(&name("gelu"), &|a| gelu(&a[0]), &x)?;
        let targets: Vec<i64> = (0..6).map(|i| (i * 29 % d) as i64).collect();
        let targets = Tensor::from_vec(targets, (2, 3), &Device::Cpu)?;
        for ignore_index in [None, Some(0)] {
            let options = CrossEntropyOptions::default().with_ignore_index(ignore_index);
            if d == 1 && ignore_index.is_some() {
                continue; // All positions would be ignored.
            }
            assert_like_cpu(
                &name("cross_entropy"),
                &|a| cross_entropy_with(&a[0], &targets.to_device(a[0].device())?, options),
                &x,
            )?;
        }
    }
    Ok(())
}

#[test]
fn many_rows() -> Result<()> {
    if skipped_on_cpu() {
        return Ok(());
    }
    // Slabs of more than 64 rows, the last of them shorter.
    let rows = 64 * 256 + 100;
    for (rows, d) in [(rows, 3), (333, 300)] {
        let args = [wave(&[rows, d], 1), wave(&[d], 2), wave(&[d], 3)];
        // Terms of both signs cancel in sums over rows.
        assert_near_cpu(
            &format!("layer_norm of {rows} rows"),
            &|a| layer_norm(&a[0], &a[1], Some(&a[2]), 1e-2),
            &args,
            1e-5,
        )?;
        let targets = Tensor::arange(0u32, rows as u32, &Device::Cpu)?;
        let targets = (targets.to_dtype(DType::F64)? * (1.0 / 7.0))?.to_dtype(DType::U8)?;
        let options = CrossEntropyOptions::default().with_ignore_index(1);
        let targets = targets.minimum(&Tensor::full(d as u8 - 1, rows, &Device::Cpu)?)?;
        assert_like_cpu(
            &format!("cross_entropy of {rows} rows"),
            &|a| cross_entropy_with(&a[0], &targets.to_device(a[0].device())?, options),
            &args[..1],
        )?;
    }
    Ok(())
}

/// A tied table and head: rows of the table, and the loss of products with it.
#[test]
fn tables_and_heads() -> Result<()> {
    if skipped_on_cpu() {
        return Ok(());
    }
    let indexes = Tensor::new(&[[4u32, 0, 4], [9, 1, 0]], &Device::Cpu)?;
    let targets = Tensor::new(&[[1u32, 2, 9], [0, 5, 2]], &Device::Cpu)?;
    let args = [wave(&[10, 40], 1), wave(&[2, 3, 40], 2)];
    let to = |x: &Tensor, of: &[Tensor]| x.to_device(of[0].device());
    assert_like_cpu(
        "embedding",
        &|a| embedding(&a[0], &to(&indexes, a)?),
        &args[..1],
    )?;
    let options = LinearCrossEntropyOptions::default();
    assert_like_cpu(
        "linear_cross_entropy",
        &|a| linear_cross_entropy(&a[1], &a[0], &to(&targets, a)?, options),
        &args,
    )
}

#[test]
fn causal_matrices() -> Result<()> {
    if skipped_on_cpu() {
        return Ok(());
    }
    let shapes = [
        (1, 1),
        (1, 9),
        (5, 5),
        (35, 64),
        (33, 70),
        (7, 8),
        (3, 1030),
        (2, 4099),
        (40, 40),
    ];
    for (tq, tk) in shapes {
        for multiplier in [0.35, -1.5, 0.0] {
            let x = (wave(&[2, 3, tq, tk], 1) * 4.0)?;
            assert_like_cpu(
                &format!("causal_softmax of {tq} x {tk} times {multiplier}"),
                &|a| causal_softmax(&a[0], multiplier),
                &[x],
            )?;
        }
    }
    Ok(())
}

#[test]
fn rotations() -> Result<()> {
    if skipped_on_cpu() {
        return Ok(());
    }
    for (t, d) in [
        (1, 2),
        (5, 6),
        (9, 8),
        (7, 64),
        (130, 16),
        (11, 128),
        (3, 34),
    ] {
        let args = [
            wave(&[2, 3, t, d], 1),
            wave(&[t + 2, d / 2], 2),
            wave(&[t + 2, d / 2], 3),
        ];
        let name = |op: &str| format!("{op} of {t} positions of {d}");
        assert_like_cpu(&name("rope"), &|a| rope(&a[0], &a[1], &a[2]), &args)?;
        assert_like_cpu(&name("rope_i"), &|a| rope_i(&a[0], &a[1], &a[2]), &args)?;
    }
    Ok(())
}
