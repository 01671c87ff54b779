use candle_core::{DType, Device, Tensor, Var};
use fp8::fp8_candle::WideNode;
use fp8::fp8_candle::wide::backward;
use fp8::nn::ops::AttentionOptions;
use fp8::AttentionProducts;
use std::time::Instant;
fn cpu() -> f64 {
    let t = std::fs::read_to_string("/proc/self/schedstat").unwrap();
    t.split(' ').next().unwrap().parse::<f64>().unwrap() / 1e9
}
fn main() -> anyhow::Result<()> {
    fp8::keep_freed_memory();
    for [b, t, h, d] in [[8, 256, 4, 64], [2, 1024, 8, 64], [1, 2048, 8, 128]] {
        for trains in [false, true] {
            let value = || Tensor::randn(0f32, 1., (b, t, h, d), &Device::Cpu);
            let vars = [Var::from_tensor(&value()?)?, Var::from_tensor(&value()?)?, Var::from_tensor(&value()?)?];
            let plain = [value()?, value()?, value()?];
            let weights = value()?;
            let bf16 = AttentionOptions::default().with_causal(true).with_operands(DType::BF16);
            let fp8 = bf16.clone().with_products(AttentionProducts::all());
            let step = |o: &AttentionOptions| -> anyhow::Result<()> {
                let mut node = WideNode::new("attention");
                let args: Vec<&Tensor> = match trains { true => vars.iter().map(|v| v.as_tensor()).collect(), false => plain.iter().collect() };
                let [q, k, v] = [0, 1, 2].map(|i| node.argument(args[i]));
                let y = node.attention([&q, &k, &v], o)?;
                let y = node.finish(y)?;
                if trains { backward(&(y * &weights)?.sum_all()?)?; }
                Ok(())
            };
            let mut ms = [vec![], vec![]];
            for round in 0..41 {
                for (i, o) in [&bf16, &fp8].into_iter().enumerate() {
                    let i = if round % 2 == 0 { i } else { 1 - i };
                    let o = if round % 2 == 0 { o } else { [&bf16, &fp8][i] };
                    let (start, c) = (Instant::now(), cpu());
                    step(o)?;
                    let _ = start;
                    if round > 2 { ms[i].push((cpu() - c) * 1e3); }
                }
            }
            for m in &mut ms { m.sort_by(f64::total_cmp); }
            let m = |i: usize| ms[i][ms[i].len() / 2];
            println!("{b}x{t} {h} heads of {d} trains {trains}: bf16 {:.3} ms fp8 {:.3} ms ratio {:.3} (mins {:.3})", m(0), m(1), m(0) / m(1), ms[0][0] / ms[1][0]);
        }
    }
    Ok(())
}
