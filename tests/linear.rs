//! The FP8 linear layer under a guard: fidelity, shapes, dtypes, gradients, threads and bad input.

mod common;

use candle_core::{D, DType, Module, Result, Tensor, Var};
use common::{
    Model, Step, assert_same_bits, assert_within, device, flat, largest, levels, normal, on_cuda,
    rounding, skipped_on_cuda, sqnr, ulp,
};
use fp8::candle::Quantizer;
use fp8::core::Contraction::{self, Cols, Rows};
use fp8::recipes::config::{Operand, ResolvedConfig};
use fp8::recipes::nn::Linear;
use fp8::recipes::{
    Autocast, DelayedScaling, Fp8LinearConfig, Recipe, RecipeName, Role, end_step, fp8_autocast,
};

const DYNAMIC: [RecipeName; 3] = [
    RecipeName::Tensorwise,
    RecipeName::Rowwise,
    RecipeName::RowwiseWithGwHp,
];

const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

fn config(name: RecipeName) -> Fp8LinearConfig {
    Fp8LinearConfig::from_recipe_name(name)
}

/// With scales that are no powers of two: between those, the axis of a scale hardly shows.
fn exact_config(name: RecipeName) -> Fp8LinearConfig {
    config(name).with_round_scales_to_power_of_two(false)
}

/// x, weight and grad_output of standard normal values.
fn operands(m: usize, k: usize, n: usize) -> (Tensor, Tensor, Tensor) {
    (normal(1, (m, k)), normal(2, (n, k)), normal(3, (m, n)))
}

fn var(x: &Tensor, dtype: DType) -> Result<Var> {
    Var::from_tensor(&x.to_dtype(dtype)?)
}

/// `[M, K] -> [M, N]` under `autocast`, all three trainable, with a bias.
fn trainable(m: usize, k: usize, n: usize, autocast: impl Into<Autocast>) -> Result<Step> {
    let (x, weight, g) = operands(m, k, n);
    let (x, weight) = (Var::from_tensor(&x)?, Var::from_tensor(&weight)?);
    let bias = Var::from_tensor(&normal(4, n))?;
    Model::prepared(&weight, Some(&bias)).step(&x, &g, autocast)
}

/// The operand of a GEMM as FP8 would hold it, in f64.
fn cast_as(
    config: &ResolvedConfig,
    operand: Operand,
    x: &Tensor,
    contraction: Contraction,
) -> Result<Tensor> {
    let cast = config.cast(operand);
    if cast.is_disabled() {
        return x.detach().to_dtype(DType::F64);
    }
    Quantizer::dynamic(cast.format.unwrap(), cast.granularity)
        .with_power_of_two(config.round_scales_to_power_of_two)
        .quantize(x, contraction)?
        .tensor
        .dequantize(DType::F64)
}

/// A product in f64, and for the bound of its errors (`rounding.rs`) the length of its sums, and the sums of |a||b| and of (a b)^2.
struct Oracle {
    product: Tensor,
    len: usize,
    magnitude: Vec<f64>,
    square: Vec<f64>,
}

impl Oracle {
    fn new(a: &Tensor, b: &Tensor) -> Result<Self> {
        Ok(Self {
            product: a.matmul(b)?,
            len: a.dim(1)?,
            square: flat(&a.sqr()?.matmul(&b.sqr()?)?),
            magnitude: flat(&a.abs()?.matmul(&b.abs()?)?),
        })
    }

    /// output, grad_input and grad_weight of a dynamic recipe.
    fn gemms(config: &ResolvedConfig, x: &Tensor, w: &Tensor, g: &Tensor) -> Result<[Self; 3]> {
        let cast = |operand, x, contraction| cast_as(config, operand, x, contraction);
        Ok([
            Self::new(
                &cast(Operand::Input, x, Cols)?,
                &cast(Operand::Weight, w, Cols)?.t()?,
            )?,
            Self::new(
                &cast(Operand::GradOutput, g, Cols)?,
                &cast(Operand::WeightForGradInput, w, Rows)?,
            )?,
            Self::new(
                &cast(Operand::GradOutputForGradWeight, g, Rows)?.t()?,
                &cast(Operand::InputForGradWeight, x, Rows)?,
            )?,
        ])
    }

    /// Sums in f32 and one rounding to the dtype of `ours`.
    fn check(&self, what: &str, ours: &Tensor) {
        let dtype = ours.dtype();
        let ours = ours.to_dtype(DType::F64).unwrap();
        assert_within(what, &ours, &self.product, |at, value| {
            rounding::bound(self.len, self.magnitude[at], self.square[at]) + ulp(dtype, value)
        });
    }
}

