//! Unfolding and folding on the host. A task has whole rows of columns, or whole planes of images, so that no two tasks write
//! one element and each sum is in the order of the taps.

use super::CpuBackend;
use super::elements::{
    Element, for_dtype, for_narrow, storage, tensor, with_codes, with_slice, with_slices,
};
use crate::base::check::check_dims;
use crate::base::data::window::{Part, Window};
use crate::base::error::{Error, Result, shape_error};
use crate::base::parallel::shared::Shared;
use crate::base::parallel::tasks;
use crate::base::simd::simd;
use crate::device::unfold::{Images, Unfolding};
use candle_core::{DType, Device, Storage, Tensor};
use fp8_core::HighPrecision;
use std::ops::Range;

/// Elements of a task: large enough to hide the cost of starting it, small enough to balance the load.
const TASK: usize = 1 << 15;

impl Unfolding for CpuBackend {
    fn unfold(&self, x: &Tensor, window: &Window, part: &Part) -> Result<Tensor> {
        const OP: &str = "unfold";
        check_dims(OP, "x", x, &window.dims())?;
        let (rows, len) = window.columns(part);
        // Columns have at most four bytes per element, and so have products.
        reserve(OP, rows.saturating_mul(len))?;
        if x.dtype() == DType::U8 {
            return with_codes(OP, x, |x| tensor(unfold(x, window, part), (rows, len)));
        }
        for_dtype!(OP, "the tensor", x.dtype(), T => {
            with_slices([x], |[x]: [&[T]; 1]| tensor(unfold(x, window, part), (rows, len)))?
        })
    }

    fn images(&self, window: &Window, dtype: DType, _: &Device) -> Result<Box<dyn Images>> {
        let len = window.dims().iter().product();
        reserve("fold", len)?;
        for_narrow!("fold", "the images", dtype, T => {
            Ok(Box::new(CpuImages::<T>(vec![T::default(); len])))
        })
    }
}

/// Fails if there is not enough memory for that many f32: the allocation itself would abort the process.
fn reserve(op: &'static str, len: usize) -> Result<()> {
    // Less is not refused in practice.
    const LARGE: usize = 1 << 30;
    if len <= LARGE {
        return Ok(());
    }
    let reserved = Vec::<f32>::new().try_reserve_exact(len);
    reserved.map_err(|source| Error::HostMemory {
        op,
        bytes: len.saturating_mul(size_of::<f32>()),
        source,
    })
}

/// The columns of a part of the images `x`.
fn unfold<T: Copy + Default + Send + Sync>(x: &[T], window: &Window, part: &Part) -> Vec<T> {
    let (rows, len) = window.columns(part);
    let mut columns = vec![T::default(); rows * len];
    let (taps, plane, places) = (window.taps(), window.plane(), window.places());
    let per_task = (TASK / len.max(1)).max(1);
    let dst = Shared::new(&mut columns);
    tasks::for_each(rows.div_ceil(per_task), |task| {
        for row in task * per_task..rows.min((task + 1) * per_task) {
            let channel = part.channels.start + row / taps;
            let tap = [row % taps / window.kernel[1], row % taps % window.kernel[1]];
            // SAFETY: each task has its own rows.
            let dst = unsafe { dst.part(row * len..(row + 1) * len) };
            let reads = Reads::new(window, tap);
            for (image, dst) in part.images.clone().zip(dst.chunks_exact_mut(places)) {
                let at = (image * window.channels + channel) * plane;
                reads.copy(&x[at..at + plane], dst);
            }
        }
    });
    columns
}

/// What one tap reads of a plane.
struct Reads<'a> {
    window: &'a Window,
    tap: [usize; 2],
    /// The positions at which the tap is inside of the image.
    down: Range<usize>,
    across: Range<usize>,
}

impl<'a> Reads<'a> {
    fn new(window: &'a Window, tap: [usize; 2]) -> Self {
        Self {
            window,
            tap,
            down: window.inside(0, tap[0]),
            across: window.inside(1, tap[1]),
        }
    }

    /// Whether no position is inside.
    fn is_empty(&self) -> bool {
        self.down.is_empty() || self.across.is_empty()
    }

    /// The element of the plane that the tap reads at the first positions inside.
    fn first(&self, position: usize) -> usize {
        let window = self.window;
        let at = |dim: usize, position: usize| {
            position * window.stride[dim] + self.tap[dim] * window.dilation[dim]
                - window.padding[dim]
        };
        at(0, position) * window.image[1] + at(1, self.across.start)
    }

    /// Writes what the tap reads at each position into `dst`, which holds zeros.
    fn copy<T: Copy + Default>(&self, src: &[T], dst: &mut [T]) {
        if self.is_empty() {
            return;
        }
        let [width, stride] = [self.window.positions[1], self.window.stride[1]];
        let inside = self.across.len();
        if stride == 1 && self.window.stride[0] == 1 && width == self.window.image[1] {
            // Positions and elements have the same distances: one copy from the first to the last, then zeros in the columns
            // that it has filled with the ends of other rows.
            let start = self.down.start * width + self.across.start;
            let len = (self.down.len() - 1) * width + inside;
            let from = self.first(self.down.start);
            dst[start..start + len].copy_from_slice(&src[from..from + len]);
            if inside < width {
                for row in dst[start..start + len].chunks_mut(width) {
                    let end = inside.min(row.len());
                    row[end..].fill(T::default());
                }
            }
            return;
        }
        for position in self.down.clone() {
            let dst = &mut dst[position * width..][self.across.clone()];
            let src = &src[self.first(position)..];
            match stride {
                1 => dst.copy_from_slice(&src[..inside]),
                2 => every_second(src, dst),
                _ => {
                    for (dst, src) in dst.iter_mut().zip(src.iter().step_by(stride)) {
                        *dst = *src;
                    }
                }
            }
        }
    }

