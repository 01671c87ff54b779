//! An optimizer step allocates nothing as large as a parameter in f32.

use candle_core::{DType, Device, Tensor};
use fp8_core::Format;
use fp8_recipes::optim::scaled::{ScaledAdamW, ScaledOptimizer, ScaledSgd};
use fp8_recipes::optim::{AdamWConfig, SgdConfig};
use fp8_scaled::{Scaled, ScaledGrads, ScaledVar};
use fp8_test_support::memory::{Counting, largest};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_step_makes_no_f32_copy() {
    const LEN: usize = 1 << 20;
    let data = Tensor::ones(LEN, DType::F16, &Device::Cpu).unwrap();
    let codes = Tensor::full(0x38u8, LEN, &Device::Cpu).unwrap();
    let var = ScaledVar::new("w", &data).unwrap();
    let sgd = SgdConfig::default().with_momentum(0.9);
    let mut adam = ScaledAdamW::from_vars(vec![var.clone()], AdamWConfig::default()).unwrap();
    let mut sgd = ScaledSgd::from_vars(vec![var.clone()], sgd).unwrap();
    let all: [&mut dyn ScaledOptimizer; 2] = [&mut adam, &mut sgd];
    for optimizer in all {
        for grad in [
            Scaled::from_parts(&data, 0.5).unwrap(),
            Scaled::from_codes(&codes, Format::E5M2, 0.5).unwrap(),
        ] {
            let mut grads = ScaledGrads::default();
            grads.insert(&var, grad);
            let (report, largest) = largest(|| optimizer.apply(&grads));
            assert_eq!(report.unwrap().updated, 1);
            // The momentum buffer, in f16, is made in the first step.
            assert!(largest <= 2 * LEN, "{largest} bytes at once");
        }
    }
    // The measurement notices such a copy.
    let (_, largest) = largest(|| data.to_dtype(DType::F32));
    assert!(largest >= 4 * LEN);
}
