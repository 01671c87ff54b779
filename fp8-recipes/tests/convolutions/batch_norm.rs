//! Batch norm: candle-nn's bits, gradients, running statistics, and folding into a convolution.

use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{ModuleT, VarBuilder, VarMap};
use fp8_recipes::checkpoint::{TrainingMeta, resume_training, save_training};
use fp8_recipes::emulation::{EmulationMethod, Emulator, EmulatorOptions};
use fp8_recipes::nn::{BatchNormConfig, Conv2dConfig};
use fp8_recipes::optim::{AdamW, AdamWConfig, LossScalerConfig, Sgd, SgdConfig};
use fp8_recipes::{Fp8Module, check_gradients, nn, with_fp8};
use fp8_test_support::differences::Slope;
use fp8_test_support::rounding::{UNIT, UNIT_F64, two_orders};
use fp8_test_support::{assert_close, cpu_tensor, flat64};
use proptest::prelude::*;

const CPU: &Device = &Device::Cpu;

fn random(seed: u64, shape: &[usize], dtype: DType) -> Tensor {
    cpu_tensor(seed, shape).to_dtype(dtype).unwrap()
}

fn close(a: &Tensor, b: &Tensor, bound: f64) {
    assert_eq!(a.dims(), b.dims());
    for (a, b) in flat64(a).into_iter().zip(flat64(b)) {
        assert!((a - b).abs() <= bound * (1. + b.abs()), "{a} {b}");
    }
}

/// mean, variance, weight, bias.
fn parameters(seed: u64, features: usize, dtype: DType) -> [Tensor; 4] {
    let all = [1, 2, 3, 4].map(|i| random(seed + i, &[features], dtype));
    let [mean, var, weight, bias] = all;
    [mean, var.affine(0.4, 1.).unwrap(), weight, bias]
}

fn norm(seed: u64, features: usize, dtype: DType) -> nn::BatchNorm {
    let [mean, var, weight, bias] = parameters(seed, features, dtype);
    nn::BatchNorm::new_with_momentum(features, mean, var, weight, bias, 1e-3, 0.3).unwrap()
}

#[test]
fn candle_nns_bits_in_both_modes() {
    for dtype in [DType::F32, DType::F64] {
        for shape in [vec![5, 3], vec![2, 3, 4], vec![2, 3, 4, 5]] {
            for (affine, remove_mean) in [(true, true), (false, true), (true, false)] {
                let config = BatchNormConfig {
                    eps: 1e-3,
                    affine,
                    remove_mean,
                    momentum: 0.3,
                };
                let [mean, var, weight, bias] = parameters(7, 3, dtype);
                let tensors = [
                    ("running_mean", mean),
                    ("running_var", var),
                    ("weight", weight),
                    ("bias", bias),
                ];
                let tensors = tensors.map(|(name, tensor)| (name.to_string(), tensor));
                let vb = VarBuilder::from_tensors(tensors.into_iter().collect(), dtype, CPU);
                let ours = nn::batch_norm(3, config, vb.clone()).unwrap();
                let theirs = candle_nn::batch_norm(3, config, vb).unwrap();
                let x = random(11, &shape, dtype);
                for train in [true, true, false] {
                    let (a, b) = (ours.forward_t(&x, train), theirs.forward_t(&x, train));
                    assert_eq!(flat64(&a.unwrap()), flat64(&b.unwrap()));
                    assert_eq!(flat64(ours.running_mean()), flat64(theirs.running_mean()));
                    assert_eq!(flat64(ours.running_var()), flat64(theirs.running_var()));
                }
                let (a, b) = (ours.forward_eval(&x), ours.forward_t(&x, false));
                assert_eq!(flat64(&a.unwrap()), flat64(&b.unwrap()));
            }
        }
    }
}

