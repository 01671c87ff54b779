//! AdamW over all tensors of a CUDA device at once: `kernels/adamw.cu`, and `kernels/adamw_coded.cu` for moments in FP8.

use super::adamw_table::Table;
use super::adamw_tensors::{
    AdamWDecision, AdamWHyperparameters, AdamWTensors, DECAYS, DTYPES, check, check_like,
};
use super::gpu::{Buffer, Gpu, with_pointer_list, with_pointers};
use super::kernels::{FloatKernels, Kernel, Shape, args, kernels};
use super::launch::launch;
use crate::base::check::check_dtype;
use crate::base::error::{Error, Result, shape_error};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DeviceRepr};
use candle_core::{DType, Tensor};

kernels! { ADAMW_KERNELS in ADAMW;
    NORM = floats "fp8_adamw_norm"("pppp");
    NORM_F64 = one "fp8_adamw_norm_f64"("pppp");
    SUM = one "fp8_adamw_sum"("plp");
    DECIDE = one "fp8_adamw_decide"("plpppllllll");
    COEFFICIENTS = one "fp8_adamw_coefficients"("plllllllll");
    UPDATE = floats "fp8_adamw_update"("pppp");
    UPDATE_F64 = one "fp8_adamw_update_f64"("pppp");
}

kernels! { ADAMW_CODED_KERNELS in ADAMW_CODED;
    UPDATE_CODED = floats "fp8_adamw_update_coded"("pppp");
}

/// `CHUNK` of the kernels.
const CHUNK: usize = 1 << 14;
/// `NORM_THREADS` of the kernels.
const NORM_THREADS: u32 = 128;
/// `PARTS` of the kernels, and the threads of each.
const PARTS: usize = 4;
const UPDATE_THREADS: u32 = 256;
/// u64s of the struct `Params` of the kernels.
const PARAM_WORDS: usize = 14;
/// Bytes of the struct `Control` of the kernels.
const CONTROL_BYTES: usize = 128;

/// AdamW over many tensors of one CUDA device: a step takes one launch per dtype for the norm, one per dtype for the update,
/// and one in between. Nothing is copied to the host, and nothing waits for the device.
///
/// Per tensor and step `t`, with g the gradient times the clip coefficient:
/// `m = beta1 m + (1 - beta1) g`, `v = beta2 v + (1 - beta2) g^2`,
/// `theta = decay theta - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)`, in f32 (f64 for f64 variables),
/// with each operation rounded to nearest, and the result rounded once more to the dtype of the variable. Moments in FP8 are decoded
/// before and coded again after it.
///
/// The norm is summed in f64: the squares of 16384 elements at a time in 1024 lanes (element i in lane i % 1024), then the
/// lanes in halves, then the sums of all pieces of all tensors in the same way. A tensor without a gradient counts as zeros.
#[derive(Debug)]
pub struct MultiTensorAdamW {
    gpu: Gpu,
    tensors: Vec<AdamWTensors>,
    classes: Vec<Class>,
    params: Table,
    grads: Table,
    partials: Buffer,
    partial_count: usize,
    control: Buffer,
}

/// The chunks of the tensors of one dtype, whose moments are all values or all codes.
#[derive(Debug)]
struct Class {
    dtype: DType,
    coded: bool,
    /// Four u32 each: tensor, block in the tensor, partial, unused.
    chunks: CudaSlice<u32>,
    count: usize,
}

impl MultiTensorAdamW {
    /// Tables for these tensors, in the order of the gradients in every step.
    ///
    /// # Errors
    /// If there are none, a dtype, shape or device does not fit, a tensor is strided, or there is not enough memory.
    pub fn new(tensors: Vec<AdamWTensors>) -> Result<Self> {
        let Some(first) = tensors.first() else {
            return Err(Error::NoTensors { op: "AdamW" });
        };
        let gpu = Gpu::of(&first.var)?;
        for tensors in &tensors {
            check(tensors)?;
        }
        let mut partial_count = 0;
        let mut chunks: [[Vec<u32>; 2]; 4] = Default::default();
        for (i, tensors) in tensors.iter().enumerate() {
            let class = DTYPES.iter().position(|d| *d == tensors.var.dtype());
            let coded = usize::from(tensors.moments.is_coded());
            let class = &mut chunks[class.unwrap_or(0)][coded];
            for block in 0..tensors.var.elem_count().div_ceil(CHUNK) {
                class.extend([index(i)?, index(block)?, index(partial_count)?, 0]);
                partial_count += 1;
            }
        }
        let classes = DTYPES
            .into_iter()
            .zip(&chunks)
            .flat_map(|(dtype, [values, codes])| [(dtype, false, values), (dtype, true, codes)])
            .filter(|(_, _, chunks)| !chunks.is_empty())
            .map(|(dtype, coded, chunks)| {
                Ok(Class {
                    dtype,
                    coded,
                    chunks: gpu.device().clone_htod(chunks)?,
                    count: chunks.len() / 4,
                })
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            partials: gpu.zeros(DType::F64, partial_count.max(1))?,
            control: gpu.zeros(DType::U8, CONTROL_BYTES)?,
            gpu,
            tensors,
            classes,
            params: Table::default(),
            grads: Table::default(),
            partial_count,
        })
    }

