//! A query's result has the same bits whatever is beside it: among all queries of its sequence, in parts or alone over a cache,
//! and with other sequences in the batch.

use candle_core::{D, DType, Device, Tensor};
use fp8_candle::Result;
use fp8_candle::ops::{
    AttentionOptions, CachedSequence, CachedTokens, attention, attention_tokens_first,
    cached_attention, cached_attention_each,
};
use fp8_core::Format;
use fp8_test_support::{cpu_tensor, flat};

/// A sequence of numbers that look random.
struct Numbers(u64);

impl Numbers {
    /// A number from `from` to `to`.
    fn next(&mut self, from: usize, to: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(11);
        from + (self.0 >> 33) as usize % (to - from + 1)
    }

    fn of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.next(0, values.len() - 1)]
    }
}

#[derive(Debug, Clone)]
struct Case {
    batch: usize,
    kv_heads: usize,
    group: usize,
    d: usize,
    tokens: usize,
    /// Tokens for which the cache has room.
    capacity: usize,
    window: Option<usize>,
    dtype: DType,
    operands: Option<DType>,
    seed: u64,
}

impl Case {
    fn random(numbers: &mut Numbers) -> Self {
        let most = numbers.of(&[5, 40, 70, 200]);
        let tokens = numbers.next(1, most);
        let dtype = numbers.of(&[DType::F32, DType::BF16, DType::F16]);
        let window = numbers.next(1, 2 * tokens);
        let operands = (dtype != DType::BF16).then_some(DType::BF16);
        Self {
            batch: numbers.next(1, 3),
            kv_heads: numbers.next(1, 3),
            group: numbers.of(&[1, 2, 3, 4, 7]),
            d: numbers.of(&[2, 7, 16, 24, 32, 64, 80]),
            tokens,
            capacity: tokens + numbers.next(0, 9),
            window: numbers.of(&[None, Some(window)]),
            dtype,
            operands: numbers.of(&[None, None, operands]),
            seed: numbers.0 >> 8,
        }
    }

    fn options(&self) -> AttentionOptions {
        AttentionOptions::default()
            .with_causal(true)
            .with_window(self.window)
            .with_operands(self.operands)
    }

    fn values(&self, heads: usize, tokens: usize, seed: u64) -> Tensor {
        let values = cpu_tensor(self.seed ^ seed, &[self.batch, heads, tokens, self.d]);
        (values * 4.).and_then(|x| x.to_dtype(self.dtype)).unwrap()
    }

    fn q(&self) -> Tensor {
        self.values(self.kv_heads * self.group, self.tokens, 1)
    }

    /// Keys and values, with NaN behind the tokens.
    fn cache(&self) -> Result<[Tensor; 2]> {
        let rest = [
            self.batch,
            self.kv_heads,
            self.capacity - self.tokens,
            self.d,
        ];
        let rest = Tensor::full(f32::NAN, &rest, &Device::Cpu)?.to_dtype(self.dtype)?;
        let [k, v] = [2, 3].map(|seed| self.values(self.kv_heads, self.tokens, seed));
        Ok([Tensor::cat(&[&k, &rest], 2)?, Tensor::cat(&[&v, &rest], 2)?])
    }

    /// The tokens in parts of random lengths: the starts and the ends.
    fn parts(&self, numbers: &mut Numbers) -> Vec<(usize, usize)> {
        let longest = numbers.of(&[1, 1, 3, 20, 100]);
        let mut parts = vec![];
        let mut start = 0;
        while start < self.tokens {
            let end = self.tokens.min(start + numbers.next(1, longest));
            parts.push((start, end));
            start = end;
        }
        parts
    }

    /// The results over a cache, part by part.
    fn in_parts(
        &self,
        parts: &[(usize, usize)],
        k: CachedTokens<'_>,
        v: CachedTokens<'_>,
    ) -> Result<Tensor> {
        let q = self.q();
        let results = parts.iter().map(|&(start, end)| {
            let q = q.narrow(2, start, end - start)?;
            cached_attention(&q, k, v, end, &self.options())
        });
        Ok(Tensor::cat(&results.collect::<Result<Vec<_>>>()?, 2)?)
    }
}

#[track_caller]
fn assert_same(got: &Tensor, expected: &Tensor, case: &Case, how: &str) {
    let bits = |x: &Tensor| -> Vec<u32> { flat(x).into_iter().map(f32::to_bits).collect() };
    assert_eq!(got.dims(), expected.dims(), "{case:?}: {how}");
    let (got, expected) = (bits(got), bits(expected));
    let apart = got.iter().zip(&expected).filter(|(a, b)| a != b).count();
    assert_eq!(apart, 0, "of {} bits apart: {case:?}, {how}", got.len());
}

