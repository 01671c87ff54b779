//! Flash attention.

use super::*;

#[test]
#[allow(deprecated)]
pub fn flash() {
    let inputs = |b, tq, tk| {
        [
            wave(&[b, tq, 4, 8], 1),
            wave(&[b, tk, 2, 8], 2),
            wave(&[b, tk, 2, 8], 3),
        ]
    };
    let mut mask = flat(&wave(&[3, 5], 4));
    // The second query sees nothing.
    mask[1] = f32::NEG_INFINITY;
    mask[5..10].fill(f32::NEG_INFINITY);
    let mask = Tensor::from_vec(mask, (1, 1, 3, 5), &Device::Cpu).unwrap();
    for (b, tq, tk, kind, max_bias, softcap) in [
        (1, 3, 5, AttnMask::None, None, None),
        (1, 3, 5, AttnMask::None, Some(4.), Some(0.9)),
        (1, 3, 5, AttnMask::Mask(mask.clone()), None, Some(0.9)),
        (1, 3, 5, AttnMask::Mask(mask.clone()), Some(4.), None),
        (1, 3, 5, AttnMask::causal(), None, None),
        (
            1,
            3,
            5,
            AttnMask::causal_with_offset(2),
            Some(4.),
            Some(0.9),
        ),
        (1, 1, 5, AttnMask::causal_with_offset(4), Some(4.), None),
        (2, 3, 5, AttnMask::None, Some(4.), None),
        (2, 3, 5, AttnMask::causal(), None, None),
        (2, 3, 3, AttnMask::causal(), Some(4.), None),
    ] {
        let what = format!("flash_attn of {b}x{tq}x{tk}, {kind:?}, {max_bias:?}, {softcap:?}");
        check_in_f32(&what, &inputs(b, tq, tk), |x| {
            attention::flash_attn::<f32>(&x[0], &x[1], &x[2], 0.4, kind.clone(), max_bias, softcap)
        });
    }
    check_in_f32("standard", &inputs(1, 3, 5), |x| {
        let (q, k, v) = (&x[0], &x[1], &x[2]);
        cpu_flash::standard::run_flash_attn_cpu::<f32>(q, k, v, Some(&mask), 0.4, None, None)
    });
    check_in_f32("causal", &inputs(1, 3, 5), |x| {
        cpu_flash::causal::run_causal_attn_cpu::<f32>(&x[0], &x[1], &x[2], 0.4, 1, None, None)
    });
    check_in_f32("the old name", &inputs(1, 3, 5), |x| {
        let (q, k, v) = (&x[0], &x[1], &x[2]);
        nn::cpu_flash_attention::run_flash_attn_cpu::<f32>(q, k, v, None, 0.4, None, None)
    });
    // A learned bias.
    check_in_f32("mask", &[wave(&[1, 1, 3, 5], 1)], |x| {
        let [q, k, v] = inputs(1, 3, 5).map(|x| x.to_dtype(DType::F32).unwrap());
        let mask = AttnMask::Mask(x[0].clone());
        attention::flash_attn::<f32>(&q, &k, &v, 0.4, mask, None, None)
    });
}

#[test]
fn masks_of_other_sizes_are_refused() {
    let x = |dims: &[usize], seed| wave(dims, seed).to_dtype(DType::F32).unwrap();
    // One for each row of the batch, and one for each head: only the first had an effect.
    for (b, dims) in [(2, [2, 1, 3, 5]), (1, [1, 4, 3, 5])] {
        let (q, k, v) = (
            x(&[b, 3, 4, 8], 1),
            x(&[b, 5, 2, 8], 2),
            x(&[b, 5, 2, 8], 3),
        );
        let tracked = Var::from_tensor(&q).unwrap();
        for q in [&q, tracked.as_tensor()] {
            let mask = AttnMask::Mask(x(&dims, 4));
            let y = attention::flash_attn::<f32>(q, &k, &v, 0.4, mask, None, None);
            let error = y.unwrap_err().to_string();
            assert!(error.contains("of the mask"), "{error}");
        }
    }
}

#[test]
pub fn varlen() {
    let inputs = [
        wave(&[5, 4, 8], 1),
        wave(&[9, 2, 8], 2),
        wave(&[9, 2, 8], 3),
    ];
    let lengths = |lengths: &[u32]| Tensor::new(lengths, &Device::Cpu).unwrap();
    let (queries, keys) = (lengths(&[2, 3]), lengths(&[4, 5]));
    let slopes = Tensor::new(&[0.5f32, 0.25, 0.125, 0.0625], &Device::Cpu).unwrap();
    for (causal, left, right, slopes) in [
        (false, None, None, None),
        (true, None, None, Some(&slopes)),
        (false, Some(1), None, Some(&slopes)),
        (false, Some(1), Some(1), None),
        (true, Some(2), Some(2), None),
        (false, Some(usize::MAX), Some(0), None),
    ] {
        let what = format!(
            "causal {causal}, window {left:?} {right:?}, {}",
            slopes.is_some()
        );
        check_in_f32(&format!("unfused, {what}"), &inputs, |x| {
            let (q, k, v) = (&x[0], &x[1], &x[2]);
            attention::flash_attn_varlen_unfused(
                q, k, v, slopes, &queries, &keys, 3, 5, 0.4, causal, left, right,
            )
        });
        check_in_f32(&format!("cpu, {what}"), &inputs, |x| {
            let (q, k, v) = (&x[0], &x[1], &x[2]);
            nn::varlen_attention::flash_attn_varlen_unfused(
                q, k, v, slopes, &queries, &keys, 3, 5, 0.4, causal, left, right,
            )?;
            attention::flash_attn_varlen_cpu(
                q, k, v, slopes, &queries, &keys, 3, 5, 0.4, causal, left, right,
            )
        });
    }
    let inputs = inputs.map(|x| x.to_dtype(DType::F32).unwrap());
    let tracked = Var::from_tensor(&inputs[0]).unwrap();
    let wrong = attention::flash_attn_varlen_cpu(
        &tracked, &inputs[1], &inputs[2], None, &queries, &queries, 3, 3, 0.4, true, None, None,
    );
    assert!(wrong.unwrap_err().to_string().contains("do not fit"));
}
