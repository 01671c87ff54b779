//! The AdamW update in one pass over contiguous f32 memory.

use std::cell::RefCell;

use candle_core::{CpuStorage, InplaceOp2, Layout, Result, bail};
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

/// In-place op: first operand the variable, second its gradient; the moments are borrowed from the
/// optimizer. It allocates nothing.
pub(super) struct FusedUpdate<'a> {
    rounded: Rounded,
    moments: RefCell<(&'a mut [f32], &'a mut [f32])>,
}

impl<'a> FusedUpdate<'a> {
    pub(super) fn new(
        coefficients: &Coefficients,
        exp_avg: &'a mut [f32],
        exp_avg_sq: &'a mut [f32],
    ) -> Self {
        Self {
            rounded: coefficients.into(),
            moments: RefCell::new((exp_avg, exp_avg_sq)),
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
        let (CpuStorage::F32(theta), CpuStorage::F32(grad)) = (theta, grad) else {
            bail!("{}: operands must be f32", self.name())
        };
        let (theta, grad) = (&mut theta[t0..t1], &grad[g0..g1]);
        let mut moments = self.moments.borrow_mut();
        let (exp_avg, exp_avg_sq) = &mut *moments;
        if theta.len() != grad.len()
            || theta.len() != exp_avg.len()
            || theta.len() != exp_avg_sq.len()
        {
            bail!(
                "{}: {} elements, {} in the gradient",
                self.name(),
                theta.len(),
                grad.len()
            )
        }
        let rounded = self.rounded;
        if theta.len() <= BLOCK {
            update(rounded, theta, grad, exp_avg, exp_avg_sq);
            return Ok(());
        }
        theta
            .par_chunks_mut(BLOCK)
            .zip(grad.par_chunks(BLOCK))
            .zip(
                exp_avg
                    .par_chunks_mut(BLOCK)
                    .zip(exp_avg_sq.par_chunks_mut(BLOCK)),
            )
            .for_each(|((theta, grad), (exp_avg, exp_avg_sq))| {
                update(rounded, theta, grad, exp_avg, exp_avg_sq)
            });
        Ok(())
    }
}

/// The order of operations is that of candle-nn's AdamW, so both give the same bits when nothing is
/// clipped.
fn update(
    c: Rounded,
    theta: &mut [f32],
    grad: &[f32],
    exp_avg: &mut [f32],
    exp_avg_sq: &mut [f32],
) {
    for (((theta, grad), m), v) in theta.iter_mut().zip(grad).zip(exp_avg).zip(exp_avg_sq) {
        let g = *grad * c.clip;
        let next_m = *m * c.beta1 + g * c.one_minus_beta1;
        let next_v = *v * c.beta2 + g * g * c.one_minus_beta2;
        let adjusted = (next_m * c.correction1) / ((next_v * c.correction2).sqrt() + c.eps);
        *theta = *theta * c.decay - adjusted * c.lr;
        *m = next_m;
        *v = next_v;
    }
}
