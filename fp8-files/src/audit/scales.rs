//! The numbers of one scale tensor.

use super::fault::Fault;
use super::report::Finding;
use crate::check::is_scale;
use crate::load::survey::{Layer, Tensor, numbers};
use fp8_core::E8M0;
use safetensors::Dtype;

/// Bytes of the largest scale that is read as a whole; of a larger one these are read.
const MOST: usize = 1 << 27;
/// Numbers of which the median is taken.
const SAMPLE: usize = 1 << 16;
/// Bytes that become numbers at a time.
const PIECE: usize = 1 << 18;

/// The numbers of a scale, and what they have in common.
pub(super) struct Numbers {
    dtype: Dtype,
    /// The numbers as stored, until [`Numbers::forget`].
    stored: Vec<u8>,
    pub(super) count: usize,
    pub(super) bytes_read: u64,
    /// The median of those that are positive and finite; None if none is.
    pub(super) median: Option<f32>,
    /// The first number and the largest finite one with its index.
    pub(super) first: f32,
    pub(super) largest: (usize, f32),
    /// Numbers that no scale can be, by the order of [`KINDS`]: how many, and the first with its index.
    bad: [(usize, Option<(usize, f32)>); 3],
    pub(super) zeros: usize,
    ones: usize,
    whole: usize,
    /// The first one that is no power of two, with its index.
    pub(super) not_power_of_two: Option<(usize, f32)>,
}

