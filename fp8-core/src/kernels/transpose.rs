//! Transposed copies of codes.

/// Rows and columns of a tile: the bytes of a vector that every x86-64 (SSE2) and every aarch64 (NEON) has.
const TILE: usize = 16;

/// Rows to transpose at once: a cache line of the result.
pub(crate) const PANEL: usize = 64;

/// Writes the transpose of `codes`, whose rows have `cols` codes, to `dst`, whose rows have `stride`, from column `start`.
pub(crate) fn transpose(codes: &[u8], cols: usize, dst: &mut [u8], stride: usize, start: usize) {
    let rows = codes.len() / cols;
    let (tile_rows, tile_cols) = (rows - rows % TILE, cols - cols % TILE);
    for col in (0..tile_cols).step_by(TILE) {
        for row in (0..tile_rows).step_by(TILE) {
            let tile = std::array::from_fn(|i| array_at(codes, (row + i) * cols + col));
            for (i, line) in transposed(tile).into_iter().enumerate() {
                let at = (col + i) * stride + start + row;
                dst[at..at + TILE].copy_from_slice(&line);
            }
        }
    }
    // The rows below the tiles, and the columns beside them.
    let below = (tile_rows..rows).flat_map(|row| (0..cols).map(move |col| (row, col)));
    let beside = (0..tile_rows).flat_map(|row| (tile_cols..cols).map(move |col| (row, col)));
    for (row, col) in below.chain(beside) {
        dst[col * stride + start + row] = codes[row * cols + col];
    }
}

#[inline(always)]
fn array_at(codes: &[u8], at: usize) -> [u8; TILE] {
    let (array, _) = codes[at..]
        .split_first_chunk()
        .expect("a tile within its matrix");
    *array
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn transposed(tile: [[u8; TILE]; TILE]) -> [[u8; TILE]; TILE] {
    use std::arch::x86_64::*;
    // SAFETY: a vector is sixteen bytes of any pattern, as an array is.
    let mut rows: [__m128i; TILE] = unsafe { std::mem::transmute(tile) };
    // Interleaving the two halves moves the first bit of an index to its end. After four times, the bits of the row come
    // after those of the column.
    for _ in 0..4 {
        let (low, high) = rows.split_at(TILE / 2);
        rows = std::array::from_fn(|i| {
            let (low, high) = (low[i / 2], high[i / 2]);
            // SAFETY: every x86-64 has SSE2.
            unsafe {
                if i.is_multiple_of(2) {
                    _mm_unpacklo_epi8(low, high)
                } else {
                    _mm_unpackhi_epi8(low, high)
                }
            }
        });
    }
    // SAFETY: as above.
    unsafe { std::mem::transmute(rows) }
}

#[cfg(target_arch = "aarch64")]
#[inline(always)]
fn transposed(tile: [[u8; TILE]; TILE]) -> [[u8; TILE]; TILE] {
    use std::arch::aarch64::*;
    // SAFETY: a vector is sixteen bytes of any pattern, as an array is.
    let mut rows: [uint8x16_t; TILE] = unsafe { std::mem::transmute(tile) };
    // As for x86-64.
    for _ in 0..4 {
        let (low, high) = rows.split_at(TILE / 2);
        rows = std::array::from_fn(|i| {
            let (low, high) = (low[i / 2], high[i / 2]);
            // SAFETY: every processor of this architecture has NEON.
            unsafe {
                if i.is_multiple_of(2) {
                    vzip1q_u8(low, high)
                } else {
                    vzip2q_u8(low, high)
                }
            }
        });
    }
    // SAFETY: as above.
    unsafe { std::mem::transmute(rows) }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
#[inline(always)]
fn transposed(tile: [[u8; TILE]; TILE]) -> [[u8; TILE]; TILE] {
    std::array::from_fn(|i| std::array::from_fn(|j| tile[j][i]))
}

#[cfg(test)]
mod tests {
    use super::transpose;

    #[test]
    fn every_element_changes_places_and_nothing_else_is_written() {
        for (rows, cols) in [(1, 1), (16, 16), (17, 33), (64, 50), (70, 7), (3, 64)] {
            let codes: Vec<u8> = (0..rows * cols).map(|i| (i * 37 % 251) as u8).collect();
            let (stride, start) = (rows + 9, 5);
            let mut dst = vec![0xFF; cols * stride];
            transpose(&codes, cols, &mut dst, stride, start);
            for (at, &code) in dst.iter().enumerate() {
                let (col, row) = (at / stride, (at % stride).wrapping_sub(start));
                let expected = if row < rows {
                    codes[row * cols + col]
                } else {
                    0xFF
                };
                assert_eq!(code, expected, "{rows}x{cols}: {row}, {col}");
            }
        }
    }
}
