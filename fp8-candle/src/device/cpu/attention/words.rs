//! FP8 codes as bf16: rows of tokens in the two bytes of a value, 64 codes at a time, and pairs of rows as cells.

use super::cast::{EXPONENT, RowCast};
use super::layout::PANEL;
use super::source::{CodeRows, Tokens};
use fp8_core::Format;
use std::arch::x86_64::*;

/// Codes of a vector.
const BLOCK: usize = 64;

/// The bf16 of the magnitude codes of a format, in bytes.
pub(super) struct Table {
    low: [u8; 128],
    /// 0xFF where a code is not finite; those of other magnitudes are smaller than 0x80.
    high: [u8; 128],
}

static E4M3: Table = Table::new(Format::E4M3);
static E5M2: Table = Table::new(Format::E5M2);

impl Table {
    const fn new(format: Format) -> Self {
        let (mut low, mut high) = ([0; 128], [0; 128]);
        let mut code = 0;
        while code < 128 {
            let bits = format.decode(code as u8).to_bits();
            let is_finite = bits < 0x7F80_0000;
            low[code] = (bits >> 16) as u8;
            high[code] = if is_finite { (bits >> 24) as u8 } else { 0xFF };
            code += 1;
        }
        Self { low, high }
    }

    /// That of a format whose codes have their sign in one bit.
    pub(super) fn of(format: Format) -> Option<&'static Self> {
        match format {
            Format::E4M3 => Some(&E4M3),
            Format::E5M2 => Some(&E5M2),
            Format::E4M3Fnuz | Format::E5M2Fnuz => None,
        }
    }
}

/// Whether all values of a scale's codes are normal numbers in bf16, too.
fn stays_normal(dequant_scale: f32) -> bool {
    (2f32.powi(-100)..=2f32.powi(100)).contains(&dequant_scale)
}

/// What a power of two adds to the exponents of bf16; None for other scales.
pub(super) fn exponent(dequant_scale: f32) -> Option<i16> {
    let bits = dequant_scale.to_bits();
    let exponent = (bits >> 23) as i16 - 127;
    let is_power = bits & 0x807F_FFFF == 0;
    is_power.then_some(exponent << 7)
}

/// How many rows ahead of the one being decoded to prefetch: rows of one head lie apart, which the processor's own prefetch does not follow.
const AHEAD: usize = 16;

/// Products of bf16 values and a scale, in f32 and rounded to nearest bf16, ties to even. All are numbers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi")]
fn scaled(words: __m512i, scale: __m512) -> __m512i {
    let upper = _mm512_set1_epi32(0xFFFF_0000u32.cast_signed());
    let halves = [
        _mm512_slli_epi32::<16>(words),
        _mm512_and_si512(words, upper),
    ];
    let [low, high] = halves.map(|values| {
        let product = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(values), scale));
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(product), _mm512_set1_epi32(1));
        _mm512_add_epi32(_mm512_add_epi32(product, _mm512_set1_epi32(0x7FFF)), odd)
    });
    // low >> 16 | high & upper.
    _mm512_ternarylogic_epi32::<0xF8>(_mm512_srli_epi32::<16>(low), high, upper)
}

