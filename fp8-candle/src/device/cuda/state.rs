//! The scaling-state table on a GPU. No amax and no scale is copied to the host.

use super::constants::constant;
use super::gpu::{Gpu, aligned, with_pointers};
use super::kernels::{Arg, Shape, args, kernels};
use super::launch::launch;
use crate::base::data::columns::{Columns, Recorded, RowUpdate, Updated};
use crate::base::error::{Error, Result, internal};
use crate::base::sync::lock;
use crate::device::backend::{AmaxCells, Backend};
use candle_core::{DType, Device, Tensor};
use fp8_core::{AmaxCompute, Format, ScaleRounding};
use std::sync::{Mutex, MutexGuard};

kernels! { STATE_KERNELS in STATE;
    RECORD_AMAX = one "fp8_record_amax"("plppi");
    GATHER_AMAXES = one "fp8_gather_amaxes"("plp");
    TAKE_CELLS = one "fp8_take_cells"("pppppl");
    MERGE_CELLS = one "fp8_merge_cells"("ppppl");
    UPDATE_COLUMNS = one "fp8_update_columns"("pppppppppppppl");
}

/// Running amaxes in device memory.
#[derive(Debug)]
pub(super) struct CudaCells {
    rows: usize,
    device: Device,
    /// f32 and U32 `[rows]`, changed in place by kernels. Allocated when something is first recorded.
    cells: Mutex<Option<(Tensor, Tensor)>>,
}

impl CudaCells {
    pub(super) fn new(device: &Device, rows: usize) -> Result<Self> {
        Ok(Self {
            rows,
            device: device.clone(),
            cells: Mutex::new(None),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Option<(Tensor, Tensor)>> {
        lock(&self.cells)
    }

    fn zeros(&self) -> Result<(Tensor, Tensor)> {
        let gpu = Gpu::new(&self.device)?;
        Ok((
            gpu.zero_tensor(DType::F32, self.rows)?,
            gpu.zero_tensor(DType::U32, self.rows)?,
        ))
    }

    fn made<'a>(&self, cells: &'a mut Option<(Tensor, Tensor)>) -> Result<&'a (Tensor, Tensor)> {
        if cells.is_none() {
            *cells = Some(self.zeros()?);
        }
        match cells {
            Some(cells) => Ok(cells),
            None => internal!("amax cells that were just made are gone"),
        }
    }
}

/// `amaxes`, or if one block of threads would take long to read them, a few that record the same: blocks of 32 values have millions.
fn gathered(gpu: &Gpu, amaxes: &Tensor) -> Result<Tensor> {
    const FEW: usize = 2048;
    const THREADS: usize = 256;
    let (amaxes, len) = (aligned(amaxes)?, amaxes.elem_count());
    if len <= FEW {
        return Ok(amaxes);
    }
    let blocks = len.div_ceil(16 * THREADS).min(FEW / 4);
    let out = gpu.alloc(DType::F32, 2 * blocks)?;
    with_pointers(gpu, [&amaxes], |[from]| {
        let args = args![p from, l len, p out.ptr()];
        // SAFETY: `len` f32 at an address that is a multiple of 16, and two for each block.
        unsafe {
            launch(
                gpu,
                &GATHER_AMAXES,
                Shape::blocks(blocks, THREADS as u32),
                &args,
            )
        }
    })?;
    out.into_tensor(2 * blocks)
}

impl AmaxCells for CudaCells {
    fn record(&self, row: usize, amax: &Tensor, keep: bool) -> Result<()> {
        if row >= self.rows {
            let cells = self.rows;
            return Err(Error::NoCell { row, cells });
        }
        let gpu = Gpu::of(amax)?;
        let mut cells = self.lock();
        let (cells, counts) = self.made(&mut cells)?;
        let amax = gathered(&gpu, amax)?;
        with_pointers(&gpu, [&amax, cells, counts], |[amax_ptr, cells, counts]| {
            let offset = 4 * row as u64;
            let args = args![
                p amax_ptr, l amax.elem_count(), p cells + offset, p counts + offset, i keep,
            ];
            // SAFETY: one block; `amax` has as many f32 as passed, and cells and counts have more than `row` entries.
            unsafe { launch(&gpu, &RECORD_AMAX, Shape::blocks(1, 128), &args) }
        })
    }

    fn read(&self) -> Result<Recorded> {
        let (amax, non_finite) = match &*self.lock() {
            // Kernels change the cells in place.
            Some((cells, counts)) => (cells.copy()?, counts.copy()?),
            None => self.zeros()?,
        };
        Ok(Recorded { amax, non_finite })
    }

    fn take(&self, which: &[bool]) -> Result<Recorded> {
        let cells = self.lock();
        let Some((cells, counts)) = &*cells else {
            let (amax, non_finite) = self.zeros()?;
            return Ok(Recorded { amax, non_finite });
        };
        let gpu = Gpu::new(&self.device)?;
        let mut mask: Vec<u8> = which.iter().map(|&which| which.into()).collect();
        mask.resize(self.rows, 0);
        let mask = constant(&gpu, &mask)?;
        let amax = gpu.alloc(DType::F32, self.rows)?;
        let taken = gpu.alloc(DType::U32, self.rows)?;
        with_pointers(&gpu, [cells, counts, &mask], |[cells, counts, mask]| {
            let args = args![p cells, p counts, p mask, p amax.ptr(), p taken.ptr(), l self.rows];
            // SAFETY: all five have an entry per row.
            unsafe { launch(&gpu, &TAKE_CELLS, Shape::stride(self.rows), &args) }
        })?;
        Ok(Recorded {
            amax: amax.into_tensor(self.rows)?,
            non_finite: taken.into_tensor(self.rows)?,
        })
    }

