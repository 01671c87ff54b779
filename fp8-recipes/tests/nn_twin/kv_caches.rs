//! Caches of keys and values.

use super::*;

/// What two calls append: three positions and one.
fn parts(x: &Tensor, dim: usize) -> [Tensor; 2] {
    [x.narrow(dim, 0, 3), x.narrow(dim, 3, 1)].map(|x| x.unwrap().contiguous().unwrap())
}

fn join(k: Tensor, v: Tensor) -> Result<Tensor> {
    Tensor::cat(&[k, v], 1)
}

#[test]
pub fn caches() {
    let inputs = [wave(&[1, 2, 4, 6], 1), wave(&[1, 2, 4, 6], 2)];
    check("KvCache", &inputs, |x| {
        let mut cache = kv_cache::KvCache::new(2, 3);
        let ([k0, k1], [v0, v1]) = (parts(&x[0], 2), parts(&x[1], 2));
        cache.append(&k0, &v0)?;
        let (k, v) = cache.append(&k1, &v1)?;
        assert_eq!((cache.current_seq_len(), flat(&k)), (4, flat(&x[0])));
        join(k, v)
    });
    check("ConcatKvCache", &inputs, |x| {
        let mut cache = kv_cache::ConcatKvCache::new(2);
        let ([k0, k1], [v0, v1]) = (parts(&x[0], 2), parts(&x[1], 2));
        cache.append(&k0, &v0)?;
        let (k, v) = cache.append(&k1, &v1)?;
        assert_eq!((cache.current_seq_len(), flat(&k)), (4, flat(&x[0])));
        join(k, v)
    });
    check("InterleavedKvCache", &inputs, |x| {
        let mut cache = kv_cache::InterleavedKvCache::new(6);
        let ([k0, k1], [v0, v1]) = (parts(&x[0], 2), parts(&x[1], 2));
        cache.append(&k0, &v0)?;
        cache.append(&k1, &v1)
    });
    // Nothing tracked before, and nothing left after a reset.
    let mut cache = kv_cache::Cache::new(0, 8);
    cache.append(&wave(&[2, 3], 1)).unwrap();
    let var = Var::from_tensor(&wave(&[2, 3], 2)).unwrap();
    cache.append(&var).unwrap();
    let held = cache.current_data().unwrap().unwrap();
    let expected = Tensor::cat(&[&wave(&[2, 3], 1), &wave(&[2, 3], 2)], 0).unwrap();
    assert_eq!(flat(&held), flat(&expected));
    assert!(
        held.sum_all()
            .unwrap()
            .backward()
            .unwrap()
            .get(&var)
            .is_some()
    );
    cache.reset();
    assert!(cache.current_data().unwrap().is_none());
}

/// Keys alone would belong to the values of the next call.
#[test]
pub fn a_failed_append_changes_nothing() {
    let k = |seed| wave(&[1, 2, 1, 6], seed);
    let other_heads = wave(&[1, 3, 1, 6], 1);
    let longer = wave(&[1, 2, 2, 6], 1);
    let narrow = k(1).to_dtype(DType::BF16).unwrap();
    let mut plain = kv_cache::KvCache::new(2, 4);
    let mut rotating = kv_cache::RotatingKvCache::new(2, 4);
    plain.append(&k(1), &k(2)).unwrap();
    rotating.append(&k(1), &k(2)).unwrap();
    for v in [&other_heads, &longer, &narrow] {
        assert!(plain.append(&k(3), v).is_err(), "{v:?}");
        assert!(rotating.append(&k(3), v).is_err(), "{v:?}");
    }
    let (keys, values) = plain.append(&k(5), &k(6)).unwrap();
    let joined = |a, b| Tensor::cat(&[&k(a), &k(b)], 2).unwrap();
    assert_eq!(flat(&keys), flat(&joined(1, 5)));
    assert_eq!(flat(&values), flat(&joined(2, 6)));
    assert_eq!(
        (plain.current_seq_len(), rotating.current_seq_len()),
        (2, 1)
    );
    rotating.append(&k(5), &k(6)).unwrap();
    let held = [rotating.k(), rotating.v()].map(|held| held.unwrap().unwrap());
    for (held, expected) in held.iter().zip([joined(1, 5), joined(2, 6)]) {
        assert_eq!(flat(&held.narrow(2, 0, 2).unwrap()), flat(&expected));
    }
}

#[test]
pub fn rotating() {
    // Every way of running into the end of a buffer of 5 positions, against candle-nn's.
    for lengths in [
        &[2, 2, 2, 2][..],
        &[3, 4, 1],
        &[5, 1],
        &[1, 7, 2],
        &[4, 4, 4],
        &[2, 3, 5],
    ] {
        let total = lengths.iter().sum();
        let input = [wave(&[1, total, 3], 5)];
        check(&format!("RotatingCache, {lengths:?}"), &input, |x| {
            let mut ours = kv_cache::RotatingKvCache::new(1, 5);
            let mut candles = candle_nn::kv_cache::RotatingKvCache::new(1, 5);
            let (mut at, mut all) = (0, vec![]);
            for &len in lengths {
                let part = x[0].narrow(1, at, len)?.contiguous()?;
                at += len;
                assert_eq!(ours.positions(len), candles.positions(len));
                let (k, v) = ours.append(&part, &part)?;
                let (expected, _) = candles.append(&part.detach(), &part.detach())?;
                assert_eq!(flat(&k), flat(&expected), "{lengths:?} at {at}");
                let held = ours.k()?.unwrap();
                assert_eq!(flat(&held), flat(&candles.k()?.unwrap()));
                assert_eq!(ours.offset(), candles.offset());
                // candle-nn's buffer is written again.
                all.extend([k.copy()?, v.copy()?]);
            }
            Tensor::cat(&all, 1)
        });
    }
}

#[test]
pub fn scattered() {
    let mut builder = kv_cache::ScatteredCacheBuilder::new(1, 4, DType::F32, &Device::Cpu).unwrap();
    let mut cache = builder.make_cache(2, 3).unwrap();
    let short = wave(&[1, 2, 2, 3], 1).to_dtype(DType::F32).unwrap();
    let at = builder.indices_and_mask(2, &[true]).unwrap();
    cache.append(&short, &short, &at).unwrap();
    let var = Var::from_tensor(&short).unwrap();
    let error = cache.append(&var, &short, &at).unwrap_err().to_string();
    assert!(error.contains("ScatteredKvCache::append"), "{error}");
    // Tensors that are returned as they are keep their gradients.
    let long = wave(&[1, 2, 4, 3], 1).to_dtype(DType::F32).unwrap();
    let var = Var::from_tensor(&long).unwrap();
    let (k, _) = cache.append(&var, &var, &at).unwrap();
    assert!(k.sum_all().unwrap().backward().unwrap().get(&var).is_some());
}