/// The loss of a batch norm: its outputs weighted by fixed numbers, as a sum of squares would hide a gradient of 0.
fn loss(x: &Tensor, parameters: &[Tensor; 4], train: bool) -> Tensor {
    let [mean, var, weight, bias] = parameters.clone();
    let features = mean.dims()[0];
    let bn = nn::BatchNorm::new(features, mean, var, weight, bias, 1e-3).unwrap();
    let y = bn.forward_t(x, train).unwrap();
    let weights = random(99, y.dims(), DType::F64);
    (y * weights).unwrap().sum_all().unwrap()
}

fn shapes() -> impl Strategy<Value = Vec<usize>> {
    (2usize..4, 1usize..4, prop::collection::vec(1usize..4, 0..3))
        .prop_map(|(batch, features, rest)| [vec![batch, features], rest].concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Finite differences in f64. A loss is a sum of at most 81 outputs below 4, weighted by numbers below 1, and an output
    /// has the roundings of two sums of at most 27 elements and some more, up to 64.
    #[test]
    fn gradients_are_the_finite_differences(
        shape in shapes(), seed in 0u64..1000, train: bool, mixed: bool,
    ) {
        let x = Var::from_tensor(&random(seed, &shape, DType::F64)).unwrap();
        // With f32 parameters and an f64 input everything is computed in f64, another way.
        let dtype = if mixed { DType::F32 } else { DType::F64 };
        let [mean, var, weight, bias] = parameters(seed, shape[1], dtype);
        let weight = Var::from_tensor(&weight).unwrap();
        let bias = Var::from_tensor(&bias).unwrap();
        let with = |weight: Tensor, bias: Tensor| [mean.clone(), var.clone(), weight, bias];
        let own = with(weight.as_tensor().clone(), bias.as_tensor().clone());
        let grads = loss(&x, &own, train).backward().unwrap();
        let value = |x: &Tensor, own: &[Tensor; 4]| loss(x, own, train).to_scalar::<f64>().unwrap();
        let difference = |at: &Tensor, i: usize, f: &dyn Fn(&Tensor) -> f64| {
            let values = flat64(at);
            let moved = |by: f64| {
                let mut values = values.clone();
                values[i] += by;
                f(&Tensor::from_vec(values, at.dims(), CPU).unwrap())
            };
            Slope::of(2f64.powi(-12), moved)
        };
        let rounding = 64. * UNIT_F64 * 81. * 4.;
        let bound = |slope: Slope| slope.bound(rounding) + 64. * UNIT_F64 * 81. * slope.value.abs().max(1.);
        for (i, grad) in flat64(grads.get(&x).unwrap()).into_iter().enumerate() {
            let expected = difference(&x, i, &|x| value(x, &own));
            prop_assert!((grad - expected.value).abs() <= bound(expected), "x {i}: {grad} {expected:?}");
        }
        // A gradient in f32 has 24 bits.
        let stored = if mixed { 2. * UNIT } else { 0. };
        let off = |slope: Slope| bound(slope) + stored * slope.value.abs();
        let (weight_grad, bias_grad) = (grads.get(&weight).unwrap(), grads.get(&bias).unwrap());
        for i in 0..shape[1] {
            let of_weight = difference(&weight, i, &|w| value(&x, &with(w.clone(), bias.as_tensor().clone())));
            let of_bias = difference(&bias, i, &|b| value(&x, &with(weight.as_tensor().clone(), b.clone())));
            prop_assert!((flat64(weight_grad)[i] - of_weight.value).abs() <= off(of_weight), "{of_weight:?}");
            prop_assert!((flat64(bias_grad)[i] - of_bias.value).abs() <= off(of_bias), "{of_bias:?}");
        }
    }

    /// Products are rounded in another order: sums of at most 4 * 9 terms, and four operations of the norm.
    #[test]
    fn a_fused_convolution_computes_what_the_two_do(
        seed in 0u64..1000, bias: bool, affine: bool, stride in 1usize..3, padding in 0usize..2, groups in 1usize..3,
    ) {
        let config = Conv2dConfig { stride, padding, groups, ..Default::default() };
        let weight = Var::from_tensor(&random(seed, &[6, 4 / groups, 3, 3], DType::F32)).unwrap();
        let bias = bias.then(|| random(seed + 9, &[6], DType::F32));
        let conv = nn::Conv2d::new(weight.as_tensor().clone(), bias, config).with_path("conv");
        let [mean, var, gain, shift] = parameters(seed, 6, DType::F32);
        let bn = match affine {
            true => nn::BatchNorm::new(6, mean, var, gain, shift, 1e-3).unwrap(),
            false => nn::BatchNorm::new_no_bias(6, mean, var, 1e-3).unwrap(),
        };
        let x = random(seed + 20, &[2, 4, 7, 6], DType::F32);
        let two = bn.forward_eval(&conv.forward(&x).unwrap()).unwrap();
        let fused = nn::fuse_batch_norm(&conv, &bn).unwrap();
        assert_close("fused", &fused.forward(&x).unwrap(), &two, two_orders(4 * 9 + 1 + 4));
        prop_assert_eq!(fused.path(), Some("conv"));
        prop_assert!(!fused.weight().track_op());
    }
}

/// Half-precision inputs with f32 parameters, which candle-nn refuses or rounds at each step, and half-precision parameters.
#[test]
fn other_dtypes_are_computed_in_f32() {
    let x = random(3, &[4, 3, 5], DType::BF16);
    let wide = x.to_dtype(DType::F32).unwrap();
    for stored in [DType::F32, DType::BF16] {
        // The same values in both layers.
        let [mean, var, weight, bias] = parameters(5, 3, stored);
        let ours = nn::BatchNorm::new(
            3,
            mean.clone(),
            var.clone(),
            weight.clone(),
            bias.clone(),
            1e-3,
        );
        let f32s = [mean, var, weight, bias].map(|t| t.to_dtype(DType::F32).unwrap());
        let [mean, var, weight, bias] = f32s;
        let reference = nn::BatchNorm::new(3, mean, var, weight, bias, 1e-3).unwrap();
        let ours = ours.unwrap();
        for train in [true, false] {
            let (y, expected) = (ours.forward_t(&x, train), reference.forward_t(&wide, train));
            let (y, expected) = (y.unwrap(), expected.unwrap());
            assert_eq!(y.dtype(), DType::BF16);
            // Half an ulp of bf16, and the rounding of statistics that are kept in it.
            let kept = if stored == DType::BF16 { 2. } else { 1. };
            close(&y, &expected, kept / 256.);
            assert_eq!(ours.running_var().dtype(), stored);
            close(ours.running_mean(), reference.running_mean(), 1. / 256.);
            close(ours.running_var(), reference.running_var(), 1. / 256.);
        }
    }
}

#[test]
fn a_batch_without_variance_and_other_shapes_are_refused_and_change_nothing() {
    let bn = norm(1, 3, DType::F32).with_path("blocks.0.bn");
    let before = (flat64(bn.running_mean()), flat64(bn.running_var()));
    for (shape, text) in [
        (vec![1, 3], "blocks.0.bn: [1, 3]"),
        (vec![1, 3, 1, 1], "fewer than two values"),
        (vec![0, 3, 2], "fewer than two values"),
        (vec![2, 4], "3 features got [2, 4]"),
        (vec![3], "3 features got [3]"),
    ] {
        let x = Tensor::zeros(shape, DType::F32, CPU).unwrap();
        let error = bn.forward_train(&x).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
    let error = bn.forward_eval(&random(1, &[2, 4], DType::F32));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("3 features got [2, 4]"), "{error}");
    assert!(bn.forward_eval(&random(1, &[1, 3], DType::F32)).is_ok());
    assert_eq!(
        (flat64(bn.running_mean()), flat64(bn.running_var())),
        before
    );
    let conv = nn::Conv2d::new(
        random(1, &[4, 3, 1, 1], DType::F32),
        None,
        Default::default(),
    );
    let error = nn::fuse_batch_norm(&conv, &bn).unwrap_err().to_string();
    assert!(
        error.contains("3 features") && error.contains("4 output"),
        "{error}"
    );
    let [mean, var, weight, bias] = parameters(1, 3, DType::F32);
    let narrow = nn::BatchNorm::new(2, mean.clone(), var.clone(), weight, bias, 1e-3);
    let error = narrow.unwrap_err().to_string();
    assert!(error.contains("should have shape [2]"), "{error}");
    let eager = nn::BatchNorm::new_no_bias_with_momentum(3, mean, var, 1e-3, 1.5);
    let error = eager.unwrap_err().to_string();
    assert!(error.contains("momentum must be between"), "{error}");
}

#[derive(Fp8Module)]
struct Net {
    conv: nn::Conv2d,
    bn: nn::BatchNorm,
}

impl Net {
    fn new(vars: &VarMap) -> Self {
        let vb = VarBuilder::from_varmap(vars, DType::F32, CPU);
        Self {
            conv: nn::conv2d(2, 3, 3, Default::default(), vb.pp("conv")).unwrap(),
            bn: nn::batch_norm(3, 1e-5, vb.pp("bn")).unwrap(),
        }
    }

    fn loss(&self, seed: u64) -> Tensor {
        let x = self.conv.forward(&random(seed, &[2, 2, 5, 5], DType::F32));
        let y = self.bn.forward_train(&x.unwrap()).unwrap();
        let target = random(seed + 1, y.dims(), DType::F32);
        (y - target).unwrap().sqr().unwrap().mean_all().unwrap()
    }
}

#[test]
fn running_statistics_are_named_kept_by_the_optimizer_and_saved() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run.safetensors");
    let step = |net: &Net, optimizer: &mut AdamW, seed: u64| {
        let grads = net.loss(seed).backward().unwrap();
        let before = flat64(net.bn.running_mean());
        assert!(!optimizer.apply(&grads).unwrap().skipped().unwrap());
        assert_eq!(
            flat64(net.bn.running_mean()),
            before,
            "no weight decay either"
        );
        grads
    };
    let state = |net: &Net| {
        [
            net.bn.running_mean(),
            net.bn.running_var(),
            net.conv.weight(),
        ]
        .map(flat64)
    };

    let vars = VarMap::new();
    let net = Net::new(&vars);
    let mut optimizer = AdamW::from_varmap(&vars, AdamWConfig::default()).unwrap();
    let grads = step(&net, &mut optimizer, 1);
    assert!(check_gradients(&vars, &grads).is_empty());
    struct Names(Vec<String>);
    impl fp8_recipes::Visitor for Names {
        fn tensor(&mut self, path: Option<&str>, _: &Tensor) {
            self.0.extend(path.map(str::to_string));
        }
    }
    let mut names = Names(vec![]);
    net.bn.visit(&mut names);
    let expected = ["bn.running_mean", "bn.running_var", "bn.weight", "bn.bias"];
    assert_eq!(names.0, expected);
    let meta = TrainingMeta {
        step: 1,
        recipe: None,
        random: Default::default(),
        extra: Default::default(),
    };
    save_training(&path, &net, &vars, &optimizer, &meta).unwrap();
    step(&net, &mut optimizer, 2);

    let vars = VarMap::new();
    let resumed = Net::new(&vars);
    let mut optimizer = AdamW::from_varmap(&vars, AdamWConfig::default()).unwrap();
    resume_training(&path, &resumed, &vars, &mut optimizer, None).unwrap();
    step(&resumed, &mut optimizer, 2);
    assert_eq!(state(&resumed), state(&net));
    assert_ne!(flat64(resumed.bn.running_mean()), vec![0.; 3]);
}

