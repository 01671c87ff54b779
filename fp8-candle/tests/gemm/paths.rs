//! Which path products take on a GPU, and that the slow path is right too.

use super::{BLOCK_1X128, BLOCK_128X128, Operand, multiply};
use candle_core::DType;
use fp8_candle::Result;
use fp8_candle::device::{GemmPaths, cuda_info, take_gemm_paths};
use fp8_core::Contraction::Cols;
use fp8_core::{Format, Granularity};
use fp8_test_support::{device, skipped_on_cpu};

const TENSORWISE: Granularity = Granularity::Tensorwise;
const ROWWISE: Granularity = Granularity::Rowwise;

/// Every product of these scales and formats is counted once, for sizes that need padding and sizes that do not.
#[test]
fn products_take_the_expected_way() -> Result<()> {
    if skipped_on_cpu() {
        return Ok(());
    }
    let info = cuda_info(&device())?;
    // Per-row and block scales are for 9.0, from CUDA 12.9 on.
    let vectors = info.capability == (9, 0) && info.cublas_lt >= 120_900;
    // E8M0 scales are for 10.0 and newer, from CUDA 12.8 on.
    let mx = info.capability >= (10, 0) && info.cublas_lt >= 120_800;
    let (e4m3, e5m2) = (Format::E4M3, Format::E5M2);
    let direct = |yes: bool, otherwise: &'static str| if yes { "direct" } else { otherwise };
    let cases = [
        (e4m3, e4m3, TENSORWISE, TENSORWISE, "direct"),
        (e5m2, e4m3, TENSORWISE, TENSORWISE, "direct"),
        (e4m3, e5m2, TENSORWISE, TENSORWISE, "direct"),
        (e5m2, e5m2, TENSORWISE, TENSORWISE, "decoded"),
        (
            e4m3,
            e4m3,
            ROWWISE,
            ROWWISE,
            direct(vectors, "scaled after"),
        ),
        (
            e4m3,
            e4m3,
            TENSORWISE,
            ROWWISE,
            direct(vectors, "scaled after"),
        ),
        (
            e4m3,
            e4m3,
            BLOCK_1X128,
            BLOCK_128X128,
            direct(vectors, "dequantized"),
        ),
        (
            e4m3,
            e4m3,
            BLOCK_128X128,
            BLOCK_1X128,
            direct(vectors, "dequantized"),
        ),
        (
            e4m3,
            e4m3,
            BLOCK_1X128,
            BLOCK_1X128,
            direct(vectors, "dequantized"),
        ),
        // No library has a layout for these two, but one can be repeated.
        (
            e4m3,
            e4m3,
            BLOCK_128X128,
            BLOCK_128X128,
            direct(vectors, "dequantized"),
        ),
        (
            e4m3,
            e4m3,
            Granularity::Mx,
            Granularity::Mx,
            direct(mx, "decoded"),
        ),
        (
            e5m2,
            e4m3,
            Granularity::Mx,
            Granularity::Mx,
            direct(mx, "decoded"),
        ),
    ];
    for (a_format, b_format, a_scales, b_scales, expected) in cases {
        for (m, n, k) in [(16, 32, 256), (128, 256, 512), (17, 33, 130), (1, 1, 256)] {
            let a = Operand::new(1, (m, k), (a_format, a_scales, Cols))?;
            let b = Operand::new(2, (n, k), (b_format, b_scales, Cols))?;
            take_gemm_paths();
            multiply(&a, &b, DType::BF16, None)?;
            let GemmPaths {
                direct,
                scaled_after,
                decoded,
                dequantized,
                ..
            } = take_gemm_paths();
            let counts = [direct, scaled_after, decoded, dequantized];
            // A scale per row of one row is one scale.
            let expected = match (m, n, expected) {
                (1, 1, "scaled after") => "direct",
                _ => expected,
            };
            let want = ["direct", "scaled after", "decoded", "dequantized"]
                .map(|way| usize::from(way == expected));
            assert_eq!(
                counts, want,
                "{a_format} {a_scales:?} x {b_format} {b_scales:?}, [{m}, {n}, {k}]: expected {expected}"
            );
        }
    }
    Ok(())
}
