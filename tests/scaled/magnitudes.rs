//! The magnitude of values makes no difference, because it is in the scales.

use candle_core::{DType, Device, Tensor};
use fp8::nn::{self, Linear};
use fp8::optim::AdamWConfig;
use fp8::optim::scaled::{ScaledAdamW, ScaledOptimizer};
use fp8::scaled::{
    Array, Direction, Layer, MatmulPrecision, Norm, Scaled, ScaledOptions, ScaledVarMap, as_scaled,
    scaled_scope,
};
use fp8_test_support::normal;

const LAYERS: usize = 24;
const WIDTH: usize = 32;
const CLASSES: usize = 4;

type Outcome = (Vec<f32>, Vec<(String, Vec<f32>, f32)>);

/// Normal values on the CPU: products of sines would lose their rank.
fn noise(dims: (usize, usize), seed: usize) -> candle_core::Result<Tensor> {
    normal(seed as u64, dims).to_device(&Device::Cpu)
}

/// Losses and parameters of a training whose inputs are multiplied by `factor`, and its logits divided by it.
fn train(factor: f32, matmul: MatmulPrecision) -> anyhow::Result<Outcome> {
    let vars = ScaledVarMap::new(DType::F16, &Device::Cpu)?;
    let vb = vars.var_builder();
    let layers = (0..LAYERS).map(|i| {
        let out = if i + 1 == LAYERS { CLASSES } else { WIDTH };
        nn::linear_no_bias(WIDTH, out, vb.pp(format!("layers.{i}")))
    });
    let layers: Vec<Linear> = layers.collect::<candle_core::Result<_>>()?;
    for (i, var) in vars.vars().iter().enumerate() {
        let &[out, inputs] = var.dims() else {
            anyhow::bail!("a weight of {:?}", var.dims())
        };
        // He's initialization, so that the signal keeps its size through 24 layers.
        let weight = noise((out, inputs), i)?.affine((2. / inputs as f64).sqrt(), 0.)?;
        vars.set(var.name(), &weight)?;
    }
    let config = AdamWConfig {
        lr: 1e-3,
        ..AdamWConfig::default()
    };
    let mut optimizer = ScaledAdamW::new(&vars, config)?;
    let options = ScaledOptions::default().with_matmul(matmul);
    let x = noise((16, WIDTH), 100)?;
    let targets: Vec<u32> = (0..16).map(|i| (i * 7 % 5) % CLASSES as u32).collect();
    let targets = Tensor::from_vec(targets, 16, &Device::Cpu)?;
    let mut losses = vec![];
    for _ in 0..12 {
        let loss = {
            let _scope = scaled_scope(options.clone());
            // The same data, another scale.
            let data = as_scaled(&x, None)?.astype(DType::F16)?.data()?;
            let mut x = Scaled::from_parts(&data, factor)?;
            for (i, layer) in layers.iter().enumerate() {
                // Without norms only this keeps the data of so many layers in the range of f16, in both passes.
                x = layer.apply(&x)?.rescale(Norm::L2, Direction::Backward)?;
                x = x.rescale(Norm::L2, Direction::Forward)?;
                if i + 1 < LAYERS {
                    x = x.relu()?;
                }
            }
            let logits = x.mul_constant(1. / f64::from(factor))?;
            Array::cross_entropy(&logits, &targets)?
        };
        losses.push(loss.to_scalar()?);
        assert!(!optimizer.apply(&loss.backward()?)?.skipped()?);
    }
    let parameters = vars.vars().into_iter().map(|var| {
        let data = var.data_var().as_tensor().to_dtype(DType::F32)?;
        let data = data.flatten_all()?.to_vec1()?;
        Ok((var.name().to_string(), data, var.scale().to_f32()))
    });
    Ok((losses, parameters.collect::<anyhow::Result<_>>()?))
}

#[test]
fn inputs_of_any_size_train_to_the_same_bits() -> anyhow::Result<()> {
    for matmul in [MatmulPrecision::Data, MatmulPrecision::FP8] {
        let (losses, parameters) = train(1., matmul)?;
        assert!(losses[11] < 0.9 * losses[0], "{losses:?}");
        for exponent in [-20, 20] {
            let (again, same) = train(2f32.powi(exponent), matmul)?;
            assert_eq!(again, losses, "2^{exponent}, {matmul:?}");
            assert!(same == parameters, "2^{exponent}, {matmul:?}");
        }
    }
    Ok(())
}

/// The purpose of scaled arithmetic: in plain f16 the same values overflow or vanish.
#[test]
fn plain_f16_does_not_get_through() -> candle_core::Result<()> {
    for (factor, expected) in [(2f64.powi(20), f32::INFINITY), (2f64.powi(-28), 0.)] {
        let x = (noise((1, 4), 1)?.abs()? * factor)?.to_dtype(DType::F16)?;
        let x = x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        assert!(x.iter().all(|&x| x == expected), "{factor}: {x:?}");
    }
    Ok(())
}
