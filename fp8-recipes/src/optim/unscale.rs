//! The product of gradients with a factor, and the check that all elements are finite, in one pass.

use candle_core::{CpuStorage, DType, Device, Storage, Tensor, bail};
use fp8_core::HighPrecision;
use half::{bf16, f16};

use super::error::Result;

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
        // 0 times an infinity or NaN is NaN, which a sum keeps.
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
        let grad = grad.contiguous()?;
        let (storage, layout) = grad.storage_and_layout();
        let (Storage::Cpu(cpu), Some((start, end))) = (&*storage, layout.contiguous_offsets())
        else {
            bail!("unscaling: expected a contiguous gradient on the CPU")
        };
        let factor = self.factor as f32;
        macro_rules! run {
            ($values:expr, $out:ty, $product:expr, $finite:expr) => {{
                let (out, finite) = run::<_, $out>(&$values[start..end], $product, $finite);
                let out = Tensor::from_vec(out, grad.shape(), &Device::Cpu)?;
                Ok((out, finite))
            }};
        }
        match cpu {
            CpuStorage::F32(values) => run!(values, f32, |x| x * factor, f32::is_finite),
            CpuStorage::F64(values) => run!(values, f64, |x| x * self.factor, f64::is_finite),
            CpuStorage::BF16(values) => {
                let product = |x: bf16| narrow::<bf16>(HighPrecision::to_f32(x) * factor);
                run!(values, bf16, product, bf16::is_finite)
            }
            CpuStorage::F16(values) if self.wide => {
                run!(
                    values,
                    f32,
                    |x: f16| HighPrecision::to_f32(x) * factor,
                    f32::is_finite
                )
            }
            CpuStorage::F16(values) => {
                let product = |x: f16| narrow::<f16>(HighPrecision::to_f32(x) * factor);
                run!(values, f16, product, f16::is_finite)
            }
            _ => bail!(
                "unscaling: {:?} is not a floating point dtype",
                grad.dtype()
            ),
        }
    }
}

fn narrow<T: HighPrecision>(x: f32) -> T {
    T::from_f32(x)
}

fn run<A: Copy + Sync, B: Copy + Default + Send>(
    values: &[A],
    product: impl Fn(A) -> B + Sync,
    finite: impl Fn(B) -> bool + Sync,
) -> (Vec<B>, bool) {
    let mut out = vec![B::default(); values.len()];
    let task = |(out, values): (&mut [B], &[A])| {
        let mut all = true;
        for (out, &x) in out.iter_mut().zip(values) {
            *out = product(x);
            all &= finite(*out);
        }
        all
    };
    let all = match values.len() <= BLOCK {
        true => task((&mut out, values)),
        false => {
            let tasks = out.chunks_mut(BLOCK).zip(values.chunks(BLOCK));
            (fp8_candle::parallel::map(tasks, task).into_iter()).fold(true, |a, b| a & b)
        }
    };
    (out, all)
}