/// The errors that f32 sums over the rows of `g` may have.
fn bias_bounds(g: &Tensor) -> Result<Vec<f64>> {
    let g = g.to_dtype(DType::F64)?.flatten_to(g.rank() - 2)?;
    let (magnitudes, squares) = (flat(&g.abs()?.sum(0)?), flat(&g.sqr()?.sum(0)?));
    let pairs = magnitudes.into_iter().zip(squares);
    let rows = g.dim(0)?;
    Ok(pairs.map(|(m, s)| rounding::bound(rows, m, s)).collect())
}

fn check_against_oracle(
    what: &str,
    config: &Fp8LinearConfig,
    operands: (&Tensor, &Tensor, &Tensor),
    step: &Step,
) -> Result<()> {
    let (x, w, g) = operands;
    let oracles = Oracle::gemms(&config.resolve().unwrap(), x, w, g)?;
    let ours = [
        ("y", &step.y),
        ("grad_x", step.grad_x()),
        ("grad_weight", step.grad_weight()),
    ];
    for (oracle, (name, ours)) in oracles.iter().zip(ours) {
        oracle.check(&format!("{what}: {name}"), ours);
    }
    Ok(())
}

#[test]
fn every_instruction_set_passes() {
    if !on_cuda() {
        levels::run_again_on_each();
    }
}

#[test]
fn fidelity_on_normal_data() -> Result<()> {
    let (m, k, n) = (512, 1024, 512);
    let (x, weight, g) = operands(m, k, n);
    let exact = [
        ("output", x.matmul(&weight.t()?)?, 28.),
        ("grad_input", g.matmul(&weight)?, 0.),
        ("grad_weight", g.t()?.matmul(&x)?, 0.),
    ];
    for name in RecipeName::ALL {
        // The gradients of the recipes with E5M2.
        let gradients = match name {
            RecipeName::Tensorwise | RecipeName::Delayed => 24.,
            _ => 28.,
        };
        let (x, weight) = (Var::from_tensor(&x)?, Var::from_tensor(&weight)?);
        let model = Model::prepared(&weight, None);
        let mut step = model.step(&x, &g, Recipe::from(name))?;
        if name == RecipeName::Delayed {
            // The first step casts with scale 1.
            step = model.step(&x, &g, Recipe::from(name))?;
        }
        let ours = [&step.y, step.grad_x(), step.grad_weight()];
        for ((gemm, exact, floor), ours) in exact.iter().zip(ours) {
            let floor = if *gemm == "output" { *floor } else { gradients };
            let got = sqnr(exact, ours);
            println!("{name} {gemm}: {got:.2} dB");
            assert!(got >= floor, "{name} {gemm}: {got:.2} dB, at least {floor}");
            // Accuracy alone does not show that FP8 was on.
            let is_exact = name == RecipeName::RowwiseWithGwHp && *gemm == "grad_weight";
            assert_eq!(got > 60., is_exact, "{name} {gemm}: {got:.2} dB");
        }
    }
    Ok(())
}

#[test]
fn any_rank_of_x() -> Result<()> {
    let (k, n) = (40, 24);
    for name in DYNAMIC {
        for leading in [vec![], vec![6], vec![2, 3], vec![1, 3, 2], vec![2, 1, 1, 3]] {
            let what = format!("{name} {leading:?}");
            let m: usize = leading.iter().product();
            let (x, weight, g) = operands(m, k, n);
            let shaped = |x: &Tensor, last: usize| x.reshape([&leading[..], &[last]].concat());
            let weight = Var::from_tensor(&weight)?;
            let bias = Var::from_tensor(&normal(4, n))?;
            let model = Model::prepared(&weight, Some(&bias));
            let flat_x = Var::from_tensor(&x)?;
            let flat = model.step(&flat_x, &g, config(name))?;
            let x = Var::from_tensor(&shaped(&x, k)?)?;
            let step = model.step(&x, &shaped(&g, n)?, config(name))?;
            assert_same_bits(&format!("{what}: y"), &step.y, &shaped(&flat.y, n)?);
            assert_same_bits(
                &format!("{what}: grad_x"),
                step.grad_x(),
                &shaped(flat.grad_x(), k)?,
            );
            let same = |name: &str, ours, theirs| {
                assert_same_bits(&format!("{what}: {name}"), ours, theirs);
            };
            same("grad_weight", step.grad_weight(), flat.grad_weight());
            same("grad_bias", step.grad_bias(), flat.grad_bias());
        }
    }
    Ok(())
}

