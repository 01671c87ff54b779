//! What does not depend on the values: threads, dtypes, biases, dimensions, casts that serve twice.

use crate::reference::{Case, Data, plan};
use candle_core::{DType, Tensor, Var};
use fp8_candle::conv::{ConvKind, ConvShape, ConvWeight, fp8_conv};
use fp8_candle::{CastCounter, GemmPlan, LinearPlan, Result, WeightCache};
use fp8_core::{Format, Granularity};
use fp8_test_support::{bits, device, flat64, normal, skipped_on_cuda};
use std::sync::atomic::Ordering;

/// E5M2 gradients in each granularity, and no plan.
fn plans() -> Vec<LinearPlan> {
    let granularities = [
        Granularity::Tensorwise,
        Granularity::Rowwise,
        Granularity::Mx,
        Granularity::Blockwise { rows: 1, cols: 128 },
        Granularity::Blockwise { rows: 16, cols: 16 },
    ];
    let plans = granularities.map(|granularity| plan(Format::E5M2, granularity));
    plans.into_iter().chain([LinearPlan::new("conv")]).collect()
}

#[test]
fn same_bits_for_any_number_of_threads() -> Result<()> {
    if skipped_on_cuda("it is about the threads of the CPU") {
        return Ok(());
    }
    // More than one part each: the columns of one image have 4 MB.
    let cases = [
        Case::new(2, 32, 8, [120, 118]),
        Case::new(3, 24, 16, [60, 59]).stride([2, 2]).transposed(),
        Case::new(3, 3, 2, [40, 40]).groups(11),
    ];
    for case in cases {
        let data = Data::new(&case, 7);
        for plan in plans() {
            let mut first: Option<[Vec<u32>; 3]> = None;
            for threads in [1, 2, 3] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
                let pool = pool.build().unwrap();
                let results = pool.install(|| data.run(&case, None, &plan))?;
                let got = [&results.y, &results.grad_x, &results.grad_weight].map(bits);
                let first = first.get_or_insert_with(|| got.clone());
                assert!(*first == got, "{case:?}: other bits on {threads} threads");
            }
        }
    }
    Ok(())
}

#[test]
fn sixteen_bit_inputs_round_the_result_of_f32_once() -> Result<()> {
    for case in [
        Case::new(2, 5, 7, [9, 8]),
        Case::new(2, 5, 7, [9, 8]).transposed(),
    ] {
        for dtype in [DType::BF16, DType::F16] {
            let data = Data::new(&case, 1);
            let x = data.x.to_dtype(dtype)?;
            let wide = x.to_dtype(DType::F32)?;
            let bias = normal(5, &[case.y_dims()[1]]);
            let emulated = plans().into_iter().map(|plan| plan.with_emulate(true));
            let plans = || plans().into_iter().chain(emulated.clone());
            // Without a plan the weight is rounded to x's dtype.
            for plan in plans().filter(|plan| plan.output.is_some()) {
                let got = case.apply(&x, &data.weight, Some(&bias), &plan)?;
                assert_eq!(got.dtype(), dtype);
                let f32 = case.apply(&wide, &data.weight, None, &plan)?;
                let bias = bias.to_dtype(dtype)?.reshape((1, (), 1, 1))?;
                let expected = f32.to_dtype(dtype)?.broadcast_add(&bias)?;
                assert_eq!(bits(&got), bits(&expected), "{dtype:?} {case:?}");
            }
            // Gradients have the dtypes of their tensors.
            let mixed = Data {
                x: Var::from_tensor(&x)?,
                ..data
            };
            let bias = Var::from_tensor(&bias)?;
            for plan in plans() {
                let results = mixed.run(&case, Some(&bias), &plan)?;
                assert_eq!(results.grad_x.dtype(), dtype);
                assert_eq!(results.grad_weight.dtype(), DType::F32);
                assert_eq!(results.grad_x.dims(), x.dims());
                assert_eq!(results.grad_weight.dims(), mixed.weight.dims());
            }
        }
    }
    Ok(())
}

