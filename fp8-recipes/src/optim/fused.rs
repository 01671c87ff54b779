//! The AdamW update in one pass over contiguous f32, bf16 or f16 memory.

use std::cell::RefCell;

use candle_core::{CpuStorage, InplaceOp2, Layout, Result, bail};
use half::{bf16, f16};
use rayon::prelude::*;

/// Elements that one task updates. The update is elementwise, so the split never changes a bit.
const BLOCK: usize = 1 << 14;

/// The numbers of one step that all variables share (`decay` differs with the variable's decay
/// flag).
#[derive(Clone, Copy, Debug)]
pub(super) struct Coefficients {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    /// `1 - lr * weight_decay`, or 1 for a variable that does not decay.
    pub decay: f64,
    /// `1 / (1 - beta1^step)`.
    pub correction1: f64,
    /// `1 / (1 - beta2^step)`.
    pub correction2: f64,
    /// What gradients are multiplied by first; exactly 1 when nothing is clipped.
    pub clip: f64,
}

/// The same numbers rounded to f32 once, as candle rounds its scalar operands.
#[derive(Clone, Copy)]
struct Rounded {
    lr: f32,
    beta1: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    eps: f32,
    decay: f32,
    correction1: f32,
    correction2: f32,
    clip: f32,
}

impl From<&Coefficients> for Rounded {
    fn from(c: &Coefficients) -> Self {
        Self {
            lr: c.lr as f32,
            beta1: c.beta1 as f32,
            one_minus_beta1: (1.0 - c.beta1) as f32,
            beta2: c.beta2 as f32,
            one_minus_beta2: (1.0 - c.beta2) as f32,
            eps: c.eps as f32,
            decay: c.decay as f32,
            correction1: c.correction1 as f32,
            correction2: c.correction2 as f32,
            clip: c.clip as f32,
        }
    }
}

/// What the optimizer keeps of one variable: host vectors here, tensors for other variables.
pub(super) struct State<T> {
    pub exp_avg: T,
    pub exp_avg_sq: T,
    /// f32 copy of a bf16 or f16 variable.
    pub master: Option<T>,
}

/// In-place op: first operand the variable, second its gradient; the state is borrowed from the
/// optimizer. It allocates nothing.
pub(super) struct FusedUpdate<'a> {
    rounded: Rounded,
    state: RefCell<&'a mut State<Vec<f32>>>,
}

impl<'a> FusedUpdate<'a> {
    pub(super) fn new(coefficients: &Coefficients, state: &'a mut State<Vec<f32>>) -> Self {
        Self {
            rounded: coefficients.into(),
            state: RefCell::new(state),
        }
    }
}

impl InplaceOp2 for FusedUpdate<'_> {
    fn name(&self) -> &'static str {
        "fused-adamw"
    }

    fn cpu_fwd(
        &self,
        theta: &mut CpuStorage,
        theta_layout: &Layout,
        grad: &CpuStorage,
        grad_layout: &Layout,
    ) -> Result<()> {
        let (Some((t0, t1)), Some((g0, g1))) = (
            theta_layout.contiguous_offsets(),
            grad_layout.contiguous_offsets(),
        ) else {
            bail!("{}: operands must be contiguous", self.name())
        };
        let state = &mut **self.state.borrow_mut();
        let lengths = [g1 - g0, state.exp_avg.len(), state.exp_avg_sq.len()];
        let master = state.master.as_ref().map_or(t1 - t0, Vec::len);
        if lengths.iter().chain([&master]).any(|len| *len != t1 - t0) {
            bail!(
                "{}: {} elements, {} in the gradient",
                self.name(),
                t1 - t0,
                g1 - g0
            )
        }
        let c = self.rounded;
        match (theta, grad) {
            (CpuStorage::F32(theta), CpuStorage::F32(grad)) => {
                run(c, &mut theta[t0..t1], &grad[g0..g1], state)
            }
            (CpuStorage::BF16(theta), CpuStorage::BF16(grad)) => {
                run(c, &mut theta[t0..t1], &grad[g0..g1], state)
            }
            (CpuStorage::F16(theta), CpuStorage::F16(grad)) => {
                run(c, &mut theta[t0..t1], &grad[g0..g1], state)
            }
            _ => bail!("{}: operands must be f32, bf16 or f16", self.name()),
        }
        Ok(())
    }
}