#[test]
fn strided_x_and_grad_output() -> Result<()> {
    let (m, k, n) = (12, 20, 8);
    let wide = normal(5, (m + 3, k + 5));
    let views = [
        ("transposed", normal(5, (k, m)).t()?),
        ("narrowed rows", wide.narrow(0, 2, m)?.narrow(1, 0, k)?),
        ("narrowed columns", wide.narrow(0, 0, m)?.narrow(1, 3, k)?),
        ("broadcast", normal(6, (1, k)).broadcast_as((m, k))?),
        ("permuted", normal(5, (3, k, 4)).permute((0, 2, 1))?),
    ];
    for name in [
        RecipeName::Tensorwise,
        RecipeName::Rowwise,
        RecipeName::Delayed,
    ] {
        for (view, x) in &views {
            assert!(!x.is_contiguous(), "{view}");
            let weight = Var::from_tensor(&normal(2, (n, k)))?;
            let g = normal(7, [&x.dims()[..x.rank() - 1], &[n]].concat());
            let run = |x: &Tensor| Model::prepared(&weight, None).step(x, &g, Recipe::from(name));
            let (strided, contiguous) = (run(x)?, run(&x.force_contiguous()?)?);
            for ((gemm, ours), (_, expected)) in strided.named().into_iter().zip(contiguous.named())
            {
                assert_same_bits(&format!("{name} {view}: {gemm}"), ours, expected);
            }
        }
        // A transposed variable, and a transposed result, whose gradient is then a view.
        let (x, weight, g) = operands(m, k, n);
        let weight = Var::from_tensor(&weight)?;
        let base = Var::from_tensor(&x.t()?.contiguous()?)?;
        let strided = Model::prepared(&weight, None);
        let guard = fp8_autocast(Recipe::from(name))?;
        let y = strided.l.forward(&base.t()?)?;
        let grads = (y.t()? * g.t()?.contiguous()?)?.sum_all()?.backward()?;
        guard.close()?;
        end_step()?;
        let x = Var::from_tensor(&x)?;
        let contiguous = Model::prepared(&weight, None).step(&x, &g, Recipe::from(name))?;
        let grad = grads.get(&base).expect("a gradient through the view").t()?;
        assert_same_bits(
            &format!("{name} transposed: grad_x"),
            &grad,
            contiguous.grad_x(),
        );
        let grad = grads.get(&weight).expect("a gradient of the weight");
        assert_same_bits(
            &format!("{name} transposed: grad_weight"),
            grad,
            contiguous.grad_weight(),
        );
    }
    Ok(())
}

