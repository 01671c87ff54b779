//! The table itself: rows, columns, and the cells into which steps are committed.

use super::group::ReductionGroup;
use super::mark::Window;
use super::role::Role;
use crate::base::data::columns::Columns;
use crate::base::error::{Error, Result};
use crate::base::sync::{lock, read, write};
use crate::device::{AmaxCells, backend};
use candle_core::{DType, Device, Tensor};
use fp8_core::{DelayedRule, Format};
use rapidhash::v3::rapidhash_v3;
use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, RwLock, RwLockReadGuard};

/// How delayed scaling updates a row, from the last recipe with a delayed cast of it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RowRule {
    /// From the history to the scale.
    pub rule: DelayedRule,
    /// The format of the cast.
    pub format: Format,
    /// Length of the history.
    pub window: usize,
    /// The ranks to reduce the amaxes over.
    pub group: Option<Arc<dyn ReductionGroup>>,
}

impl RowRule {
    /// A rule for casts to `format` with a history of `window` entries, not reduced over ranks.
    pub fn new(rule: DelayedRule, format: Format, window: usize) -> Self {
        Self {
            rule,
            format,
            window,
            group: None,
        }
    }

    /// The same rule with another [`RowRule::group`].
    pub fn with_group(self, group: impl Into<Option<Arc<dyn ReductionGroup>>>) -> Self {
        Self {
            group: group.into(),
            ..self
        }
    }
}

/// What updates a row in steps that do not use it: other ranks may have used it, and all have to update it alike.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub enum IdleRule {
    /// The rule of the step for rows of the same role.
    #[default]
    OfTheStep,
    /// Nothing: the layer's own recipe has no delayed casts of this row.
    Never,
    /// The rule of its layer's own recipe.
    Own {
        /// The rule; the group of the step is put in.
        rule: RowRule,
        /// Whether amaxes are reduced over the group of the step.
        reduces: bool,
    },
}

/// What the host knows about a row.
#[derive(Debug, Clone)]
pub(super) struct Row {
    /// Path of the layer, a dot, the role.
    pub(super) name: Arc<str>,
    pub(super) role: Role,
    pub(super) rule: Option<RowRule>,
    pub(super) idle: IdleRule,
    /// The format that the scale was made for; `None` for the initial scale.
    pub(super) format: Option<Format>,
    /// The rule that the scale was made by; `None` for the initial scale and one from outside.
    pub(super) made_by: Option<DelayedRule>,
    /// Entries of the history in use.
    pub(super) window: usize,
    /// Number of updates that changed the scale; 0 for the initial scale.
    pub(super) generation: u64,
    /// How often the scale was set from outside (calibration, loading).
    pub(super) epoch: u64,
    pub(super) initial: Initial,
    /// The amax from calibration, until training continues.
    pub(super) calibrated_amax: Option<f32>,
    /// Stochastic roundings so far, by micro-batch.
    pub(super) draws: BTreeMap<u32, u32>,
    /// The row's tensor id in stochastic rounding.
    pub(super) id: u32,
    /// An amax was recorded since the last update, even 0.
    pub(super) touched: bool,
}

impl Row {
    /// Whether the scale was made by `rule`, as far as is known.
    pub(super) fn is_made_by(&self, rule: &DelayedRule) -> bool {
        self.made_by.as_ref().is_none_or(|made_by| made_by == rule)
    }
}

/// Whether a row's scale is still the initial one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Initial {
    Yes,
    No,
    /// It was updated on a device, and the host does not know whether there was an amax.
    Unknown,
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) rows: Vec<Row>,
    pub(super) columns: Columns,
    /// A training step was committed since gradients were last updated.
    pub(super) gradients_due: bool,
    /// A hash of the names of all rows in order, which ranks compare.
    pub(super) names_hash: u64,
    /// What [`StateTable::report`] last returned.
    pub(super) reported: Tensor,
}

