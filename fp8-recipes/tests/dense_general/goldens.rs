//! Results, gradients and FP8 state of flax: `tests/golden/dense_general.py` made them.

use candle_core::{DType, Device, Module, Tensor, Var, safetensors};
use fp8_recipes::config::DelayedScaling;
use fp8_recipes::nn::{DenseConfig, DenseGeneral};
use fp8_recipes::{PrepareOptions, Role, end_step, prepare_fp8, with_fp8};
use fp8_test_support::{assert_same, assert_within, device, golden, largest, rounding};
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};

type Done = Result<(), Box<dyn std::error::Error>>;

#[derive(Deserialize)]
struct Case {
    features: Vec<usize>,
    axis: Vec<isize>,
    batch_axis: Vec<isize>,
    bias: bool,
    fp8: bool,
}

impl Case {
    fn config(&self) -> DenseConfig {
        DenseConfig::new(self.features.clone())
            .with_axis(self.axis.clone())
            .with_batch_axis(self.batch_axis.clone())
            .with_bias(self.bias)
    }
}

struct Goldens {
    cases: BTreeMap<String, Case>,
    tensors: HashMap<String, Tensor>,
}

impl Goldens {
    fn load() -> Result<Self, Box<dyn std::error::Error>> {
        let bytes = std::fs::read(golden("dense_general.safetensors"))?;
        let (_, header) = ::safetensors::SafeTensors::read_metadata(&bytes)?;
        let metadata = header.metadata().as_ref().ok_or("no metadata")?;
        Ok(Self {
            cases: serde_json::from_str(&metadata["cases"])?,
            tensors: safetensors::load_buffer(&bytes, &Device::Cpu)?,
        })
    }

    fn get(&self, case: &str, name: &str) -> Result<Tensor, Box<dyn std::error::Error>> {
        let name = format!("{case}.{name}");
        let tensor = self.tensors.get(&name).ok_or(name)?;
        Ok(tensor.to_dtype(DType::F32)?.to_device(&device())?)
    }

    fn var(&self, case: &str, name: &str) -> Result<Var, Box<dyn std::error::Error>> {
        Ok(Var::from_tensor(&self.get(case, name)?)?)
    }
}

/// Equal but for the order of sums.
#[track_caller]
fn close(case: &str, ours: &Tensor, theirs: &Tensor, terms: usize) {
    assert_eq!(ours.dims(), theirs.dims(), "{case}");
    let bound = rounding::two_products(&[terms]) * largest(theirs);
    assert_within(case, ours, theirs, |_, _| bound);
}

#[test]
fn results_and_gradients_are_those_of_flax() -> Done {
    let goldens = Goldens::load()?;
    let plain = goldens.cases.iter().filter(|(_, case)| !case.fp8);
    let mut count = 0;
    for (name, case) in plain {
        let (x, kernel) = (goldens.var(name, "x")?, goldens.var(name, "kernel")?);
        let bias = case.bias.then(|| goldens.var(name, "bias")).transpose()?;
        let held = bias.as_ref().map(|bias| bias.as_tensor().clone());
        let layer = DenseGeneral::new(kernel.as_tensor().clone(), held, case.config())?;
        let y = layer.forward(&x)?;
        let grads = (&y * goldens.get(name, "cotangent")?)?
            .sum_all()?
            .backward()?;
        let terms = x.elem_count();
        close(&format!("{name}: y"), &y, &goldens.get(name, "y")?, terms);
        let vars = [
            ("x", Some(&x)),
            ("kernel", Some(&kernel)),
            ("bias", bias.as_ref()),
        ];
        for (own, var) in vars {
            if let Some(var) = var {
                let (ours, theirs) = (grads.get(var).ok_or("no gradient")?, format!("grad_{own}"));
                close(
                    &format!("{name}: {theirs}"),
                    ours,
                    &goldens.get(name, &theirs)?,
                    terms,
                );
            }
        }
        count += 1;
    }
    assert_eq!(count, 14);
    Ok(())
}

/// flax makes a scale at the start of a step from the history before it, and stores it; here it is made at the end of the step before.
#[test]
fn fp8_state_is_that_of_flax() -> Done {
    let goldens = Goldens::load()?;
    let fp8 = goldens.cases.iter().filter(|(_, case)| case.fp8);
    let mut count = 0;
    for (name, case) in fp8 {
        let first = format!("{name}.0");
        let kernel = goldens.var(&first, "kernel")?;
        let bias = goldens.var(&first, "bias")?;
        let (held, bias_held) = (kernel.as_tensor().clone(), bias.as_tensor().clone());
        let layer = DenseGeneral::new(held, Some(bias_held), case.config())?.with_path("fc");
        let report = prepare_fp8(&layer, &PrepareOptions::default())?;
        assert_eq!(report.converted(), 1, "{report}");
        let state = layer.fp8_state().ok_or("no state")?;
        let slots = [Role::Input, Role::Weight, Role::GradOutput].map(|role| state.slot(role));
        let recipe = DelayedScaling::default().with_amax_history_len(2);
        for step in 0..3 {
            let at = format!("{name}.{step}");
            kernel.set(&goldens.get(&at, "kernel")?)?;
            bias.set(&goldens.get(&at, "bias")?)?;
            let theirs = goldens.get(&at, "state")?;
            for (row, slot) in slots.iter().enumerate() {
                let scale = slot.ok_or("no slot")?.tensors()?.dequant_scale;
                let expected = theirs.get(row)?.narrow(0, 0, 1)?;
                assert_same(&format!("{at}: scale {row}"), &scale, &expected);
            }
            let x = goldens.var(&at, "x")?;
            let y = with_fp8(recipe.clone(), || layer.forward(&x))?;
            let product = (&y * goldens.get(&at, "cotangent")?)?.sum_all()?;
            let grads = fp8_recipes::backward(&product)?;
            end_step()?;
            for (row, slot) in slots.iter().enumerate() {
                let history = slot.ok_or("no slot")?.tensors()?.amax_history;
                let expected = theirs.get(row)?.narrow(0, 1, 2)?;
                assert_same(&format!("{at}: history {row}"), &history, &expected);
            }
            let terms = x.elem_count();
            close(&format!("{at}: y"), &y, &goldens.get(&at, "y")?, terms);
            for (own, var) in [("x", &x), ("kernel", &kernel), ("bias", &bias)] {
                let (ours, theirs) = (grads.get(var).ok_or("no gradient")?, format!("grad_{own}"));
                close(
                    &format!("{at}: {theirs}"),
                    ours,
                    &goldens.get(&at, &theirs)?,
                    terms,
                );
            }
        }
        count += 1;
    }
    assert_eq!(count, 4);
    Ok(())
}