/// Channel by channel, in both ways of computing, and without a trace in the next batch.
#[test]
fn statistics_that_are_not_finite_move_nothing() {
    for (dtype, stored) in [
        (DType::F32, DType::F32),
        (DType::F64, DType::F64),
        (DType::BF16, DType::F32),
        (DType::F32, DType::F16),
    ] {
        // Infinite, NaN, and squares that overflow: 1e30 in f32, and what f16 cannot keep.
        for bad in [f64::INFINITY, f64::NAN, 1e30] {
            let bn = norm(1, 3, stored);
            let clean = norm(1, 3, stored);
            let x = random(2, &[4, 3, 2], dtype);
            let mask = Tensor::new(&[[[0u8], [1], [0]]], CPU).unwrap();
            let mask = mask.broadcast_as(x.shape()).unwrap();
            let values = Tensor::full(bad, x.shape(), CPU).unwrap();
            let values = values.to_dtype(dtype).unwrap();
            let sign = random(9, &[4, 3, 2], dtype).sign().unwrap();
            let spoiled = mask.where_cond(&(values * sign).unwrap(), &x).unwrap();
            let before = [flat64(bn.running_mean()), flat64(bn.running_var())];
            bn.forward_train(&spoiled).unwrap();
            clean.forward_train(&x).unwrap();
            let moved = [flat64(clean.running_mean()), flat64(clean.running_var())];
            let after = [flat64(bn.running_mean()), flat64(bn.running_var())];
            // In f64 such squares are numbers like others.
            let overflows = !(bad.is_finite() && dtype == DType::F64);
            for i in 0..2 {
                for channel in [0, 2] {
                    assert_eq!(after[i][channel], moved[i][channel], "{dtype:?} {bad}");
                    assert_ne!(after[i][channel], before[i][channel], "{dtype:?} {bad}");
                }
                let stayed = after[i][1] == before[i][1];
                assert_eq!(stayed, overflows, "{dtype:?} {stored:?} {bad}: {after:?}");
            }
        }
    }
}