#[test]
fn any_size() -> Result<()> {
    const SIZES: [usize; 8] = [1, 2, 3, 7, 16, 17, 33, 130];
    for name in [RecipeName::Tensorwise, RecipeName::Rowwise] {
        for m in SIZES {
            for k in SIZES {
                for n in SIZES {
                    let what = format!("{name} M {m} K {k} N {n}");
                    let (x, weight, g) = operands(m, k, n);
                    let (x, weight) = (Var::from_tensor(&x)?, Var::from_tensor(&weight)?);
                    let step = Model::prepared(&weight, None).step(&x, &g, exact_config(name))?;
                    check_against_oracle(&what, &exact_config(name), (&x, &weight, &g), &step)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn no_tokens() -> Result<()> {
    let (k, n) = (24, 40);
    for name in RecipeName::ALL {
        for emulate in [false, true] {
            let recipe = match Recipe::from(name) {
                Recipe::Linear(config) => Recipe::Linear(config.with_emulate(emulate)),
                delayed => delayed,
            };
            for dims in [vec![0], vec![2, 0], vec![0, 3]] {
                let what = format!("{name} emulate={emulate} {dims:?}");
                let x = Var::zeros([&dims[..], &[k]].concat(), DType::F32, &device())?;
                let g = Tensor::zeros([&dims[..], &[n]].concat(), DType::F32, &device())?;
                let weight = Var::from_tensor(&normal(2, (n, k)))?;
                let bias = Var::from_tensor(&normal(4, n))?;
                let model = Model::prepared(&weight, Some(&bias));
                let step = model.step(&x, &g, recipe.clone())?;
                assert_eq!(step.y.dims(), g.dims(), "{what}");
                assert_eq!(step.grad_x().dims(), x.dims(), "{what}");
                for (name, grad, dims) in [
                    ("grad_weight", step.grad_weight(), vec![n, k]),
                    ("grad_bias", step.grad_bias(), vec![n]),
                ] {
                    assert_eq!(grad.dims(), dims, "{what}: {name}");
                    assert!(flat(grad).iter().all(|&g| g == 0.), "{what}: {name} {grad}");
                }
                let state = model.l.fp8_state().unwrap();
                let scale = state
                    .slot(Role::Input)
                    .unwrap()
                    .tensors()
                    .unwrap()
                    .quant_scale
                    .to_vec1::<f32>()?;
                assert_eq!(scale, [1.], "{what}: nothing was recorded");
            }
        }
    }
    Ok(())
}

#[test]
fn every_pair_of_dtypes() -> Result<()> {
    let (m, k, n) = (19, 48, 21);
    let (x, weight, g) = operands(m, k, n);
    for name in DYNAMIC {
        for x_dtype in FLOATS {
            for w_dtype in FLOATS {
                let what = format!("{name} x {x_dtype:?} w {w_dtype:?}");
                let x = var(&x, x_dtype)?;
                let weight = var(&weight, w_dtype)?;
                let bias = var(&Tensor::zeros(n, DType::F32, &device())?, w_dtype)?;
                let g = g.to_dtype(x_dtype)?;
                let step =
                    Model::prepared(&weight, Some(&bias)).step(&x, &g, exact_config(name))?;
                let expected = [x_dtype, x_dtype, w_dtype, w_dtype];
                for ((name, ours), dtype) in step.named().into_iter().zip(expected) {
                    assert_eq!(ours.dtype(), dtype, "{what}: {name}");
                }
                if name == RecipeName::RowwiseWithGwHp {
                    continue;
                }
                check_against_oracle(&what, &exact_config(name), (&x, &weight, &g), &step)?;
                // Each operand is cast from its own dtype: a weight rounded to x's dtype first would give others.
                let sums = flat(&g.to_dtype(DType::F64)?.sum(0)?);
                let bounds = bias_bounds(&g)?;
                for ((got, sum), bound) in flat(step.grad_bias()).into_iter().zip(sums).zip(bounds)
                {
                    let bound = bound + ulp(w_dtype, sum);
                    assert!(
                        (got - sum).abs() <= bound,
                        "{what}: grad_bias {got}, expected {sum}"
                    );
                }
            }
        }
    }
    Ok(())
}

#[test]
fn bias_is_added_in_the_output_dtype() -> Result<()> {
    let (m, k, n) = (9, 32, 12);
    let (x, weight, _) = operands(m, k, n);
    // Large beside the product, with bits that 16-bit dtypes do not hold.
    let bias = ((normal(4, n) * 100.)? + 0.123)?;
    for x_dtype in FLOATS {
        for b_dtype in FLOATS {
            for emulate in [false, true] {
                let what = format!("x {x_dtype:?} bias {b_dtype:?} emulate={emulate}");
                let x = x.to_dtype(x_dtype)?;
                let bias = bias.to_dtype(b_dtype)?;
                let recipe = config(RecipeName::Tensorwise).with_emulate(emulate);
                let _guard = fp8_autocast(recipe)?;
                let with = Model::prepared(&weight, Some(&bias)).l.forward(&x)?;
                let without = Model::prepared(&weight, None).l.forward(&x)?;
                let expected = without.broadcast_add(&bias.to_dtype(x_dtype)?)?;
                assert_same_bits(&what, &with, &expected);
            }
        }
    }
    Ok(())
}

#[test]
fn emulation_agrees_with_the_fast_path() -> Result<()> {
    for name in RecipeName::ALL {
        let base = match Recipe::from(name) {
            Recipe::Linear(config) => config,
            Recipe::Delayed(_) => config(RecipeName::Delayed),
        };
        for (m, k, n) in [(5, 7, 3), (64, 96, 48), (33, 257, 130)] {
            let run = |emulate: bool| trainable(m, k, n, base.clone().with_emulate(emulate));
            let (fast, emulated) = (run(false)?, run(true)?);
            let mut differing = 0;
            for ((gemm, fast), (_, emulated)) in fast.named().into_iter().zip(emulated.named()) {
                // Each path is off by some standard deviations of its own; those of the sums themselves are no more than
                // their largest.
                let len = match gemm {
                    "y" => k,
                    "grad_x" => n,
                    _ => m,
                };
                let roundings = rounding::roundings(len) as f64;
                let share = 2. * rounding::LAMBDA * rounding::UNIT * roundings.sqrt();
                let bound = share * largest(emulated);
                assert_within(
                    &format!("{name} {m} {k} {n}: {gemm}"),
                    fast,
                    emulated,
                    |_, _| bound,
                );
                differing += flat(fast)
                    .iter()
                    .zip(flat(emulated))
                    .filter(|(a, b)| *a != b)
                    .count();
            }
            // Where scales are powers of two, the order of scaling and summing changes nothing.
            let exact = name != RecipeName::Tensorwise;
            assert!(
                m < 10 || exact || differing > 0,
                "{name}: the two paths are one"
            );
        }
    }
    Ok(())
}

#[test]
fn high_precision_grad_weight_is_the_plain_one() -> Result<()> {
    for dims in [vec![37], vec![4, 11], vec![512]] {
        for (x_dtype, w_dtype) in [
            (DType::F32, DType::F32),
            (DType::BF16, DType::BF16),
            (DType::F16, DType::F16),
            (DType::BF16, DType::F32),
        ] {
            let (k, n) = (96, 72);
            let what = format!("{dims:?} x {x_dtype:?} w {w_dtype:?}");
            let weight = var(&normal(2, (n, k)), w_dtype)?;
            let x = var(&normal(1, [&dims[..], &[k]].concat()), x_dtype)?;
            let g = normal(3, [&dims[..], &[n]].concat()).to_dtype(x_dtype)?;
            let model = Model::prepared(&weight, None);
            let step = model.step(&x, &g, config(RecipeName::RowwiseWithGwHp))?;

            let plain = candle_nn::Linear::new(weight.to_dtype(x_dtype)?, None).forward(&x)?;
            let grads = (&plain * &g)?.sum_all()?.backward()?;
            let expected = grads.get(&weight).unwrap();
            assert_same_bits(&what, step.grad_weight(), expected);
            assert!(sqnr(&plain, &step.y) < 60., "{what}: the output is not FP8");

            // And by hand: the matmul that candle's backward does.
            let (x2, g2) = (x.reshape(((), k))?, g.reshape(((), n))?);
            let by_hand = x2.t()?.matmul(&g2)?.t()?.to_dtype(w_dtype)?;
            assert_same_bits(&what, step.grad_weight(), &by_hand);
        }
    }
    Ok(())
}

#[test]
fn disabled_casts_are_the_plain_layer() -> Result<()> {
    for (x_dtype, w_dtype) in [(DType::F32, DType::F32), (DType::BF16, DType::F32)] {
        for dims in [vec![37], vec![4, 11]] {
            let (k, n) = (96, 72);
            let weight = var(&normal(2, (n, k)), w_dtype)?;
            let bias = var(&normal(4, n), w_dtype)?;
            let x = var(&normal(1, [&dims[..], &[k]].concat()), x_dtype)?;
            let g = normal(3, [&dims[..], &[n]].concat()).to_dtype(x_dtype)?;
            let model = Model::prepared(&weight, Some(&bias));
            let step = model.step(&x, &g, Fp8LinearConfig::disabled())?;
            let plain = model.step(&x, &g, Autocast::disabled())?;
            assert_eq!(model.casts(), 0);
            for ((gemm, ours), (_, plain)) in step.named().into_iter().zip(plain.named()) {
                let what = format!("{dims:?} x {x_dtype:?} w {w_dtype:?}: {gemm}");
                if gemm == "grad_bias" {
                    // Ours is a sum in f32, candle's one in the dtype, in another order: each has its own roundings.
                    let wider = match x_dtype {
                        DType::F32 => 1.,
                        _ => 2f64.powi(-9) / rounding::UNIT,
                    };
                    let bounds = bias_bounds(&g)?;
                    assert_within(&what, ours, plain, |at, _| (1. + wider) * bounds[at]);
                } else {
                    assert_same_bits(&what, ours, plain);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn frozen_tensors_get_no_gradient_and_cost_no_cast() -> Result<()> {
    let (m, k, n) = (16, 32, 24);
    let (x, weight, g) = operands(m, k, n);
    let (x_var, weight_var) = (Var::from_tensor(&x)?, Var::from_tensor(&weight)?);
    // Casts of a step: x, w and go for the output and grad_input; x and go again for grad_weight.
    for (what, x, weight, rowwise, tensorwise) in [
        (
            "both trainable",
            x_var.as_tensor(),
            weight_var.as_tensor(),
            6,
            3,
        ),
        ("weight frozen", x_var.as_tensor(), &weight, 4, 3),
        ("x frozen", &x, weight_var.as_tensor(), 4, 3),
        ("both frozen", &x, &weight, 2, 2),
    ] {
        for (name, casts) in [
            (RecipeName::Rowwise, rowwise),
            (RecipeName::Tensorwise, tensorwise),
        ] {
            let model = Model::prepared(weight, None);
            let step = model.step(x, &g, config(name))?;
            assert_eq!(
                step.grad_x.is_some(),
                what != "x frozen" && what != "both frozen",
                "{what}"
            );
            assert_eq!(
                step.grad_weight.is_some(),
                what != "weight frozen" && what != "both frozen",
                "{what}"
            );
            assert_eq!(model.casts(), casts, "{name} {what}: casts");
            assert_eq!(step.y.track_op(), what != "both frozen", "{what}");
        }
    }
    // A trainable bias alone.
    let bias = Var::from_tensor(&normal(4, n))?;
    let model = Model::prepared(&weight, Some(&bias));
    let step = model.step(&x, &g, config(RecipeName::Rowwise))?;
    assert!(step.grad_x.is_none() && step.grad_weight.is_none());
    let bounds = bias_bounds(&g)?;
    assert_within("grad_bias", step.grad_bias(), &g.sum(0)?, |at, _| {
        2. * bounds[at]
    });
    Ok(())
}

#[test]
fn backward_uses_the_recipe_of_the_forward() -> Result<()> {
    let (m, k, n) = (24, 40, 32);
    let (x, weight, g) = operands(m, k, n);
    let (x, weight) = (Var::from_tensor(&x)?, Var::from_tensor(&weight)?);
    for name in DYNAMIC {
        let expected = Model::prepared(&weight, None).step(&x, &g, config(name))?;
        let others = [
            ("no guard", None),
            ("tensorwise", Some(Autocast::new(RecipeName::Tensorwise))),
            ("rowwise", Some(Autocast::new(RecipeName::Rowwise))),
            ("delayed", Some(Autocast::new(RecipeName::Delayed))),
            ("disabled", Some(Autocast::disabled())),
            ("calibrating", Some(Autocast::default().calibrating(true))),
        ];
        for (other, autocast) in others {
            let model = Model::prepared(&weight, None);
            let guard = fp8_autocast(config(name))?;
            let y = model.l.forward(&x)?;
            guard.close()?;
            let guard = autocast.map(fp8_autocast).transpose()?;
            let step = model.backward(&x, y, &g)?;
            drop(guard);
            for ((gemm, ours), (_, expected)) in step.named().into_iter().zip(expected.named()) {
                assert_same_bits(
                    &format!("{name}, backward under {other}: {gemm}"),
                    ours,
                    expected,
                );
            }
        }
    }
    // And the other way round: a plain forward has a plain backward.
    let model = Model::prepared(&weight, None);
    let y = model.l.forward(&x)?;
    let guard = fp8_autocast(config(RecipeName::Tensorwise))?;
    let step = model.backward(&x, y, &g)?;
    guard.close()?;
    assert_same_bits("plain grad_x", step.grad_x(), &g.matmul(&weight)?);
    assert_eq!(model.casts(), 0);
    Ok(())
}

#[test]
fn delayed_backward_uses_the_scales_of_its_own_step() -> Result<()> {
    let (m, k, n) = (16, 24, 20);
    let (x, weight, g) = operands(m, k, n);
    let (x, weight) = (Var::from_tensor(&x)?, Var::from_tensor(&weight)?);
    let model = Model::prepared(&weight, None);
    let recipe = || Recipe::from(DelayedScaling::default().with_amax_history_len(4));
    model.step(&x, &g, recipe())?;
    let expected = model.step(&x, &g, recipe())?;
    // The forward slots are updated between forward and backward here, to the same scales' successors.
    let guard = fp8_autocast(recipe())?;
    let y = model.l.forward(&x)?;
    guard.close()?;
    let step = model.backward(&x, y, &g)?;
    end_step()?;
    for ((gemm, ours), (_, expected)) in step.named().into_iter().zip(expected.named()) {
        assert_same_bits(gemm, ours, expected);
    }
    Ok(())
}

const CHILD: &str = "FP8_TEST_THREADS_CHILD";

/// Runs itself with several sizes of the thread pool: a guard belongs to a thread outside of a pool, so the global one is what
/// its layers compute with.
#[test]
fn same_bits_for_any_number_of_threads() -> Result<()> {
    if skipped_on_cuda("the threads share what lives on the device of one of them") {
        return Ok(());
    }
    if std::env::var_os(CHILD).is_some() {
        return print_bits();
    }
    let bits = ["1", "2", "3"].map(|threads| {
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "same_bits_for_any_number_of_threads",
                "--exact",
                "--nocapture",
            ])
            .env(CHILD, "1")
            .env("RAYON_NUM_THREADS", threads)
            .output()
            .unwrap();
        assert!(child.status.success(), "{threads} threads: {child:?}");
        let text = String::from_utf8(child.stdout).unwrap();
        let lines = text.lines().filter_map(|line| line.split_once("bits of "));
        lines.map(|(_, line)| line.to_string()).collect::<Vec<_>>()
    });
    assert!(bits[0].len() > 50, "{bits:?}");
    assert_eq!(bits[0], bits[1], "one thread and two");
    assert_eq!(bits[0], bits[2], "one thread and three");
    Ok(())
}

/// Fingerprints of everything that training steps of many sizes compute.
fn print_bits() -> Result<()> {
    // Some of these are larger than one slab of the GEMM or one task of a cast.
    for (m, k, n) in [
        (200, 1536, 1030),
        (384, 513, 640),
        (2000, 96, 700),
        (1, 2048, 1024),
    ] {
        for name in RecipeName::ALL {
            for dtype in [DType::F32, DType::BF16] {
                // One recipe and shape each is enough for the second dtype.
                if dtype == DType::BF16 && (m != 384 || name == RecipeName::Delayed) {
                    continue;
                }
                let (x, weight, g) = operands(m, k, n);
                let weight = Var::from_tensor(&weight)?;
                let bias = Var::from_tensor(&normal(4, n))?;
                let model = Model::prepared(&weight, Some(&bias));
                let x = var(&x, dtype)?;
                let g = g.to_dtype(dtype)?;
                let mut step = model.step(&x, &g, Recipe::from(name))?;
                if name == RecipeName::Delayed {
                    step = model.step(&x, &g, Recipe::from(name))?;
                }
                for (gemm, values) in step.named() {
                    let hash = fp8::candle::fingerprint(values)?;
                    println!("bits of {name} {dtype:?} {m} {k} {n} {gemm}: {hash:x}");
                }
            }
        }
    }
    Ok(())
}

/// `x` with one element replaced.
fn with_value(x: &Tensor, row: usize, col: usize, value: f32) -> Result<Tensor> {
    let mut rows = x.to_vec2::<f32>()?;
    rows[row][col] = value;
    Tensor::new(rows, &device())
}

#[test]
fn non_finite_values_under_dynamic_scales_fail_loudly() -> Result<()> {
    let (m, k, n) = (8, 16, 12);
    let (x, weight, g) = operands(m, k, n);
    let weight = Var::from_tensor(&weight)?;
    for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let x = Var::from_tensor(&with_value(&x, 3, 5, value)?)?;
        for emulate in [false, true] {
            for name in [RecipeName::Tensorwise, RecipeName::Rowwise] {
                let what = format!("{name} {value} emulate={emulate}");
                let recipe = config(name).with_emulate(emulate);
                let step = Model::prepared(&weight, None).step(&x, &g, recipe)?;
                for row in 0..m {
                    for col in 0..n {
                        let bad = name == RecipeName::Tensorwise || row == 3;
                        let got = step.y.to_vec2::<f32>()?[row][col];
                        assert_eq!(got.is_nan(), bad, "{what}: y [{row}, {col}] = {got}");
                    }
                }
                // x enters grad_weight by columns, grad_input not at all.
                assert!(
                    flat(step.grad_x()).iter().all(|g| g.is_finite()),
                    "{what}: grad_x"
                );
                for row in 0..n {
                    for col in 0..k {
                        let bad = name == RecipeName::Tensorwise || col == 5;
                        let got = step.grad_weight().to_vec2::<f32>()?[row][col];
                        assert_eq!(
                            got.is_nan(),
                            bad,
                            "{what}: grad_weight [{row}, {col}] = {got}"
                        );
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn non_finite_values_under_delayed_scales_saturate_and_are_counted() -> Result<()> {
    let (m, k, n) = (8, 16, 12);
    let (x, weight, g) = operands(m, k, n);
    let weight = Var::from_tensor(&weight)?;
    let recipe = || Recipe::from(DelayedScaling::default().with_amax_history_len(4));
    for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let model = Model::prepared(&weight, None);
        let state = model.l.fp8_state().unwrap().clone();
        let clean = Var::from_tensor(&x)?;
        model.step(&clean, &g, recipe())?;
        let before = state.slot(Role::Input).unwrap().tensors().unwrap();
        assert_eq!(state.slot(Role::Input).unwrap().non_finite_count()?, 0);

        let bad = Var::from_tensor(&with_value(&x, 3, 5, value)?)?;
        let step = model.step(&bad, &g, recipe())?;
        assert_eq!(
            state.slot(Role::Input).unwrap().non_finite_count()?,
            1,
            "{value}"
        );
        let after = state.slot(Role::Input).unwrap().tensors().unwrap();
        assert_same_bits("quant_scale", &after.quant_scale, &before.quant_scale);
        assert_same_bits("amax_history", &after.amax_history, &before.amax_history);
        assert_eq!(state.slot(Role::Weight).unwrap().non_finite_count()?, 0);

        if value.is_nan() {
            for (row, y) in step.y.to_vec2::<f32>()?.iter().enumerate() {
                assert!(
                    y.iter().all(|y| y.is_nan() == (row == 3)),
                    "NaN: y row {row} {y:?}"
                );
            }
            continue;
        }
        // The infinity counts as the largest value that the scale can hold.
        let limit = 448. / before.quant_scale.to_vec1::<f32>()?[0];
        let saturated = Var::from_tensor(&with_value(&x, 3, 5, limit.copysign(value))?)?;
        let expected = Model::prepared(&weight, None);
        expected.step(&clean, &g, recipe())?;
        let expected = expected.step(&saturated, &g, recipe())?;
        for ((gemm, ours), (_, expected)) in step.named().into_iter().zip(expected.named()) {
            assert_same_bits(&format!("{value}: {gemm}"), ours, expected);
            assert!(flat(ours).iter().all(|y| y.is_finite()), "{value}: {gemm}");
        }
    }
    Ok(())
}

#[test]
fn non_finite_gradients_are_counted_too() -> Result<()> {
    let (m, k, n) = (8, 16, 12);
    let (x, weight, g) = operands(m, k, n);
    let (x, weight) = (Var::from_tensor(&x)?, Var::from_tensor(&weight)?);
    let model = Model::prepared(&weight, None);
    let state = model.l.fp8_state().unwrap().clone();
    model.step(&x, &g, RecipeName::Delayed)?;
    let before = state.slot(Role::GradOutput).unwrap().tensors().unwrap();
    model.step(
        &x,
        &with_value(&g, 1, 1, f32::INFINITY)?,
        RecipeName::Delayed,
    )?;
    assert_eq!(state.slot(Role::GradOutput).unwrap().non_finite_count()?, 1);
    assert_same_bits(
        "history",
        &state
            .slot(Role::GradOutput)
            .unwrap()
            .tensors()
            .unwrap()
            .amax_history,
        &before.amax_history,
    );
    Ok(())
}

#[track_caller]
fn assert_error(result: Result<Tensor>, parts: &[&str]) {
    let text = match result {
        Ok(y) => panic!("no error but {y}; expected one with {parts:?}"),
        Err(error) => error.to_string(),
    };
    for part in parts {
        assert!(text.contains(part), "`{part}` is not in: {text}");
    }
}

#[test]
fn bad_input_is_named() -> Result<()> {
    let weight = Var::from_tensor(&normal(2, (12, 16)))?;
    let l = Linear::new(weight.as_tensor().clone(), None).with_path("blocks.3.fc");
    fp8::recipes::prepare_fp8(&l, &Default::default())?;
    let device = &device();
    for guarded in [false, true] {
        let _guard = match guarded {
            true => Some(fp8_autocast(RecipeName::Tensorwise)?),
            false => None,
        };
        for dims in [vec![4, 15], vec![17], vec![2, 16, 3]] {
            let x = Tensor::zeros(dims.as_slice(), DType::F32, device)?;
            let got = format!("{} features", dims[dims.len() - 1]);
            assert_error(
                l.forward(&x),
                &["blocks.3.fc", "expected 16", &got, &format!("{dims:?}")],
            );
        }
        let scalar = Tensor::zeros((), DType::F32, device)?;
        assert_error(l.forward(&scalar), &["blocks.3.fc", "expected 16"]);
        for dtype in [DType::U8, DType::U32, DType::I64] {
            let x = Tensor::zeros((4, 16), dtype, device)?;
            assert_error(
                l.forward(&x),
                &["blocks.3.fc", dtype.as_str(), "expected f32"],
            );
        }
    }
    // Outside a guard the layer is candle-nn's and takes f64; FP8 has no kernel for it.
    let x = normal(1, (4, 16)).to_dtype(DType::F64)?;
    assert_eq!(l.forward(&x)?.dtype(), DType::F64);
    let guard = fp8_autocast(RecipeName::Tensorwise)?;
    assert_error(l.forward(&x), &["F64", "x", "f32, bf16 or f16"]);
    for dims in [vec![11], vec![1, 12], vec![]] {
        let bias = Tensor::zeros(dims.as_slice(), DType::F32, device)?;
        let model = Model::prepared(&weight, Some(&bias));
        let x = normal(1, (4, 16));
        assert_error(model.l.forward(&x), &["bias", "[12]", &format!("{dims:?}")]);
    }
    guard.close()?;
    // A failed call leaves the layer usable.
    let x = normal(1, (4, 16));
    let _guard = fp8_autocast(RecipeName::Tensorwise)?;
    assert_eq!(l.forward(&x)?.dim(D::Minus1)?, 12);
    Ok(())
}