/// The scaling state of one model on one device.
///
/// Layers hold [`super::Slot`]s, which refer to its rows. `fp8_recipes::prepare_fp8` creates it.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fp8_candle::state::{RowRule, StepCells};
/// use fp8_candle::{Role, Slot, StateTable};
/// use fp8_core::{DelayedRule, Format};
///
/// let table = StateTable::new(&Device::Cpu)?;
/// let row = table.add_rows(&[("fc", Role::Input)], 16)?;
///
/// // One training step that casts the input of `fc`.
/// let step = StepCells::new(&table)?;
/// let rule = RowRule::new(DelayedRule::default(), Format::E4M3, 16);
/// step.note_rule(row, Role::Input, rule);
/// step.record(row, &Tensor::new(&[3.5f32], &Device::Cpu)?, true)?;
/// table.commit(&step)?;
///
/// let scale = Slot::new(&table, row).tensors()?.quant_scale;
/// assert_eq!(scale.to_vec1::<f32>()?, [448.0 / 3.5]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
#[derive(Debug)]
pub struct StateTable {
    device: Device,
    inner: Mutex<Inner>,
    /// Amaxes of committed steps, waiting for an update.
    running: RwLock<Box<dyn AmaxCells>>,
    /// Held during an update, its reduction included: a second caller finds it done.
    updating: Mutex<()>,
    window: Mutex<Window>,
}

impl StateTable {
    /// A table without rows.
    pub fn new(device: &Device) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            device: device.clone(),
            inner: Mutex::new(Inner {
                rows: vec![],
                columns: initial_columns(0, 0, device)?,
                gradients_due: false,
                names_hash: 0,
                reported: Tensor::zeros(0, DType::U32, device)?,
            }),
            running: RwLock::new(backend(device)?.amax_cells(device, 0)?),
            updating: Mutex::new(()),
            window: Mutex::default(),
        }))
    }

    /// Adds rows with quant_scale 1 and histories of `amax_history_len` zeros, and returns the index of the first.
    ///
    /// `rows`: path of the layer and role, for example `blocks.0.fc` and [`Role::Input`].
    ///
    /// # Errors
    /// If the history is longer than [`fp8_core::MAX_HISTORY_LEN`], or the device fails.
    pub fn add_rows(&self, rows: &[(&str, Role)], amax_history_len: usize) -> Result<usize> {
        check_history_len(amax_history_len)?;
        let mut inner = self.lock();
        let first = inner.rows.len();
        let len = inner.columns.amax_history.dim(1)?.max(amax_history_len);
        let fresh = initial_columns(rows.len(), len, &self.device)?;
        let columns = append(&inner.columns, &fresh, len)?;
        let cells = backend(&self.device)?.amax_cells(&self.device, first + rows.len())?;
        {
            let mut running = write(&self.running);
            cells.merge(&running.read()?)?;
            *running = cells;
        }
        inner.columns = columns;
        let mut taken: HashSet<u32> = inner.rows.iter().map(|row| row.id).collect();
        for &(path, role) in rows {
            let name = format!("{path}.{role}");
            let mut id = id_of(&name);
            while !taken.insert(id) {
                id = id.wrapping_add(1);
            }
            let bytes = inner.names_hash.to_le_bytes();
            inner.names_hash = rapidhash_v3(&[&bytes, name.as_bytes()].concat());
            inner.rows.push(Row {
                name: name.into(),
                role,
                rule: None,
                idle: IdleRule::OfTheStep,
                format: None,
                made_by: None,
                window: amax_history_len,
                generation: 0,
                epoch: 0,
                initial: Initial::Yes,
                calibrated_amax: None,
                draws: BTreeMap::new(),
                id,
                touched: false,
            });
        }
        Ok(first)
    }

    /// Sets what updates a row in steps that do not use it. A row with its own rule does not lend that rule to other rows.
    pub fn set_idle_rule(&self, row: usize, idle: IdleRule) {
        if let Some(row) = self.lock().rows.get_mut(row) {
            row.idle = idle;
        }
    }

    /// Device of the columns.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.lock().rows.len()
    }

    /// Name of each row: path of the layer, a dot, the role.
    pub fn names(&self) -> Vec<Arc<str>> {
        let inner = self.lock();
        inner.rows.iter().map(|row| row.name.clone()).collect()
    }

    /// The current columns.
    pub fn columns(&self) -> Columns {
        self.lock().columns.clone()
    }

    /// How many casts of each row have seen Inf or NaN, U32 `[rows]`, on the device. Steps that are not committed do not
    /// count.
    pub(super) fn non_finite_counts(&self) -> Result<Tensor> {
        let counted = self.lock().columns.non_finite.clone();
        let running = self.running().read()?.non_finite;
        Ok(counted.broadcast_add(&running)?)
    }

    /// How many casts of each row had seen Inf or NaN at the last call of this function, and now, U32 `[rows]` each, on the device.
    pub fn report(&self) -> Result<(Tensor, Tensor)> {
        let now = self.non_finite_counts()?;
        let before = std::mem::replace(&mut self.lock().reported, now.clone());
        Ok((before, now))
    }

    /// Whether a training step was committed since the gradients were last updated.
    pub(super) fn gradients_due(&self) -> bool {
        self.lock().gradients_due
    }

    /// Whether amaxes of a row are reduced over ranks, by the latest rules.
    pub fn reduces(&self) -> bool {
        let inner = self.lock();
        let mut rules = inner.rows.iter().filter_map(|row| row.rule.as_ref());
        rules.any(|rule| rule.group.is_some())
    }

    // A panic while the lock is held leaves the values whole, since columns are replaced at once: a poisoned lock is still
    // usable.
    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    pub(super) fn lock_window(&self) -> MutexGuard<'_, Window> {
        lock(&self.window)
    }

    pub(super) fn updating(&self) -> MutexGuard<'_, ()> {
        lock(&self.updating)
    }

    pub(super) fn running(&self) -> RwLockReadGuard<'_, Box<dyn AmaxCells>> {
        read(&self.running)
    }
}