#[test]
fn the_bias_is_added_last_and_its_gradient_is_a_sum() -> Result<()> {
    for case in [
        Case::new(3, 5, 7, [9, 8]).groups(2),
        Case::new(3, 5, 7, [9, 8]).groups(2).transposed(),
    ] {
        for plan in plans() {
            let data = Data::new(&case, 2);
            let [_, channels, height, width] = case.y_dims();
            let bias = Var::from_tensor(&normal(9, &[channels]))?;
            let without = data.run(&case, None, &plan)?;
            let with = data.run(&case, Some(&bias), &plan)?;
            let expected = without.y.broadcast_add(&bias.reshape((1, (), 1, 1))?)?;
            assert_eq!(bits(&with.y), bits(&expected));
            assert_eq!(bits(&with.grad_x), bits(&without.grad_x));
            assert_eq!(bits(&with.grad_weight), bits(&without.grad_weight));

            let go = flat64(&data.go);
            let grad = flat64(&with.grad_bias.expect("a gradient"));
            for (channel, grad) in grad.iter().enumerate() {
                let of_channel = |at: &usize| at / (height * width) % channels == channel;
                let terms: Vec<f64> = (0..go.len()).filter(of_channel).map(|at| go[at]).collect();
                let exact: f64 = terms.iter().sum();
                let magnitude: f64 = terms.iter().map(|term| term.abs()).sum();
                let bound = terms.len() as f64 * 2f64.powi(-24) * magnitude;
                assert!((grad - exact).abs() <= bound, "{grad} {exact}");
            }
        }
    }
    Ok(())
}

#[test]
fn one_dimension_is_a_height_of_one() -> Result<()> {
    let shape = ConvShape::new()
        .with_padding([9, 1])
        .with_stride([5, 2])
        .with_dilation([3, 2])
        .with_groups(2);
    let flat_shape = ConvShape::new()
        .with_padding([0, 1])
        .with_stride([1, 2])
        .with_dilation([1, 2])
        .with_groups(2);
    let x = Var::from_tensor(&normal(1, &[3, 6, 17]))?;
    let bias = normal(3, &[4]);
    for granularity in [Granularity::Tensorwise, Granularity::Rowwise] {
        let plan = plan(Format::E5M2, granularity);
        for transposed in [false, true] {
            let dims = if transposed { [6, 2, 3] } else { [4, 3, 3] };
            let weight = Var::from_tensor(&normal(2, &dims))?;
            let (x2, weight2) = (x.unsqueeze(2)?, weight.unsqueeze(2)?);
            let (one, two) = match transposed {
                false => (
                    fp8_conv(
                        ConvKind::Conv1d,
                        &x,
                        weight.as_tensor(),
                        Some(&bias),
                        &shape,
                        &plan,
                    )?,
                    fp8_conv(
                        ConvKind::Conv2d,
                        &x2,
                        &weight2,
                        Some(&bias),
                        &flat_shape,
                        &plan,
                    )?,
                ),
                true => (
                    fp8_conv(
                        ConvKind::ConvTranspose1d,
                        &x,
                        weight.as_tensor(),
                        Some(&bias),
                        &shape,
                        &plan,
                    )?,
                    fp8_conv(
                        ConvKind::ConvTranspose2d,
                        &x2,
                        &weight2,
                        Some(&bias),
                        &flat_shape,
                        &plan,
                    )?,
                ),
            };
            assert_eq!(one.dims(), two.squeeze(2)?.dims());
            assert_eq!(bits(&one), bits(&two));
            let (one, two) = (one.sqr()?.backward()?, two.sqr()?.backward()?);
            for var in [&x, &weight] {
                let (one, two) = (one.get(var).unwrap(), two.get(var).unwrap());
                assert_eq!(one.dims(), var.dims());
                assert_eq!(bits(one), bits(two));
            }
        }
    }
    Ok(())
}

