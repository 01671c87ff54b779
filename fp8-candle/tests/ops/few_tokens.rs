//! What decoding uses: attention over a cache.

use candle_core::{DType, Device, Tensor, Var};
use fp8_candle::ops::{
    AttentionDropout, AttentionOptions, AttentionProducts, CachedSequence, CachedTokens, attention,
    cached_attention, cached_attention_each,
};
use fp8_candle::{Error, Result};
use fp8_core::Format;
use fp8_test_support::{apart, flat, wave_f32};

const EPS: f64 = f32::EPSILON as f64;

fn of(x: &Tensor) -> CachedTokens<'_> {
    CachedTokens::HighPrecision(x)
}

fn plain() -> AttentionOptions {
    AttentionOptions::default()
}

/// Two ways to sum `d` products and then `keys` of them: each adds half an ulp per term, and the softmax passes an error of the
/// scores on as a relative one of its weights.
fn bound(d: usize, keys: usize) -> f64 {
    2. * EPS * (d as f64).sqrt() * (d + 8) as f64 / 8. + 2. * EPS * (keys + 8) as f64
}

#[test]
fn equals_attention_over_what_is_in_the_cache() -> Result<()> {
    let options = AttentionOptions::default().with_causal(true);
    for (batch, heads, kv_heads, d) in [(1, 1, 1, 16), (2, 6, 2, 32), (3, 4, 4, 24)] {
        for (tokens, keys) in [(1, 1), (1, 63), (1, 64), (3, 65), (7, 200), (5, 5)] {
            let q = wave_f32(&[batch, heads, tokens, d], 1);
            let (k, v) = (
                wave_f32(&[batch, kv_heads, 210, d], 2),
                wave_f32(&[batch, kv_heads, 210, d], 3),
            );
            let part = |x: &Tensor| x.narrow(2, 0, keys)?.contiguous();
            let expected = attention(&q, &part(&k)?, &part(&v)?, options.clone())?;
            let case = format!("{batch} {heads}/{kv_heads} {d}: {tokens} of {keys}");
            let y = cached_attention(&q, of(&k), of(&v), keys, &plain())?;
            assert!(apart(&y, &expected) <= bound(d, keys), "{case}");

            // The rest of the cache is not looked at.
            let poison = Tensor::full(f32::NAN, (batch, kv_heads, 210 - keys, d), &Device::Cpu)?;
            let poisoned = |x: &Tensor| Tensor::cat(&[&part(x)?, &poison], 2);
            let (k, v) = (poisoned(&k)?, poisoned(&v)?);
            let again = cached_attention(&q, of(&k), of(&v), keys, &plain())?;
            assert_eq!(flat(&again), flat(&y), "{case}");
        }
    }
    Ok(())
}

#[test]
fn codes_and_16_bit_caches_give_what_their_values_give() -> Result<()> {
    let (q, shape) = (wave_f32(&[2, 4, 2, 16], 1), [2, 2, 90, 16]);
    let codes = |seed: usize| {
        let values = flat(&wave_f32(&shape, seed));
        let mut codes = vec![0u8; values.len()];
        let cast = fp8_core::Cast::new(Format::E4M3);
        fp8_core::encode(&cast, &values, 300., &mut codes);
        Tensor::from_vec(codes, &shape, &Device::Cpu)
    };
    let (k, v) = (codes(2)?, codes(3)?);
    let scales = [1. / 300., 1. / 200.];
    let side = |codes| CachedTokens::Fp8 {
        codes,
        format: Format::E4M3,
        dequant_scales: &scales,
    };
    let (k_values, v_values) = (
        side(&k).dequantize(90, DType::F32)?,
        side(&v).dequantize(90, DType::F32)?,
    );
    let y = cached_attention(&q, side(&k), side(&v), 77, &plain())?;
    let expected = cached_attention(&q, of(&k_values), of(&v_values), 77, &plain())?;
    assert_eq!(flat(&y), flat(&expected));

    for dtype in [DType::BF16, DType::F16] {
        let (k, v) = (k_values.to_dtype(dtype)?, v_values.to_dtype(dtype)?);
        let y = cached_attention(&q, of(&k), of(&v), 77, &plain())?;
        let (k, v) = (k.to_dtype(DType::F32)?, v.to_dtype(DType::F32)?);
        let expected = cached_attention(&q, of(&k), of(&v), 77, &plain())?;
        assert_eq!(flat(&y), flat(&expected), "{dtype:?}");
    }
    Ok(())
}

