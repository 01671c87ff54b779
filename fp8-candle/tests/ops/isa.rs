//! An unknown `FP8_ISA` is an error in every operation.

use candle_core::{DType, Device, Tensor, Var};
use fp8_candle::device::backend;
use fp8_candle::ops::{AttentionOptions, attention, gelu, layer_norm};
use fp8_candle::{Fp8Tensor, GemmPlan, LinearPlan, LinearWeight, Quantizer, Result, fp8_linear};
use fp8_core::{Contraction, Format, Granularity};
use fp8_test_support::child::child;

const VARIABLE: &str = "FP8_ISA";
const WRONG: &str = "sse9";

fn message<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => panic!("{VARIABLE}={WRONG} was followed"),
        Err(error) => error.to_string(),
    }
}

/// The variable is read once per process, so this test starts processes of its own.
#[test]
fn a_wrong_instruction_set_is_an_error_and_no_panic() {
    let output = child("isa::under_a_wrong_instruction_set")
        .env(VARIABLE, WRONG)
        // With a backtrace, candle's errors have more than one line.
        .env("RUST_BACKTRACE", "0")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}{errors}");
    assert!(text.contains("1 passed"), "{text}");
}

#[test]
#[ignore = "run by a_wrong_instruction_set_is_an_error_and_no_panic in a child process"]
fn under_a_wrong_instruction_set() -> Result<()> {
    let x = Var::zeros((4, 4), DType::F32, &Device::Cpu)?;
    let one = Tensor::ones(4, DType::F32, &Device::Cpu)?;
    let quantizer = Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise);
    let gemm = GemmPlan::new(quantizer.clone(), quantizer.clone());
    let plan = LinearPlan::new("layer");
    let weight = LinearWeight::HighPrecision(x.as_tensor(), None);
    let qkv = Tensor::zeros((1, 1, 4, 4), DType::F32, &Device::Cpu)?;
    let messages = [
        message(backend(&Device::Cpu)),
        message(Fp8Tensor::quantize(&x, &quantizer, Contraction::Cols)),
        message(fp8_linear(
            &x,
            weight,
            None,
            &plan.clone().with_output(gemm),
        )),
        message(layer_norm(&x, &one, None, 1e-5)),
        message(gelu(&x)),
        message(attention(&qkv, &qkv, &qkv, AttentionOptions::default())),
    ];
    let highest = match () {
        _ if cfg!(target_arch = "x86_64") => "avx512bf16, amx",
        _ if cfg!(target_arch = "aarch64") => "portable, neon",
        _ => "portable",
    };
    for message in messages {
        for part in ["FP8_ISA=sse9", "portable", highest] {
            assert!(message.contains(part), "{message}");
        }
        assert_eq!(message.lines().count(), 1, "{message}");
    }
    // Without FP8 nothing depends on it.
    fp8_linear(&x, weight, None, &plan)?;
    Ok(())
}
