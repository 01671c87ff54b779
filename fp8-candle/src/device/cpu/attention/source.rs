//! Rows of tensors of any strides with neighbouring features.

use crate::base::check::narrow_error;
use crate::base::data::attention::Attention;
use crate::base::data::attention_products::Operand;
use crate::base::error::{Result, internal};
use candle_core::{CpuStorage, Layout, Storage};
use fp8_core::{Format, HighPrecision};
use half::{bf16, f16};
use std::ops::Range;

/// Values in memory.
#[derive(Clone, Copy)]
enum Values<'a> {
    F32(&'a [f32]),
    BF16(&'a [bf16]),
    F16(&'a [f16]),
    Codes(Codes<'a>),
}

/// FP8 codes of a contiguous tensor.
#[derive(Clone, Copy)]
struct Codes<'a> {
    codes: &'a [u8],
    format: Format,
    dequant_scales: Scales<'a>,
}

/// The dequant_scales of codes.
#[derive(Clone, Copy)]
pub(super) enum Scales<'a> {
    /// One for each head.
    Heads(&'a [f32]),
    /// One for each row of features, in order.
    Rows(&'a [f32]),
}

/// Codes of consecutive tokens of one head.
#[derive(Clone, Copy)]
#[cfg(target_arch = "x86_64")]
pub(super) struct CodeRows<'a> {
    pub(super) count: usize,
    pub(super) features: usize,
    pub(super) codes: &'a [u8],
    /// From one row to the next.
    pub(super) stride: usize,
    pub(super) dequant_scales: &'a [f32],
    pub(super) scale_stride: usize,
}

/// A tensor of batch entries, heads, tokens and features, in the layout of a call.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    values: Values<'a>,
    /// Strides of batch entries, heads and tokens.
    strides: [usize; 3],
    features: usize,
    /// Packing turns each row of features into the values of its codes in this format.
    rounding: Option<Format>,
}

/// Consecutive tokens of one head in f32.
#[derive(Clone, Copy)]
pub(super) struct Tokens<'a> {
    values: &'a [f32],
    stride: usize,
    features: usize,
}

impl<'a> Tokens<'a> {
    #[cfg(all(test, target_arch = "x86_64"))]
    pub(super) fn new(values: &'a [f32], stride: usize, features: usize) -> Self {
        Self {
            values,
            stride,
            features,
        }
    }

    #[cfg(target_arch = "x86_64")]
    pub(super) fn features(&self) -> usize {
        self.features
    }

    pub(super) fn row(&self, row: usize) -> &'a [f32] {
        &self.values[row * self.stride..][..self.features]
    }

    /// The rows, each so far from the next.
    pub(super) fn rows(&self) -> (&'a [f32], usize) {
        (self.values, self.stride)
    }
}

