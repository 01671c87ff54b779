//! Delayed scaling: a tensor is cast with a scale made from the amaxes of earlier steps.
//!
//! A [`DelayedSlot`] is the state of one tensor role of one layer. Its numbers are tensors on the layer's device;
//! casting, recording and updating never copy them to the host.
//!
//! Source: "FP8 Formats for Deep Learning" (arXiv:2209.05433) and Transformer Engine's `DelayedScaling`, with one
//! deliberate difference: a non-finite amax is counted, never stored.

use crate::device::{Backend, backend};
use crate::error::Error;
use candle_core::{DType, Device, Result, Tensor};
use fp8_core::{DelayedRule, Format, static_dequant_scale};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The numbers of a slot, on its device.
#[derive(Debug, Clone)]
pub struct SlotTensors {
    /// f32 `[1]`, multiplies before the cast.
    pub quant_scale: Tensor,
    /// f32 `[1]`, multiplies after the decode.
    pub dequant_scale: Tensor,
    /// f32 `[amax_history_len]`, newest first.
    pub amax_history: Tensor,
    /// U32 `[1]`, how many recorded amaxes were Inf or NaN.
    pub non_finite: Tensor,
}

#[derive(Debug)]
struct State {
    tensors: SlotTensors,
    /// Amaxes recorded since the last update.
    pending: Vec<Tensor>,
    /// Amaxes recorded under calibration, merged to one value at each close.
    calibration: Vec<Tensor>,
    calibrated: bool,
    /// Updates that changed the scale; 0 while the scale is the initial one.
    generation: u64,
    /// Scales set from outside (calibration, loading).
    epoch: u64,
    /// Whether the scale is still the initial one.
    initial: bool,
}

/// Delayed-scaling state of one tensor role (input, weight or grad_output) of one layer.
#[derive(Debug)]
pub struct DelayedSlot {
    name: String,
    device: Device,
    state: Mutex<State>,
}

impl DelayedSlot {
    /// A slot with quant_scale 1 and a history of `amax_history_len` zeros.
    ///
    /// `name` stands in error messages, for example `blocks.0.fc.input`.
    pub fn new(name: impl Into<String>, amax_history_len: usize, device: &Device) -> Result<Self> {
        let one = Tensor::ones(1, DType::F32, device)?;
        let tensors = SlotTensors {
            quant_scale: one.clone(),
            dequant_scale: one,
            amax_history: Tensor::zeros(amax_history_len, DType::F32, device)?,
            non_finite: Tensor::zeros(1, DType::U32, device)?,
        };
        Ok(Self {
            name: name.into(),
            device: device.clone(),
            state: Mutex::new(State {
                tensors,
                pending: vec![],
                calibration: vec![],
                calibrated: false,
                generation: 0,
                epoch: 0,
                initial: true,
            }),
        })
    }

    // A panic while the lock is held leaves whole values behind (each field is replaced at once), so a poisoned
    // lock is still good.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Name given at construction.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Device of the state.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The current numbers; the tensors are never changed in place.
    pub fn tensors(&self) -> SlotTensors {
        self.lock().tensors.clone()
    }

    /// How often an update has set the scale, and how often it was set from outside.
    pub fn version(&self) -> (u64, u64) {
        let state = self.lock();
        (state.generation, state.epoch)
    }

    /// Whether the slot holds a static scale from calibration.
    pub fn is_calibrated(&self) -> bool {
        self.lock().calibrated
    }

    /// How many recorded amaxes were Inf or NaN. Copies one number to the host.
    pub fn non_finite_count(&self) -> Result<u32> {
        let count = self.lock().tensors.non_finite.clone();
        Ok(count.to_vec1::<u32>()?.iter().sum())
    }

    /// Keeps the newest `len` amaxes, padding a shorter history with zeros.
    pub fn set_history_len(&self, len: usize) -> Result<()> {
        let mut state = self.lock();
        let history = &state.tensors.amax_history;
        let have = history.dim(0)?;
        if have != len {
            state.tensors.amax_history = if len < have {
                history.narrow(0, 0, len)?.copy()?
            } else {
                history.pad_with_zeros(0, 0, len - have)?
            };
        }
        Ok(())
    }

    /// Notes an amax (f32 `[1]`) of the step in progress. Several merge by maximum.
    pub fn record(&self, amax: Tensor) {
        self.lock().pending.push(amax);
    }

