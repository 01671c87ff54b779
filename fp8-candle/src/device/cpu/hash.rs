//! A fingerprint of a tensor's bits, to see whether a weight has changed since it was quantized.

use super::data::Floats;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

const LANES: usize = 16;
const CHUNK: usize = 1 << 16;

/// 64-bit hash of every bit of `values`.
///
/// Sixteen 32-bit multiply-add lanes per chunk: multiplication by an odd number is a bijection, so a single changed
/// word always changes its lane.
pub(super) fn fingerprint(values: Floats<'_>) -> u64 {
    match values {
        Floats::F32(v) => run(v, |x| x.to_bits()),
        Floats::BF16(v) => run(v.reinterpret_cast(), |x: u16| x.into()),
        Floats::F16(v) => run(v.reinterpret_cast(), |x: u16| x.into()),
        Floats::F64(v) => run(v, |x| {
            let bits = x.to_bits();
            (bits as u32).wrapping_mul(0x9E37_79B1) ^ (bits >> 32) as u32
        }),
    }
}

fn run<T: Copy + Sync>(values: &[T], word: impl Fn(T) -> u32 + Sync) -> u64 {
    let hash_chunk = |chunk: &[T]| {
        let mut lanes = [0x811C_9DC5u32; LANES];
        let (blocks, rest) = chunk.as_chunks::<LANES>();
        for block in blocks {
            for (lane, &value) in lanes.iter_mut().zip(block) {
                *lane = lane.wrapping_mul(0x0100_0193).wrapping_add(word(value));
            }
        }
        for (lane, &value) in lanes.iter_mut().zip(rest) {
            *lane = lane.wrapping_mul(0x0100_0193).wrapping_add(word(value));
        }
        lanes.iter().fold(
            chunk.len() as u64,
            |hash, &lane| mix(hash ^ u64::from(lane)),
        )
    };
    let hashes: Vec<u64> = if values.len() > CHUNK {
        values.par_chunks(CHUNK).map(hash_chunk).collect()
    } else {
        values.chunks(CHUNK).map(hash_chunk).collect()
    };
    hashes.into_iter().fold(values.len() as u64, |hash, part| {
        mix(hash.rotate_left(5) ^ part)
    })
}

/// The finalizer of splitmix64.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_single_bit_counts() {
        let values: Vec<f32> = (0..200_000).map(|i| (i as f32).sin()).collect();
        let base = fingerprint(Floats::F32(&values));
        assert_eq!(base, fingerprint(Floats::F32(&values)));
        for index in [0, 1, 15, 16, 65_535, 65_536, 199_999] {
            for bit in [0, 13, 31] {
                let mut changed = values.clone();
                changed[index] = f32::from_bits(changed[index].to_bits() ^ (1 << bit));
                assert_ne!(base, fingerprint(Floats::F32(&changed)), "{index} {bit}");
            }
        }
        let mut swapped = values.clone();
        swapped.swap(3, 70_000);
        assert_ne!(base, fingerprint(Floats::F32(&swapped)));
    }
}
