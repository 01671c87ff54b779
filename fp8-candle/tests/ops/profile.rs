//! What operations report to a profile recording.

use candle_core::{DType, Device, Tensor, Var};
use fp8_candle::ops::{AttentionOptions, cross_entropy, gelu, layer_norm};
use fp8_candle::profile::{Kind, Report, enter, record};
use fp8_candle::{GemmPlan, LinearPlan, LinearWeight, Quantizer, WideNode, fp8_linear};
use fp8_core::{Format, Granularity};

type Outcome = Result<(), Box<dyn std::error::Error>>;

const ROWS: usize = 64;
const COLS: usize = 32;

fn plan() -> LinearPlan {
    let cast = || Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise);
    let gemm = || GemmPlan::new(cast(), cast());
    LinearPlan::new("layer")
        .with_output(gemm())
        .with_grad_input(gemm())
        .with_grad_weight(gemm())
}

fn all_there(report: &Report, kinds: &[Kind]) {
    for &kind in kinds {
        assert!(!report.time(kind).is_zero(), "{kind:?}:\n{report}");
    }
    for kind in Kind::all().filter(|kind| !kinds.contains(kind) && *kind != Kind::Other) {
        assert!(report.time(kind).is_zero(), "{kind:?}:\n{report}");
    }
}

/// Both passes, each recorded alone.
#[test]
fn each_pass_has_the_kinds_of_its_operations() -> Outcome {
    let device = Device::Cpu;
    let x = Var::randn(0f32, 1., (ROWS, COLS), &device)?;
    let weight = Var::randn(0f32, 1., (COLS, COLS), &device)?;
    let gain = Var::ones(COLS, DType::F32, &device)?;
    let bias = Var::zeros(COLS, DType::F32, &device)?;
    let targets = Tensor::zeros(ROWS, DType::U32, &device)?;
    let plan = plan();
    let (loss, forward) = record(|| {
        let y = gelu(&layer_norm(&x, &gain, Some(&bias), 1e-5)?)?;
        let weight = LinearWeight::HighPrecision(&weight, None);
        cross_entropy(&fp8_linear(&y, weight, Some(&bias), &plan)?, &targets)
    });
    let own = [
        Kind::Cast,
        Kind::Gemm,
        Kind::Norm,
        Kind::Activation,
        Kind::Loss,
    ];
    all_there(&forward, &own);
    let loss = loss?;
    let (grads, backward) = record(|| {
        let _pass = enter(Kind::Candle);
        loss.backward()
    });
    assert!(grads?.get(&weight).is_some());
    let [cast, gemm, norm, activation, loss] = own;
    all_there(
        &backward,
        &[cast, gemm, norm, activation, loss, Kind::Candle],
    );
    Ok(())
}

/// Also for a wide node, whose backward pass calls the kernels directly.
#[test]
fn operations_of_a_wide_node_are_recorded() -> Outcome {
    let device = Device::Cpu;
    let x = Var::randn(0f32, 1., (2, ROWS, 2, COLS), &device)?;
    let weight = Var::ones(COLS, DType::F32, &device)?;
    let (y, forward) = record(|| {
        let mut node = WideNode::new("node");
        let x = node.argument(&x);
        let x = node.rms_norm(&x, &weight, 1e-5)?;
        let y = node.attention([&x, &x, &x], &AttentionOptions::default())?;
        node.finish(y)
    });
    all_there(&forward, &[Kind::Norm, Kind::Attention]);
    let y = y?;
    let (grads, backward) = record(|| y.sum_all()?.backward());
    assert!(grads?.get(&weight).is_some());
    all_there(&backward, &[Kind::Norm, Kind::Attention]);
    Ok(())
}
