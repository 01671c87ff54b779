//! Attention and its gradients to the bit, on values for which every sum is exact: whatever tiles, warps and registers do with
//! them, a single element in a wrong place shows.

use candle_core::{DType, Tensor, Var};
use fp8_candle::Result;
use fp8_candle::ops::{AttentionOptions, attention};
use fp8_test_support::{flat64, skipped_on_cpu};

/// Queries, keys, features of a head; heads of queries and of keys.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    queries: usize,
    keys: usize,
    features: usize,
    heads: [usize; 2],
}

/// -1, 0 or 1.
fn digit(seed: usize, i: usize) -> f64 {
    let mixed = (i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15 ^ ((seed as u64) << 32));
    ((mixed ^ mixed >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 40) as f64 % 3. - 1.
}

/// 2^-3: products with it are exact.
const SCALE: f64 = 0.125;

/// Results and gradients of q, k and v where all dot products of q and k are 0 and the rows of v cancel: each probability is one part
/// of the number of keys, a power of two, and the result is 0.
fn expected(sizes: Sizes, [q, k, v, dout]: &[Vec<f64>; 4]) -> [Vec<f64>; 4] {
    let Sizes {
        queries,
        keys,
        features: d,
        heads: [heads, kv_heads],
    } = sizes;
    let group = heads / kv_heads;
    let p = 1. / keys as f64;
    let mut dq = vec![0.; q.len()];
    let (mut dk, mut dv) = (vec![0.; k.len()], vec![0.; v.len()]);
    for head in 0..heads {
        for query in 0..queries {
            let at = (head * queries + query) * d;
            for key in 0..keys {
                let kv = (head / group * keys + key) * d;
                let dp: f64 = (0..d).map(|c| dout[at + c] * v[kv + c]).sum();
                for c in 0..d {
                    dq[at + c] += SCALE * p * dp * k[kv + c];
                    dk[kv + c] += SCALE * p * dp * q[at + c];
                    dv[kv + c] += p * dout[at + c];
                }
            }
        }
    }
    [vec![0.; q.len()], dq, dk, dv]
}

fn check(sizes: Sizes, zero_queries: bool, dtype: DType) -> Result<()> {
    let device = fp8_test_support::device();
    let Sizes {
        queries,
        keys,
        features: d,
        heads: [heads, kv_heads],
    } = sizes;
    let of_queries = |seed| (0..heads * queries * d).map(move |i| digit(seed, i));
    let of_keys = |seed| (0..kv_heads * keys * d).map(move |i| digit(seed, i));
    let q: Vec<f64> = of_queries(1)
        .map(|x| if zero_queries { 0. } else { x })
        .collect();
    let k: Vec<f64> = of_keys(2)
        .map(|x| if zero_queries { x } else { 0. })
        .collect();
    let half = keys / 2 * d;
    // The second half of the keys has the values of the first with the other sign.
    let v = (0..kv_heads * keys * d).map(|i| match i % (keys * d) < half {
        true => digit(3, i),
        false => -digit(3, i - half),
    });
    let values = [q, k, v.collect(), of_queries(4).collect()];
    let tensor = |values: &[f64], heads: usize| {
        let shape = (1, heads, values.len() / (heads * d), d);
        Tensor::from_slice(values, shape, &candle_core::Device::Cpu)?
            .to_dtype(dtype)?
            .to_device(&device)
    };
    let var = |i: usize, heads| Var::from_tensor(&tensor(&values[i], heads)?);
    let vars = [var(0, heads)?, var(1, kv_heads)?, var(2, kv_heads)?];
    let options = AttentionOptions::default().with_softmax_scale(Some(SCALE));
    let y = attention(&vars[0], &vars[1], &vars[2], options)?;
    let grads = (&y * tensor(&values[3], heads)?)?.sum_all()?.backward()?;
    let mut got = vec![y.clone()];
    got.extend(
        vars.iter()
            .map(|var| grads.get(var).expect("a gradient").clone()),
    );
    for (i, (got, expected)) in got.iter().zip(expected(sizes, &values)).enumerate() {
        // Sums are exact in f32; what is stored is rounded once.
        let rounded = Tensor::from_vec(expected, got.shape(), &candle_core::Device::Cpu)?;
        let rounded = flat64(&rounded.to_dtype(dtype)?);
        let got = flat64(got);
        let wrong = got
            .iter()
            .zip(&rounded)
            .position(|(got, expected)| got != expected);
        assert_eq!(
            wrong.map(|at| (at, got[at], rounded[at])),
            None,
            "{sizes:?}, {dtype:?}, result {i}: element, value, expected"
        );
    }
    Ok(())
}

#[test]
fn every_element_of_every_tile_is_in_its_place() -> Result<()> {
    if skipped_on_cpu() {
        return Ok(());
    }
    let sizes = |queries, keys, features, heads| Sizes {
        queries,
        keys,
        features,
        heads,
    };
    // One tile, several of both, and parts of tiles; heads of fewer features than a kernel has room for; shared keys.
    let cases = [
        sizes(64, 64, 64, [1, 1]),
        sizes(70, 256, 64, [2, 1]),
        sizes(200, 16, 40, [2, 2]),
        sizes(128, 128, 128, [1, 1]),
        sizes(131, 256, 128, [4, 2]),
        sizes(33, 512, 96, [1, 1]),
        sizes(1, 4, 128, [1, 1]),
    ];
    for case in cases {
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            check(case, true, dtype)?;
            check(case, false, dtype)?;
        }
    }
    Ok(())
}