/// Calls `f` with views of operands. Tensors are copied first if their features are not neighbours.
pub(super) fn with_views<const N: usize, Out>(
    attention: &Attention,
    operands: [Operand<'_>; N],
    f: impl FnOnce([View<'_>; N]) -> Result<Out>,
) -> Result<Out> {
    let tensors = operands.map(|operand| match operand {
        Operand::Values(x) | Operand::Rounded(x, _) | Operand::Codes { codes: x, .. } => {
            match x.stride() {
                [.., last] if *last == 1 || attention.head_dim == 1 => Ok(x.clone()),
                _ => x.contiguous(),
            }
        }
    });
    let tensors = tensors
        .into_iter()
        .collect::<candle_core::Result<Vec<_>>>()?;
    let guards: Vec<_> = tensors.iter().map(|x| x.storage_and_layout()).collect();
    let scales = operands.map(|operand| match operand {
        Operand::Values(_) | Operand::Rounded(..) => None,
        Operand::Codes {
            dequant_scale,
            format,
            ..
        } => Some((dequant_scale.storage_and_layout().0, format)),
    });
    let mut views = Vec::with_capacity(N);
    for (((storage, layout), scales), operand) in guards.iter().zip(&scales).zip(operands) {
        let fp8 = match scales {
            None => None,
            Some((storage, format)) => match &**storage {
                Storage::Cpu(CpuStorage::F32(scales)) => Some((*format, Scales::Rows(scales))),
                _ => internal!("scales of attention that are not f32 in host memory"),
            },
        };
        let rounding = match operand {
            Operand::Rounded(_, format) => Some(format),
            _ => None,
        };
        views.push(View {
            rounding,
            ..View::new(attention, storage, layout, fp8)?
        });
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
    /// A tensor with neighbouring features; with `fp8`, codes of this format with dequant_scales.
    pub(super) fn new(
        attention: &Attention,
        storage: &'a Storage,
        layout: &Layout,
        fp8: Option<(Format, Scales<'a>)>,
    ) -> Result<Self> {
        let start = layout.start_offset();
        let values = match (storage, fp8) {
            (Storage::Cpu(CpuStorage::F32(values)), None) => Values::F32(&values[start..]),
            (Storage::Cpu(CpuStorage::BF16(values)), None) => Values::BF16(&values[start..]),
            (Storage::Cpu(CpuStorage::F16(values)), None) => Values::F16(&values[start..]),
            (Storage::Cpu(CpuStorage::U8(codes)), Some((format, dequant_scales))) => {
                if let Scales::Rows(scales) = dequant_scales
                    && (start != 0 || scales.len() * attention.head_dim != codes.len())
                {
                    internal!("codes of attention that are a part, or have other scales");
                }
                Values::Codes(Codes {
                    codes: &codes[start..],
                    format,
                    dequant_scales,
                })
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
            rounding: None,
        })
    }

    /// `tokens` of a head, in place or in `buffer`.
    pub(super) fn tokens<'b>(
        &self,
        at: [usize; 2],
        tokens: Range<usize>,
        buffer: &'b mut [f32],
    ) -> Tokens<'b>
    where
        'a: 'b,
    {
        let start = self.start(at, tokens.start);
        let (features, count, stride) = (self.features, tokens.len(), self.strides[2]);
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
            Values::Codes(codes) => {
                codes.decode_rows(at[1], [start, stride], features, count, buffer)
            }
        }
        Tokens {
            values: buffer,
            stride: features,
            features,
        }
    }
}

impl<'a> View<'a> {
    /// Whether the tensor is in bf16.
    pub(super) fn is_bf16(&self) -> bool {
        matches!(self.values, Values::BF16(_))
    }

    /// The rows of `tokens` and their format, if the tensor holds codes.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn code_rows(
        &self,
        at: [usize; 2],
        tokens: Range<usize>,
    ) -> Option<(Format, CodeRows<'a>)> {
        let Values::Codes(codes) = self.values else {
            return None;
        };
        let (features, stride) = (self.features, self.strides[2]);
        let start = self.start(at, tokens.start);
        let (dequant_scales, scale_stride) = match codes.dequant_scales {
            Scales::Heads(scales) => (&scales[at[1]..], 0),
            Scales::Rows(scales) => (&scales[start / features..], stride / features),
        };
        let rows = CodeRows {
            count: tokens.len(),
            features,
            codes: &codes.codes[start..],
            stride,
            dequant_scales,
            scale_stride,
        };
        Some((codes.format, rows))
    }

    /// Whether both are the same part of the same memory.
    pub(super) fn is(&self, other: &Self) -> bool {
        let is_same = match (self.values, other.values) {
            (Values::F32(x), Values::F32(y)) => std::ptr::eq(x, y),
            (Values::BF16(x), Values::BF16(y)) => std::ptr::eq(x, y),
            (Values::F16(x), Values::F16(y)) => std::ptr::eq(x, y),
            (Values::Codes(x), Values::Codes(y)) => std::ptr::eq(x.codes, y.codes),
            _ => false,
        };
        is_same && self.strides == other.strides && self.rounding == other.rounding
    }

    /// The format to whose values packing rounds.
    pub(super) fn rounding(&self) -> Option<Format> {
        self.rounding
    }

    /// Features of a token.
    pub(super) fn features(&self) -> usize {
        self.features
    }

    /// Where tokens begin in memory.
    fn start(&self, [batch, head]: [usize; 2], token: usize) -> usize {
        let [per_batch, per_head, stride] = self.strides;
        batch * per_batch + head * per_head + token * stride
    }

    /// The rows of `tokens` as pairs of bf16, each so far from the next, if the tensor holds bf16 in whole and aligned pairs.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn bf16_pairs(
        &self,
        at: [usize; 2],
        tokens: Range<usize>,
    ) -> Option<(&'a [u32], usize)> {
        let stride = self.strides[2];
        match self.values {
            Values::BF16(values)
                if self.rounding.is_none()
                    && self.features.is_multiple_of(2)
                    && stride.is_multiple_of(2) =>
            {
                let values = &values[self.start(at, tokens.start)..];
                // SAFETY: both types are plain numbers, and the middle part is aligned.
                let (before, pairs, _) = unsafe { values.align_to::<u32>() };
                before.is_empty().then_some((pairs, stride / 2))
            }
            _ => None,
        }
    }
}

impl Codes<'_> {
    /// `count` rows of `features` values of a head, `stride` apart, in f32.
    fn decode_rows(
        &self,
        head: usize,
        [start, stride]: [usize; 2],
        features: usize,
        count: usize,
        buffer: &mut [f32],
    ) {
        // With one scale, rows that are neighbours in memory are decoded at once.
        let rows = match self.dequant_scales {
            Scales::Heads(_) if stride == features => count.max(1),
            _ => 1,
        };
        let parts = buffer[..count * features].chunks_exact_mut(rows * features);
        for (part, to) in parts.enumerate() {
            let at = start + part * rows * stride;
            let dequant_scale = match self.dequant_scales {
                Scales::Heads(scales) => scales[head],
                Scales::Rows(scales) => scales[at / features],
            };
            let codes = &self.codes[at..at + to.len()];
            fp8_core::decode(self.format, codes, dequant_scale, to);
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
