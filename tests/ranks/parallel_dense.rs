//! Dense layers over any axes in parts, against the whole layer.

use candle_core::{DType, Device, Tensor, Var};
use fp8::nn::{AxisRules, DenseConfig, DenseGeneral, ParallelDense};
use fp8::ranks::{DeviceMesh, ProcessGroup, ReduceOp, threads};
use fp8::{Autocast, Fp8Module, PrepareOptions, end_step, fp8_autocast, prepare_fp8};
use fp8_test_support::{Slot, flat, tensor};
use std::sync::Arc;

/// x `[4, 4, 2, 8]`, of which dimensions 1 and 3 are summed over; features `[4, 6]`.
const X: [usize; 4] = [4, 4, 2, 8];
const KERNEL: [usize; 4] = [4, 8, 4, 6];
const Y: [usize; 4] = [4, 2, 4, 6];

/// Which mesh axis divides: the tokens (dimension 0 of x), the two contracted dimensions, the two dimensions of features.
type Axes = [Option<&'static str>; 5];

fn config(axes: Axes) -> DenseConfig {
    let names = ["p", "q", "r", "s"];
    let rules = names.into_iter().zip(axes[1..].iter().copied());
    DenseConfig::new([4, 6])
        .with_axis([1, -1])
        .with_kernel_axes(names)
        .with_bias_axes(["r", "s"])
        .with_axis_rules(AxisRules::new(["data", "model"], rules).unwrap())
}

fn inputs() -> [Tensor; 4] {
    let shaped = |seed, dims: &[usize]| {
        let count: usize = dims.iter().product();
        tensor(seed, &[1, count]).reshape(dims).unwrap()
    };
    [
        shaped(1, &X),
        shaped(2, &KERNEL),
        shaped(3, &[4, 6]),
        shaped(4, &Y),
    ]
}

/// y, the gradients of x, kernel and bias, and the FP8 state.
type Outcome = (Tensor, [Tensor; 3], [Slot; 3]);

/// A layer as a step sees it.
struct Case<'a, M> {
    model: &'a M,
    dense: &'a DenseGeneral,
    forward: &'a dyn Fn(&Tensor) -> fp8::Result<Tensor>,
    vars: [&'a Var; 3],
    grad: Tensor,
    group: Option<&'a ProcessGroup>,
}

impl<M: Fp8Module> Case<'_, M> {
    fn train(&self, recipe: &str) -> Outcome {
        prepare_fp8(self.model, &PrepareOptions::default()).unwrap();
        let mut last = None;
        for _ in 0..2 {
            let mut autocast = Autocast::new(recipe.parse::<fp8::Recipe>().unwrap());
            autocast.reduction_group = self.group.map(|group| Arc::new(group.clone()) as _);
            let guard = fp8_autocast(autocast).unwrap();
            let y = (self.forward)(self.vars[0].as_tensor()).unwrap();
            let loss = (&y * &self.grad).unwrap().sum_all().unwrap();
            let grads = fp8::backward(&loss).unwrap();
            guard.close().unwrap();
            let grads = self.vars.map(|var| grads.get(var).unwrap().clone());
            last = Some((y.detach(), grads));
        }
        end_step().unwrap();
        let (y, grads) = last.unwrap();
        let state = self.dense.fp8_state().unwrap();
        let slot = |name: &str| {
            let mut slots = state.slots().iter();
            let (_, slot) = slots.find(|(role, _)| role.name() == name).unwrap();
            let tensors = slot.tensors().unwrap();
            Slot {
                quant_scale: flat(&tensors.quant_scale)[0],
                history: flat(&tensors.amax_history),
                non_finite: slot.non_finite_count().unwrap(),
            }
        };
        (y, grads, ["input", "weight", "grad_output"].map(slot))
    }
}

fn whole(recipe: &str) -> Outcome {
    let [x, kernel, bias, grad] = inputs();
    let [x, kernel, bias] = [x, kernel, bias].map(|t| Var::from_tensor(&t).unwrap());
    let (k, b) = (kernel.as_tensor().clone(), bias.as_tensor().clone());
    let layer = DenseGeneral::new(k, Some(b), config([None; 5])).unwrap();
    let layer = layer.with_path("dense");
    let case = Case {
        model: &layer,
        dense: &layer,
        forward: &|x| layer.try_forward(x),
        vars: [&x, &kernel, &bias],
        grad,
        group: None,
    };
    case.train(recipe)
}

/// A rank's part of a tensor whose dimensions these axes divide.
fn part(mesh: &DeviceMesh, x: &Tensor, axes: &[Option<&str>]) -> Tensor {
    let mut own = x.clone();
    for (dim, axis) in axes.iter().enumerate() {
        if let Some(group) = axis.and_then(|axis| mesh.axis(axis)) {
            let len = own.dim(dim).unwrap() / group.size();
            own = own.narrow(dim, group.rank() * len, len).unwrap();
        }
    }
    own.contiguous().unwrap()
}