/// Whole sequences, beginnings of them, parts over a cache, and rows of a batch alone.
#[test]
fn a_query_has_its_bits_whatever_is_beside_it() -> Result<()> {
    let mut numbers = Numbers(1);
    for _ in 0..250 {
        let case = Case::random(&mut numbers);
        let (q, [k, v]) = (case.q(), case.cache()?);
        let first = |x: &Tensor, tokens: usize| x.narrow(2, 0, tokens);
        let [all_k, all_v] = [first(&k, case.tokens)?, first(&v, case.tokens)?];
        let whole = attention(&q, &all_k, &all_v, case.options())?;

        let parts = case.parts(&mut numbers);
        let [k_side, v_side] = [&k, &v].map(CachedTokens::HighPrecision);
        let cached = case.in_parts(&parts, k_side, v_side)?;
        assert_same(&cached, &whole, &case, &format!("{parts:?}"));

        let tokens = numbers.next(1, case.tokens);
        let [q, k, v] = [first(&q, tokens)?, first(&k, tokens)?, first(&v, tokens)?];
        let beginning = attention(&q, &k, &v, case.options())?;
        let expected = first(&whole, tokens)?;
        assert_same(&beginning, &expected, &case, &format!("the first {tokens}"));

        let turned = |x: &Tensor| x.transpose(1, 2);
        let [q_turned, k_turned, v_turned] = [turned(&q)?, turned(&k)?, turned(&v)?];
        let y = attention_tokens_first(&q_turned, &k_turned, &v_turned, case.options())?;
        assert_same(&turned(&y)?.contiguous()?, &expected, &case, "tokens first");

        let row = numbers.next(0, case.batch - 1);
        let row_of = |x: &Tensor| x.narrow(0, row, 1);
        let alone = attention(&row_of(&q)?, &row_of(&k)?, &row_of(&v)?, case.options())?;
        assert_same(&alone, &row_of(&expected)?, &case, "a row alone");
    }
    Ok(())
}

/// Over codes there is no whole sequence of values; tokens one by one, in parts and all at once agree, and so do the values that the
/// codes mean.
#[test]
fn codes_give_the_same_bits_in_parts() -> Result<()> {
    let mut numbers = Numbers(2);
    for _ in 0..100 {
        let case = Case::random(&mut numbers);
        let codes = |x: &Tensor| {
            let values = flat(x);
            let mut codes = vec![0u8; values.len()];
            fp8_core::encode(
                &fp8_core::Cast::new(Format::E4M3),
                &values,
                100.,
                &mut codes,
            );
            Tensor::from_vec(codes, x.dims(), &Device::Cpu)
        };
        let [k, v] = case.cache()?;
        let (k, v) = (codes(&k)?, codes(&v)?);
        let scales: Vec<f32> = (0..case.kv_heads).map(|i| 0.01 + i as f32 * 1e-3).collect();
        let side = |codes| CachedTokens::Fp8 {
            codes,
            format: Format::E4M3,
            dequant_scales: &scales,
        };
        let whole = case.in_parts(&[(0, case.tokens)], side(&k), side(&v))?;
        let parts = case.parts(&mut numbers);
        let cached = case.in_parts(&parts, side(&k), side(&v))?;
        assert_same(&cached, &whole, &case, &format!("{parts:?}"));
        if case.dtype == DType::F32 {
            let [k, v] = [&k, &v].map(|x| side(x).dequantize(case.tokens, DType::F32));
            let y = attention(&case.q(), &k?, &v?, case.options())?;
            assert_same(&y, &whole, &case, "values");
        }
    }
    Ok(())
}

/// The last token of each of several sequences of different lengths.
#[test]
fn sequences_together_get_their_own_bits() -> Result<()> {
    let mut numbers = Numbers(3);
    for _ in 0..60 {
        let case = Case {
            batch: 1,
            ..Case::random(&mut numbers)
        };
        let (mut last, mut expected, mut caches) = (vec![], vec![], vec![]);
        for row in 0..numbers.next(1, 9) {
            let most = numbers.of(&[3, 60, 150]);
            let tokens = numbers.next(1, most);
            let own = Case {
                tokens,
                capacity: tokens + numbers.next(0, 40),
                seed: case.seed + row as u64,
                ..case.clone()
            };
            let (q, [k, v]) = (own.q(), own.cache()?);
            let keys = |x: &Tensor| x.narrow(2, 0, tokens);
            let whole = attention(&q, &keys(&k)?, &keys(&v)?, own.options())?;
            last.push(q.narrow(2, tokens - 1, 1)?);
            expected.push(whole.narrow(2, tokens - 1, 1)?);
            caches.push((k, v, tokens));
        }
        let sequences = caches.iter().map(|(k, v, keys)| CachedSequence {
            k: CachedTokens::HighPrecision(k),
            v: CachedTokens::HighPrecision(v),
            keys: *keys,
        });
        let sequences: Vec<_> = sequences.collect();
        let y = cached_attention_each(&Tensor::cat(&last, 0)?, &sequences, &case.options())?;
        assert_same(&y, &Tensor::cat(&expected, 0)?, &case, "together");
    }
    Ok(())
}

/// In f64 the operation is composed, over caches too.
#[test]
fn caches_in_f64_give_what_attention_gives() -> Result<()> {
    let values = |heads: usize, seed: u64| cpu_tensor(seed, &[2, heads, 9, 8]);
    let [q, k, v] = [values(4, 1), values(2, 2), values(2, 3)];
    let [q, k, v] = [&q, &k, &v].map(|x| x.to_dtype(DType::F64));
    let (q, k, v) = (q?.narrow(2, 6, 3)?, k?, v?);
    let options = AttentionOptions::default().with_causal(true);
    let expected = attention(&q, &k, &v, options.clone())?;
    let [k, v] = [&k, &v].map(CachedTokens::HighPrecision);
    let y = cached_attention(&q, k, v, 9, &options)?;
    let apart = (y - expected)?.abs()?.sum_all()?.to_scalar::<f64>()?;
    assert_eq!(apart, 0.);
    assert_eq!(q.dim(D::Minus1)?, 8);
    Ok(())
}
