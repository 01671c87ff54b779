//! State of a table that outlives a recorded step: every run must find it at the same addresses.

use super::table::StateTable;
use crate::base::data::columns::Columns;
use crate::base::error::Result;
use crate::device::cuda::recording::copy_into;
use candle_core::Tensor;
use std::sync::Arc;

/// The tensors of a table before a step.
pub(crate) struct Lasting {
    table: Arc<StateTable>,
    columns: Columns,
    reported: Tensor,
    /// The counts when the latest step began.
    began: Option<Tensor>,
    /// Those at its end, which its mark holds until the recorded step drops that.
    ended: Tensor,
}

impl Lasting {
    /// Moves the tensors of `table` to memory of their own, which nothing else shares.
    pub(crate) fn of(table: &Arc<StateTable>) -> Result<Self> {
        let (now, reported) = {
            let inner = table.lock();
            (inner.columns.clone(), inner.reported.clone())
        };
        let began = table.lock_window().began.clone();
        let lasting = Self {
            table: table.clone(),
            columns: Columns {
                quant_scale: now.quant_scale.copy()?,
                dequant_scale: now.dequant_scale.copy()?,
                amax_history: now.amax_history.copy()?,
                non_finite: now.non_finite.copy()?,
            },
            reported: reported.copy()?,
            began: began.map(|began| began.copy()).transpose()?,
            ended: table.non_finite_counts()?,
        };
        lasting.restore();
        // Stores the previous step's end now: the recorded step would store it in a tensor that weight caches keep alive.
        let _ = table.mark().ended.set(lasting.ended.clone());
        Ok(lasting)
    }

    /// Copies what the step has made to where it found its state, and lets the table have that. The tensor that it returns must not be
    /// dropped before the recording ends.
    pub(crate) fn put_back(self) -> Result<Tensor> {
        let pairs = {
            let inner = self.table.lock();
            let now = inner.columns.clone();
            [
                (now.quant_scale, &self.columns.quant_scale),
                (now.dequant_scale, &self.columns.dequant_scale),
                (now.amax_history, &self.columns.amax_history),
                (now.non_finite, &self.columns.non_finite),
                (inner.reported.clone(), &self.reported),
            ]
        };
        let began = self.table.lock_window().began.clone();
        for (now, then) in pairs.into_iter().chain(began.zip(self.began.as_ref())) {
            if now.id() != then.id() {
                copy_into(&now.contiguous()?, then)?;
            }
        }
        Ok(self.ended.clone())
    }

    fn restore(&self) {
        {
            let mut inner = self.table.lock();
            inner.columns = self.columns.clone();
            inner.reported = self.reported.clone();
        }
        self.table.lock_window().began = self.began.clone();
    }
}

/// After [`Lasting::put_back`] the old tensors have the new values; a step that failed has made nothing that the table may keep.
impl Drop for Lasting {
    fn drop(&mut self) {
        self.restore();
    }
}
