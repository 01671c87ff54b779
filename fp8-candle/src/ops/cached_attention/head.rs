//! The queries that read one head of keys, and how they read it.

use super::tokens::{CachedTokens, OP};
use crate::base::error::{Result, dtype_error, shape_error};
use crate::base::math::{Real, max, sum2};
use crate::base::simd::simd;
use candle_core::{CpuStorage, Storage};
use fp8_core::Format;

/// The values of one side in host memory, from `start` on.
pub(super) struct Part<'a> {
    storage: &'a CpuStorage,
    start: usize,
    fp8: Option<(Format, &'a [f32])>,
}

impl<'a> Part<'a> {
    pub(super) fn new(tokens: &CachedTokens<'a>, storage: &'a Storage) -> Result<Self> {
        let (tensor, fp8) = match *tokens {
            CachedTokens::HighPrecision(tensor) => (tensor, None),
            CachedTokens::Fp8 {
                codes,
                format,
                dequant_scales,
            } => (codes, Some((format, dequant_scales))),
        };
        let storage = match (storage, &fp8) {
            (
                Storage::Cpu(
                    storage @ (CpuStorage::F32(_) | CpuStorage::BF16(_) | CpuStorage::F16(_)),
                ),
                None,
            )
            | (Storage::Cpu(storage @ CpuStorage::U8(_)), Some(_)) => storage,
            _ => {
                return Err(dtype_error(
                    OP,
                    "the cache",
                    "f32, bf16 or f16, or u8 for codes, on the device of q",
                    tensor.dtype(),
                ));
            }
        };
        match tensor.layout().contiguous_offsets() {
            Some((start, _)) => Ok(Self {
                storage,
                start,
                fp8,
            }),
            None => Err(shape_error(
                OP,
                "the cache",
                "contiguous values",
                tensor.dims(),
            )),
        }
    }

    /// The values from `from` on, `buffer.len()` of them, in `buffer` or in place.
    fn load<'b>(&'b self, kv_head: usize, from: usize, buffer: &'b mut [f32]) -> &'b [f32] {
        let range = self.start + from..self.start + from + buffer.len();
        match (self.storage, self.fp8) {
            (CpuStorage::F32(values), _) => return &values[range],
            (CpuStorage::BF16(values), _) => fp8_core::widen(&values[range], buffer),
            (CpuStorage::F16(values), _) => fp8_core::widen(&values[range], buffer),
            (CpuStorage::U8(codes), Some((format, dequant_scales))) => {
                fp8_core::decode(format, &codes[range], dequant_scales[kv_head], buffer);
            }
            _ => unreachable!("the dtype was looked at before"),
        }
        buffer
    }
}

/// Tokens of the cache that are decoded at a time: they fit into the first-level cache.
const CHUNK: usize = 64;

pub(super) struct Sizes {
    pub(super) kv_heads: usize,
    /// Queries that read one head of keys.
    pub(super) rows: usize,
    pub(super) tokens: usize,
    pub(super) keys: usize,
    pub(super) capacity: usize,
    pub(super) head_dim: usize,
    pub(super) softmax_scale: f32,
}

impl Sizes {
    /// The rows of `q` that read the keys of one batch entry and head.
    pub(super) fn head(&self, pair: usize, q: &[f32], k: &Part<'_>, v: &Part<'_>, y: &mut [f32]) {
        let d = self.head_dim;
        let (first, kv_head) = (pair * self.capacity * d, pair % self.kv_heads);
        let mut buffer = vec![0f32; CHUNK.min(self.keys) * d];
        let mut scores = vec![0f32; self.rows * self.keys];
        let visible = |row: usize| self.keys - self.tokens + row % self.tokens + 1;
        for from in (0..self.keys).step_by(CHUNK) {
            let count = CHUNK.min(self.keys - from);
            let keys = k.load(kv_head, first + from * d, &mut buffer[..count * d]);
            simd(
                #[inline(always)]
                || {
                    for (q, scores) in q.chunks_exact(d).zip(scores.chunks_exact_mut(self.keys)) {
                        let scores = scores[from..from + count].iter_mut();
                        for (score, key) in scores.zip(keys.chunks_exact(d)) {
                            *score = sum2(q, key, |a, b| a * b) * self.softmax_scale;
                        }
                    }
                },
            );
        }
        for (row, scores) in scores.chunks_exact_mut(self.keys).enumerate() {
            let (seen, hidden) = scores.split_at_mut(visible(row));
            hidden.fill(0.0);
            softmax(seen);
        }
        for from in (0..self.keys).step_by(CHUNK) {
            let count = CHUNK.min(self.keys - from);
            let values = v.load(kv_head, first + from * d, &mut buffer[..count * d]);
            simd(
                #[inline(always)]
                || {
                    for (row, y) in y.chunks_exact_mut(d).enumerate() {
                        // A hidden value may be NaN, which a weight of 0 would not remove.
                        let end = visible(row).clamp(from, from + count);
                        let weights = &scores[row * self.keys + from..row * self.keys + end];
                        for (weight, value) in weights.iter().zip(values.chunks_exact(d)) {
                            for (y, value) in y.iter_mut().zip(value) {
                                *y = weight.mul_add(*value, *y);
                            }
                        }
                    }
                },
            );
        }
    }
}

fn softmax(x: &mut [f32]) {
    simd(
        #[inline(always)]
        || {
            let top = max(x, |x| x);
            let mut total = 0f32;
            for x in x.iter_mut() {
                *x = Real::exp(*x - top);
            }
            for x in x.iter() {
                total += *x;
            }
            for x in x.iter_mut() {
                *x /= total;
            }
        },
    );
}
