//! Casts of quotients: values are divided by their dequant_scales a buffer at a time, and the quotients are cast by the other kernels.

use super::{
    Isa, Layout, amax, dispatch, general,
    nearest::{self, Nearest},
};
use crate::{
    HighPrecision,
    cast::{Cast, divided_bits},
};

/// Values that are divided at a time, few enough that their quotients are still in the nearest cache when they are cast.
const BUFFER: usize = 512;

/// Casts elements divided by their scales; max |x| as bits where `AMAX`. `nearest` is the cast, if it is to nearest even.
///
/// `element` is the index of the first element for stochastic rounding.
pub(crate) fn encode<T: HighPrecision, const AMAX: bool>(
    isa: Isa,
    (cast, nearest): (&Cast, Option<Nearest>),
    src: &[T],
    layout: Layout,
    dequant_scales: &[f32],
    element: u64,
    dst: &mut [u8],
) -> u32 {
    let (mut buffer, mut max) = ([0f32; BUFFER], 0f32);
    let chunks = src.chunks(BUFFER).zip(dst.chunks_mut(BUFFER));
    for (index, (src, dst)) in chunks.enumerate() {
        let start = index * BUFFER;
        let quotients = &mut buffer[..src.len()];
        match layout {
            Layout::Segments(len) => {
                divide_segments(isa, src, start, len, dequant_scales, quotients);
            }
            Layout::PerElement => divide_each(isa, src, &dequant_scales[start..], quotients),
        }
        let whole = Layout::Segments(src.len());
        match nearest {
            Some(nearest) => {
                nearest::encode::<f32, false>(isa, nearest, quotients, whole, &[1.0], dst);
            }
            None => {
                let element = element + start as u64;
                general::encode::<f32, false>(isa, cast, quotients, whole, &[1.0], element, dst);
            }
        }
        if AMAX {
            amax::merge(isa, src, whole, std::slice::from_mut(&mut max));
        }
    }
    max.to_bits()
}

dispatch! {
    /// The quotients of elements from `start` on, where every `len` elements share a scale.
    fn divide_segments [T: HighPrecision] [T] (
        src: &[T], start: usize, len: usize, dequant_scales: &[f32], quotients: &mut [f32],
    ) {
        let mut done = 0;
        while done < src.len() {
            let position = start + done;
            let stop = src.len().min(done + len - position % len);
            let dequant_scale = dequant_scales[position / len];
            for (x, quotient) in src[done..stop].iter().zip(&mut quotients[done..stop]) {
                *quotient = f32::from_bits(divided_bits(x.to_f32(), dequant_scale));
            }
            done = stop;
        }
    }
}

dispatch! {
    fn divide_each [T: HighPrecision] [T] (src: &[T], dequant_scales: &[f32], quotients: &mut [f32]) {
        for ((x, &dequant_scale), quotient) in src.iter().zip(dequant_scales).zip(quotients) {
            *quotient = f32::from_bits(divided_bits(x.to_f32(), dequant_scale));
        }
    }
}
