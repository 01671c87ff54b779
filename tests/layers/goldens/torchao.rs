//! The linear layers of torchao.

use super::*;
use candle_core::{DType, Result, Tensor, Var};
use fp8::config::Operand;
use fp8::fp8_candle::Quantizer;
use fp8::fp8_core::{Contraction, Format, Granularity};
use fp8::{Fp8LinearConfig, RecipeName};
use fp8_test_support::{
    Model, Step, assert_same, assert_within, flat64, golden, largest, rounding, sqnr, ulp,
};
use serde_json::Value;

/// Each of torchao's casts: its name, which of our operands it is, its tensor, and the dimension that the GEMM contracts.
const TORCHAO_CASTS: [(&str, Operand, &str, Contraction); 6] = [
    ("x_fwd", Operand::Input, "x", Contraction::Cols),
    ("w_fwd", Operand::Weight, "w", Contraction::Cols),
    ("g_dgrad", Operand::GradOutput, "g", Contraction::Cols),
    (
        "w_dgrad",
        Operand::WeightForGradInput,
        "w",
        Contraction::Rows,
    ),
    (
        "g_wgrad",
        Operand::GradOutputForGradWeight,
        "g",
        Contraction::Rows,
    ),
    (
        "x_wgrad",
        Operand::InputForGradWeight,
        "x",
        Contraction::Rows,
    ),
];

struct TorchaoCase<'a> {
    key: &'a str,
    info: &'a Value,
    tensors: &'a Tensors,
    config: Fp8LinearConfig,
}

impl<'a> TorchaoCase<'a> {
    fn new(info: &'a Value, tensors: &'a Tensors) -> Self {
        let name: RecipeName = text(info, "recipe").parse().unwrap();
        let config = Fp8LinearConfig::from_recipe_name(name)
            .with_round_scales_to_power_of_two(info["pow2"] == true);
        Self {
            key: text(info, "key"),
            info,
            tensors,
            config,
        }
    }

    fn input(&self, name: &str) -> &Tensor {
        &self.tensors[&format!("{}.{name}", text(self.info, "inputs"))]
    }

    fn output(&self, name: &str) -> &Tensor {
        &self.tensors[&format!("{}.{name}", self.key)]
    }

    /// One step of our layer.
    fn run(&self, emulate: bool) -> Result<Step> {
        // Prepared with zeros, because a weight that contains NaN or Inf would be skipped.
        let (w, b) = (self.input("w"), self.input("b"));
        let (weight, bias) = (Var::from_tensor(&w.zeros_like()?)?, Var::from_tensor(b)?);
        let model = Model::prepared(&weight, Some(&bias));
        weight.set(w)?;
        let x = Var::from_tensor(self.input("x"))?;
        let step = model.step(
            &x,
            self.input("g"),
            self.config.clone().with_emulate(emulate),
        )?;
        let expected = match text(self.info, "recipe") {
            "tensorwise" => 3,
            "rowwise" => 6,
            _ => 4,
        };
        assert_eq!(model.casts(), expected, "{}: tensors cast", self.key);
        Ok(step)
    }

    fn check_step(&self, step: &Step, emulate: bool) {
        let bias = flat64(self.input("b"));
        for (name, ours) in [
            ("y", &step.y),
            ("gx", step.grad_x()),
            ("gw", step.grad_weight()),
            ("gb", step.grad_bias()),
        ] {
            let theirs = self.output(name);
            let terms = self.input("w").dims().iter().chain(self.input("x").dims());
            let terms = *terms.max().expect("dimensions");
            let summation = rounding::two_products(&[terms]) * largest(theirs);
            let what = format!("{} emulate={emulate} {name}", self.key);
            assert_within(&what, ours, theirs, |at, value| {
                // The output is rounded twice, before and after the bias is added.
                let before = if name == "y" {
                    bias[at % bias.len()].abs()
                } else {
                    0.
                };
                // bf16 instructions flush subnormals: torch uses them in its matmul, candle where it adds up gradients.
                let flushed = if ours.dtype() == DType::BF16 {
                    f32::MIN_POSITIVE.into()
                } else {
                    0.
                };
                summation + ulp(ours.dtype(), value.abs() + before) + flushed
            });
        }
    }

