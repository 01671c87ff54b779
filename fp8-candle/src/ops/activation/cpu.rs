//! Activations on the CPU, in tasks of whole rows.

use crate::base::activation::Activation;
use crate::base::error::Result;
use crate::base::parallel;
use crate::cast::kept::KeptTensor;
use crate::cast::quantizer::Quantizer;
use crate::cast::tensor::{Fp8Tensor, Quantized};
use crate::device::cpu::elements::{
    Buffer, Element, for_dtype, map_rows, piece_len, storage, tensor, with_slices,
};
use crate::device::{Beside, MadeRows, filled_in_pieces};
use candle_core::{DType, Storage, Tensor};

pub(super) fn forward(activation: Activation, x: &Tensor) -> Result<Storage> {
    crate::base::simd::check()?;
    for_dtype!(activation.name(), x.dtype(), T => {
        with_slices([x], |[values]: [&[T]; 1]| storage(self::values(activation, values, last_dim(x))))
    })
}

pub(super) fn forward_pair(
    activation: Activation,
    gate: &Tensor,
    value: &Tensor,
) -> Result<Storage> {
    crate::base::simd::check()?;
    let curve = activation.curve();
    for_dtype!(activation.name(), gate.dtype(), T => {
        with_slices([gate, value], |slices: [&[T]; 2]| {
            storage(map_rows(slices, 1, |_, [gate, value], y| curve.gated(gate, value, y)))
        })
    })
}

pub(super) fn backward(activation: Activation, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    crate::base::simd::check()?;
    for_dtype!(activation.name(), x.dtype(), T => {
        with_slices([x, grad], |[values, grad]: [&[T]; 2]| {
            tensor(gradient(activation, values, grad, last_dim(x)), x.shape())
        })?
    })
}

pub(super) fn backward_pair(
    activation: Activation,
    gate: &Tensor,
    value: &Tensor,
    grad: &Tensor,
) -> Result<[Tensor; 2]> {
    crate::base::simd::check()?;
    let curve = activation.curve();
    for_dtype!(activation.name(), gate.dtype(), T => {
        with_slices([gate, value, grad], |slices: [&[T]; 3]| {
            let (mut dgate, mut dvalue) = (zeros::<T>(slices[0].len()), zeros::<T>(slices[0].len()));
            let outs = dgate.chunks_mut(TASK).zip(dvalue.chunks_mut(TASK));
            parallel::for_each(outs.enumerate(), |(task, (dgate, dvalue))| {
                let [mut a, mut b, mut c] = [(); 3].map(|()| Buffer::default());
                let range = task * TASK..task * TASK + dgate.len();
                let gate = T::load(&slices[0][range.clone()], &mut a);
                let value = T::load(&slices[1][range.clone()], &mut b);
                let grad = T::load(&slices[2][range], &mut c);
                T::store(dgate, |dgate| {
                    T::store(dvalue, |dvalue| curve.gated_gradient(gate, value, grad, dgate, dvalue));
                });
            });
            Ok([tensor(dgate, gate.shape())?, tensor(dvalue, gate.shape())?])
        })?
    })
}

/// The cast of the result, of shape `dims`, whose rows are cast as they are made; and [`group_codes`](crate::cast::kept::group_codes)
/// of `x` in groups of `keep` features.
pub(super) fn cast_rows(
    activation: Activation,
    x: &Tensor,
    dims: &[usize],
    quantizer: &Quantizer,
    keep: Option<usize>,
) -> Result<Option<(Quantized, Option<Fp8Tensor>)>> {
    let (last, n) = (last_dim(x), dims.last().copied().unwrap_or(1));
    for_dtype!(activation.name(), x.dtype(), T => {
        with_slices([x], |[values]: [&[T]; 1]| {
            let made = |start: usize, y: &mut [T]| {
                part(activation, input_of(values, start, y.len(), [last, n]), [last, n], y);
            };
            quantizer.quantize_and_keep(dims, &made, (values, x.dims()), keep)
        })?
    })
}

