//! Results are the same to the bit for any number of threads.

use super::*;
use candle_core::{DType, Result, Var};
use fp8::{Recipe, RecipeName};
use fp8_test_support::child::child;
use fp8_test_support::{Model, normal, skipped_on_cuda};

/// In processes with other sizes of the global thread pool. A pool made here does not help: guards do not open on its workers.
#[test]
fn same_bits_for_any_number_of_threads() -> Result<()> {
    if skipped_on_cuda("the threads share what lives on the device of one of them") {
        return Ok(());
    }
    let bits = ["1", "2", "3"].map(|threads| {
        let output = child("linear::threads::print_bits")
            .env("RAYON_NUM_THREADS", threads)
            .output()
            .unwrap();
        assert!(output.status.success(), "{threads} threads: {output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        let lines = text.lines().filter_map(|line| line.split_once("bits of "));
        lines.map(|(_, line)| line.to_string()).collect::<Vec<_>>()
    });
    assert!(bits[0].len() > 50, "{bits:?}");
    assert_eq!(bits[0], bits[1], "one thread and two");
    assert_eq!(bits[0], bits[2], "one thread and three");
    Ok(())
}

/// Prints fingerprints of everything that training steps of several sizes compute.
#[test]
#[ignore = "run by same_bits_for_any_number_of_threads in child processes"]
fn print_bits() -> Result<()> {
    // Products of few rows and of many, shared by threads; casts of several tasks.
    for (m, k, n) in [
        (196, 1030, 200),
        (384, 513, 160),
        (1000, 96, 180),
        (1, 2048, 1024),
    ] {
        let (x, weight, g) = operands(m, k, n);
        for name in RecipeName::ALL {
            for dtype in [DType::F32, DType::BF16] {
                // For bf16 one shape is enough.
                if dtype == DType::BF16 && (m != 384 || name == RecipeName::Delayed) {
                    continue;
                }
                let weight = Var::from_tensor(&weight)?;
                let bias = Var::from_tensor(&normal(4, n))?;
                let model = Model::prepared(&weight, Some(&bias));
                let x = var(&x, dtype)?;
                let g = g.to_dtype(dtype)?;
                let mut step = model.step(&x, &g, Recipe::from(name))?;
                if name == RecipeName::Delayed {
                    step = model.step(&x, &g, Recipe::from(name))?;
                }
                for (gemm, values) in step.named() {
                    let hash = fp8::fp8_candle::fingerprint(values)?;
                    println!("bits of {name} {dtype:?} {m} {k} {n} {gemm}: {hash:x}");
                }
            }
        }
    }
    Ok(())
}