    /// One step. Each tensor has a gradient, contiguous, of the tensor's dtype and shape and in memory of its own, or `None`.
    /// If the norm is not finite, nothing is changed.
    ///
    /// `counter`: i64 `[1]` on this device, the number of steps taken; the step adds 1 unless it is skipped.
    ///
    /// # Returns
    /// f64 `[4]` on the device: the norm, the clip coefficient (0 if skipped), 1 if skipped and 0 otherwise, and the steps
    /// taken.
    ///
    /// # Errors
    /// If a gradient or the counter does not fit its tensor (nothing is changed), or a launch fails.
    pub fn step(
        &mut self,
        grads: &[Option<Tensor>],
        hyper: &AdamWHyperparameters,
        counter: &Tensor,
    ) -> Result<Tensor> {
        const OP: &str = "AdamW step counter";
        check_dtype(OP, "the counter", counter, DType::I64)?;
        if counter.elem_count() != 1 {
            return Err(shape_error(OP, "the counter", "[1]", counter.dims()));
        }
        let report = self.gpu.alloc(DType::F64, 4)?;
        self.with_tables(grads, |this, tables| {
            this.launch_norms(tables)?;
            let limit = hyper.max_grad_norm.unwrap_or(f64::INFINITY);
            with_pointers(&this.gpu, [counter], |[counter]| {
                let args = args![
                    p this.partials.ptr(), l this.partial_count, p this.control.ptr(), p counter,
                    p report.ptr(), l limit.to_bits(), l hyper.lr.to_bits(),
                    l hyper.beta1.to_bits(), l hyper.beta2.to_bits(), l hyper.eps.to_bits(),
                    l hyper.decay.to_bits(),
                ];
                // SAFETY: `partial_count` f64s written by the launches before, the control block, one i64 and four f64s,
                // all on this device and used only by its stream.
                unsafe { launch(&this.gpu, &DECIDE, ONE_BLOCK, &args) }
            })?;
            this.launch_updates(tables)
        })?;
        report.into_tensor(4)
    }

    /// The sum of the squares of all gradients, f64 `[1]` on the device.
    ///
    /// # Errors
    /// As [`MultiTensorAdamW::step`].
    pub fn sum_of_squares(&mut self, grads: &[Option<Tensor>]) -> Result<Tensor> {
        let sum = self.gpu.alloc(DType::F64, 1)?;
        self.with_tables(grads, |this, tables| {
            this.launch_norms(tables)?;
            let args = args![p this.partials.ptr(), l this.partial_count, p sum.ptr()];
            // SAFETY: `partial_count` f64s written by the launches before, and one f64.
            unsafe { launch(&this.gpu, &SUM, ONE_BLOCK, &args) }
        })?;
        sum.into_tensor(1)
    }

    /// The update of a step whose norm the host knows: for variables on several devices, which share one norm.
    ///
    /// # Errors
    /// As [`MultiTensorAdamW::step`].
    pub fn update(
        &mut self,
        grads: &[Option<Tensor>],
        hyper: &AdamWHyperparameters,
        decision: &AdamWDecision,
    ) -> Result<()> {
        self.with_tables(grads, |this, tables| {
            let args = args![
                p this.control.ptr(), l hyper.lr.to_bits(), l hyper.beta1.to_bits(),
                l hyper.beta2.to_bits(), l hyper.eps.to_bits(), l hyper.decay.to_bits(),
                l decision.correction1.to_bits(), l decision.correction2.to_bits(),
                l decision.clip.to_bits(), l decision.step,
            ];
            // SAFETY: the control block, which the other launches of the stream use before or after this one.
            unsafe { launch(&this.gpu, &COEFFICIENTS, Shape::blocks(1, 32), &args)? };
            this.launch_updates(tables)
        })
    }