    /// A few cases were also run through `torch._scaled_mm`, which rounds rowwise products to bf16. Returns the number of
    /// compared tensors.
    fn check_scaled_mm(&self, step: &Step) -> usize {
        let mut compared = 0;
        for (name, ours) in [
            ("y", &step.y),
            ("gx", step.grad_x()),
            ("gw", step.grad_weight()),
        ] {
            if let Some(theirs) = self.tensors.get(&format!("{}.scaledmm.{name}", self.key)) {
                let got = sqnr(theirs, ours);
                assert!(got >= 48., "{} {name}: {got:.1} dB to _scaled_mm", self.key);
                compared += 1;
            }
        }
        compared
    }

    /// Returns the number of compared codes.
    fn check_casts(&self) -> Result<usize> {
        let config = self.config.resolve().unwrap();
        let mut codes = 0;
        for (name, operand, tensor, contraction) in TORCHAO_CASTS {
            let what = format!("{} {name}", self.key);
            let info = &self.info["operands"][name];
            let cast = config.cast(operand);
            if info.is_null() {
                assert!(cast.is_disabled(), "{what}: {}", cast.short());
                continue;
            }
            let axis = info["axiswise_dim"].as_i64();
            let granularity = if axis.is_some() {
                Granularity::Rowwise
            } else {
                Granularity::Tensorwise
            };
            assert_eq!(cast.granularity, granularity, "{what}");
            let format: Format = text(info, "dtype").parse().unwrap();
            assert_eq!(cast.format, Some(format), "{what}");

            let quantizer = Quantizer::dynamic(format, granularity)
                .with_power_of_two(self.config.round_scales_to_power_of_two);
            let ours = quantizer.quantize(self.input(tensor), contraction)?;
            // torchao casts the transposed weight; x and g may have two leading dimensions.
            let as_theirs = |ours: &Tensor, theirs: &Tensor| {
                let ours = if tensor == "w" {
                    ours.t()?
                } else {
                    ours.clone()
                };
                ours.reshape(theirs.shape())
            };
            let theirs = self.output(&format!("scale.{name}"));
            let scale = as_theirs(&ours.quant_scale, theirs)?;
            assert_same(&format!("scale of {what}"), &scale, theirs);
            if let Some(theirs) = self.tensors.get(&format!("{}.codes.{name}", self.key)) {
                let ours = as_theirs(ours.tensor.codes(), theirs)?
                    .flatten_all()?
                    .to_vec1::<u8>()?;
                for (at, (ours, theirs)) in ours
                    .into_iter()
                    .zip(theirs.flatten_all()?.to_vec1::<u8>()?)
                    .enumerate()
                {
                    let same = ours == theirs || format.is_nan(ours) && format.is_nan(theirs);
                    assert!(
                        same,
                        "code of {what} at {at}: {ours:#04x}, expected {theirs:#04x}"
                    );
                    codes += 1;
                }
            }
        }
        Ok(codes)
    }
}

fn torchao(check: impl Fn(&TorchaoCase<'_>) -> Result<()>) -> Result<()> {
    let tensors = load_tensors("torchao_float8linear.safetensors");
    let json = std::fs::read(golden("torchao_float8linear.json")).unwrap();
    let index: Value = serde_json::from_slice(&json).unwrap();
    let cases = index["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 112);
    cases
        .iter()
        .try_for_each(|info| check(&TorchaoCase::new(info, &tensors)))
}

#[test]
fn torchao_layers() -> Result<()> {
    let scaled_mm = std::cell::Cell::new(0);
    torchao(|case| {
        for emulate in [false, true] {
            let step = case.run(emulate)?;
            case.check_step(&step, emulate);
            scaled_mm.set(scaled_mm.get() + case.check_scaled_mm(&step));
        }
        Ok(())
    })?;
    assert_eq!(
        scaled_mm.get(),
        2 * 8 * 3,
        "8 cases, both paths, y, gx and gw"
    );
    Ok(())
}

#[test]
fn torchao_scales_and_codes() -> Result<()> {
    let codes = std::cell::Cell::new(0);
    torchao(|case| {
        codes.set(codes.get() + case.check_casts()?);
        Ok(())
    })?;
    assert!(
        codes.get() > 50_000,
        "only {} codes are stored",
        codes.get()
    );
    Ok(())
}
