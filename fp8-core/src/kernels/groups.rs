//! Casts of groups under powers of two from their amaxes.

#[cfg(target_arch = "x86_64")]
use super::avx512;
use super::{
    Isa, Layout, amax,
    nearest::{self, Nearest},
};
#[cfg(target_arch = "x86_64")]
use crate::high_precision::sealed::Kind;
use crate::{
    Cast, Format, HighPrecision, ScaleGrid, dynamic_quant_scale, floor_to_power_of_two, reciprocal,
};

/// Casts rows whose groups have a scale each in `grid`.
pub(crate) fn encode<T: HighPrecision>(
    isa: Isa,
    src: &[T],
    grid: &ScaleGrid,
    codes: &mut [u8],
    dequant_scales: &mut [f32],
) {
    let cols = grid.cols().max(1);
    let group = grid.block_cols().clamp(1, cols);
    let general = Groups::new(isa);
    #[cfg(target_arch = "x86_64")]
    if avx512::is_in(isa) && T::KIND == Kind::Bf16 && cols.is_multiple_of(group) {
        let alone = |src: &[T], codes: &mut [u8]| general.alone(src, codes);
        return avx512::exact::encode_groups(isa, src, group, codes, dequant_scales, alone);
    }
    let mut quant_scales = vec![0.; dequant_scales.len()];
    // If no group ends within another one's row, all rows are one.
    let (len, scales) = match cols.is_multiple_of(group) {
        true => (src.len().max(1), dequant_scales.len().max(1)),
        false => (cols, grid.scale_cols().max(1)),
    };
    let scales = dequant_scales
        .chunks_mut(scales)
        .zip(quant_scales.chunks_mut(scales));
    for ((src, codes), scales) in src.chunks(len).zip(codes.chunks_mut(len)).zip(scales) {
        general.encode(src, group, codes, scales);
    }
}

/// The casts by other kernels.
#[derive(Clone, Copy)]
struct Groups {
    isa: Isa,
    cast: Cast,
    kernel: Nearest,
}

impl Groups {
    fn new(isa: Isa) -> Self {
        let cast = Cast::new(Format::E4M3);
        Self {
            isa,
            cast,
            kernel: Nearest::new(&cast).expect("a cast to nearest even"),
        }
    }

    fn encode<T: HighPrecision>(
        &self,
        src: &[T],
        group: usize,
        codes: &mut [u8],
        (dequant_scales, quant_scales): (&mut [f32], &mut [f32]),
    ) {
        let layout = Layout::Segments(group);
        dequant_scales.fill(0.);
        amax::merge(self.isa, src, layout, dequant_scales);
        for (dequant_scale, quant_scale) in dequant_scales.iter_mut().zip(&mut *quant_scales) {
            let exact = dynamic_quant_scale(*dequant_scale, self.cast.format);
            *quant_scale = floor_to_power_of_two(exact);
            *dequant_scale = reciprocal(*quant_scale);
        }
        nearest::encode::<T, false>(self.isa, self.kernel, src, layout, quant_scales, codes);
    }

    /// A group alone; returns its dequant_scale.
    #[cfg(target_arch = "x86_64")]
    fn alone<T: HighPrecision>(&self, src: &[T], codes: &mut [u8]) -> f32 {
        let (mut dequant_scale, mut quant_scale) = ([0.], [0.]);
        let scales = (&mut dequant_scale[..], &mut quant_scale[..]);
        self.encode(src, src.len().max(1), codes, scales);
        dequant_scale[0]
    }
}
