//! A tensor is cast once, whatever groups and parts its products are cut into, and observed once.

use crate::reference::{Case, Data, tensorwise};
use candle_core::{DType, Tensor};
use fp8_candle::conv::{ConvKind, ConvWeight, fp8_conv};
use fp8_candle::state::StepCells;
use fp8_candle::{
    AmaxRecorder, CastCounter, CastHook, FirstScale, GemmPlan, LinearPlan, Quantized, Quantizer,
    Result, Role, ScaleSource, Slot, WeightCache,
};
use fp8_core::{DelayedRule, Format, Granularity};
use fp8_test_support::{bits, device, normal, skipped_on_cuda};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

/// What a hook saw: the shape of the values, the number of scales, the largest error relative to its bound.
#[derive(Debug, Default)]
struct Seen(Mutex<Vec<(Vec<usize>, usize, f32)>>);

impl CastHook for Seen {
    fn on_cast(&self, x: &Tensor, quantized: &Quantized) -> Result<()> {
        assert_eq!(x.dims(), quantized.tensor.dims());
        let scales = quantized.quant_scale.elem_count();
        assert_eq!(quantized.tensor.dequant_scale().elem_count(), scales);
        let back = quantized.tensor.dequantize(DType::F32)?;
        let x = x.to_dtype(DType::F32)?;
        // Half a step of 3 bits, or of a subnormal of a tensor whose amax is below 16.
        let bound = ((x.abs()? / 16.)? + 16. / 448. / 1024.)?;
        let worst = ((back - x)?.abs()? / bound)?
            .max_all()?
            .to_scalar::<f32>()?;
        let mut seen = self.0.lock().unwrap();
        seen.push((quantized.tensor.dims().to_vec(), scales, worst));
        Ok(())
    }
}

/// A cast that is observed and counted.
struct Observed {
    cast: Quantizer,
    seen: Arc<Seen>,
    counter: CastCounter,
}

impl Observed {
    fn new(cast: Quantizer) -> Self {
        let (seen, counter) = (Arc::new(Seen::default()), CastCounter::default());
        let hook: Arc<dyn CastHook> = seen.clone();
        Self {
            cast: cast.with_hook(hook).with_counter(counter.clone()),
            seen,
            counter,
        }
    }

    /// Fails unless one cast of a tensor of `elements` was seen.
    #[track_caller]
    fn once(&self, what: &str, elements: usize, scales: Option<usize>) {
        assert_eq!(self.counter.load(Ordering::Relaxed), 1, "{what}");
        let seen = self.seen.0.lock().unwrap();
        let [(dims, got, worst)] = &seen[..] else {
            panic!("{what}: {seen:?}")
        };
        assert_eq!(dims.iter().product::<usize>(), elements, "{what} {dims:?}");
        assert!(
            scales.is_none_or(|scales| scales == *got),
            "{what}: {got} scales"
        );
        assert!(*worst <= 1.0001, "{what}: {worst}");
    }
}

/// `weight_for_grad_input` tensorwise, as in `rowwise_with_gw_hp`.
#[test]
fn each_tensor_is_observed_once() -> Result<()> {
    let case = Case::new(5, 8, 12, [62, 60]).groups(4);
    for granularity in [Granularity::Rowwise, Granularity::Mx] {
        for case in [case, case.transposed()] {
            let data = Data::new(&case, 1);
            let cast = |granularity| Observed::new(Quantizer::dynamic(Format::E4M3, granularity));
            let [x, w, go, go2, x2] = [(); 5].map(|()| cast(granularity));
            let w2 = cast(Granularity::Tensorwise);
            let gemm = |a: &Observed, b: &Observed| GemmPlan::new(a.cast.clone(), b.cast.clone());
            let plan = LinearPlan::new("conv")
                .with_output(gemm(&x, &w))
                .with_grad_input(gemm(&go, &w2))
                .with_grad_weight(gemm(&go2, &x2));
            data.run(&case, None, &plan)?;

            let elements = |dims: [usize; 4]| dims.iter().product::<usize>();
            let weight = elements(case.weight_dims());
            let places = match case.transposed {
                false => case.y_dims(),
                true => case.x_dims(),
            };
            let places = places[0] * places[2] * places[3];
            let columns = 4 * case.channels * 9 * places;
            let (x_len, go_len) = match case.transposed {
                false => (columns, elements(case.y_dims())),
                true => (elements(case.x_dims()), columns),
            };
            x.once("x", x_len, None);
            x2.once("x for grad_weight", x_len, None);
            go.once("go", go_len, None);
            go2.once("go for grad_weight", go_len, None);
            w.once("weight", weight, None);
            w2.once("weight for grad_x", weight, Some(1));
        }
    }
    Ok(())
}

