//! How close convolutions in FP8 are to those of the values before the casts, and after them.

use crate::reference::{Case, Data, dequantized, flat, plan, reference, sqnr};
use candle_core::Result as CandleResult;
use fp8_candle::conv::ConvShape;
use fp8_candle::{LinearPlan, Result};
use fp8_core::{Format, Granularity};
use fp8_test_support::isa;
use proptest::prelude::*;

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

fn products(case: &Case) -> usize {
    let mut products = 0;
    case.each(|_, _, _| products += 1);
    products
}

/// The least number of elements of a tensor of the case: the fewer, the more an SQNR depends on chance.
fn fewest(case: &Case) -> usize {
    let dims = [case.x_dims(), case.y_dims(), case.weight_dims()];
    let sizes = dims.iter().map(|dims| dims.iter().product());
    sizes.min().unwrap_or(0)
}

/// Output and gradients against the definition, before and after the casts.
fn check(case: &Case, seed: u64, grad_format: Format, wanted: Option<[f64; 2]>) -> Result<()> {
    let data = Data::new(case, seed);
    let (x, weight, go) = (flat(&data.x), flat(&data.weight), flat(&data.go));
    let exact = reference(case, [[&x, &weight], [&go, &weight], [&go, &x]]);
    let x8 = dequantized(&data.x, Format::E4M3);
    let w8 = dequantized(&data.weight, Format::E4M3);
    let go8 = dequantized(&data.go, grad_format);
    let casted = reference(case, [[&x8, &w8], [&go8, &w8], [&go8, &x8]]);

    let plan = plan(grad_format, Granularity::Tensorwise);
    for emulate in [false, true] {
        let results = data.run(case, None, &plan.clone().with_emulate(emulate))?;
        let tensors = [&results.y, &results.grad_x, &results.grad_weight];
        for (index, tensor) in tensors.into_iter().enumerate() {
            let what = format!("{} of {case:?}, emulate {emulate}", NAMES[index]);
            // Products of values that were multiplied by their scales before are rounded.
            casted[index].check(&what, tensor, emulate);
            let Some(wanted) = wanted else { continue };
            let sqnr = sqnr(tensor, &exact[index].exact);
            let wanted = wanted[usize::from(index > 0)];
            assert!(sqnr >= wanted, "{what}: {sqnr} dB, expected {wanted}");
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn any_sizes_give_the_sums_of_their_casts(case in cases(), seed in 0u64..1000, e4m3: bool) {
        let format = if e4m3 { Format::E4M3 } else { Format::E5M2 };
        // A tensor of few values may be unlucky: the power of the noise is a mean over the fewest independent values, so its
        // standard deviation is about 1 / sqrt(n) of it, or 4.3 / sqrt(n) dB; eight of them.
        let slack = 35. / (fewest(&case) as f64).sqrt();
        let enough = products(&case) > 0 && fewest(&case) > 200;
        let gradients = if e4m3 { 28. } else { 24. };
        let wanted = enough.then_some([28. - slack, gradients - slack]);
        check(&case, seed, format, wanted).unwrap();
    }

    #[test]
    fn without_a_plan_it_is_the_convolution_of_f32(case in cases(), seed in 0u64..1000) {
        let data = Data::new(&case, seed);
        let (x, weight, go) = (flat(&data.x), flat(&data.weight), flat(&data.go));
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
        check(case, seed as u64, Format::E5M2, Some([28., 24.]))?;
        check(case, seed as u64, Format::E4M3, Some([28., 28.]))?;
    }
    Ok(())
}

#[test]
fn every_instruction_set_passes() {
    isa::run_again_on_each(&["any_sizes", "layers_of"]);
}