/// Writes the values of rows of codes as rows of pairs of bf16, one behind the other; a zero follows an odd end. Returns whether it could:
/// if no code is Inf or NaN, and no scale so large or small that values would be.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi")]
pub(super) fn decode(table: &Table, rows: CodeRows<'_>, to: &mut [u32]) -> bool {
    let (features, steps) = (rows.features, rows.features.div_ceil(2));
    assert_eq!(to.len(), rows.count * steps);
    // SAFETY: an array of 128 bytes is two vectors, and the loads ask for no alignment.
    let half =
        |bytes: &[u8; 128], at: usize| unsafe { _mm512_loadu_si512(bytes.as_ptr().add(at).cast()) };
    let low = [half(&table.low, 0), half(&table.low, 64)];
    let high = [half(&table.high, 0), half(&table.high, 64)];
    let (sign, magnitude) = (_mm512_set1_epi8(i8::MIN), _mm512_set1_epi16(i16::MAX));
    // Bytes are interleaved within lanes of 128 bits: eight codes of each half of the block.
    let order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    let mut special = 0;
    for (row, to) in to.chunks_exact_mut(steps).enumerate() {
        let scale = rows.dequant_scales[row * rows.scale_stride];
        if !stays_normal(scale) {
            return false;
        }
        let exponent = exponent(scale);
        let (shift, scale) = (
            _mm512_set1_epi16(exponent.unwrap_or_default()),
            _mm512_set1_ps(scale),
        );
        let codes = &rows.codes[row * rows.stride..][..features];
        for (codes, to) in codes.chunks(BLOCK).zip(to.chunks_mut(BLOCK / 2)) {
            let from: *const i8 = codes.as_ptr().cast();
            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD * rows.stride));
            let mask = u64::MAX >> (BLOCK - codes.len());
            // SAFETY: the mask has a bit for each code of the chunk.
            let codes = unsafe { _mm512_maskz_loadu_epi8(mask, from) };
            let codes = _mm512_permutexvar_epi64(order, codes);
            let high = _mm512_permutex2var_epi8(high[0], codes, high[1]);
            let low = _mm512_permutex2var_epi8(low[0], codes, low[1]);
            special |= _mm512_movepi8_mask(high);
            // high | codes & sign.
            let high = _mm512_ternarylogic_epi32::<0xF8>(high, codes, sign);
            let words = [
                _mm512_unpacklo_epi8(low, high),
                _mm512_unpackhi_epi8(low, high),
            ];
            let mask = u32::MAX >> (BLOCK / 2 - to.len());
            for (half, words) in words.into_iter().enumerate() {
                let words = if exponent.is_some() {
                    let is_number = _mm512_test_epi16_mask(words, magnitude);
                    _mm512_mask_add_epi16(words, is_number, words, shift)
                } else {
                    scaled(words, scale)
                };
                let to = to.as_mut_ptr().wrapping_add(16 * half);
                // SAFETY: the mask has a bit for each pair of the chunk.
                unsafe { _mm512_mask_storeu_epi32(to.cast(), (mask >> (16 * half)) as u16, words) };
            }
        }
    }
    special == 0
}

/// Writes rows of values as rows of pairs of the values of their codes, by [`RowCast`]. Returns whether it could: if no value is Inf or
/// NaN, and none is too large or small.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) fn round(cast: RowCast, rows: Tokens<'_>, to: &mut [u32]) -> bool {
    const LANES: usize = 16;
    let (features, stride) = (rows.features(), rows.rows().1);
    let steps = features.div_ceil(2);
    // Of the last vector, the values and the pairs.
    let (last, rest) = ((features - 1) / LANES, (features - 1) % LANES + 1);
    let [values, pairs] = [rest, rest.div_ceil(2)].map(|count| u16::MAX >> (LANES - count));
    let field = _mm512_set1_epi32(EXPONENT.cast_signed());
    for (index, to) in to.chunks_exact_mut(steps).enumerate() {
        let from = rows.row(index).as_ptr();
        let mut largest = _mm512_setzero_si512();
        for v in 0..=last {
            let next = from.wrapping_add(AHEAD * stride + v * LANES);
            _mm_prefetch::<_MM_HINT_T0>(next.cast());
            let mask = if v == last { values } else { u16::MAX };
            // SAFETY: the row has a value for each bit of the mask.
            let bits = unsafe { _mm512_maskz_loadu_epi32(mask, from.add(v * LANES).cast()) };
            let magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(i32::MAX));
            largest = _mm512_max_epu32(largest, magnitude);
        }
        let amax = f32::from_bits(_mm512_reduce_max_epu32(largest));
        if amax == 0.0 {
            to.fill(0);
            continue;
        }
        let Some(distances) = cast.steps(amax) else {
            return false;
        };
        let least = _mm512_set1_epi32(distances.least_exponent.cast_signed());
        let to_large = _mm512_set1_ps(distances.to_large);
        for v in 0..=last {
            let (mask, pairs) = match v == last {
                true => (values, pairs as u8),
                false => (u16::MAX, u8::MAX),
            };
            // SAFETY: the row has a value for each bit of the mask, and its pairs one for each bit of theirs; a bf16 has 16 bits.
            unsafe {
                let x = _mm512_maskz_loadu_ps(mask, from.add(v * LANES));
                let exponent = _mm512_and_si512(_mm512_castps_si512(x), field);
                let power = _mm512_castsi512_ps(_mm512_max_epu32(exponent, least));
                let sum = _mm512_fmadd_ps(power, to_large, x);
                let rounded = _mm512_cvtneps_pbh(_mm512_fnmadd_ps(power, to_large, sum));
                let rounded = std::mem::transmute::<__m256bh, __m256i>(rounded);
                let to = to.as_mut_ptr().add(v * LANES / 2);
                _mm256_mask_storeu_epi32(to.cast(), pairs, rounded);
            }
        }
    }
    true
}

