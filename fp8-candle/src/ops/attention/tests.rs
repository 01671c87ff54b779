use super::*;
use crate::ops::test_support::wave;

fn bits(x: &Tensor) -> Vec<f64> {
    let x = x.to_dtype(DType::F64).and_then(|x| x.flatten_all());
    x.and_then(|x| x.to_vec1()).unwrap()
}

/// What a node may keep: bf16 copies, and nothing of the result.
#[test]
fn copies_in_bf16_give_the_same_bits() -> Result<()> {
    let values = |heads, seed| wave(&[2, 70, heads, 24], seed).to_dtype(DType::F32);
    let [q, k, v, grad] = [values(4, 1)?, values(2, 2)?, values(2, 3)?, values(4, 4)?];
    let dropout = AttentionDropout::new(0.2, 5);
    let options = AttentionOptions::default()
        .with_causal(true)
        .with_dropout(dropout)
        .with_operands(DType::BF16);
    let qkv = [&q, &k, &v];
    let attention = Attention::new(qkv, &options, true)?;
    let (y, saved) = attention.forward(qkv, DType::F32, true)?;
    let grads = attention.backward(qkv, &saved, &grad, [true; 3])?;
    assert!(saved.result.is_none());

    let copies = [
        q.to_dtype(DType::BF16)?,
        k.to_dtype(DType::BF16)?,
        v.to_dtype(DType::BF16)?,
    ];
    let copies = copies.each_ref();
    let (from_copies, saved) = attention.forward(copies, DType::F32, true)?;
    let of_copies = attention.backward(copies, &saved, &grad, [true, false, true])?;
    assert_eq!((y.dtype(), y.dims()), (DType::F32, q.dims()));
    assert_eq!(bits(&y), bits(&from_copies));
    assert!(of_copies[1].is_none());
    for i in [0, 2] {
        let [got, expected] = [&of_copies[i], &grads[i]].map(|x| x.as_ref().expect("wanted"));
        assert_eq!((got.dtype(), got.dims()), (DType::F32, qkv[i].dims()));
        assert_eq!(bits(got), bits(expected));
    }
    Ok(())
}