/// A cast that rounds per tensor, whatever the products are cut into, does not show how many images there are.
#[test]
fn images_of_a_batch_do_not_depend_on_each_other() -> Result<()> {
    // 4 images are more than one part.
    let case = Case::new(4, 24, 16, [60, 62]).groups(2);
    for case in [case, case.transposed()] {
        let data = Data::new(&case, 3);
        for granularity in [Granularity::Rowwise, Granularity::Mx] {
            let plan = crate::reference::plan(Format::E4M3, granularity);
            let whole = case.apply(&data.x, &data.weight, None, &plan)?;
            for image in 0..4 {
                let x = data.x.narrow(0, image, 1)?;
                let one = case.apply(&x, &data.weight, None, &plan)?;
                assert_eq!(bits(&one), bits(&whole.narrow(0, image, 1)?), "{case:?}");
            }
        }
    }
    Ok(())
}

/// A frozen weight is cast once and recorded once beside an input with scales along the sums.
#[test]
fn a_cache_serves_every_granularity() -> Result<()> {
    if skipped_on_cuda("a change of the weight is not known without a copy to the host") {
        return Ok(());
    }
    let slot = Slot::alone("conv", Role::Weight, 4, &device())?;
    let delayed = tensorwise(Format::E4M3).with_source(ScaleSource::Delayed {
        slot,
        rule: DelayedRule::default(),
        first: FirstScale::OwnAmax,
    });
    let rowwise = || Quantizer::dynamic(Format::E4M3, Granularity::Rowwise);
    let blocks = Quantizer::dynamic(Format::E4M3, Granularity::Blockwise { rows: 4, cols: 4 });
    for weight_cast in [delayed, rowwise(), blocks] {
        for transposed in [false, true] {
            let case = Case::new(2, 6, 8, [9, 8]).groups(2);
            let case = if transposed { case.transposed() } else { case };
            let data = Data::new(&case, 4);
            let (cache, counter) = (WeightCache::default(), CastCounter::default());
            let cast = weight_cast.clone().with_counter(counter.clone());
            let plan = LinearPlan::new("conv").with_output(GemmPlan::new(rowwise(), cast));
            let weight = ConvWeight::new(&data.weight).with_cache(&cache);
            let forward = || match transposed {
                false => fp8_conv(ConvKind::Conv2d, &data.x, weight, None, &case.shape, &plan),
                true => fp8_conv(
                    ConvKind::ConvTranspose2d,
                    &data.x,
                    weight,
                    None,
                    &case.shape,
                    &plan,
                ),
            };
            let first = forward()?;
            assert_eq!(bits(&forward()?), bits(&first));
            assert_eq!(counter.load(Ordering::Relaxed), 1);
            data.weight.set(&normal(77, &case.weight_dims()))?;
            assert_ne!(bits(&forward()?), bits(&first));
            assert_eq!(counter.load(Ordering::Relaxed), 2);
        }
    }
    Ok(())
}

/// Inf in any part of a batch counts as one cast with Inf.
#[test]
fn a_non_finite_cast_counts_once() -> Result<()> {
    let case = Case::new(4, 24, 16, [60, 62]).groups(2);
    let data = Data::new(&case, 5);
    let x = data.x.as_tensor();
    let inf = Tensor::full(f32::INFINITY, (1, 48, 60, 62), &device())?;
    let x = Tensor::cat(&[&x.narrow(0, 0, 2)?, &inf, &x.narrow(0, 3, 1)?], 0)?;
    let table = fp8_candle::StateTable::new(&device())?;
    let row = table.add_rows(&[("conv", Role::Input)], 4)?;
    let step = StepCells::new(&table)?;
    let rowwise = || Quantizer::dynamic(Format::E4M3, Granularity::Rowwise);
    let observed = rowwise().with_recorder(AmaxRecorder::new(step.clone(), row, true));
    let plan = LinearPlan::new("conv").with_output(GemmPlan::new(observed, rowwise()));
    case.apply(&x, &data.weight, None, &plan)?;
    assert_eq!(step.casts(), 1);
    assert_eq!(step.recorded()?.non_finite.to_vec1::<u32>()?, [1]);
    Ok(())
}