/// The output of the convolution is beyond E5M2 in one step: the loss scaler leaves it out, and nothing stays of it.
#[test]
fn an_overflow_under_emulation_leaves_no_trace() {
    let vars = VarMap::new();
    let net = Net::new(&vars);
    for (name, var) in vars.data().lock().unwrap().iter() {
        if var.rank() > 1 {
            let values = random(name.len() as u64, var.dims(), DType::F32);
            var.set(&values).unwrap();
        }
    }
    let method = EmulationMethod::Direct;
    // Gradients of the other steps are far from the end of E5M2.
    let scaler = LossScalerConfig::default().with_initial_loss_scale(16.);
    let options = EmulatorOptions::default().with_loss_scaler(scaler);
    let mut emulator = Emulator::initialize(&net, method, options).unwrap();
    let mut optimizer = Sgd::from_varmap(&vars, SgdConfig::default()).unwrap();
    let statistics = || [flat64(net.bn.running_mean()), flat64(net.bn.running_var())];
    let forward = |emulator: &Emulator, x: &Tensor, train: bool| {
        let autocast = emulator.autocast().training(train);
        with_fp8(autocast, || net.bn.forward_t(&net.conv.forward(x)?, train)).unwrap()
    };
    let x = random(3, &[2, 2, 5, 5], DType::F32);
    let mut skipped = vec![];
    for step in 0..4 {
        let factor = if step == 1 { 60_000. } else { 1. };
        let before = statistics();
        let y = forward(&emulator, &(&x * factor).unwrap(), true);
        let loss = (y - 1.).unwrap().powf(4.).unwrap().mean_all().unwrap();
        let taken = emulator.optimizer_step(&mut optimizer, &loss).unwrap();
        skipped.push(taken.skipped());
        assert_eq!(statistics() == before, step == 1, "step {step}");
    }
    assert_eq!(skipped, [false, true, false, false]);
    let y = forward(&emulator, &x, false);
    assert!(flat64(&y).iter().all(|y| y.is_finite()));
}
