//! One row of a scaling-state table, and the step that its casts record into.

#![allow(dead_code, reason = "each test binary uses its own part")]

use candle_core::Tensor;
use fp8_candle::state::{RowRule, StepCells};
use fp8_candle::{AmaxRecorder, FirstScale, Quantizer, Role, ScaleSource, Slot};
use fp8_core::{Cast, DelayedRule, Format, Granularity};
use fp8_test_support::{device, flat};
use std::cell::RefCell;
use std::sync::Arc;

pub fn tensor(values: &[f32]) -> Tensor {
    Tensor::from_slice(values, (1, values.len()), &device()).unwrap()
}

pub fn codes(q: &fp8_candle::Fp8Tensor) -> Vec<u8> {
    q.codes().flatten_all().unwrap().to_vec1().unwrap()
}

pub fn quantizer(format: Format, source: ScaleSource) -> Quantizer {
    Quantizer::new(Cast::new(format), Granularity::Tensorwise, source)
}

/// A table of one row, updated by the default rule.
pub struct Row {
    pub slot: Slot,
    pub rule: RowRule,
    role: Role,
    step: RefCell<Arc<StepCells>>,
}

impl Row {
    /// A row of layer `path` with a history of `len`, cast to E4M3.
    pub fn new(path: &str, role: Role, len: usize) -> Self {
        let slot = Slot::alone(path, role, len, &device()).unwrap();
        let step = RefCell::new(StepCells::new(slot.table()).unwrap());
        let rule = RowRule::new(DelayedRule::default(), Format::E4M3, len);
        Self {
            slot,
            rule,
            role,
            step,
        }
    }

    pub fn step(&self) -> Arc<StepCells> {
        self.step.borrow().clone()
    }

    fn delayed(&self, first: FirstScale, record: bool) -> Quantizer {
        let source = ScaleSource::Delayed {
            slot: self.slot.clone(),
            rule: self.rule.rule.clone(),
            first,
        };
        let recorder = AmaxRecorder::new(self.step(), self.slot.row(), record);
        quantizer(self.rule.format, source).with_recorder(recorder)
    }

    /// The delayed cast of training.
    pub fn train(&self) -> Quantizer {
        self.delayed(FirstScale::One, true)
    }

    /// The delayed cast of evaluation.
    pub fn eval(&self) -> Quantizer {
        self.delayed(FirstScale::OwnAmax, false)
    }

    /// The delayed cast of training that starts from the tensor's own amax.
    pub fn first_batch(&self) -> Quantizer {
        self.delayed(FirstScale::OwnAmax, true)
    }

    pub fn record(&self, amax: f32) {
        let amax = Tensor::from_slice(&[amax], 1, &device()).unwrap();
        self.step().record(self.slot.row(), &amax, true).unwrap();
    }

    /// Ends the step; later records of its casts go to the table.
    pub fn end(&self) -> fp8_candle::Result<()> {
        let step = self.step.replace(StepCells::new(self.slot.table())?);
        step.note_rule(self.slot.row(), self.role, self.rule.clone());
        self.slot.table().commit(&step)?;
        self.slot.table().update_gradients()
    }

    pub fn update(&self) {
        self.end().unwrap();
    }

    pub fn scale(&self) -> f32 {
        flat(&self.slot.tensors().unwrap().quant_scale)[0]
    }

    pub fn dequant_scale(&self) -> f32 {
        flat(&self.slot.tensors().unwrap().dequant_scale)[0]
    }

    pub fn history(&self) -> Vec<f32> {
        flat(&self.slot.tensors().unwrap().amax_history)
    }
}