type Kind = (Fault, fn(f32) -> bool, &'static str);

const KINDS: [Kind; 3] = [
    (
        Fault::ScaleNotFinite,
        |value| !value.is_finite(),
        "finite numbers",
    ),
    (
        Fault::ScaleNegative,
        |value| value < 0. && value.is_finite(),
        "positive numbers",
    ),
    (
        Fault::ScaleTiny,
        |value| value > 0. && value.is_finite() && !is_scale(value),
        "numbers that are normal in f32, and their reciprocals too",
    ),
];

impl Numbers {
    /// The numbers of `tensor`, up to `most` bytes of them; None if it cannot be read, which another finding tells.
    pub(super) fn read(tensor: Tensor<'_>, most: usize) -> Option<Self> {
        let dtype = tensor.dtype()?;
        let stored = tensor.bytes(0..most.min(MOST)).ok()?;
        let mut found = Self {
            dtype,
            count: 0,
            bytes_read: stored.len() as u64,
            median: None,
            first: f32::NAN,
            largest: (0, f32::NEG_INFINITY),
            bad: [(0, None); 3],
            zeros: 0,
            ones: 0,
            whole: 0,
            not_power_of_two: None,
            stored: vec![],
        };
        match found.are_bytes() {
            true => found.add_bytes(&stored),
            false => {
                for piece in stored.chunks(PIECE) {
                    for value in numbers(dtype, piece)? {
                        found.add(value, 1, found.count);
                    }
                }
            }
        }
        let step = found.count.div_ceil(SAMPLE).max(1);
        let sample = stored.chunks_exact(dtype.bitsize() / 8).step_by(step);
        let sample: Vec<u8> = sample.flatten().copied().collect();
        found.stored = stored;
        let mut usable = numbers(dtype, &sample)?;
        usable.retain(|v| *v > 0. && v.is_finite());
        let middle = usable.len() / 2;
        found.median =
            (!usable.is_empty()).then(|| *usable.select_nth_unstable_by(middle, f32::total_cmp).1);
        Some(found)
    }

    /// Counts `times` equal numbers, of which the first has the index `at`.
    fn add(&mut self, value: f32, times: usize, at: usize) {
        const MANTISSA: u32 = (1 << 23) - 1;
        if self.count == 0 {
            self.first = value;
        }
        self.count += times;
        if value.is_finite() && value > self.largest.1 {
            self.largest = (at, value);
        }
        for ((_, is_bad, _), (count, first)) in KINDS.iter().zip(&mut self.bad) {
            if is_bad(value) {
                *count += times;
                *first = first.or(Some((at, value)));
            }
        }
        self.zeros += times * usize::from(value == 0.);
        self.ones += times * usize::from(value == 1.);
        self.whole += times * usize::from(value.fract() == 0. && (1. ..=254.).contains(&value));
        if value.is_normal() && value.to_bits() & MANTISSA != 0 {
            self.not_power_of_two = self.not_power_of_two.or(Some((at, value)));
        }
    }

    /// Counts bytes that encode powers of two, each value once.
    fn add_bytes(&mut self, bytes: &[u8]) {
        let counts = counts(bytes);
        let present = || (0..=255u8).zip(counts).filter(|(_, count)| *count > 0);
        let is_nan = |byte: u8| byte == E8M0::NAN.to_bits();
        let largest = present().map(|(byte, _)| byte).rfind(|byte| !is_nan(*byte));
        for (byte, count) in present() {
            // Where the others are first is never told, and to look for a rare one takes as long as to count all.
            let at = match is_nan(byte) || Some(byte) == largest {
                true => first(bytes, byte),
                false => 0,
            };
            self.add(E8M0::from_bits(byte).to_f32(), count, at);
        }
        self.first = bytes
            .first()
            .map_or(f32::NAN, |byte| E8M0::from_bits(*byte).to_f32());
    }

    /// Drops the numbers; what they have in common stays.
    pub(super) fn forget(&mut self) {
        self.stored = vec![];
    }

    /// The number at an index, if it was read.
    pub(super) fn value(&self, index: usize) -> Option<f32> {
        let size = self.dtype.bitsize() / 8;
        let begin = index.checked_mul(size)?;
        let bytes = self.stored.get(begin..begin.checked_add(size)?)?;
        numbers(self.dtype, bytes)?.first().copied()
    }

    /// Whether they encode powers of two in bytes.
    pub(super) fn are_bytes(&self) -> bool {
        matches!(self.dtype, Dtype::U8 | Dtype::F8_E8M0)
    }

    /// Whether all of them are exactly 1.
    pub(super) fn all_one(&self) -> bool {
        self.count > 0 && self.ones == self.count
    }

    /// Whether all of them could be exponent bytes that became numbers.
    pub(super) fn all_bytes(&self) -> bool {
        !self.are_bytes() && self.count > 0 && self.whole == self.count
    }
}

/// How often each byte occurs. Neighbours are mostly equal, and a counter that was just written is slow to read: so four take turns.
fn counts(bytes: &[u8]) -> [usize; 256] {
    const TURNS: usize = 4;
    let mut counts = [[0usize; 256]; TURNS];
    let (quads, rest) = bytes.as_chunks::<TURNS>();
    for quad in quads {
        for (counts, byte) in counts.iter_mut().zip(quad) {
            counts[usize::from(*byte)] += 1;
        }
    }
    for byte in rest {
        counts[0][usize::from(*byte)] += 1;
    }
    std::array::from_fn(|byte| counts.iter().map(|counts| counts[byte]).sum())
}

/// The index of the first `wanted` among `bytes`, of which one is.
fn first(bytes: &[u8], wanted: u8) -> usize {
    const PART: usize = 1 << 12;
    let part = bytes.chunks(PART).position(|part| part.contains(&wanted));
    let start = part.unwrap_or_default() * PART;
    let own = bytes[start..].iter().position(|byte| *byte == wanted);
    start + own.unwrap_or_default()
}

/// Adds the numbers that no scale can be. A scale of 0 is left to the codes.
pub(super) fn check(tensor: Tensor<'_>, numbers: &Numbers, faults: &mut Vec<Finding>) {
    for ((fault, _, expected), (count, first)) in KINDS.iter().zip(&numbers.bad) {
        // The smallest power of two in a byte is subnormal in f32, and valid.
        let Some((index, value)) =
            first.filter(|_| *fault != Fault::ScaleTiny || !numbers.are_bytes())
        else {
            continue;
        };
        let mut found = format!("{value:e} at index {index}");
        if *count > 1 {
            found += &format!(", {count} such of {}", numbers.count);
        }
        faults.push(Finding::new(*fault, tensor.name, found, *expected));
    }
}

/// Adds a padded grid whose padding is not one number: its blocks have another size.
pub(super) fn check_padding(layer: &Layer<'_>, numbers: &Numbers, faults: &mut Vec<Finding>) {
    let grid = layer.grid();
    let (rows, cols) = (grid.scale_rows(), grid.scale_cols());
    let Some(scale) = layer.scale.filter(|_| !layer.is_tiled) else {
        return;
    };
    let &[r, c] = scale.shape() else {
        return;
    };
    if r.saturating_mul(c) <= rows * cols || (r, c) == (rows, cols) {
        return;
    }
    let padding = (0..numbers.count).filter(|at| at / c >= rows || at % c >= cols);
    let mut padding = padding.filter_map(|at| Some((at, numbers.value(at)?)));
    let Some((_, first)) = padding.next() else {
        return;
    };
    if let Some((index, value)) = padding.find(|(_, value)| value.to_bits() != first.to_bits()) {
        let found = format!("{value:e} at index {index} of a grid {:?}", scale.shape());
        let expected = format!("{first:e} beyond the {rows}x{cols} blocks of the weight");
        faults.push(Finding::new(
            Fault::ScalePadding,
            scale.name,
            found,
            expected,
        ));
    }
}