/// Cells of neighbouring rows, given as pairs of neighbours; zeros follow the ends of both. `cells` are whole chunks of 32.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn columns(x: &[u32], y: &[u32], cells: &mut [u32]) {
    const PAIRS: usize = PANEL / 2;
    let order = |first: i16| {
        let order: [i16; 32] = std::array::from_fn(|i| first + (i / 2 + i % 2 * 32) as i16);
        // SAFETY: an array of 32 words is as long as the vector, and the load asks for no alignment.
        unsafe { _mm512_loadu_si512(order.as_ptr().cast()) }
    };
    let orders = [order(0), order(16)];
    for (index, cells) in cells.as_chunks_mut::<PANEL>().0.iter_mut().enumerate() {
        let load = |row: &[u32]| {
            let row = row.get(index * PAIRS..).unwrap_or(&[]);
            let mask = (1u32 << row.len().min(PAIRS)) - 1;
            // SAFETY: the mask has a bit for each pair, up to those of a vector.
            unsafe { _mm512_maskz_loadu_epi32(mask as u16, row.as_ptr().cast()) }
        };
        let (x, y) = (load(x), load(y));
        for (half, order) in orders.iter().enumerate() {
            let pairs = _mm512_permutex2var_epi16(x, *order, y);
            // SAFETY: the chunk is two vectors.
            unsafe { _mm512_storeu_si512(cells.as_mut_ptr().add(half * PAIRS).cast(), pairs) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fp8_core::{Isa, IsaLevel};
    use half::bf16;

    fn has_units() -> bool {
        matches!(Isa::best().level(), IsaLevel::Avx512Bf16 | IsaLevel::Amx)
    }

    fn words(pairs: &[u32]) -> impl Iterator<Item = u16> {
        pairs.iter().flat_map(|x| [*x as u16, (*x >> 16) as u16])
    }

    fn rows<'a>(codes: &'a [u8], count: usize, scales: &'a [f32]) -> CodeRows<'a> {
        let stride = codes.len() / count;
        CodeRows {
            count,
            features: stride - 3,
            codes,
            stride,
            dequant_scales: scales,
            scale_stride: usize::from(scales.len() > 1),
        }
    }

    /// All codes, rows of all lengths, and the largest and smallest scales, powers of two and others.
    #[test]
    fn codes_have_their_values() {
        if !has_units() {
            return;
        }
        for format in [Format::E4M3, Format::E5M2] {
            let table = Table::of(format).expect("a table");
            let finite = (0..=255).filter(|c| format.decode(*c).is_finite());
            let finite: Vec<u8> = finite.cycle().take(3 * 260).collect();
            let powers = [-100, 9, 100].map(|power| 2f32.powi(power));
            let others = [1.0000001 * powers[0], 0.012_345_67, 0.999_999 * powers[2]];
            let lengths = (1..70usize).chain([128, 257]);
            for (features, scales) in lengths.flat_map(|n| [(n, powers), (n, others)]) {
                let codes = &finite[..3 * (features + 3)];
                let steps = features.div_ceil(2);
                let mut pairs = vec![0; 3 * steps];
                // SAFETY: these levels have the instructions.
                assert!(unsafe { decode(table, rows(codes, 3, &scales), &mut pairs) });
                for (row, scale) in scales.iter().enumerate() {
                    let expected = codes[row * (features + 3)..][..features]
                        .iter()
                        .map(|code| {
                            let value = format.decode(*code) * scale;
                            assert!(value == 0.0 || value.is_normal());
                            bf16::from_f32(value).to_bits()
                        });
                    let expected = expected.chain((features % 2 == 1).then_some(0));
                    let expected: Vec<u16> = expected.collect();
                    let got = words(&pairs[row * steps..][..steps]);
                    assert!(got.eq(expected), "{format:?} {features} {scale}");
                }
            }
        }
    }

    #[test]
    fn other_codes_and_scales_are_left_alone() {
        if !has_units() {
            return;
        }
        for format in [Format::E4M3, Format::E5M2] {
            let table = Table::of(format).expect("a table");
            let decodes = |codes: &[u8], scales: &[f32]| {
                let mut pairs = [0; 2 * 34];
                // SAFETY: these levels have the instructions.
                unsafe { decode(table, rows(codes, 2, scales), &mut pairs) }
            };
            let codes = [1; 2 * 70];
            assert!(decodes(&codes, &[0.5]) && decodes(&codes, &[1.0, 2.0]));
            for scale in [
                0.0,
                -1.0,
                2f32.powi(101),
                2f32.powi(-101),
                f32::NAN,
                f32::INFINITY,
            ] {
                assert!(!decodes(&codes, &[scale]) && !decodes(&codes, &[1.0, scale]));
            }
            for code in (0..=255).filter(|c| !format.decode(*c).is_finite()) {
                let mut codes = codes;
                codes[70 + 65] = code;
                assert!(!decodes(&codes, &[1.0]));
            }
        }
        assert!(Table::of(Format::E4M3Fnuz).is_none());
    }

    /// Rows of all lengths, with zeros and values of all sizes.
    #[test]
    fn values_are_rounded_as_rows_are() {
        if !has_units() {
            return;
        }
        for format in Format::ALL {
            let cast = RowCast::new(format);
            for features in (1..70usize).chain([128, 257]) {
                let (stride, steps) = (features + 3, features.div_ceil(2));
                let mut values: Vec<f32> = (0..4 * stride)
                    .map(|i| (i as f32 * 12.9898).sin() * 2f32.powi(i as i32 * 7 % 40 - 20))
                    .collect();
                values[2 * stride..][..features].fill(0.0);
                let mut pairs = vec![u32::MAX; 4 * steps];
                // SAFETY: these levels have the instructions.
                assert!(unsafe { round(cast, Tokens::new(&values, stride, features), &mut pairs) });
                for row in 0..4 {
                    let mut expected = values[row * stride..][..features].to_vec();
                    cast.round(&mut expected);
                    let expected = expected.into_iter().map(|x| bf16::from_f32(x).to_bits());
                    let expected = expected.chain((features % 2 == 1).then_some(0));
                    let expected: Vec<u16> = expected.collect();
                    let got = words(&pairs[row * steps..][..steps]);
                    assert!(got.eq(expected), "{format:?} {features} {row}");
                }
                for bad in [f32::NAN, f32::INFINITY, 1e30] {
                    values[stride + features / 2] = bad;
                    let rows = Tokens::new(&values, stride, features);
                    // SAFETY: as above.
                    assert!(!unsafe { round(cast, rows, &mut pairs) });
                }
            }
        }
    }

    #[test]
    fn rows_become_columns() {
        if !has_units() {
            return;
        }
        for (len, other) in [(1usize, 1), (16, 16), (17, 0), (40, 40), (33, 33)] {
            let x: Vec<u32> = (0..len as u32)
                .map(|i| (2 * i) | ((2 * i + 1) << 16))
                .collect();
            let y: Vec<u32> = x[..other].iter().map(|x| x + 0x0700_0700).collect();
            let mut cells = vec![u32::MAX; (2 * len).next_multiple_of(PANEL)];
            // SAFETY: these levels have the instructions.
            unsafe { columns(&x, &y, &mut cells) };
            for (feature, cell) in cells.into_iter().enumerate() {
                let word = |row: &[u32]| words(row).nth(feature).map_or(0, u32::from);
                assert_eq!(cell, word(&x) | word(&y) << 16, "{len} {other} {feature}");
            }
        }
    }
}