/// The cast of the gradient of `x` and, with `sum_rows`, the sums over its rows, which are cast as they are made.
pub(super) fn cast_gradient(
    activation: Activation,
    x: &KeptTensor,
    grad: &Tensor,
    quantizer: &Quantizer,
    sum_rows: Option<DType>,
) -> Result<Option<(Quantized, Option<Tensor>)>> {
    let last = x.dims().last().copied().unwrap_or(1);
    for_dtype!(activation.name(), x.dtype(), T => {
        x.with_rows(|rows: &dyn MadeRows<T>| {
            with_slices([grad], |[grad]: [&[T]; 1]| {
                let made = |start: usize, dx: &mut [T]| {
                    let mut room = None;
                    let x = rows.rows(start, dx.len(), &mut room);
                    gradient_part(activation, (x, grad), last, start, dx);
                };
                let beside = Beside { sum_rows, groups: None };
                let cast = quantizer.quantize_rows(x.dims(), beside, &made)?;
                Ok(cast.map(|cast| (cast.quantized, cast.sums)))
            })?
        })
    })
}

/// The size of the last dimension; a scalar is one row of one element.
fn last_dim(x: &Tensor) -> usize {
    x.dims().last().copied().unwrap_or(1)
}

fn values<T: Element>(activation: Activation, x: &[T], last: usize) -> Vec<T> {
    let n = if activation.is_gated() {
        last / 2
    } else {
        last
    };
    let rows = x.len().checked_div(last).unwrap_or(0);
    let lens = [rows_of_task(last) * n, piece_len(last) / last.max(1) * n];
    let (y, _) = filled_in_pieces(T::default(), rows * n, lens, |pieces| {
        for (start, y) in pieces {
            let x = input_of(x, start, y.len(), [last, n]);
            part(activation, x, [last, n], y);
        }
    });
    y
}

/// The results of rows of `last` elements, `n` each.
fn part<T: Element>(activation: Activation, x: &[T], [last, n]: [usize; 2], y: &mut [T]) {
    let (curve, gated) = (activation.curve(), activation.is_gated());
    let mut buffer = Buffer::default();
    let x = T::load(x, &mut buffer);
    T::store(y, |y| match gated {
        false => curve.values(x, y),
        true => {
            for (x, y) in x.chunks_exact(last).zip(y.chunks_exact_mut(n)) {
                curve.gated(&x[..n], &x[n..], y);
            }
        }
    });
}

fn gradient<T: Element>(activation: Activation, x: &[T], grad: &[T], last: usize) -> Vec<T> {
    let lens = [rows_of_task(last) * last, piece_len(last)];
    let (dx, _) = filled_in_pieces(T::default(), x.len(), lens, |pieces| {
        for (start, dx) in pieces {
            let x = &x[start..start + dx.len()];
            gradient_part(activation, (x, grad), last, start, dx);
        }
    });
    dx
}

/// The gradient of `x`, rows of `last` elements from element `start` of them all on; `grad` has the gradients of all results.
fn gradient_part<T: Element>(
    activation: Activation,
    (x, grad): (&[T], &[T]),
    last: usize,
    start: usize,
    dx: &mut [T],
) {
    let (curve, gated) = (activation.curve(), activation.is_gated());
    let n = if gated { last / 2 } else { last };
    let (mut x_buffer, mut grad_buffer) = (Buffer::default(), Buffer::default());
    let grad = input_of(grad, start, dx.len(), [n, last]);
    let (x, grad) = (T::load(x, &mut x_buffer), T::load(grad, &mut grad_buffer));
    T::store(dx, |dx| match gated {
        false => curve.gradient(x, grad, dx),
        true => {
            let rows = x.chunks_exact(last).zip(grad.chunks_exact(n));
            for ((x, grad), dx) in rows.zip(dx.chunks_exact_mut(last)) {
                let (dgate, dvalue) = dx.split_at_mut(n);
                curve.gated_gradient(&x[..n], &x[n..], grad, dgate, dvalue);
            }
        }
    });
}

fn zeros<T: Element>(len: usize) -> Vec<T> {
    vec![T::default(); len]
}

/// The rows of `x`, of `cols[0]` elements each, that belong to `len` elements from `start` on of rows of `cols[1]`.
fn input_of<T>(x: &[T], start: usize, len: usize, cols: [usize; 2]) -> &[T] {
    let [from, to] = cols.map(|cols| cols.max(1));
    &x[start / to * from..][..len / to * from]
}

/// Elements of one task.
const TASK: usize = 1 << 14;

/// Rows of one task.
fn rows_of_task(last: usize) -> usize {
    TASK.div_ceil(last.max(1))
}