#[test]
fn each_sequence_over_its_own_cache_gets_what_it_gets_alone() -> Result<()> {
    let (heads, d) = (6, 32);
    for (kv_heads, keys) in [
        (2, vec![1, 64, 200, 77, 65]),
        (6, vec![3]),
        (3, vec![400; 9]),
    ] {
        let q = wave_f32(&[keys.len(), heads, 1, d], 1);
        let caches = keys.iter().enumerate().map(|(i, keys)| {
            let shape = [1, kv_heads, keys + i, d];
            (wave_f32(&shape, 2 + i), wave_f32(&shape, 50 + i))
        });
        let caches: Vec<(Tensor, Tensor)> = caches.collect();
        let sequences = caches
            .iter()
            .zip(&keys)
            .map(|((k, v), &keys)| CachedSequence {
                k: of(k),
                v: of(v),
                keys,
            });
        let sequences: Vec<_> = sequences.collect();
        let y = cached_attention_each(&q, &sequences, &plain())?;
        for (row, CachedSequence { k, v, keys }) in sequences.iter().enumerate() {
            let alone = cached_attention(&q.narrow(0, row, 1)?, *k, *v, *keys, &plain())?;
            assert_eq!(flat(&y.narrow(0, row, 1)?), flat(&alone), "row {row}");
        }
        let refused = |q: &Tensor, sequences: &[CachedSequence<'_>]| {
            let result = cached_attention_each(q, sequences, &plain());
            assert!(matches!(result, Err(Error::Shape { .. })), "{result:?}");
        };
        refused(&q, &sequences[1..]);
        refused(&wave_f32(&[keys.len(), heads, 2, d], 1), &sequences);
        let mut long = sequences.clone();
        long[0].keys += 1;
        refused(&q, &long);
    }
    let none = cached_attention_each(&wave_f32(&[0, heads, 1, d], 1), &[], &plain())?;
    assert_eq!(none.dims(), [0, heads, 1, d]);
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused() -> Result<()> {
    let (q, k) = (wave_f32(&[1, 4, 2, 16], 1), wave_f32(&[1, 2, 8, 16], 2));
    let refused = |q: &Tensor, k: &Tensor, v: &Tensor, keys: usize| {
        let result = cached_attention(q, of(k), of(v), keys, &plain());
        assert!(matches!(result, Err(Error::Shape { .. })), "{result:?}");
    };
    refused(&q, &k, &k, 9); // more than the capacity
    refused(&q, &k, &k, 1); // fewer than the queries
    refused(&q, &k, &wave_f32(&[1, 2, 9, 16], 2), 4);
    refused(&q, &wave_f32(&[1, 3, 8, 16], 2), &k, 4);
    refused(&q, &wave_f32(&[1, 2, 8, 12], 2), &k, 4);
    let codes = k.to_dtype(DType::U8)?;
    let one = CachedTokens::Fp8 {
        codes: &codes,
        format: Format::E4M3,
        dequant_scales: &[1.],
    };
    let result = cached_attention(&q, one, one, 4, &plain());
    assert!(matches!(result, Err(Error::Shape { .. })), "{result:?}");
    let result = cached_attention(&q, of(&codes), of(&codes), 4, &plain());
    assert!(matches!(result, Err(Error::DType { .. })), "{result:?}");
    let turned = wave_f32(&[1, 2, 16, 8], 2).transpose(2, 3)?;
    for (k, v) in [(&turned, &k), (&k, &turned)] {
        let error = cached_attention(&q, of(k), of(v), 4, &plain()).unwrap_err();
        assert!(error.to_string().contains("next to each other"), "{error}");
    }
    // A gradient would be lost.
    let var = Var::from_tensor(&q)?;
    let error = cached_attention(&var, of(&k), of(&k), 4, &plain()).unwrap_err();
    assert!(error.to_string().contains("no backward pass"), "{error}");
    Ok(())
}

/// Also where the operation is composed, and where there is nothing to compute.
#[test]
fn dropout_is_refused() -> Result<()> {
    let none = wave_f32(&[0, 4, 1, 16], 1);
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        let q = wave_f32(&[1, 4, 1, 16], 1).to_dtype(dtype)?;
        let k = wave_f32(&[1, 2, 8, 16], 2).to_dtype(dtype)?;
        let cache = CachedSequence {
            k: of(&k),
            v: of(&k),
            keys: 8,
        };
        for products in [AttentionProducts::none(), AttentionProducts::all()] {
            let plain = plain().with_products(products);
            let dropout = |probability| {
                let dropout = AttentionDropout::new(probability, 3);
                plain.clone().with_dropout(dropout)
            };
            for probability in [0.1, 1., f64::NAN] {
                let options = dropout(probability);
                for result in [
                    cached_attention(&q, of(&k), of(&k), 8, &options),
                    cached_attention_each(&q, &[cache], &options),
                    cached_attention_each(&none, &[], &options),
                ] {
                    assert!(matches!(result, Err(Error::Dropout { .. })), "{result:?}");
                }
            }
            // A probability of 0 drops nothing.
            let y = cached_attention(&q, of(&k), of(&k), 8, &dropout(0.))?;
            let expected = cached_attention(&q, of(&k), of(&k), 8, &plain)?;
            assert_eq!(flat(&y), flat(&expected));
        }
    }
    Ok(())
}