fn assert_near(case: &str, got: &Tensor, expected: &Tensor, terms: usize) {
    assert_eq!(got.dims(), expected.dims(), "{case}");
    let (got, expected) = (flat(got), flat(expected));
    // Sums of products of values up to 2 in another order, twice.
    let bound = 2. * (terms as f32 + 8.) * terms as f32 * 4. * f32::EPSILON;
    for (got, expected) in got.iter().zip(&expected) {
        let error = (got - expected).abs();
        assert!(
            error <= bound,
            "{case}: {got} for {expected}, bound {bound}"
        );
    }
}

fn check(group: &ProcessGroup, recipe: &str, axes: Axes, expected: &Outcome) {
    let mesh = DeviceMesh::new(group, &[("data", 2), ("model", 2)]).unwrap();
    let case = format!("{recipe}, {axes:?}, rank {}", group.rank());
    let [x, kernel, bias, grad] = inputs();
    let config = config(axes);
    let [tokens, p, q, r, s] = axes;
    let var = |t: Tensor| Var::from_tensor(&t).unwrap();
    let own_x = var(part(&mesh, &x, &[tokens, p, None, q]));
    let k = var(ParallelDense::part_of_kernel(&config, &kernel, &mesh).unwrap());
    let b = var(ParallelDense::part_of_bias(&config, &bias, &mesh).unwrap());
    let (kernel, bias) = (k.as_tensor().clone(), b.as_tensor().clone());
    let layer = ParallelDense::new(kernel, Some(bias), config, tokens, &mesh, "dense").unwrap();
    let of_y = [tokens, None, r, s];
    let own = Case {
        model: &layer,
        dense: layer.part(),
        forward: &|x| layer.try_forward(x),
        vars: [&own_x, &k, &b],
        grad: part(&mesh, &grad, &of_y),
        group: Some(group),
    };
    let (y, grads, slots) = own.train(recipe);
    assert_near(&case, &y, &part(&mesh, &expected.0, &of_y), 33);
    let grad_x = part(&mesh, &expected.1[0], &[tokens, p, None, q]);
    assert_near(&case, &grads[0], &grad_x, 24);
    // Of this rank's tokens.
    let all = |x: &Tensor| match tokens.and_then(|axis| mesh.axis(axis)) {
        Some(group) => group.all_reduce(x, ReduceOp::Sum).unwrap(),
        None => x.clone(),
    };
    let grad_kernel = part(&mesh, &expected.1[1], &[p, q, r, s]);
    assert_near(&case, &all(&grads[1]), &grad_kernel, 8);
    let grad_bias = part(&mesh, &expected.1[2], &[r, s]);
    assert_near(&case, &all(&grads[2]), &grad_bias, 8);
    if recipe == "delayed" {
        assert_eq!(slots, expected.2, "{case}");
    }
}

#[test]
fn parts_equal_the_whole_layer() {
    let (d, m) = (Some("data"), Some("model"));
    let cases: [Axes; 8] = [
        [None; 5],
        [d, None, None, None, None],
        [None, m, None, None, None],
        [None, None, m, None, None],
        [None, None, None, m, None],
        [None, d, None, None, m],
        [d, None, m, None, None],
        [None, d, m, None, None],
    ];
    for recipe in ["delayed", "tensorwise", "rowwise"] {
        let expected = whole(recipe);
        for axes in cases {
            threads::run(4, |group| check(&group, recipe, axes, &expected));
        }
    }
}

#[test]
fn names_that_do_not_fit_are_said() {
    let errors = threads::run(2, |group| {
        let mesh = DeviceMesh::new(&group, &[("data", 1), ("model", 2)]).unwrap();
        let kernel = |dims: [usize; 4]| Tensor::zeros(&dims, DType::F32, &Device::Cpu).unwrap();
        let new = |axes: Axes, tokens| {
            let layer = ParallelDense::new(kernel(KERNEL), None, config(axes), tokens, &mesh, "fc");
            layer.expect_err("an error").to_string()
        };
        let model = Some("model");
        let odd = config([None, model, None, None, None]);
        let odd = ParallelDense::part_of_kernel(&odd, &kernel([3, 8, 4, 6]), &mesh);
        let few = config([None; 5]).with_kernel_axes(["p"]);
        let few = ParallelDense::new(kernel(KERNEL), None, few, None, &mesh, "fc");
        [
            new([None, None, None, model, None], model),
            new([None, model, None, model, None], None),
            odd.unwrap_err().to_string(),
            few.unwrap_err().to_string(),
        ]
    });
    for [twice, same, uneven, few] in errors {
        assert!(few.contains("needs a name"), "{few}");
        assert!(
            twice.contains("axis `model` divides two dimensions"),
            "{twice}"
        );
        assert!(
            same.contains("`p` and `r`") || same.contains("model"),
            "{same}"
        );
        let expected = "3 cannot be divided evenly over 2";
        assert!(uneven.contains(expected), "{uneven}");
    }
}