/// A training step casts x, weight and the gradient once each if one cast serves both of its products.
#[test]
fn one_cast_serves_both_products() -> Result<()> {
    let case = Case::new(2, 5, 7, [9, 8]);
    let data = Data::new(&case, 3);
    for (grad_weight_format, casts) in [(Format::E5M2, 3), (Format::E4M3, 4)] {
        let counter = CastCounter::default();
        let cast = |format| crate::reference::tensorwise(format).with_counter(counter.clone());
        let (e4m3, e5m2) = (|| cast(Format::E4M3), || cast(Format::E5M2));
        let plan = LinearPlan::new("conv")
            .with_output(GemmPlan::new(e4m3(), e4m3()))
            .with_grad_input(GemmPlan::new(e5m2(), e4m3()))
            .with_grad_weight(GemmPlan::new(cast(grad_weight_format), e4m3()));
        data.run(&case, None, &plan)?;
        assert_eq!(counter.load(Ordering::Relaxed), casts);
    }
    Ok(())
}

#[test]
fn a_cache_keeps_the_codes_of_an_unchanged_weight() -> Result<()> {
    if skipped_on_cuda("a change of the weight is not known without a copy to the host") {
        return Ok(());
    }
    let case = Case::new(2, 5, 7, [9, 8]);
    let data = Data::new(&case, 4);
    let (cache, counter) = (WeightCache::default(), CastCounter::default());
    let weight_cast = crate::reference::tensorwise(Format::E4M3).with_counter(counter.clone());
    let x_cast = crate::reference::tensorwise(Format::E4M3);
    let plan = LinearPlan::new("conv").with_output(GemmPlan::new(x_cast, weight_cast));
    let weight = ConvWeight::new(&data.weight).with_cache(&cache);
    let forward = || fp8_conv(ConvKind::Conv2d, &data.x, weight, None, &case.shape, &plan);
    let first = forward()?;
    assert_eq!(bits(&forward()?), bits(&first));
    assert_eq!(counter.load(Ordering::Relaxed), 1);
    data.weight.set(&(data.weight.as_tensor() * 2.)?)?;
    // Twice the values have the same codes with twice the scale.
    assert_eq!(bits(&forward()?), bits(&(first * 2.)?));
    assert_eq!(counter.load(Ordering::Relaxed), 2);
    Ok(())
}

#[test]
fn an_empty_batch_gives_an_empty_output_and_no_gradient_of_the_weight() -> Result<()> {
    for case in [
        Case::new(0, 3, 4, [6, 6]),
        Case::new(0, 3, 4, [6, 6]).transposed(),
    ] {
        for plan in plans() {
            let x = Var::from_tensor(&Tensor::zeros(&case.x_dims(), DType::F32, &device())?)?;
            let weight = Var::from_tensor(&normal(1, &case.weight_dims()))?;
            let y = case.apply(&x, &weight, None, &plan)?;
            assert_eq!(y.dims(), case.y_dims());
            let grads = y.sum_all()?.backward()?;
            let grad = flat64(grads.get(&weight).expect("a gradient"));
            assert!(grad.iter().all(|&grad| grad == 0.));
            assert_eq!(grads.get(&x).expect("a gradient").dims(), x.dims());
        }
    }
    Ok(())
}

#[test]
fn strided_inputs_are_read_as_they_are() -> Result<()> {
    let case = Case::new(3, 5, 7, [9, 8]);
    let x = normal(1, &[9, 8, 3, 5]).permute((2, 3, 0, 1))?;
    let weight = normal(2, &[3, 3, 7, 5]).permute((2, 3, 0, 1))?;
    let (x2, weight2) = (x.force_contiguous()?, weight.force_contiguous()?);
    for plan in plans() {
        let got = case.apply(&x, &weight, None, &plan)?;
        let expected = case.apply(&x2, &weight2, None, &plan)?;
        assert_eq!(bits(&got), bits(&expected));
    }
    Ok(())
}
