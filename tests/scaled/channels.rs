//! Batch norm, group norm, transposed and one-dimensional convolutions with scaled parameters.

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::Fp8Module;
use fp8::nn::{self, ModuleT};
use fp8::optim::AdamWConfig;
use fp8::optim::scaled::{ScaledAdamW, ScaledOptimizer};
use fp8::scaled::{Array, Layer, Scaled, ScaledVar, ScaledVarMap, as_scaled};
use fp8_test_support::rounding::{roundings, two_orders};
use fp8_test_support::{apart, largest};
use std::collections::HashMap;

#[derive(Fp8Module)]
struct Net {
    down: nn::Conv1d,
    group: nn::GroupNorm,
    up: nn::ConvTranspose1d,
    batch: nn::BatchNorm,
    grow: nn::ConvTranspose2d,
    head: nn::Linear,
}

impl Net {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        let down = nn::Conv1dConfig {
            stride: 2,
            padding: 1,
            ..Default::default()
        };
        let up = nn::ConvTranspose1dConfig {
            stride: 2,
            ..Default::default()
        };
        let grow = nn::ConvTranspose2dConfig {
            stride: 2,
            ..Default::default()
        };
        Ok(Self {
            down: nn::conv1d(4, 8, 3, down, vb.pp("down"))?,
            group: nn::group_norm(2, 8, 1e-5, vb.pp("group"))?,
            up: nn::conv_transpose1d(8, 4, 2, up, vb.pp("up"))?,
            batch: nn::batch_norm(4, 1e-5, vb.pp("batch"))?,
            grow: nn::conv_transpose2d(4, 2, 2, grow, vb.pp("grow"))?,
            head: nn::linear_no_bias(2 * 4 * 8, 3, vb.pp("head"))?,
        })
    }

    /// `[batch, 4, 8]` to `[batch, 3]`.
    fn forward<A: Array>(&self, x: &A, train: bool) -> fp8::Result<A> {
        let batch = x.dims()[0];
        let y = self.group.apply(&self.down.apply(x)?)?.relu()?;
        let y = self.batch.apply_t(&self.up.apply(&y)?, train)?.relu()?;
        let y = self.grow.apply(&y.reshape(&[batch, 4, 2, 4])?)?;
        self.head.apply(&y.reshape(&[batch, 64])?)
    }
}

fn input() -> candle_core::Result<Tensor> {
    let values: Vec<f32> = (0..6 * 4 * 8)
        .map(|i| ((i * 37 % 101) as f32 - 50.) / 32.)
        .collect();
    Tensor::from_vec(values, (6, 4, 8), &Device::Cpu)
}

/// The same values in a plain model.
fn plain_copy(vars: &ScaledVarMap) -> anyhow::Result<Net> {
    let mut tensors = HashMap::new();
    for var in vars.vars() {
        let value = var.value().to_tensor(DType::F32)?;
        tensors.insert(var.name().to_string(), value);
    }
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    Ok(Net::new(vb)?)
}

/// f32 data, so only the order of operations differs: at most three convolutions of up to 16 products, the two norms over 48
/// elements (mean and variance), and a layer of 64.
fn bound(expected: &Tensor) -> f64 {
    two_orders(3 * 16 + 2 * 2 * 48 + roundings(64)) * largest(expected)
}

#[test]
fn scaled_layers_compute_what_plain_ones_do() -> anyhow::Result<()> {
    let vars = ScaledVarMap::new(DType::F32, &Device::Cpu)?;
    let net = Net::new(vars.var_builder())?;
    let plain = plain_copy(&vars)?;
    let x = as_scaled(&input()?, 4.)?;
    for train in [true, true, false] {
        let y: Scaled = net.forward(&x, train)?;
        let expected: Tensor = plain.forward(&input()?, train)?;
        let error = apart(&y.to_tensor(DType::F32)?, &expected);
        assert!(error <= bound(&expected), "{error} in training: {train}");
        let statistics = [
            (net.batch.running_mean(), plain.batch.running_mean()),
            (net.batch.running_var(), plain.batch.running_var()),
        ];
        for (own, expected) in statistics {
            let own = ScaledVar::of(own).unwrap().value().to_tensor(DType::F32)?;
            // A tenth of sums over 48 results of convolutions, which are about 1 and may cancel.
            assert!(apart(&own, expected) <= 0.1 * two_orders(3 * 16 + 48));
        }
        let grads = y.square()?.sum_all()?.backward()?;
        for var in vars
            .vars()
            .iter()
            .filter(|var| !var.name().contains("running"))
        {
            assert!(grads.get(var).is_some(), "{}", var.name());
        }
    }
    // Plain tensors meet the values of scaled parameters.
    let expected = plain.forward(&input()?, false)?;
    let error = apart(&net.forward(&input()?, false)?, &expected);
    assert!(error <= bound(&expected), "{error}");
    let (own, other) = (
        net.batch.forward_t(&input()?, true)?,
        plain.batch.forward_t(&input()?, true)?,
    );
    assert!(apart(&own, &other) <= bound(&other));
    let own = ScaledVar::of(net.batch.running_var()).unwrap().value();
    let expected = plain.batch.running_var();
    assert!(apart(&own.to_tensor(DType::F32)?, expected) <= 0.1 * two_orders(3 * 16 + 48));
    let expected = plain.group.forward(&x8()?)?;
    let error = apart(&net.group.forward(&x8()?)?, &expected);
    assert!(error <= bound(&expected), "{error}");
    Ok(())
}

/// Eight channels.
fn x8() -> candle_core::Result<Tensor> {
    input()?.reshape((3, 8, 8))
}

#[test]
fn a_model_of_scaled_channels_trains_in_16_bits() -> anyhow::Result<()> {
    let vars = ScaledVarMap::new(DType::F16, &Device::Cpu)?;
    let net = Net::new(vars.var_builder())?;
    let config = AdamWConfig {
        lr: 1e-2,
        ..Default::default()
    };
    let mut optimizer = ScaledAdamW::new(&vars, config)?;
    let x = as_scaled(&input()?.to_dtype(DType::F16)?, None)?;
    let targets = Tensor::new(&[0u32, 1, 2, 0, 1, 2], &Device::Cpu)?;
    let mut losses = vec![];
    for _ in 0..30 {
        let loss = net.forward(&x, true)?.cross_entropy(&targets)?;
        losses.push(loss.to_scalar()?);
        assert!(!optimizer.apply(&loss.backward()?)?.skipped()?);
    }
    assert!(losses[29] < losses[0] / 2., "{losses:?}");
    Ok(())
}

#[test]
fn a_plain_batch_norm_refuses_scaled_input_by_name() -> anyhow::Result<()> {
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    let bn = nn::batch_norm(4, 1e-5, vb.pp("bn"))?;
    let error = bn.apply_t(&as_scaled(&input()?, None)?, false).unwrap_err();
    assert!(error.to_string().contains("bn."), "{error}");
    Ok(())
}
