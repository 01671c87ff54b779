//! A moment in memory: floats, or FP8 codes by blocks.

use std::ops::Range;

use candle_core::{CpuStorage, Tensor};
use fp8_core::decode_expanded;

use super::super::memory::Memory;
use super::super::moments::{BLOCK, Coded, Coding};
use super::value::Value;

/// A moment of a pass, which it updates in place.
#[derive(Clone, Copy)]
pub(crate) enum Operand<'a> {
    /// In the dtype of the parameter if the pass saturates, else in f32.
    Values(&'a Tensor),
    Coded(&'a Coded, Coding),
}

impl<'a> Operand<'a> {
    /// The tensors whose memory [`Stored::open`] takes.
    pub(super) fn tensors(self) -> Vec<&'a Tensor> {
        match self {
            Self::Values(values) => vec![values],
            Self::Coded(coded, _) => coded.tensors().map(|(_, tensor)| tensor).to_vec(),
        }
    }
}

/// The memory of a moment, or of a part of it that begins with a block.
pub(super) enum Stored<'a, M> {
    Values(&'a mut [M]),
    Coded {
        codes: &'a mut [u8],
        amaxes: &'a mut [f32],
        curves: &'a mut [u8],
        coding: Coding,
    },
}

impl<'a, M: Value> Stored<'a, M> {
    /// The `len` elements of a moment. None if dtypes or lengths do not fit.
    pub(super) fn open(
        operand: Operand<'_>,
        memory: &mut impl Iterator<Item = Memory<'a>>,
        len: usize,
    ) -> Option<Self> {
        match operand {
            Operand::Values(_) => elements(memory.next(), len).map(Self::Values),
            Operand::Coded(_, coding) => Some(Self::Coded {
                codes: bytes(memory.next(), len)?,
                amaxes: elements(memory.next(), len.div_ceil(BLOCK))?,
                curves: bytes(memory.next(), len.div_ceil(BLOCK))?,
                coding,
            }),
        }
    }

    /// Parts of `size` elements, a multiple of the size of blocks.
    pub(super) fn parts(self, size: usize) -> Vec<Self> {
        match self {
            Self::Values(values) => values.chunks_mut(size).map(Self::Values).collect(),
            Self::Coded {
                codes,
                amaxes,
                curves,
                coding,
            } => {
                let amaxes = amaxes.chunks_mut(size / BLOCK);
                let parts = codes.chunks_mut(size).zip(amaxes);
                let parts = parts.zip(curves.chunks_mut(size / BLOCK));
                let part = |((codes, amaxes), curves)| Self::Coded {
                    codes,
                    amaxes,
                    curves,
                    coding,
                };
                parts.map(part).collect()
            }
        }
    }

    /// The values of some elements, the first of which begins a block, in f32: in their own memory, or in `scratch`, which is as long.
    pub(super) fn widened<'s>(
        &'s mut self,
        range: Range<usize>,
        scratch: &'s mut [f32],
    ) -> &'s mut [f32] {
        match self {
            Self::Values(values) => M::widened(&mut values[range], scratch),
            Self::Coded {
                codes,
                amaxes,
                curves,
                ..
            } => {
                let blocks = blocks(&range);
                decode_expanded(
                    &codes[range],
                    &amaxes[blocks.clone()],
                    &curves[blocks],
                    scratch,
                );
                scratch
            }
        }
    }
}

/// The blocks of a range of elements.
pub(super) fn blocks(range: &Range<usize>) -> Range<usize> {
    range.start / BLOCK..range.end.div_ceil(BLOCK)
}

/// All `len` elements of a tensor.
pub(super) fn elements<'a, T: Value>(
    memory: Option<Memory<'a>>,
    len: usize,
) -> Option<&'a mut [T]> {
    let Memory { storage, range } = memory?;
    let elements = T::of_storage(storage)?.get_mut(range)?;
    (elements.len() == len).then_some(elements)
}

fn bytes(memory: Option<Memory<'_>>, len: usize) -> Option<&mut [u8]> {
    let Memory { storage, range } = memory?;
    let CpuStorage::U8(bytes) = storage else {
        return None;
    };
    let bytes = bytes.get_mut(range)?;
    (bytes.len() == len).then_some(bytes)
}