    /// Whether amaxes of a step wait for an update.
    pub fn has_pending(&self) -> bool {
        !self.lock().pending.is_empty()
    }

    /// Drops the amaxes of a step or a calibration that did not happen; says whether the step had any.
    pub fn discard_pending(&self) -> bool {
        let mut state = self.lock();
        let had_any = !state.pending.is_empty();
        state.pending.clear();
        // The first one is what earlier calibrations came to.
        let keep = usize::from(state.calibrated);
        state.calibration.truncate(keep);
        had_any
    }

    /// Notes an amax (f32 `[1]`) for calibration.
    pub fn record_calibration(&self, amax: Tensor) {
        self.lock().calibration.push(amax);
    }

    /// Whether no scale was set yet: neither by an update nor from outside.
    pub(crate) fn is_initial(&self) -> bool {
        self.lock().initial
    }

    /// Takes the first amax as the scale at once, if no scale was set yet (`initial: FirstBatch`). An amax that makes
    /// no scale (0, Inf, NaN) is not the first; a GPU tells whether it was by a copy of one number, which ends with the
    /// first.
    pub(crate) fn adopt_first(
        &self,
        rule: &DelayedRule,
        format: Format,
        amax: &Tensor,
    ) -> Result<()> {
        let mut state = self.lock();
        if !state.initial {
            return Ok(());
        }
        let backend = backend(&self.device)?;
        let none = Tensor::zeros(1, DType::U32, &self.device)?;
        let updated = backend.update_delayed(&[(&state.tensors, format)], rule, amax, &none)?;
        let Some(updated) = updated.into_iter().next() else {
            return Ok(());
        };
        let made_a_scale = if backend.knows_unchanged_slots() {
            is_new(&updated, &state.tensors)
        } else {
            // An unchanged history means that nothing was taken.
            let newest = updated.amax_history.narrow(0, 0, 1)?;
            newest.to_vec1::<f32>()? != [0.]
        };
        if made_a_scale {
            // The history waits for the regular update, which will store this amax.
            state.tensors.quant_scale = updated.quant_scale;
            state.tensors.dequant_scale = updated.dequant_scale;
            state.generation = 1;
            state.initial = false;
        }
        Ok(())
    }

    /// Sets a static scale, `dequant_scale = amax / MAX`, from the amaxes recorded for calibration since the last call
    /// and, with `with_earlier`, from those of earlier calibrations. Does nothing if none was recorded.
    ///
    /// # Errors
    /// If an amax is Inf or NaN; the recorded amaxes are dropped then and the scale stays.
    pub fn finish_calibration(&self, format: Format, with_earlier: bool) -> Result<()> {
        let mut state = self.lock();
        let mut recorded = std::mem::take(&mut state.calibration);
        if recorded.is_empty() {
            return Ok(());
        }
        // The first one is what earlier calibrations came to.
        if state.calibrated && !with_earlier && recorded.len() > 1 {
            recorded.remove(0);
        }
        let mut amax = 0f32;
        for value in &recorded {
            for value in value.flatten_all()?.to_vec1::<f32>()? {
                amax = if value.is_finite() && amax.is_finite() {
                    amax.max(value)
                } else {
                    f32::NAN
                };
            }
        }
        let dequant_scale =
            static_dequant_scale(amax, format).map_err(|source| Error::Calibration {
                slot: self.name.clone(),
                source,
            })?;
        state.tensors.dequant_scale = Tensor::from_slice(&[dequant_scale], 1, &self.device)?;
        state.tensors.quant_scale =
            Tensor::from_slice(&[fp8_core::reciprocal(dequant_scale)], 1, &self.device)?;
        state
            .calibration
            .push(Tensor::from_slice(&[amax], 1, &self.device)?);
        state.calibrated = true;
        state.initial = false;
        state.epoch += 1;
        Ok(())
    }

    /// Forgets the amaxes of earlier calibrations; the scale stays until the next one ends.
    pub fn reset_calibration(&self) {
        let mut state = self.lock();
        state.calibration.clear();
        state.calibrated = false;
    }