    /// Adds `src`, one value per position, to what the tap reads.
    #[inline(always)]
    fn add(&self, src: &[f32], dst: &mut [f32]) {
        if self.is_empty() {
            return;
        }
        let [width, stride] = [self.window.positions[1], self.window.stride[1]];
        for position in self.down.clone() {
            let src = &src[position * width..][self.across.clone()];
            let dst = &mut dst[self.first(position)..];
            if stride == 1 {
                for (dst, src) in dst.iter_mut().zip(src) {
                    *dst += src;
                }
            } else {
                for (dst, src) in dst.iter_mut().step_by(stride).zip(src) {
                    *dst += src;
                }
            }
        }
    }
}

/// Elements 0, 2, 4, .. of `src`.
fn every_second<T: Copy>(src: &[T], dst: &mut [T]) {
    let Some((last, dst)) = dst.split_last_mut() else {
        return;
    };
    *last = src[2 * dst.len()];
    simd(
        #[inline(always)]
        || {
            for (dst, src) in dst.iter_mut().zip(src.chunks_exact(2)) {
                *dst = src[0];
            }
        },
    );
}

struct CpuImages<T>(Vec<T>);

impl<T: Element> Images for CpuImages<T> {
    fn fold(
        &mut self,
        columns: &Tensor,
        window: &Window,
        part: &Part,
        bias: Option<&Tensor>,
    ) -> Result<()> {
        const OP: &str = "fold";
        let (rows, len) = window.columns(part);
        check_dims(OP, "columns", columns, &[rows, len])?;
        let bias = match bias {
            None => None,
            Some(bias) => {
                check_dims(OP, "bias", bias, &[window.channels])?;
                // Rounded to the dtype of the images first.
                let bias = bias.to_dtype(T::DTYPE)?.to_dtype(DType::F32)?;
                Some(bias.to_vec1::<f32>()?)
            }
        };
        let images: usize = window.dims().iter().product();
        if self.0.len() != images {
            let expected = format!("{images} elements");
            return Err(shape_error(OP, "images", expected, window.dims()));
        }
        with_slice(OP, "columns", columns, |columns| {
            fold(columns, window, part, bias.as_deref(), &mut self.0);
            Ok(())
        })
    }

    fn finish(self: Box<Self>) -> Result<Storage> {
        Ok(storage(self.0))
    }
}

/// Sets a part of the images `out` to the sums of the columns.
fn fold<T: HighPrecision>(
    columns: &[f32],
    window: &Window,
    part: &Part,
    bias: Option<&[f32]>,
    out: &mut [T],
) {
    let (_, len) = window.columns(part);
    let (taps, plane, places) = (window.taps(), window.plane(), window.places());
    let planes = part.images.len() * part.channels.len();
    let per_task = (TASK / (plane + taps * places)).max(1);
    let single = window.is_single();
    let out = Shared::new(out);
    tasks::for_each(planes.div_ceil(per_task), |task| {
        let mut sums = vec![0f32; if single { 0 } else { plane }];
        for index in task * per_task..planes.min((task + 1) * per_task) {
            let (image, channel) = (index / part.channels.len(), index % part.channels.len());
            let at = (part.images.start + image) * window.channels + part.channels.start + channel;
            // SAFETY: each plane has one index, and each task its own indices.
            let out = unsafe { out.part(at * plane..(at + 1) * plane) };
            let bias = bias.map(|bias| bias[part.channels.start + channel]);
            let column =
                |tap: usize| &columns[(channel * taps + tap) * len + image * places..][..places];
            if single {
                finish(column(0), bias, out);
                continue;
            }
            simd(
                #[inline(always)]
                || {
                    sums.fill(0.);
                    for tap in 0..taps {
                        let at = [tap / window.kernel[1], tap % window.kernel[1]];
                        Reads::new(window, at).add(column(tap), &mut sums);
                    }
                },
            );
            finish(&sums, bias, out);
        }
    });
}

/// The sums rounded, and the bias added to what was rounded.
fn finish<T: HighPrecision>(sums: &[f32], bias: Option<f32>, out: &mut [T]) {
    simd(
        #[inline(always)]
        || match bias {
            None => {
                for (out, &sum) in out.iter_mut().zip(sums) {
                    *out = T::from_f32(sum);
                }
            }
            Some(bias) => {
                for (out, &sum) in out.iter_mut().zip(sums) {
                    *out = T::from_f32(T::from_f32(sum).to_f32() + bias);
                }
            }
        },
    );
}

#[cfg(test)]
mod tests;
