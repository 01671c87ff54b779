//! One guard around a whole training loop. This is a program of its own because it watches the memory of its process.

use candle_core::{Module, Result, Tensor};
use fp8::{end_step, fp8_autocast};
use fp8_test_support::{Layer, delayed, flat, of, skipped_on_cuda};

/// Resident memory in KiB, on systems that report it.
fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

fn train(layer: &Layer, x: &Tensor, go: &Tensor) -> Result<()> {
    let y = layer.linear.forward(x)?;
    let grads = (&y * go)?.sum_all()?.backward()?;
    // The weight moves, and stays in range.
    let step = (grads.get(&layer.weight).unwrap() * 1e-6)?;
    layer.weight.set(&(layer.weight.as_tensor() - step)?)
}

#[test]
fn ten_thousand_steps_under_one_guard() -> Result<()> {
    if skipped_on_cuda("the memory of the host is watched") {
        return Ok(());
    }
    let layer = Layer::prepared("fc", 1, 8, 16);
    let (x, go) = (of(&[1e-4; 64], &[4, 16]), of(&[1e-3; 32], &[4, 8]));
    let guard = fp8_autocast(delayed(16))?;
    let mut early = None;
    for step in 0..10_000 {
        train(&layer, &x, &go)?;
        let summary = end_step()?;
        assert_eq!(summary.layers(), 1, "step {step}");
        if step == 0 {
            // Without a scale 1e-4 is 0 in E4M3, so the new scale must take effect in the very next step.
            assert_eq!(layer.slot("input").quant_scale, 448. / 1e-4);
            assert_eq!(layer.slot("grad_output").quant_scale, 57344. / 1e-3);
        }
        if step == 100 {
            early = resident();
        }
    }
    let y = layer.linear.forward(&x)?;
    assert!(flat(&y).iter().all(|&y| y != 0.));
    guard.close()?;
    if let (Some(early), Some(late)) = (early, resident()) {
        let grown = late.saturating_sub(early);
        println!("resident memory: {early} KiB after 100 steps, {late} KiB after 10,000");
        assert!(grown <= 1024, "grown by {grown} KiB");
    }
    Ok(())
}
