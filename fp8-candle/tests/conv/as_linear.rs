//! A convolution with a 1x1 kernel is a linear layer over the positions: the same casts, scales and gradients.

use crate::reference::{Case, Data, Results, plan, sqnr};
use candle_core::{DType, Tensor, Var};
use fp8_candle::conv::{ConvKind, fp8_conv};
use fp8_candle::{GemmPlan, LinearPlan, LinearWeight, Quantizer, Result, fp8_linear};
use fp8_core::{Format, Granularity};
use fp8_test_support::rounding::least_sqnr_of_tensor_cores;
use fp8_test_support::{bits, flat64, normal, on_cuda};

fn case(batch: usize) -> Case {
    Case::new(batch, 40, 24, [60, 50]).kernel([1, 1], [0, 0])
}

/// The layer over `[batch * places, channels]`, with its results as images.
fn linear(case: &Case, data: &Data, bias: &Var, plan: &LinearPlan) -> Result<Results> {
    let rows = |x: &Tensor| x.permute((0, 2, 3, 1))?.contiguous()?.flatten(0, 2);
    let images = |x: &Tensor, [batch, channels, height, width]: [usize; 4]| {
        let x = x.reshape((batch, height, width, channels))?;
        x.permute((0, 3, 1, 2))?.contiguous()
    };
    let x = Var::from_tensor(&rows(&data.x)?)?;
    let weight = Var::from_tensor(&data.weight.flatten(1, 3)?)?;
    let y = fp8_linear(
        &x,
        LinearWeight::HighPrecision(&weight, None),
        Some(bias.as_tensor()),
        plan,
    )?;
    let go = rows(&data.go)?.to_dtype(y.dtype())?;
    let grads = (&y * go)?.sum_all()?.backward()?;
    let grad = |x: &Var| grads.get(x).expect("a gradient").clone();
    Ok(Results {
        y: images(&y.detach(), case.y_dims())?,
        grad_x: images(&grad(&x), case.x_dims())?,
        grad_weight: grad(&weight).reshape(data.weight.shape())?,
        grad_bias: Some(grad(bias)),
    })
}

/// Fails if the results differ by more than the order of sums, and a last rounding to the dtype of the output, explain.
#[track_caller]
fn same(what: &str, case: &Case, got: &Results, expected: &Results) {
    let places = case.batch * case.image.iter().product::<usize>();
    // With the lengths of their sums of FP8 products.
    let pairs = [
        (&got.y, &expected.y, Some(case.channels)),
        (&got.grad_x, &expected.grad_x, Some(case.n)),
        (&got.grad_weight, &expected.grad_weight, Some(places)),
        (
            got.grad_bias.as_ref().expect("a gradient"),
            expected.grad_bias.as_ref().expect("a gradient"),
            None,
        ),
    ];
    for (index, (got, expected, sum)) in pairs.into_iter().enumerate() {
        assert_eq!(got.dtype(), expected.dtype(), "{what} {index}");
        // f32 sums have more than 110 dB, a bf16 result that is rounded to a neighbour now and then more than 60; one code
        // of E4M3 in 1000 that differs leaves less than 55.
        let wanted = match (got.dtype(), sum) {
            (DType::F32, Some(len)) if on_cuda() => {
                100f64.min(least_sqnr_of_tensor_cores(len, got.elem_count()))
            }
            (DType::F32, _) => 100.,
            _ => 60.,
        };
        let sqnr = sqnr(got, &flat64(expected));
        assert!(sqnr >= wanted, "{what}, result {index}: {sqnr} dB");
    }
}

fn granularities() -> [Granularity; 5] {
    [
        Granularity::Tensorwise,
        Granularity::Rowwise,
        Granularity::Mx,
        Granularity::Blockwise { rows: 1, cols: 128 },
        Granularity::Blockwise { rows: 16, cols: 32 },
    ]
}

/// Also where the batch is cut into parts (here of some of 48 images of 480 kB).
#[test]
fn every_granularity_casts_as_a_linear_layer() -> Result<()> {
    let case = case(48);
    let data = Data::new(&case, 1);
    let bias = Var::from_tensor(&normal(9, &[24]))?;
    for granularity in granularities() {
        let plan = plan(Format::E4M3, granularity);
        let expected = linear(&case, &data, &bias, &plan)?;
        same(
            &granularity.to_string(),
            &case,
            &data.run(&case, Some(&bias), &plan)?,
            &expected,
        );
    }
    Ok(())
}

#[test]
fn fused_outputs_and_biases_from_casts_are_those_of_a_linear_layer() -> Result<()> {
    let case = case(3);
    let data = Data::new(&case, 2);
    let data = Data {
        x: Var::from_tensor(&data.x.to_dtype(DType::BF16)?)?,
        ..data
    };
    let bias = Var::from_tensor(&normal(9, &[24]))?;
    for granularity in granularities()
        .into_iter()
        .chain([Granularity::Blockwise { rows: 8, cols: 8 }])
    {
        let plan = plan(Format::E4M3, granularity);
        for plan in [
            plan.clone().with_grad_output_in_high_precision(true),
            plan.with_bias_from_cast(true),
        ] {
            let expected = linear(&case, &data, &bias, &plan)?;
            let got = data.run(&case, Some(&bias), &plan)?;
            same(&format!("{granularity}, {plan:?}"), &case, &got, &expected);
            assert_eq!(got.grad_weight.dtype(), DType::F32);
            // Not rounded to bf16 on the way.
            let bits = bits(&expected.grad_weight);
            assert!(bits.iter().any(|bits| bits & 0xFFFF != 0));
        }
    }
    Ok(())
}

/// A sum in which f16 would overflow before it cancels: 250 * 280 - 250 * 280.
#[test]
fn overlapping_taps_are_added_before_they_are_rounded() -> Result<()> {
    let device = fp8_test_support::device();
    let x = Tensor::new(&[[[[250f32, -250.]]]], &device)?.to_dtype(DType::F16)?;
    let weight = Tensor::new(&[[[[280f32, 280.]]]], &device)?;
    for granularity in granularities() {
        let cast = || Quantizer::dynamic(Format::E4M3, granularity);
        let gemm = || GemmPlan::new(cast(), cast());
        let plan = LinearPlan::new("conv")
            .with_output(gemm())
            .with_grad_input(gemm());
        for emulate in [false, true] {
            let plan = plan.clone().with_emulate(emulate);
            let shape = fp8_candle::conv::ConvShape::new();
            let y = fp8_conv(ConvKind::ConvTranspose2d, &x, &weight, None, &shape, &plan)?;
            assert_eq!(
                flat64(&y),
                [f64::INFINITY, 0., f64::NEG_INFINITY],
                "{granularity}"
            );

            // The gradient of the input that such an output would be.
            let input = Var::zeros((1, 1, 1, 3), DType::F16, &device)?;
            let y = fp8_conv(ConvKind::Conv2d, &input, &weight, None, &shape, &plan)?;
            let grads = (y * &x)?.sum_all()?.backward()?;
            let grad = grads.get(&input).expect("a gradient");
            assert_eq!(
                flat64(grad),
                [f64::INFINITY, 0., f64::NEG_INFINITY],
                "{granularity}"
            );
        }
    }
    Ok(())
}
