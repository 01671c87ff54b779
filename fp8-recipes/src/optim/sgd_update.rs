//! The SGD update over contiguous f32, bf16 or f16 memory, in place.

use std::cell::RefCell;

use candle_core::{CpuStorage, InplaceOp2, Layout, Result, bail};
use fp8_core::StochasticKey;

use super::elements::{Element, current, through_master, through_variable};
use super::masters::HostMaster;
use super::sgd_slot::Rates;

/// Elements that one task updates. The update is elementwise, so the split never changes a bit.
const BLOCK: usize = 1 << 14;

/// The numbers rounded to f32 once, as candle rounds its scalar operands.
#[derive(Clone, Copy)]
struct Rounded {
    lr: f32,
    weight_decay: f32,
    momentum: f32,
    /// What a gradient is multiplied by when it is added to the buffer.
    share: f32,
    nesterov: bool,
    clip: f32,
}

impl Rounded {
    fn new(rates: &Rates, begins: bool) -> Self {
        Self {
            lr: rates.lr as f32,
            weight_decay: rates.weight_decay as f32,
            momentum: rates.momentum as f32,
            share: if begins {
                1.
            } else {
                (1. - rates.dampening) as f32
            },
            nesterov: rates.nesterov,
            clip: rates.clip as f32,
        }
    }
}

/// The new value of one element; its momentum in place.
#[inline(always)]
fn step(c: &Rounded, theta: f32, grad: f32, buffer: Option<&mut f32>) -> f32 {
    let g = grad * c.clip;
    let g = if c.weight_decay == 0. {
        g
    } else {
        g + theta * c.weight_decay
    };
    let g = match buffer {
        None => g,
        Some(buffer) => {
            *buffer = *buffer * c.momentum + g * c.share;
            if c.nesterov {
                g + *buffer * c.momentum
            } else {
                *buffer
            }
        }
    };
    theta - g * c.lr
}

/// In-place op: first operand the variable, second its gradient; buffer and master are borrowed from the optimizer.
pub(super) struct HostUpdate<'a> {
    rounded: Rounded,
    key: Option<StochasticKey>,
    state: RefCell<(Option<&'a mut Vec<f32>>, &'a mut Option<HostMaster>)>,
}

impl<'a> HostUpdate<'a> {
    /// With a `key` for what is rounded at random. A buffer that `begins` takes the whole gradient.
    pub(super) fn new(
        rates: &Rates,
        begins: bool,
        key: Option<StochasticKey>,
        buffer: Option<&'a mut Vec<f32>>,
        master: &'a mut Option<HostMaster>,
    ) -> Self {
        Self {
            rounded: Rounded::new(rates, begins),
            key,
            state: RefCell::new((buffer, master)),
        }
    }
}

impl InplaceOp2 for HostUpdate<'_> {
    fn name(&self) -> &'static str {
        "fused-sgd"
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
        let (buffer, master) = &mut *self.state.borrow_mut();
        let len = t1 - t0;
        let buffer_len = buffer.as_ref().map_or(len, |buffer| buffer.len());
        let master_len = master.as_ref().map_or(len, HostMaster::len);
        if [g1 - g0, buffer_len, master_len]
            .iter()
            .any(|other| *other != len)
        {
            bail!(
                "{}: {len} elements, {} in the gradient",
                self.name(),
                g1 - g0
            )
        }
        let buffer = buffer.as_mut().map(|buffer| buffer.as_mut_slice());
        macro_rules! run {
            ($($theta:ident $grad:ident),+) => {
                match (theta, grad) {
                    $((CpuStorage::$theta(theta), CpuStorage::$grad(grad)) => {
                        let (theta, grad) = (&mut theta[t0..t1], &grad[g0..g1]);
                        run(&self.rounded, self.key, theta, grad, buffer, master.as_mut())
                    })+
                    _ => bail!("{}: operands must be f32, bf16 or f16", self.name()),
                }
            };
        }
        run!(F32 F32, BF16 BF16, F16 F16, BF16 F32, F16 F32);
        Ok(())
    }
}

/// A stretch of one variable.
struct Task<'a, T, G, M> {
    first: u64,
    theta: &'a mut [T],
    grad: &'a [G],
    buffer: Option<&'a mut [f32]>,
    /// As long as `theta`, or empty.
    master: &'a mut [M],
}

fn run<T: Element, G: Element>(
    c: &Rounded,
    key: Option<StochasticKey>,
    theta: &mut [T],
    grad: &[G],
    buffer: Option<&mut [f32]>,
    master: Option<&mut HostMaster>,
) {
    match master {
        None => tasks(theta, grad, buffer, &mut [] as &mut [f32], |task| {
            task.alone(c, key)
        }),
        Some(HostMaster::F32(m)) => tasks(theta, grad, buffer, m, |task| task.master(c, key)),
        Some(HostMaster::Bf16(m)) => tasks(theta, grad, buffer, m, |task| task.master(c, key)),
        Some(HostMaster::F16(m)) => tasks(theta, grad, buffer, m, |task| task.master(c, key)),
    }
}

fn tasks<T: Element, G: Element, M: Element>(
    theta: &mut [T],
    grad: &[G],
    buffer: Option<&mut [f32]>,
    master: &mut [M],
    work: impl Fn(Task<'_, T, G, M>) + Send + Sync,
) {
    let mut buffers = buffer.map(|buffer| buffer.chunks_mut(BLOCK));
    let mut masters = master.chunks_mut(BLOCK);
    let pairs = theta.chunks_mut(BLOCK).zip(grad.chunks(BLOCK));
    let all = pairs.enumerate().map(|(i, (theta, grad))| Task {
        first: (i * BLOCK) as u64,
        theta,
        grad,
        buffer: buffers.as_mut().and_then(Iterator::next),
        master: masters.next().unwrap_or_default(),
    });
    if grad.len() <= BLOCK {
        // Without the way through the thread pool.
        return all.for_each(work);
    }
    fp8_candle::parallel::for_each(all, work);
}

impl<T: Element, G: Element, M: Element> Task<'_, T, G, M> {
    /// Without a copy.
    fn alone(self, c: &Rounded, key: Option<StochasticKey>) {
        let Self {
            first,
            theta,
            grad,
            buffer,
            ..
        } = self;
        match (buffer, key) {
            (None, None) => {
                for (theta, grad) in theta.iter_mut().zip(grad) {
                    *theta = T::narrow(step(c, theta.widen(), grad.widen(), None));
                }
            }
            (Some(buffer), None) => {
                for ((theta, grad), buffer) in theta.iter_mut().zip(grad).zip(buffer) {
                    *theta = T::narrow(step(c, theta.widen(), grad.widen(), Some(buffer)));
                }
            }
            (mut buffer, Some(key)) => through_variable(key, first, theta, |i, current| {
                let buffer = buffer.as_mut().map(|buffer| &mut buffer[i]);
                step(c, current, grad[i].widen(), buffer)
            }),
        }
    }

    /// With one.
    fn master(self, c: &Rounded, key: Option<StochasticKey>) {
        let Self {
            first,
            theta,
            grad,
            mut buffer,
            master,
        } = self;
        let mut step = |i: usize, current: f32| {
            let buffer = buffer.as_mut().map(|buffer| &mut buffer[i]);
            step(c, current, grad[i].widen(), buffer)
        };
        if let Some(key) = key {
            return through_master(key, first, theta, master, step);
        }
        for (i, (theta, master)) in theta.iter_mut().zip(master).enumerate() {
            *master = M::narrow(step(i, current(*theta, *master)));
            *theta = T::narrow(master.widen());
        }
    }
}
