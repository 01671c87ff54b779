//! What the cases share: device, pace, filter, and the rows.

use crate::args::Args;
use crate::race::{Contestant, Pace, Track};
use crate::rows::{Metric, Row, print_row};
use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Shape, Tensor};
use fp8::fp8_candle::device::{cuda_info, open_cuda_untracked, take_gemm_paths};
use std::cell::RefCell;

/// More bytes than the caches hold.
const CACHE: usize = 128 << 20;

/// A run of the bench.
pub struct Session {
    args: Args,
    pub device: Device,
    track: Track,
    rows: RefCell<Vec<Row>>,
}

/// A row before its value is computed.
#[derive(Default)]
pub struct Measured {
    pub ours_ms: f64,
    pub against_ms: Option<f64>,
    /// Floating point operations of a call.
    pub flop: Option<f64>,
    /// Bytes that a call reads and writes.
    pub bytes: Option<f64>,
}

impl Session {
    /// Opens the first GPU and prints what it is.
    pub fn new(args: &Args) -> Result<Self> {
        // SAFETY: the only CUDA device of this program, which has no second stream.
        let device = unsafe { open_cuda_untracked(0) }.context("this bench needs an NVIDIA GPU")?;
        let info = cuda_info(&device)?;
        let (major, minor) = info.capability;
        println!(
            "{}, compute capability {major}.{minor}, {} multiprocessors, {:.1} GiB",
            info.chip,
            info.multiprocessors,
            info.memory as f64 / (1u64 << 30) as f64
        );
        // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  .."
        let module = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
        let release = module
            .split_whitespace()
            .find(|word| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit()));
        println!(
            "driver {} (CUDA {}.{}), cuBLASLt {}.{}.{}",
            release.unwrap_or("of unknown release"),
            info.driver / 1000,
            info.driver % 1000 / 10,
            info.cublas_lt / 10_000,
            info.cublas_lt % 10_000 / 100,
            info.cublas_lt % 100
        );
        if args.shrink > 1 {
            println!(
                "every size divided by {}: no figure means anything",
                args.shrink
            );
        }
        println!();
        Ok(Self {
            track: Track::new(&device, args.shrink)?,
            args: args.clone(),
            device,
            rows: RefCell::default(),
        })
    }

    /// Whether the filter lets a case through.
    pub fn wants(&self, case: &str) -> bool {
        self.args.common.wants(case)
    }

    /// A size, divided by `--shrink`.
    pub fn size(&self, size: usize) -> usize {
        (size / self.args.shrink).max(1)
    }

    /// How many sets of inputs, of `bytes` bytes each, exceed the caches.
    pub fn sets(&self, bytes: usize) -> usize {
        (2 * CACHE / self.args.shrink)
            .div_ceil(bytes.max(1))
            .clamp(2, 64)
    }

    /// Fails if an FP8 product since the last call was decoded and multiplied in bf16 or f32: then no FP8 product was timed.
    pub fn multiplied_fp8(&self, case: &str) -> Result<()> {
        let paths = take_gemm_paths();
        ensure!(
            paths.decoded + paths.dequantized == 0,
            "{case}: {} of its products were multiplied in bf16 or f32, {} by cuBLASLt, {} by cuBLASLt and scaled by a kernel",
            paths.decoded + paths.dequantized,
            paths.direct,
            paths.scaled_after
        );
        Ok(())
    }

    /// Standard normal values.
    pub fn normal(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        Ok(Tensor::randn(0f32, 1., shape, &self.device)?.to_dtype(dtype)?)
    }

    /// Median milliseconds of a call of each contestant.
    pub fn race(&self, contestants: Vec<Contestant<'_>>) -> Result<Vec<f64>> {
        let pace = if self.args.common.quick {
            Pace {
                min_rounds: 3,
                max_rounds: 5,
                budget_ms: 200.,
            }
        } else {
            Pace {
                min_rounds: 10,
                max_rounds: 41,
                budget_ms: 1500.,
            }
        };
        self.track.race(contestants, &pace)
    }

    /// Prints and stores a row. The default value is the ratio of the times.
    pub fn report(
        &self,
        case: impl Into<String>,
        (metric, value): (Metric, Option<f64>),
        bar: Option<f64>,
        measured: Measured,
    ) {
        let Measured {
            ours_ms,
            against_ms,
            flop,
            bytes,
        } = measured;
        let value = value.unwrap_or_else(|| against_ms.unwrap_or(f64::NAN) / ours_ms);
        let row = Row {
            case: case.into(),
            metric,
            value,
            bar,
            ours_ms,
            against_ms,
            tflop_per_s: flop.map(|flop| flop / ours_ms * 1e-9),
            gb_per_s: bytes.map(|bytes| bytes / ours_ms * 1e-6),
        };
        print_row(&row);
        self.rows.borrow_mut().push(row);
    }

    /// Everything that was reported.
    pub fn into_rows(self) -> Vec<Row> {
        self.rows.into_inner()
    }
}

/// Fails unless `|ours - reference| <= limit * |reference|` in the Frobenius norm.
pub fn check(what: &str, ours: &Tensor, reference: &Tensor, limit: f64) -> Result<()> {
    anyhow::ensure!(
        ours.dims() == reference.dims(),
        "{what}: {:?} where {:?} is expected",
        ours.dims(),
        reference.dims()
    );
    let norm = |x: &Tensor| -> Result<f64> {
        Ok(f64::from(x.sqr()?.mean_all()?.to_scalar::<f32>()?).sqrt())
    };
    let reference = reference.detach().to_dtype(DType::F32)?;
    let difference = (ours.detach().to_dtype(DType::F32)? - &reference)?;
    let error = norm(&difference)? / norm(&reference)?;
    anyhow::ensure!(
        error < limit,
        "{what}: wrong output, relative error {error:.2e}, at most {limit:.0e}"
    );
    Ok(())
}