/// A tensor id for stochastic rounding, the same in every run and on every machine. Two models of one run have other bits
/// unless their layers have the same names.
fn id_of(name: &str) -> u32 {
    let hash = rapidhash_v3(name.as_bytes());
    (hash ^ (hash >> 32)) as u32
}

/// Scales of 1 and histories of zeros.
fn initial_columns(rows: usize, len: usize, device: &Device) -> Result<Columns> {
    // At least one row: candle cannot fill a tensor without elements on a GPU.
    let made = rows.max(1);
    let first = |x: Tensor| x.narrow(0, 0, rows);
    let one = first(Tensor::ones(made, DType::F32, device)?)?;
    let history = Tensor::zeros(made * len.max(1), DType::F32, device)?;
    Ok(Columns {
        quant_scale: one.clone(),
        dequant_scale: one,
        amax_history: history.narrow(0, 0, rows * len)?.reshape((rows, len))?,
        non_finite: first(Tensor::zeros(made, DType::U32, device)?)?,
    })
}

/// The rows of both, with histories of `len` entries.
fn append(columns: &Columns, more: &Columns, len: usize) -> Result<Columns> {
    if columns.quant_scale.elem_count() == 0 {
        return Ok(more.clone());
    }
    let cat = |a: &Tensor, b: &Tensor| Tensor::cat(&[a, b], 0);
    Ok(Columns {
        quant_scale: cat(&columns.quant_scale, &more.quant_scale)?,
        dequant_scale: cat(&columns.dequant_scale, &more.dequant_scale)?,
        amax_history: cat(&longer(&columns.amax_history, len)?, &more.amax_history)?,
        non_finite: cat(&columns.non_finite, &more.non_finite)?,
    })
}

/// A length beyond all memory must not reach the allocator, which would abort the process.
pub(super) fn check_history_len(len: usize) -> Result<()> {
    if len <= fp8_core::MAX_HISTORY_LEN {
        return Ok(());
    }
    Err(Error::HistoryLength {
        got: len,
        limit: fp8_core::MAX_HISTORY_LEN,
    })
}

/// Histories with at least `len` entries, with zeros after the oldest.
pub(super) fn longer(histories: &Tensor, len: usize) -> Result<Tensor> {
    let have = histories.dim(1)?;
    if have >= len {
        return Ok(histories.clone());
    }
    Ok(histories.pad_with_zeros(1, 0, len - have)?.contiguous()?)
}
