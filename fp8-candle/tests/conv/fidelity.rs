//! How close convolutions in FP8 are to those of the values before the casts, and after them.

use crate::reference::{Case, Data, dequantized, plan, reference};
use candle_core::Result as CandleResult;
use fp8_candle::conv::ConvShape;
use fp8_candle::{LinearPlan, Result};
use fp8_core::{Format, Granularity};
use fp8_test_support::flat64;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use std::cell::RefCell;

const NAMES: [&str; 3] = ["output", "grad_x", "grad_weight"];

/// Any sizes that fit.
fn cases() -> impl Strategy<Value = Case> {
    let pair = |range: std::ops::Range<usize>| prop::array::uniform2(range);
    let channels = (1usize..4, 1usize..10, 1usize..10, 1usize..5);
    let sizes = (pair(1..14), pair(1..5), pair(1..4), pair(1..4), pair(0..4));
    (channels, sizes, pair(0..2), any::<bool>())
        .prop_map(|(channels, sizes, output_padding, transposed)| {
            let (batch, channels, n, groups) = channels;
            let (image, kernel, stride, dilation, padding) = sizes;
            let shape = ConvShape::new()
                .with_padding(padding)
                .with_stride(stride)
                .with_dilation(dilation)
                .with_groups(groups);
            Case {
                transposed,
                batch,
                channels,
                n,
                image,
                kernel,
                shape: match transposed {
                    true => shape.with_output_padding(output_padding),
                    false => shape,
                },
            }
        })
        .prop_filter("a kernel that fits", |case| case.output().is_some())
}

/// Powers of the exact sums of output and gradients, and of the errors.
#[derive(Debug, Default, Clone, Copy)]
struct Power {
    signal: [f64; 3],
    noise: [f64; 3],
}

impl Power {
    fn add(&mut self, other: &Self) {
        for index in 0..3 {
            self.signal[index] += other.signal[index];
            self.noise[index] += other.noise[index];
        }
    }

    /// Fails if the output has less than 28 dB, or a gradient less than `gradients`.
    #[track_caller]
    fn check(&self, what: &str, gradients: f64) {
        for (index, wanted) in [28., gradients, gradients].into_iter().enumerate() {
            let sqnr = 10. * (self.signal[index] / self.noise[index]).log10();
            assert!(
                sqnr >= wanted,
                "{} of {what}: {sqnr} dB, expected {wanted}",
                NAMES[index]
            );
        }
    }
}

/// Compares output and gradients with the definition after the casts, and measures how far they are from it before.
fn check(case: &Case, seed: u64, grad_format: Format) -> Result<Power> {
    let data = Data::new(case, seed);
    let (x, weight, go) = (flat64(&data.x), flat64(&data.weight), flat64(&data.go));
    let exact = reference(case, [[&x, &weight], [&go, &weight], [&go, &x]]);
    let x8 = dequantized(&data.x, Format::E4M3);
    let w8 = dequantized(&data.weight, Format::E4M3);
    let go8 = dequantized(&data.go, grad_format);
    let casted = reference(case, [[&x8, &w8], [&go8, &w8], [&go8, &x8]]);

    let plan = plan(grad_format, Granularity::Tensorwise);
    let mut power = Power::default();
    for emulate in [true, false] {
        let results = data.run(case, None, &plan.clone().with_emulate(emulate))?;
        let tensors = [&results.y, &results.grad_x, &results.grad_weight];
        for (index, tensor) in tensors.into_iter().enumerate() {
            let what = format!("{} of {case:?}, emulate {emulate}", NAMES[index]);
            // Products of values that were multiplied by their scales before are rounded.
            casted[index].check(&what, tensor, emulate);
            let (got, exact) = (flat64(tensor), &exact[index].exact);
            let errors = got.iter().zip(exact).map(|(got, exact)| got - exact);
            power.noise[index] = errors.map(|error| error * error).sum();
            power.signal[index] = exact.iter().map(|x| x * x).sum();
        }
    }
    Ok(power)
}

/// Each case equals the sums of its casts; all together reach the contract. A single one of few values may be unlucky.
#[test]
fn any_sizes_give_the_sums_of_their_casts() {
    for (format, gradients) in [(Format::E5M2, 24.), (Format::E4M3, 28.)] {
        let all = RefCell::new(Power::default());
        let mut runner = TestRunner::new(ProptestConfig::with_cases(64));
        let result = runner.run(&(cases(), 0u64..1000), |(case, seed)| {
            all.borrow_mut().add(&check(&case, seed, format).unwrap());
            Ok(())
        });
        result.unwrap();
        all.borrow()
            .check(&format!("any sizes, {format}"), gradients);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn without_a_plan_it_is_the_convolution_of_f32(case in cases(), seed in 0u64..1000) {
        let data = Data::new(&case, seed);
        let (x, weight, go) = (flat64(&data.x), flat64(&data.weight), flat64(&data.go));
        let exact = reference(&case, [[&x, &weight], [&go, &weight], [&go, &x]]);
        let results = data.run(&case, None, &LinearPlan::new("conv")).unwrap();
        let tensors = [&results.y, &results.grad_x, &results.grad_weight];
        for (index, tensor) in tensors.into_iter().enumerate() {
            exact[index].check(&format!("{} of {case:?}", NAMES[index]), tensor, true);
        }
        if let Some(candle) = candle(&case, &data).unwrap() {
            exact[0].check(&format!("candle's, {case:?}"), &candle, true);
        }
    }
}

/// candle's own convolution, which has one number for height and width.
fn candle(case: &Case, data: &Data) -> CandleResult<Option<candle_core::Tensor>> {
    let shape = &case.shape;
    let pairs = [
        shape.padding,
        shape.stride,
        shape.dilation,
        shape.output_padding,
    ];
    if pairs.iter().any(|[height, width]| height != width) {
        return Ok(None);
    }
    let [padding, stride, dilation, output_padding] = pairs.map(|pair| pair[0]);
    let (x, weight) = (data.x.as_tensor(), data.weight.as_tensor());
    match case.transposed {
        false => x.conv2d(weight, padding, stride, dilation, shape.groups),
        true if shape.groups > 1 => return Ok(None),
        true => x.conv_transpose2d(weight, padding, output_padding, stride, dilation),
    }
    .map(Some)
}

/// Enough elements for the figures of the contract, in kinds of layers that networks have.
#[test]
fn layers_of_networks_reach_the_contract() -> Result<()> {
    let cases = [
        Case::new(2, 16, 32, [16, 16]),
        Case::new(4, 16, 32, [21, 21]).stride([2, 2]),
        Case::new(4, 64, 80, [8, 9]).kernel([1, 1], [0, 0]),
        Case::new(3, 12, 20, [23, 23])
            .kernel([7, 7], [3, 3])
            .stride([2, 2]),
        Case::new(2, 16, 32, [16, 16])
            .kernel([3, 3], [2, 2])
            .dilation([2, 2]),
        Case::new(2, 20, 20, [16, 16]).groups(4),
        Case::new(4, 48, 32, [8, 9])
            .kernel([2, 2], [0, 0])
            .stride([2, 2])
            .transposed(),
        Case::new(4, 16, 32, [8, 9])
            .kernel([4, 3], [1, 1])
            .stride([2, 1])
            .transposed(),
    ];
    for (seed, case) in cases.iter().enumerate() {
        for (format, gradients) in [(Format::E5M2, 24.), (Format::E4M3, 28.)] {
            let power = check(case, seed as u64, format)?;
            power.check(&format!("{case:?}, {format}"), gradients);
        }
    }
    Ok(())
}
