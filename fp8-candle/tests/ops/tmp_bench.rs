use candle_core::{DType, Device, Result, Tensor};
use fp8_candle::ops::linear;
use std::time::Instant;
#[test]
#[ignore]
fn tmp_bench() -> Result<()> {
    for (m, k, n, dt) in [
        (1, 576, 49152, DType::BF16), (1, 576, 49152, DType::F32), (1, 576, 1536, DType::F32), (1, 4096, 4096, DType::F32),
        (8, 576, 1536, DType::F32), (8, 576, 49152, DType::F32), (32, 576, 1536, DType::F32),
        (128, 576, 1536, DType::F32), (512, 576, 1536, DType::F32), (128, 1536, 576, DType::F32), (512, 1536, 576, DType::F32),
        (128, 576, 49152, DType::F32), (512, 576, 49152, DType::F32), (512, 4096, 4096, DType::F32), (512, 576, 576, DType::F32),
    ] {
        let x = Tensor::randn(0f32, 1., (m, k), &Device::Cpu)?;
        let copies = (400_000_000 / (n * k * 4)).clamp(1, 12);
        let w: Vec<_> = (0..copies).map(|_| Tensor::randn(0f32, 1., (n, k), &Device::Cpu)?.to_dtype(dt)).collect::<Result<_>>()?;
        let flop = 2. * (m * n * k) as f64;
        let rounds = ((3e11 / flop) as usize).clamp(5, 60);
        let (mut ours, mut theirs) = (vec![], vec![]);
        for i in 0..rounds {
            let w = &w[i % copies];
            let t = Instant::now();
            std::hint::black_box(linear(&x, w, None)?);
            ours.push(t.elapsed().as_secs_f64());
            let t = Instant::now();
            std::hint::black_box(x.matmul(&w.to_dtype(DType::F32)?.t()?)?);
            theirs.push(t.elapsed().as_secs_f64());
        }
        let median = |v: &mut Vec<f64>| { v.sort_by(f64::total_cmp); v[v.len() / 2] };
        let (o, t) = (median(&mut ours), median(&mut theirs));
        println!("{m:4} {k:5} {n:6} {dt:?}: ours {:.3} ms {:.1} GF/s, candle {:.3} ms {:.1} GF/s, candle/ours {:.2}", o*1e3, flop/o/1e9, t*1e3, flop/t/1e9, t/o);
    }
    Ok(())
}
