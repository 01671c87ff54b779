//! The AdamW update in one pass over contiguous f32, bf16 or f16 memory.

use std::cell::RefCell;

use candle_core::{CpuStorage, InplaceOp2, Layout, Result, bail};
use fp8_candle::parallel;
use fp8_core::StochasticKey;

use super::elements::{Element, current, through_master, through_variable};
use super::masters::HostMaster;

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
pub(super) struct State<T, M = T> {
    pub exp_avg: T,
    pub exp_avg_sq: T,
    pub master: Option<M>,
}

/// In host memory.
pub(super) type HostState = State<Vec<f32>, HostMaster>;

/// In-place op: first operand the variable, second its gradient; the state is borrowed from the
/// optimizer. It allocates nothing.
pub(super) struct FusedUpdate<'a> {
    rounded: Rounded,
    key: Option<StochasticKey>,
    state: RefCell<&'a mut HostState>,
}

impl<'a> FusedUpdate<'a> {
    /// With a `key` for what is rounded at random: the master, or the variable where it has none.
    pub(super) fn new(
        coefficients: &Coefficients,
        key: Option<StochasticKey>,
        state: &'a mut HostState,
    ) -> Self {
        Self {
            rounded: coefficients.into(),
            key,
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
        let master = state.master.as_ref().map_or(t1 - t0, HostMaster::len);
        if lengths.iter().chain([&master]).any(|len| *len != t1 - t0) {
            bail!(
                "{}: {} elements, {} in the gradient",
                self.name(),
                t1 - t0,
                g1 - g0
            )
        }
        let c = self.rounded;
        macro_rules! run {
            ($($theta:ident $grad:ident),+) => {
                match (theta, grad) {
                    $((CpuStorage::$theta(theta), CpuStorage::$grad(grad)) => {
                        run(c, self.key, &mut theta[t0..t1], &grad[g0..g1], state)
                    })+
                    _ => bail!("{}: operands must be f32, bf16 or f16", self.name()),
                }
            };
        }
        run!(F32 F32, BF16 BF16, F16 F16, BF16 F32, F16 F32);
        Ok(())
    }
}

fn run<T: Element, G: Element>(
    c: Rounded,
    key: Option<StochasticKey>,
    theta: &mut [T],
    grad: &[G],
    state: &mut HostState,
) {
    let (m, v) = (&mut state.exp_avg, &mut state.exp_avg_sq);
    // Without the way through the thread pool.
    if grad.len() <= BLOCK && state.master.is_none() && key.is_none() {
        return update(c, theta, grad, m, v);
    }
    let tasks = theta
        .chunks_mut(BLOCK)
        .zip(grad.chunks(BLOCK))
        .zip(m.chunks_mut(BLOCK))
        .zip(v.chunks_mut(BLOCK));
    let first = |task: usize| (task * BLOCK) as u64;
    macro_rules! at_random {
        ($key:ident, $master:ident) => {
            parallel::for_each(
                tasks.zip($master.chunks_mut(BLOCK)).enumerate(),
                |(task, ((((theta, grad), m), v), master))| {
                    through_master($key, first(task), theta, master, |i, current| {
                        step(&c, current, grad[i].widen(), &mut m[i], &mut v[i])
                    })
                },
            )
        };
    }
    match (&mut state.master, key) {
        (None, None) => parallel::for_each(tasks, |(((theta, grad), m), v)| {
            update(c, theta, grad, m, v)
        }),
        (None, Some(key)) => {
            parallel::for_each(tasks.enumerate(), |(task, (((theta, grad), m), v))| {
                through_variable(key, first(task), theta, |i, current| {
                    step(&c, current, grad[i].widen(), &mut m[i], &mut v[i])
                })
            })
        }
        (Some(HostMaster::Bf16(master)), Some(key)) => at_random!(key, master),
        (Some(HostMaster::F16(master)), Some(key)) => at_random!(key, master),
        (Some(HostMaster::F32(master)), _) => {
            let tasks = tasks.zip(master.chunks_mut(BLOCK));
            parallel::for_each(tasks, |((((theta, grad), m), v), master)| {
                update_master(c, theta, grad, m, v, master)
            })
        }
        // A 16-bit master without a key is none that a slot makes.
        (Some(_), None) => {}
    }
}

fn update<T: Element, G: Element>(
    c: Rounded,
    theta: &mut [T],
    grad: &[G],
    m: &mut [f32],
    v: &mut [f32],
) {
    for (((theta, grad), m), v) in theta.iter_mut().zip(grad).zip(m).zip(v) {
        *theta = T::narrow(step(&c, theta.widen(), grad.widen(), m, v));
    }
}

fn update_master<T: Element, G: Element>(
    c: Rounded,
    theta: &mut [T],
    grad: &[G],
    m: &mut [f32],
    v: &mut [f32],
    master: &mut [f32],
) {
    for ((((theta, grad), m), v), master) in theta.iter_mut().zip(grad).zip(m).zip(v).zip(master) {
        *master = step(&c, current(*theta, *master), grad.widen(), m, v);
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
