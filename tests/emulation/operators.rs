//! The effect of the casts on values and gradients.

use crate::table::{Net, SIZE, ids};
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::VarMap;
use fp8::fp8_core::{Cast, Format, Overflow};
use fp8::nn::{Linear, Matmul};
use fp8::{Autocast, PrepareOptions, RecipeName, fp8_autocast, prepare_fp8, with_fp8};
use fp8_test_support::{cpu_tensor, flat};

/// The value after a cast to E5M2 without a scale.
fn e5m2(x: f32) -> f32 {
    let cast = Cast::new(Format::E5M2).with_overflow(Overflow::NonFinite);
    Format::E5M2.decode(cast.encode(x, 0))
}

/// The output of a layer under `direct` is the cast of a product of casts.
#[test]
fn outputs_of_direct_are_casts_of_products_of_casts() {
    let (x, w, b) = (
        cpu_tensor(1, &[5, 24]),
        cpu_tensor(2, &[7, 24]),
        cpu_tensor(3, &[7]),
    );
    let layer = Linear::new(w.clone(), Some(b.clone())).with_path("fc");
    prepare_fp8(&layer, &PrepareOptions::default()).unwrap();
    let y = with_fp8(RecipeName::Direct, || layer.forward(&x)).unwrap();
    let (x, w, b) = (flat(&x), flat(&w), flat(&b));
    for (i, &got) in flat(&y).iter().enumerate() {
        let (row, col) = (i / 7, i % 7);
        let product = |k: usize| e5m2(x[row * 24 + k]) * e5m2(w[col * 24 + k]);
        // Products of three-bit numbers of at most 1, and their sums, are exact in f32.
        let sum: f32 = (0..24).map(product).sum();
        assert_eq!(got, e5m2(sum + b[col]), "{row}, {col}");
    }
}

/// An output beyond the range is Inf, and so is a gradient, which a loss scaler sees.
#[test]
fn overflow_shows_as_inf() {
    let w = Var::from_tensor(&Tensor::full(1f32, (1, 1), &Device::Cpu).unwrap()).unwrap();
    let layer = Linear::new(w.as_tensor().clone(), None).with_path("fc");
    prepare_fp8(&layer, &PrepareOptions::default()).unwrap();
    let forward = |x: f32| {
        let x = Tensor::full(x, (1, 1), &Device::Cpu).unwrap();
        with_fp8(RecipeName::Direct, || layer.forward(&x)).unwrap()
    };
    assert_eq!(flat(&forward(57344.)), [57344.]);
    assert_eq!(flat(&forward(61440.)), [f32::INFINITY]);
    let loss = (forward(1.).sum_all().unwrap() * 1e6).unwrap();
    let grads = loss.backward().unwrap();
    assert!(!flat(grads.get(&w).unwrap())[0].is_finite());
}

/// The gradients of a fused layer come from the uncast gradient of its output, and the cast operands.
#[test]
fn fused_outputs_leave_the_gradient_as_it_comes() {
    let (x, w) = (
        Var::from_tensor(&cpu_tensor(1, &[3, 4])).unwrap(),
        Var::from_tensor(&cpu_tensor(2, &[2, 4])).unwrap(),
    );
    let layer = Linear::new(w.as_tensor().clone(), None).with_path("fc");
    let options = PrepareOptions::default().with_output_fused("fc").unwrap();
    prepare_fp8(&layer, &options).unwrap();
    // Gradients would be rounded too, which this test does not cover.
    use fp8::config::{CastConfig, Fp8LinearConfig};
    let config = Fp8LinearConfig::from_recipe_name(RecipeName::Direct)
        .with_grad_input(CastConfig::disabled())
        .with_grad_weight(CastConfig::disabled());
    let y = with_fp8(config, || layer.forward(&x)).unwrap();
    let go = 1.0625f32; // Between two codes of E5M2.
    let grads = (y.sum_all().unwrap() * f64::from(go))
        .unwrap()
        .backward()
        .unwrap();
    let (xs, ws) = (flat(&x), flat(&w));
    let (gx, gw) = (flat(grads.get(&x).unwrap()), flat(grads.get(&w).unwrap()));
    for k in 0..4 {
        let expected: f32 = (0..2).map(|n| go * e5m2(ws[n * 4 + k])).sum();
        assert_eq!(gx[k], expected);
        let expected: f32 = (0..3).map(|m| go * e5m2(xs[m * 4 + k])).sum();
        assert_eq!(gw[k], expected);
    }
}

/// Nothing is cast outside a guard or inside a disabled one.
#[test]
fn outside_a_guard_nothing_changes() {
    let vars = VarMap::new();
    let net = Net::new(&vars).unwrap();
    let before = net.loss(&ids()).unwrap().to_scalar::<f32>().unwrap();
    let options = PrepareOptions::default().with_operators(true);
    prepare_fp8(&net, &options).unwrap();
    let after = net.loss(&ids()).unwrap().to_scalar::<f32>().unwrap();
    let disabled = with_fp8(Autocast::disabled(), || net.loss(&ids())).unwrap();
    let cast = with_fp8(RecipeName::Direct, || net.loss(&ids())).unwrap();
    assert_eq!(before.to_bits(), after.to_bits());
    assert_eq!(
        before.to_bits(),
        disabled.to_scalar::<f32>().unwrap().to_bits()
    );
    assert_ne!(before.to_bits(), cast.to_scalar::<f32>().unwrap().to_bits());
}

/// Gradients are rounded with other bits each time, and with the same ones by the same run.
#[test]
fn gradients_are_rounded_with_other_bits_each_time() {
    let run = |steps: usize| -> Vec<Vec<f32>> {
        let w = Var::from_tensor(&cpu_tensor(5, &[SIZE, SIZE])).unwrap();
        let layer = Linear::new(w.as_tensor().clone(), None).with_path("fc");
        prepare_fp8(&layer, &PrepareOptions::default()).unwrap();
        let x = cpu_tensor(6, &[9, SIZE]);
        let step = |_| {
            let guard = fp8_autocast(RecipeName::Hybrid).unwrap();
            let y = layer.forward(&x).unwrap();
            guard.close().unwrap();
            let loss = (y * &cpu_tensor(7, &[9, SIZE])).unwrap().sum_all().unwrap();
            flat(loss.backward().unwrap().get(&w).unwrap())
        };
        (0..steps).map(step).collect()
    };
    let first = run(3);
    assert_eq!(first, run(3));
    assert_ne!(first[0], first[1]);
    assert_ne!(first[1], first[2]);
    // Every gradient is a number of the format.
    for value in first.iter().flatten() {
        assert_eq!(e5m2(*value), *value);
    }
}

/// The result of a batched product is not cast, that of a plain one is.
#[test]
fn batched_products_keep_their_result() {
    let matmul = Matmul::new("scores");
    let options = PrepareOptions::default().with_operators(true);
    prepare_fp8(&matmul, &options).unwrap();
    let (a, b) = (
        Tensor::new(&[[1f32, 1.]], &Device::Cpu).unwrap(),
        Tensor::new(&[[1f32], [0.125]], &Device::Cpu).unwrap(),
    );
    let plain = with_fp8(RecipeName::Direct, || matmul.forward(&a, &b)).unwrap();
    let [a, b] = [a, b].map(|x| x.unsqueeze(0).unwrap());
    let batched = with_fp8(RecipeName::Direct, || matmul.forward(&a, &b)).unwrap();
    assert_eq!((flat(&plain), flat(&batched)), (vec![1.], vec![1.125]));
    assert_eq!(plain.dtype(), DType::F32);
}