    /// Checks the gradients, updates both tables, and calls `f` with their addresses while holding the memory of all
    /// tensors.
    fn with_tables(
        &mut self,
        grads: &[Option<Tensor>],
        f: impl FnOnce(&Self, [u64; 2]) -> Result<()>,
    ) -> Result<()> {
        if grads.len() != self.tensors.len() {
            return Err(Error::GradientCount {
                op: "AdamW",
                got: grads.len(),
                expected: self.tensors.len(),
            });
        }
        for (tensors, grad) in self.tensors.iter().zip(grads) {
            if let Some(grad) = grad {
                check_like(
                    "AdamW",
                    "a gradient",
                    &tensors.var,
                    tensors.var.dtype(),
                    grad,
                )?;
            }
        }
        // Cloned handles, so that `self` is free for the tables.
        let tensors = self.tensors.clone();
        let mut all: Vec<&Tensor> = Vec::with_capacity(5 * tensors.len());
        for (tensors, grad) in tensors.iter().zip(grads) {
            all.push(&tensors.var);
            all.extend(tensors.moments.tensors());
            all.extend(&tensors.master);
            all.extend(grad);
        }
        let gpu = self.gpu.clone();
        with_pointer_list(&gpu, &all, |pointers| {
            let mut pointers = pointers.iter().copied();
            let mut next = |present: bool| present.then(|| pointers.next()).flatten().unwrap_or(0);
            let mut words = Vec::with_capacity(PARAM_WORDS * tensors.len());
            let mut addresses = Vec::with_capacity(tensors.len());
            for (tensors, grad) in tensors.iter().zip(grads) {
                words.push(next(true));
                words.extend(tensors.moments.words(|| next(true)));
                words.push(next(tensors.master.is_some()));
                let (flags, key) = tensors.moments.flags();
                let flags = flags + u64::from(tensors.decays) * DECAYS;
                let count = tensors.var.elem_count() as u64;
                words.extend([count, flags, key.seed, u64::from(key.tensor)]);
                addresses.push(next(grad.is_some()));
            }
            let params = self.params.update(&gpu, words)?;
            let grads = self.grads.update(&gpu, addresses)?;
            // What only this step uses is freed after the launches.
            f(self, [params.address, grads.address])
        })
    }

    fn launch_norms(&self, [params, grads]: [u64; 2]) -> Result<()> {
        for class in &self.classes {
            let args = args![
                p address(&self.gpu, &class.chunks), p params, p grads, p self.partials.ptr(),
            ];
            let shape = Shape::blocks(class.count, NORM_THREADS);
            let kernel = of("AdamW norm", &NORM, &NORM_F64, class.dtype)?;
            // SAFETY: a block per chunk; the tables hold the addresses of tensors that `with_tables` has checked and
            // keeps alive, and each chunk writes its own partial.
            unsafe { launch(&self.gpu, kernel, shape, &args)? };
        }
        Ok(())
    }

    fn launch_updates(&self, [params, grads]: [u64; 2]) -> Result<()> {
        for class in &self.classes {
            let args = args![
                p address(&self.gpu, &class.chunks), p params, p grads, p self.control.ptr(),
            ];
            let shape = Shape::grid(class.count, PARTS, UPDATE_THREADS);
            let kernel = match class.coded {
                true => UPDATE_CODED.of("AdamW update", class.dtype)?,
                false => of("AdamW update", &UPDATE, &UPDATE_F64, class.dtype)?,
            };
            // SAFETY: as for the norm; the tensors written to are used only by this stream, the host has no reference
            // into their memory, and no two chunks overlap.
            unsafe { launch(&self.gpu, kernel, shape, &args)? };
        }
        Ok(())
    }
}

const ONE_BLOCK: Shape = Shape {
    grid: (1, 1, 1),
    threads: NORM_THREADS,
    shared: 0,
    resident: false,
};

/// Device address of memory that only this device's stream uses.
fn address<T: DeviceRepr>(gpu: &Gpu, slice: &CudaSlice<T>) -> u64 {
    slice.device_ptr(gpu.stream()).0
}

fn of(
    op: &'static str,
    floats: &'static FloatKernels,
    double: &'static Kernel,
    dtype: DType,
) -> Result<&'static Kernel> {
    match dtype {
        DType::F64 => Ok(double),
        other => floats.of(op, other),
    }
}

/// An index as the tables hold it.
fn index(i: usize) -> Result<u32> {
    u32::try_from(i).map_err(|_| Error::Internal(format!("AdamW: {i} is too large for an index")))
}
