//! Rows of tensors: inputs of any strides with neighbouring features, and outputs.

use crate::base::check::narrow_error;
use crate::base::data::attention::Attention;
use crate::base::error::Result;
use crate::base::parallel::shared::Shared;
use crate::base::simd::simd;
use candle_core::{CpuStorage, Layout, Storage, Tensor};
use fp8_core::{Format, HighPrecision};
use half::{bf16, f16};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Values in memory.
#[derive(Clone, Copy)]
enum Values<'a> {
    F32(&'a [f32]),
    BF16(&'a [bf16]),
    F16(&'a [f16]),
    /// Codes of a format, and the dequant_scale of each head.
    Fp8(&'a [u8], Format, &'a [f32]),
}

/// A tensor of batch entries, heads, tokens and features, in the layout of a call.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    values: Values<'a>,
    /// Strides of batch entries, heads and tokens.
    strides: [usize; 3],
    features: usize,
}

/// Consecutive tokens of one head in f32.
#[derive(Clone, Copy)]
pub(super) struct Tokens<'a> {
    values: &'a [f32],
    stride: usize,
    features: usize,
}

impl<'a> Tokens<'a> {
    pub(super) fn row(&self, row: usize) -> &'a [f32] {
        &self.values[row * self.stride..][..self.features]
    }
}

/// Calls `f` with views of tensors, which are copied first if their features are not neighbours.
pub(super) fn with_views<const N: usize, Out>(
    attention: &Attention,
    tensors: [&Tensor; N],
    f: impl FnOnce([View<'_>; N]) -> Result<Out>,
) -> Result<Out> {
    let tensors = tensors.map(|x| match x.stride() {
        [.., last] if *last == 1 || attention.head_dim == 1 => Ok(x.clone()),
        _ => x.contiguous(),
    });
    let tensors = tensors
        .into_iter()
        .collect::<candle_core::Result<Vec<_>>>()?;
    let guards: Vec<_> = tensors.iter().map(|x| x.storage_and_layout()).collect();
    let mut views = Vec::with_capacity(N);
    for (storage, layout) in &guards {
        views.push(View::new(attention, storage, layout, None)?);
    }
    match <[View<'_>; N]>::try_from(views) {
        Ok(views) => f(views),
        Err(views) => crate::base::error::internal!("{} views of {N} tensors", views.len()),
    }
}

/// Strides of batch entries, heads and tokens.
fn outer_strides(attention: &Attention, strides: &[usize]) -> [usize; 3] {
    match attention.tokens_first {
        true => [strides[0], strides[2], strides[1]],
        false => [strides[0], strides[1], strides[2]],
    }
}

impl<'a> View<'a> {
    /// A tensor with neighbouring features; with `fp8`, codes of this format and their dequant_scales, one per head.
    pub(super) fn new(
        attention: &Attention,
        storage: &'a Storage,
        layout: &Layout,
        fp8: Option<(Format, &'a [f32])>,
    ) -> Result<Self> {
        let start = layout.start_offset();
        let values = match (storage, fp8) {
            (Storage::Cpu(CpuStorage::F32(values)), None) => Values::F32(&values[start..]),
            (Storage::Cpu(CpuStorage::BF16(values)), None) => Values::BF16(&values[start..]),
            (Storage::Cpu(CpuStorage::F16(values)), None) => Values::F16(&values[start..]),
            (Storage::Cpu(CpuStorage::U8(codes)), Some((format, scales))) => {
                Values::Fp8(&codes[start..], format, scales)
            }
            _ => {
                return Err(narrow_error(
                    "attention",
                    "a tensor in host memory",
                    storage.dtype(),
                ));
            }
        };
        Ok(Self {
            values,
            strides: outer_strides(attention, layout.stride()),
            features: attention.head_dim,
        })
    }

    /// `tokens` of a head, in place or in `buffer`.
    pub(super) fn tokens<'b>(
        &self,
        [batch, head]: [usize; 2],
        tokens: Range<usize>,
        buffer: &'b mut [f32],
    ) -> Tokens<'b>
    where
        'a: 'b,
    {
        let [per_batch, per_head, stride] = self.strides;
        let start = batch * per_batch + head * per_head + tokens.start * stride;
        let (features, count) = (self.features, tokens.len());
        match self.values {
            Values::F32(values) => {
                return Tokens {
                    values: &values[start..],
                    stride,
                    features,
                };
            }
            Values::BF16(values) => widen_rows(&values[start..], stride, features, count, buffer),
            Values::F16(values) => widen_rows(&values[start..], stride, features, count, buffer),
            Values::Fp8(codes, format, dequant_scales) => {
                let rows = buffer.chunks_exact_mut(features).take(count);
                for (row, to) in rows.enumerate() {
                    let codes = &codes[start + row * stride..][..features];
                    fp8_core::decode(format, codes, dequant_scales[head], to);
                }
            }
        }
        Tokens {
            values: buffer,
            stride: features,
            features,
        }
    }
}

/// `count` rows of `features` values, `stride` apart, in f32.
fn widen_rows<T: HighPrecision>(
    values: &[T],
    stride: usize,
    features: usize,
    count: usize,
    buffer: &mut [f32],
) {
    for (row, to) in buffer.chunks_exact_mut(features).enumerate().take(count) {
        fp8_core::widen(&values[row * stride..][..features], to);
    }
}

/// A contiguous result whose rows are written by different tasks.
pub(super) struct Output<'a, T> {
    values: Shared<'a, MaybeUninit<T>>,
    strides: [usize; 3],
    features: usize,
}

impl<T> Clone for Output<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Output<'_, T> {}

impl<T: HighPrecision> Output<'_, T> {
    /// Writes `factor * row`, rounded once, or zeros if `row` is empty. Negative zeros become positive: which of both a sum of
    /// zeros is may depend on terms of 0 that hidden keys add.
    ///
    /// # Safety
    /// No other task may write this row.
    pub(super) unsafe fn write(&self, at: [usize; 3], row: &[f32], factor: f32) {
        let start: usize = at.iter().zip(self.strides).map(|(at, by)| at * by).sum();
        // SAFETY: the rows are disjoint; the caller guarantees the rest.
        let to = unsafe { self.values.part(start..start + self.features) };
        if row.is_empty() {
            to.fill(MaybeUninit::new(T::from_f32(0.0)));
            return;
        }
        simd(
            #[inline(always)]
            || {
                for (to, &x) in to.iter_mut().zip(row) {
                    to.write(T::from_f32(x * factor + 0.0));
                }
            },
        );
    }
}

/// Elements of a result with this many heads and tokens.
pub(super) fn len(attention: &Attention, [heads, tokens]: [usize; 2]) -> usize {
    attention.batch * heads * tokens * attention.head_dim
}

impl<'a, T> Output<'a, T> {
    /// The spare capacity of `values`, which has room for this many heads and tokens.
    pub(super) fn of(
        values: &'a mut Vec<T>,
        attention: &Attention,
        [heads, tokens]: [usize; 2],
    ) -> Self {
        let features = attention.head_dim;
        let strides = match attention.tokens_first {
            true => [heads * tokens * features, features, heads * features],
            false => [heads * tokens * features, tokens * features, features],
        };
        let len = len(attention, [heads, tokens]);
        Self {
            values: Shared::new(&mut values.spare_capacity_mut()[..len]),
            strides,
            features,
        }
    }
}