    fn merge(&self, recorded: &Recorded) -> Result<()> {
        let rows = recorded.amax.elem_count();
        if rows == 0 {
            return Ok(());
        }
        if rows > self.rows {
            internal!("{rows} amaxes do not fit {} cells", self.rows);
        }
        let gpu = Gpu::new(&self.device)?;
        let mut cells = self.lock();
        let (cells, counts) = self.made(&mut cells)?;
        let inputs = [&recorded.amax, &recorded.non_finite, cells, counts];
        with_pointers(&gpu, inputs, |[amaxes, more, cells, counts]| {
            let args = args![p amaxes, p more, p cells, p counts, l rows];
            // SAFETY: the cells have at least as many rows as what is merged into them.
            unsafe { launch(&gpu, &MERGE_CELLS, Shape::stride(rows), &args) }
        })
    }
}

const UPDATE: u32 = 1;
const MOST_RECENT: u32 = 2;
const POWER_OF_TWO: u32 = 4;
const REMAKE: u32 = 8;

/// One update of all rows in one launch. A custom reduction is the user's code and runs on the host, which needs copies.
pub(super) fn update_columns(
    columns: &Columns,
    rows: &[Option<RowUpdate>],
    recorded: &Recorded,
) -> Result<Updated> {
    let is_custom = |update: &RowUpdate| matches!(update.rule.amax_compute, AmaxCompute::Custom(_));
    if rows.iter().flatten().any(is_custom) {
        return on_the_host(columns, rows, recorded);
    }
    let gpu = Gpu::of(&columns.quant_scale)?;
    let (count, len) = columns.amax_history.dims2()?;
    if count == 0 {
        return Ok(Updated {
            columns: columns.clone(),
            changed: Some(vec![]),
        });
    }
    let flags = |update: &Option<RowUpdate>| {
        let Some(update) = update else { return 0 };
        let most_recent = update.rule.amax_compute == AmaxCompute::MostRecent;
        let power_of_two = update.rule.scale_rounding == ScaleRounding::PowerOfTwo;
        UPDATE
            | if most_recent { MOST_RECENT } else { 0 }
            | if power_of_two { POWER_OF_TWO } else { 0 }
            | if update.remake { REMAKE } else { 0 }
    };
    let max_value = |update: &Option<RowUpdate>| {
        update.as_ref().map_or(1., |update| {
            (f64::from(Format::max(update.format)) / 2f64.powi(update.rule.margin)) as f32
        })
    };
    let window = |update: &Option<RowUpdate>| {
        update.as_ref().map_or(len, |update| update.window.min(len)) as u32
    };
    let max_values = constant(&gpu, &rows.iter().map(max_value).collect::<Vec<_>>())?;
    let windows = constant(&gpu, &rows.iter().map(window).collect::<Vec<_>>())?;
    let flags = constant(&gpu, &rows.iter().map(flags).collect::<Vec<_>>())?;
    let quant_scales = gpu.alloc(DType::F32, count)?;
    let dequant_scales = gpu.alloc(DType::F32, count)?;
    let histories = gpu.alloc(DType::F32, count * len)?;
    let counts = gpu.alloc(DType::U32, count)?;
    let (amax, more) = (
        recorded.amax.contiguous()?,
        recorded.non_finite.contiguous()?,
    );
    let history = columns.amax_history.contiguous()?;
    let inputs = [
        &columns.quant_scale,
        &columns.dequant_scale,
        &history,
        &columns.non_finite,
        &amax,
        &more,
        &max_values,
        &windows,
        &flags,
    ];
    with_pointers(&gpu, inputs, |inputs| {
        let outputs = [
            quant_scales.ptr(),
            dequant_scales.ptr(),
            histories.ptr(),
            counts.ptr(),
        ];
        let mut args: Vec<Arg> = inputs.into_iter().chain(outputs).map(Arg::Ptr).collect();
        args.push(Arg::Len(len as u64));
        // SAFETY: a block per row; every column has an entry, or `len`, per row.
        unsafe { launch(&gpu, &UPDATE_COLUMNS, Shape::blocks(count, 128), &args) }
    })?;
    Ok(Updated {
        columns: Columns {
            quant_scale: quant_scales.into_tensor(count)?,
            dequant_scale: dequant_scales.into_tensor(count)?,
            amax_history: histories.into_tensor((count, len))?,
            non_finite: counts.into_tensor(count)?,
        },
        changed: None,
    })
}

fn on_the_host(
    columns: &Columns,
    rows: &[Option<RowUpdate>],
    recorded: &Recorded,
) -> Result<Updated> {
    let moved = |columns: &Columns, device: &Device| -> Result<Columns> {
        Ok(Columns {
            quant_scale: columns.quant_scale.to_device(device)?,
            dequant_scale: columns.dequant_scale.to_device(device)?,
            amax_history: columns.amax_history.to_device(device)?,
            non_finite: columns.non_finite.to_device(device)?,
        })
    };
    let device = columns.quant_scale.device();
    let recorded = Recorded {
        amax: recorded.amax.to_device(&Device::Cpu)?,
        non_finite: recorded.non_finite.to_device(&Device::Cpu)?,
    };
    let here = moved(columns, &Device::Cpu)?;
    let updated = crate::device::cpu::CpuBackend.update_columns(&here, rows, &recorded)?;
    Ok(Updated {
        columns: moved(&updated.columns, device)?,
        changed: updated.changed,
    })
}
