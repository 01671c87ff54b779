//! Weights that are rounded at random.

use super::*;
use candle_core::Device;
use fp8::config::CastRounding;
use fp8_test_support::{bits, skipped_on_cuda};

const N: usize = 16;

/// Values in the two upper binades under any scale: codes are at most an eighth of a value apart.
fn weight() -> Vec<f32> {
    (0..N * N)
        .map(|i| 0.55 + 0.44 * (i as f32 * 0.37).sin().abs())
        .collect()
}

/// The weight as both products see it: ones and zeros have exact codes.
fn seen(model: &Model, config: &Fp8LinearConfig) -> Result<[Tensor; 2]> {
    let ones = Tensor::eye(N, DType::F32, &Device::Cpu)?;
    let x = Var::from_tensor(&ones)?;
    let step = model.step(&x, &ones, config.clone())?;
    Ok([step.y.t()?.contiguous()?, step.grad_x().clone()])
}

#[test]
fn codes_stay_until_the_weight_changes_and_their_mean_is_the_weight() -> Result<()> {
    if skipped_on_cuda("codes of a weight are drawn from its values where the host has them") {
        return Ok(());
    }
    for name in [
        RecipeName::Tensorwise,
        RecipeName::Delayed,
        RecipeName::Rowwise,
        RecipeName::Blockwise,
        RecipeName::Mxfp8,
    ] {
        let distance = |rounding| -> Result<[f64; 2]> {
            let config = config(name).with_weight_rounding(rounding);
            let mut values = weight();
            let var = Var::from_vec(values.clone(), (N, N), &Device::Cpu)?;
            let model = Model::prepared(&var, None);
            // Delayed scaling has seen the weight then.
            seen(&model, &config)?;
            let [before, again] = [seen(&model, &config)?, seen(&model, &config)?];
            assert_eq!(before.map(|w| bits(&w)), again.map(|w| bits(&w)), "{name}");
            let mut sums = [vec![0.; N * N], vec![0.; N * N]];
            const CHANGES: usize = 256;
            for _ in 0..CHANGES {
                // A change of one value, too small for another nearest code.
                values[0] += 1e-6;
                var.set(&Tensor::from_slice(&values, (N, N), &Device::Cpu)?)?;
                for (sum, w) in sums.iter_mut().zip(seen(&model, &config)?) {
                    sum.iter_mut().zip(flat64(&w)).for_each(|(s, w)| *s += w);
                }
            }
            // Of the mean from the weight, in parts of the weight.
            Ok(sums.map(|sum| {
                let means = sum.iter().zip(&values);
                let far = means.map(|(s, w)| (s / CHANGES as f64 / f64::from(*w) - 1.).abs());
                far.fold(0., f64::max)
            }))
        };
        // Five standard deviations of the mean of codes an eighth apart.
        let bound = 5. / 8. / 2. / 16.;
        let [random, nearest] = [CastRounding::Stochastic, CastRounding::NearestEven].map(distance);
        let (random, nearest) = (random?, nearest?);
        assert!(random.iter().all(|far| *far < bound), "{name}: {random:?}");
        assert!(
            nearest.iter().all(|far| *far > bound),
            "{name}: {nearest:?}"
        );
    }
    Ok(())
}
