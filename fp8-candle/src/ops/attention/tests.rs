use super::*;
use crate::cast::kept::group_codes;
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

/// Codes that kernels read have the gradients of their decoded values: with operands in f32 and in bf16, with groups of several heads, with
/// groups that kernels do not read, and with a value that is not a number.
#[test]
fn kept_codes_have_the_gradients_of_their_values() -> Result<()> {
    let (batch, tokens, dim) = (2, 70, 24);
    for (dtype, operands) in [
        (DType::F32, None),
        (DType::BF16, None),
        (DType::BF16, Some(DType::F32)),
    ] {
        for (group, reads, nan) in [(48, true, false), (16, false, false), (48, true, true)] {
            let values =
                |heads, seed| (wave(&[batch, tokens, heads, dim], seed) * 3.)?.to_dtype(dtype);
            let qkv = [values(4, 1)?, values(2, 2)?, values(2, 3)?];
            let grad = values(4, 4)?.to_dtype(DType::F32)?;
            let options = AttentionOptions::default()
                .with_causal(true)
                .with_operands(operands);
            let mut attention = Attention::new(qkv.each_ref(), &options, true)?;
            let (_, saved) = attention.forward(qkv.each_ref(), DType::F32, true)?;
            attention.normalizes = true;
            let kept = qkv.each_ref().map(|x| -> Result<_> {
                let (dims, heads) = (x.dims().to_vec(), x.dim(2)?);
                let mut x = x.reshape((batch, tokens, heads * dim))?;
                if nan {
                    let last = Tensor::full(f32::NAN, (batch, 1, heads * dim), x.device())?;
                    x = Tensor::cat(&[&x.narrow(1, 0, tokens - 1)?, &last.to_dtype(dtype)?], 1)?;
                }
                Ok(KeptTensor::Codes(group_codes(&x, group)?, dims, dtype))
            });
            let [q, k, v] = kept;
            let kept = [q?, k?, v?];
            assert_eq!(kept[0].code_rows()?.is_some(), reads);
            let decoded = kept.each_ref().map(KeptTensor::get);
            let [q, k, v] = decoded;
            let decoded = [q?, k?, v?];
            let got = attention.backward_of_kept(&kept, &saved, &grad, [true; 3])?;
            let expected = attention.backward(decoded.each_ref(), &saved, &grad, [true; 3])?;
            for (got, expected) in got.iter().zip(&expected) {
                let [got, expected] = [got, expected].map(|x| x.as_ref().expect("wanted"));
                let [got, expected] = [bits(got), bits(expected)];
                assert_eq!(got.iter().any(|x| x.is_nan()), nan);
                let same = got
                    .iter()
                    .zip(&expected)
                    .all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{dtype:?} {operands:?} {group} {nan}");
            }
        }
    }
    Ok(())
}
