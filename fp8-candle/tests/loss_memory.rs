//! The loss of a language model's head never has more than a part of its logits.

use candle_core::{Device, Result, Tensor, Var};
use fp8_candle::ops::{LinearCrossEntropyOptions, linear_cross_entropy};
use fp8_test_support::memory::{Counting, peak};
use fp8_test_support::wave_f32;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes of logits that exist at a time.
const PART: isize = 64 << 20;

const FEATURES: usize = 8;
const CLASSES: usize = 1 << 14;

/// With these rows the logits have twice as many bytes.
const ROWS: usize = 2 << 10;

fn head(rows: usize) -> Result<(Var, Var, Tensor)> {
    let x = Var::from_tensor(&wave_f32(&[rows, FEATURES], 1))?;
    let weight = Var::from_tensor(&wave_f32(&[CLASSES, FEATURES], 2))?;
    let targets: Vec<u32> = (0..rows as u32)
        .map(|row| row * 31 % CLASSES as u32)
        .collect();
    Ok((x, weight, Tensor::from_vec(targets, rows, &Device::Cpu)?))
}

/// One test, since it counts the allocations of the whole process.
#[test]
fn logits_exist_for_64_mib_at_a_time() -> Result<()> {
    let options = LinearCrossEntropyOptions::default();
    // Threads, buffers.
    let (x, weight, targets) = head(2)?;
    linear_cross_entropy(&x, &weight, &targets, options)?.backward()?;

    let (x, weight, targets) = head(ROWS)?;
    assert_eq!((4 * ROWS * CLASSES) as isize, 2 * PART);
    let others = PART / 2;
    let (loss, most) =
        peak(|| linear_cross_entropy(&x.detach(), &weight.detach(), &targets, options));
    assert!(!loss?.track_op());
    println!("without gradients: {most} bytes");
    assert!(most >= PART / 2, "{most}: the measurement sees the logits");
    assert!(most <= PART + others, "{most}");

    // The logits and their gradients.
    let (loss, most) = peak(|| linear_cross_entropy(&x, &weight, &targets, options));
    assert!(loss?.track_op());
    println!("with gradients: {most} bytes");
    assert!(most <= 2 * PART + others, "{most}");
    Ok(())
}