    /// Puts saved numbers in place: quant_scale f32 `[1]`, amax_history f32 `[len]`.
    ///
    /// # Errors
    /// If a shape or dtype is wrong.
    pub fn restore(&self, quant_scale: &Tensor, amax_history: &Tensor) -> Result<()> {
        for (what, tensor, rank_one) in [
            ("quant_scale", quant_scale, quant_scale.dims() == [1]),
            ("amax_history", amax_history, amax_history.rank() == 1),
        ] {
            if tensor.dtype() != DType::F32 {
                return Err(Error::DType {
                    op: "restore delayed state",
                    what,
                    expected: "f32",
                    got: tensor.dtype(),
                }
                .into());
            }
            if !rank_one {
                return Err(Error::Shape {
                    op: "restore delayed state",
                    what,
                    expected: "one dimension (quant_scale: [1])".into(),
                    got: tensor.dims().to_vec(),
                }
                .into());
            }
        }
        let quant_scale = quant_scale.to_device(&self.device)?;
        let dequant_scale = backend(&self.device)?.reciprocal(&quant_scale)?;
        let used = amax_history
            .to_vec1::<f32>()?
            .iter()
            .any(|&amax| amax != 0.);
        let initial = !used && quant_scale.to_vec1::<f32>()? == [1.];
        let mut state = self.lock();
        state.tensors = SlotTensors {
            quant_scale,
            dequant_scale,
            amax_history: amax_history.to_device(&self.device)?,
            non_finite: state.tensors.non_finite.clone(),
        };
        state.pending.clear();
        state.calibration.clear();
        state.calibrated = false;
        state.generation = used.into();
        state.initial = initial;
        state.epoch += 1;
        Ok(())
    }
}

/// Whether an update made new numbers, as far as the backend knows without a copy to the host.
fn is_new(updated: &SlotTensors, before: &SlotTensors) -> bool {
    updated.quant_scale.id() != before.quant_scale.id()
}

/// Maximum over the ranks of a job, elementwise over an f32 vector.
pub type AmaxReduce<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;

/// Updates every slot that recorded something since its last update; the others keep history and scale.
///
/// All slots of one device are updated together: the amaxes are merged into one vector, reduced over the ranks by
/// `reduce`, and applied. Zero amaxes leave a slot as it was; non-finite ones are counted and dropped.
pub fn update_slots(
    slots: &[(Arc<DelayedSlot>, Format)],
    rule: &DelayedRule,
    amax_history_len: usize,
    reduce: AmaxReduce<'_>,
) -> Result<()> {
    let mut todo: Vec<&(Arc<DelayedSlot>, Format)> = vec![];
    for slot in slots {
        let pending = !slot.0.lock().pending.is_empty();
        // A slot named twice would take its amax twice.
        if pending && !todo.iter().any(|other| Arc::ptr_eq(&other.0, &slot.0)) {
            todo.push(slot);
        }
    }
    while let Some(first) = todo.first() {
        let device = first.0.device.clone();
        let (here, elsewhere): (Vec<_>, Vec<_>) = todo
            .into_iter()
            .partition(|slot| slot.0.device.same_device(&device));
        todo = elsewhere;
        update_on_device(
            backend(&device)?,
            &device,
            &here,
            rule,
            amax_history_len,
            reduce,
        )?;
    }
    Ok(())
}

fn update_on_device(
    backend: &dyn Backend,
    device: &Device,
    slots: &[&(Arc<DelayedSlot>, Format)],
    rule: &DelayedRule,
    amax_history_len: usize,
    reduce: AmaxReduce<'_>,
) -> Result<()> {
    let mut pending = Vec::with_capacity(slots.len());
    let mut tensors = Vec::with_capacity(slots.len());
    for (slot, _) in slots {
        slot.set_history_len(amax_history_len)?;
        let mut state = slot.lock();
        pending.push(std::mem::take(&mut state.pending));
        tensors.push(state.tensors.clone());
    }
    let pending: Vec<&[Tensor]> = pending.iter().map(Vec::as_slice).collect();
    let (amaxes, non_finite) = backend.merge_amaxes(&pending, device)?;
    let amaxes = reduce(&amaxes)?;
    let formats = slots.iter().map(|(_, format)| *format);
    let with_formats: Vec<_> = tensors.iter().zip(formats).collect();
    let updated = backend.update_delayed(&with_formats, rule, &amaxes, &non_finite)?;
    for ((slot, _), updated) in slots.iter().zip(updated) {
        let mut state = slot.lock();
        if is_new(&updated, &state.tensors) {
            state.generation += 1;
            // Where it is not known whether this update did something, the first amax is adopted by `adopt_first` alone.
            state.initial &= !backend.knows_unchanged_slots();
            // The scale is no longer the one that calibration has set.
            state.calibrated = false;
            state.calibration.clear();
        }
        state.tensors = updated;
    }
    Ok(())
}