/// An element type that is updated in f32.
trait Element: Copy + PartialEq + Send + Sync {
    fn widen(self) -> f32;
    /// Rounds to nearest.
    fn narrow(x: f32) -> Self;
    fn same_bits(self, other: Self) -> bool;
}

macro_rules! element {
    ($type:ty, $widen:expr, $narrow:expr) => {
        impl Element for $type {
            #[inline(always)]
            fn widen(self) -> f32 {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(x: f32) -> Self {
                $narrow(x)
            }
            #[inline(always)]
            fn same_bits(self, other: Self) -> bool {
                self.to_bits() == other.to_bits()
            }
        }
    };
}
element!(f32, std::convert::identity, std::convert::identity);
element!(bf16, bf16::to_f32, bf16::from_f32);
element!(f16, f16::to_f32, f16::from_f32);

fn run<T: Element>(c: Rounded, theta: &mut [T], grad: &[T], state: &mut State<Vec<f32>>) {
    let tasks = theta
        .par_chunks_mut(BLOCK)
        .zip(grad.par_chunks(BLOCK))
        .zip(state.exp_avg.par_chunks_mut(BLOCK))
        .zip(state.exp_avg_sq.par_chunks_mut(BLOCK));
    match &mut state.master {
        // Without the way through the thread pool.
        None if grad.len() <= BLOCK => {
            update(c, theta, grad, &mut state.exp_avg, &mut state.exp_avg_sq)
        }
        None => tasks.for_each(|(((theta, grad), m), v)| update(c, theta, grad, m, v)),
        Some(master) => {
            tasks
                .zip(master.par_chunks_mut(BLOCK))
                .for_each(|((((theta, grad), m), v), master)| {
                    update_master(c, theta, grad, m, v, master)
                })
        }
    }
}

fn update<T: Element>(c: Rounded, theta: &mut [T], grad: &[T], m: &mut [f32], v: &mut [f32]) {
    for (((theta, grad), m), v) in theta.iter_mut().zip(grad).zip(m).zip(v) {
        *theta = T::narrow(step(&c, theta.widen(), grad.widen(), m, v));
    }
}

fn update_master<T: Element>(
    c: Rounded,
    theta: &mut [T],
    grad: &[T],
    m: &mut [f32],
    v: &mut [f32],
    master: &mut [f32],
) {
    for ((((theta, grad), m), v), master) in theta.iter_mut().zip(grad).zip(m).zip(v).zip(master) {
        // Where somebody has written to the variable, its value counts.
        let current = match T::narrow(*master).same_bits(*theta) {
            true => *master,
            false => theta.widen(),
        };
        *master = step(&c, current, grad.widen(), m, v);
        *theta = T::narrow(*master);
    }
}

/// The new value of one element; moments in place. The order of operations is that of candle-nn's
/// AdamW, so both give the same bits when nothing is clipped. The CUDA kernel follows it too.
#[inline(always)]
fn step(c: &Rounded, theta: f32, grad: f32, m: &mut f32, v: &mut f32) -> f32 {
    let g = grad * c.clip;
    let next_m = *m * c.beta1 + g * c.one_minus_beta1;
    let next_v = *v * c.beta2 + g * g * c.one_minus_beta2;
    let adjusted = (next_m * c.correction1) / ((next_v * c.correction2).sqrt() + c.eps);
    *m = next_m;
    *v = next_v;
    theta * c.decay - adjusted * c.lr
}
