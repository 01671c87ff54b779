//! Helpers of the guard's tests.

use candle_core::backprop::GradStore;
use candle_core::{Module, Tensor, Var};
use fp8::config::Recipe;
use fp8::{Autocast, AutocastGuard, fp8_autocast};
use fp8_test_support::{Layer, assert_same, flat, rounding::UNIT};

/// How far a product of a cast input and a cast weight may be off, as a share of it: the operands, the four scales, the two products
/// with them, the sum with the bias and the expected number are rounded.
pub const SCALED: f64 = 10. * UNIT;

pub fn recipe(name: &str) -> Recipe {
    name.parse().unwrap()
}

pub fn open(autocast: impl Into<Autocast>) -> AutocastGuard {
    fp8_autocast(autocast).unwrap()
}

/// Guards opened one inside the other. They close in the reverse order.
pub struct Nest(pub Vec<AutocastGuard>);

impl Nest {
    pub fn open(guards: &[Autocast]) -> Self {
        Self(guards.iter().cloned().map(open).collect())
    }
}

impl Drop for Nest {
    fn drop(&mut self) {
        while self.0.pop().is_some() {}
    }
}

pub fn backward(y: &Tensor, grad_output: &Tensor) -> GradStore {
    (y * grad_output)
        .unwrap()
        .sum_all()
        .unwrap()
        .backward()
        .unwrap()
}

/// Forward and backward inside `guards`: y, grad_x, grad_weight, grad_bias.
pub fn run(
    layer: &Layer,
    module: &dyn Module,
    x: &Var,
    go: &Tensor,
    guards: &[Autocast],
) -> [Tensor; 4] {
    let _nest = Nest::open(guards);
    let y = module.forward(x).unwrap();
    let grads = backward(&y, go);
    let grad = |var: &Var| grads.get(var).unwrap().clone();
    [y, grad(x), grad(&layer.weight), grad(&layer.bias)]
}

pub const TENSORS: [&str; 4] = ["y", "grad_x", "grad_weight", "grad_bias"];

#[track_caller]
pub fn assert_all_same(case: &str, got: &[Tensor; 4], expected: &[Tensor; 4]) {
    for (name, (got, expected)) in TENSORS.iter().zip(got.iter().zip(expected)) {
        assert_same(&format!("{case}, {name}"), got, expected);
    }
}

/// A training step of one layer: forward in a guard, backward after it closed.
pub fn train(layer: &Layer, recipe: impl Into<Autocast>, x: &Tensor, go: &Tensor) -> Tensor {
    let guard = open(recipe);
    let y = layer.linear.forward(x).unwrap();
    guard.close().unwrap();
    backward(&y, go);
    y
}

pub fn amax(x: &Tensor) -> f32 {
    flat(x).into_iter().fold(0., |max, x| max.max(x.abs()))
}

pub fn in_private_pool<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2);
    pool.build().unwrap().install(work)
}
