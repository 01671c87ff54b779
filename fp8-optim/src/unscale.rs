//! The product of gradients with a factor, and the check that all elements are finite, in one pass.

use candle_core::{DType, Device, Shape, Tensor, WithDType, bail};
use fp8_core::HighPrecision;
use half::{bf16, f16};

use super::error::Result;
use super::host::Slice;

/// Elements of one task. The work is elementwise, so the split never changes a bit.
const BLOCK: usize = 1 << 14;

pub(super) struct Unscaled {
    factor: f64,
    /// Whether f16 gradients become f32.
    wide: bool,
    /// Gradients on the CPU that are not finite.
    found: usize,
    /// Per gradient of an accelerator an f32 scalar on its device: 0, or NaN if the gradient is not finite.
    marks: Vec<Tensor>,
}

impl Unscaled {
    pub(super) fn new(factor: f64, wide: bool) -> Self {
        Self {
            factor,
            wide,
            found: 0,
            marks: Vec::new(),
        }
    }

    /// The gradient times the factor, detached, in memory of its own.
    pub(super) fn take(&mut self, grad: &Tensor) -> Result<Tensor> {
        let grad = grad.detach();
        if matches!(grad.device(), Device::Cpu) {
            let (out, finite) = self.on_cpu(&grad)?;
            self.found += usize::from(!finite);
            return Ok(out);
        }
        let grad = match grad.dtype() {
            DType::F16 if self.wide => grad.to_dtype(DType::F32)?,
            _ => grad,
        };
        let out = grad.affine(self.factor, 0.)?;
        // 0 times Inf or NaN is NaN, which the sum propagates.
        let mark = out.affine(0., 0.)?.sum_all()?.to_dtype(DType::F32)?;
        self.marks.push(mark);
        Ok(out)
    }

    /// How many gradients have an element that is not finite, at least 1 if one of `casts` (f64 scalars) is NaN; one copy from the
    /// accelerator for all.
    pub(super) fn non_finite(self, casts: Vec<Tensor>) -> Result<usize> {
        let mut marks = self.marks;
        let own = marks.len();
        for cast in casts {
            marks.push(cast.to_dtype(DType::F32)?);
        }
        // All marks go to the accelerator, and return in one copy.
        let accelerator = marks.iter().find(|mark| !mark.device().is_cpu());
        let Some(device) = accelerator
            .or(marks.first())
            .map(|mark| mark.device().clone())
        else {
            return Ok(self.found);
        };
        let marks = marks.iter().map(|mark| mark.to_device(&device));
        let marks = Tensor::stack(&marks.collect::<candle_core::Result<Vec<_>>>()?, 0)?;
        let marks = marks.to_vec1::<f32>()?;
        let bad = |marks: &[f32]| marks.iter().filter(|mark| !mark.is_finite()).count();
        let found = self.found + bad(&marks[..own]);
        Ok(found.max(bad(&marks[own..]).min(1)))
    }

    fn on_cpu(&self, grad: &Tensor) -> candle_core::Result<(Tensor, bool)> {
        let (shape, wide_factor, factor) = (grad.shape(), self.factor, self.factor as f32);
        Slice::with(grad, None, |grad| match grad {
            Slice::F32(values) => products(values, shape, narrow::<_, f32>(factor)),
            Slice::BF16(values) => products(values, shape, narrow::<_, bf16>(factor)),
            Slice::F16(values) if self.wide => products(values, shape, narrow::<_, f32>(factor)),
            Slice::F16(values) => products(values, shape, narrow::<_, f16>(factor)),
            Slice::F64(values) => products(values, shape, |x| {
                let product = x * wide_factor;
                (product, product.is_finite())
            }),
            Slice::Codes(..) => bail!("a gradient cannot be FP8 codes"),
        })?
    }
}

/// The product in f32, rounded once, and whether it is finite.
fn narrow<A: HighPrecision, B: HighPrecision>(factor: f32) -> impl Fn(A) -> (B, bool) + Sync {
    move |x| {
        let product = B::from_f32(x.to_f32() * factor);
        (product, product.to_f32().is_finite())
    }
}

/// All products, and whether all are finite.
fn products<A: Copy + Sync, B: WithDType + Default + Send>(
    values: &[A],
    shape: &Shape,
    product: impl Fn(A) -> (B, bool) + Sync,
) -> candle_core::Result<(Tensor, bool)> {
    let mut out = vec![B::default(); values.len()];
    let tasks = out.chunks_mut(BLOCK).zip(values.chunks(BLOCK));
    let finite = fp8_candle::parallel::map(tasks, |(out, values)| {
        let mut all = true;
        for (out, &x) in out.iter_mut().zip(values) {
            let finite;
            (*out, finite) = product(x);
            all &= finite;
        }
        all
    });
    let out = Tensor::from_vec(out, shape, &Device::Cpu)?;
    Ok((out, finite.into_iter().all(|finite| finite)))
}
