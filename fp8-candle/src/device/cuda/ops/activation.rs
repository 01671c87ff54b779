//! Activations, gated or not.

use crate::base::activation::Activation;
use crate::base::error::Result;
use crate::device::cuda::gpu::{Gpu, with_pointer_list};
use crate::device::cuda::kernels::{Arg, Shape, args, kernels};
use crate::device::cuda::launch::launch;
use candle_core::{DType, Storage, Tensor};

kernels! { KERNELS in ACTIVATION;
    FORWARD = activations "fp8_activation"("ppplll");
    BACKWARD = activations "fp8_activation_backward"("ppppplll");
}

const OP: &str = "activation";

/// Elements per thread.
const CHUNK: usize = 8;

/// The input of an activation: addresses of gate and value (0 if it is not gated), whose rows are `pitch` elements apart.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sides {
    gate: u64,
    value: u64,
    pitch: usize,
}

impl Sides {
    /// Gate and value in one tensor at `x`, rows of `n` elements each; only a gate if `activation` is not gated.
    pub(crate) fn halves(activation: Activation, x: u64, n: usize, dtype: DType) -> Self {
        let gated = activation.is_gated();
        Self {
            gate: x,
            value: if gated {
                x + (n * dtype.size_in_bytes()) as u64
            } else {
                0
            },
            pitch: if gated { 2 * n } else { n },
        }
    }

    /// The first arguments of the casts that compute an activation.
    pub(crate) fn args(&self) -> [Arg; 3] {
        [
            Arg::Ptr(self.gate),
            Arg::Ptr(self.value),
            Arg::Len(self.pitch as u64),
        ]
    }
}

/// The result for `x` `[.., n]`, or `[.., 2n]` if `activation` is gated.
pub(crate) fn forward(activation: Activation, x: &Tensor) -> Result<Storage> {
    let (rows, n) = size(activation, x);
    run_forward(activation, &[x], (rows, n), |pointers| {
        Sides::halves(activation, pointers[0], n, x.dtype())
    })
}

/// The result of a gated activation for gate and value of one shape.
pub(crate) fn forward_pair(
    activation: Activation,
    gate: &Tensor,
    value: &Tensor,
) -> Result<Storage> {
    let n = gate.elem_count();
    run_forward(activation, &[gate, value], (1, n), |pointers| Sides {
        gate: pointers[0],
        value: pointers[1],
        pitch: n,
    })
}

fn run_forward(
    activation: Activation,
    inputs: &[&Tensor],
    (rows, n): (usize, usize),
    sides: impl Fn(&[u64]) -> Sides,
) -> Result<Storage> {
    let (gpu, dtype) = (Gpu::of(inputs[0])?, inputs[0].dtype());
    let y = gpu.alloc(dtype, rows * n)?;
    if rows * n > 0 {
        with_pointer_list(&gpu, inputs, |pointers| {
            let sides = sides(pointers);
            let args = args![
                p sides.gate, p sides.value, p y.ptr(), l rows, l n, l sides.pitch,
            ];
            let shape = Shape::stride((rows * n).div_ceil(CHUNK));
            // SAFETY: gate and value have `rows` rows of n elements, `pitch` apart, y rows * n, all of the kernel's dtype.
            unsafe { launch(&gpu, FORWARD.of(activation).of(OP, dtype)?, shape, &args) }
        })?;
    }
    Ok(y.into_storage())
}

/// The gradient of `x`.
pub(crate) fn backward(activation: Activation, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let gpu = Gpu::of(x)?;
    let (rows, n) = size(activation, x);
    let dx = gpu.alloc(x.dtype(), x.elem_count())?;
    run_backward(activation, &[x, grad], (rows, n), |pointers| {
        let halves = |x| Sides::halves(activation, x, n, grad.dtype());
        (halves(pointers[0]), halves(dx.ptr()), pointers[1])
    })?;
    dx.into_tensor(x.shape())
}

/// The gradients of gate and value.
pub(crate) fn backward_pair(
    activation: Activation,
    gate: &Tensor,
    value: &Tensor,
    grad: &Tensor,
) -> Result<[Tensor; 2]> {
    let gpu = Gpu::of(gate)?;
    let n = gate.elem_count();
    let (dgate, dvalue) = (gpu.alloc(gate.dtype(), n)?, gpu.alloc(gate.dtype(), n)?);
    run_backward(activation, &[gate, value, grad], (1, n), |pointers| {
        let sides = |gate, value| Sides {
            gate,
            value,
            pitch: n,
        };
        let of = sides(pointers[0], pointers[1]);
        (of, sides(dgate.ptr(), dvalue.ptr()), pointers[2])
    })?;
    Ok([
        dgate.into_tensor(gate.shape())?,
        dvalue.into_tensor(gate.shape())?,
    ])
}

/// `sides` gives what is read, where its gradients go, and the gradient of the result.
fn run_backward(
    activation: Activation,
    inputs: &[&Tensor],
    (rows, n): (usize, usize),
    sides: impl Fn(&[u64]) -> (Sides, Sides, u64),
) -> Result<()> {
    if rows * n == 0 {
        return Ok(());
    }
    let (gpu, dtype) = (Gpu::of(inputs[0])?, inputs[0].dtype());
    with_pointer_list(&gpu, inputs, |pointers| {
        let (of, to, grad) = sides(pointers);
        let args = args![
            p of.gate, p of.value, p grad, p to.gate, p to.value, l rows, l n, l of.pitch,
        ];
        let shape = Shape::stride((rows * n).div_ceil(CHUNK));
        // SAFETY: as in the forward pass; grad has rows * n elements, and gradients lie as what they are the gradients of.
        unsafe { launch(&gpu, BACKWARD.of(activation).of(OP, dtype)?, shape, &args) }
    })
}

/// Rows of `x` and features of the result.
fn size(activation: Activation, x: &Tensor) -> (usize, usize) {
    let (rows, cols) = crate::base::data::matrix_dims(x.dims());
    (
        rows,
        if activation.is_gated() {
            cols / 2
        } else {
            cols
        },
    )
}
