//! Several products of one layer, each with its own part of input and kernel: flax's `DenseGeneral` with batch axes.

use super::backward::{BackwardProducts, Operands, gradients};
use super::forward::{check_operands, quantize_weight};
use super::plan::{LinearPlan, SavedCasts, kernel_gradient, kernel_matrix};
use crate::base::data::storage::{take_storage, tensor_of};
use crate::base::error::{Result, internal, shape_error};
use crate::cast::quantizer::{Quantizer, recast};
use crate::cast::tensor::{Fp8Tensor, multiply};
use crate::cast::weight_cache::WeightCache;
use crate::cast::weight_version::Seen;
use crate::device::GemmOutput;
use crate::graph::{Ready, attach};
use candle_core::{DType, Tensor};
use fp8_core::Contraction::{self, Cols, Rows};
use fp8_core::Granularity;

const OP: &str = "fp8_linear_batched";

/// `y[i] = x[i] kernel[i]` for each entry `i` of a batch, with FP8 GEMMs.
///
/// A tensorwise cast sees all entries as one tensor, so they share its scale, and its amax is that of the whole. Scales of rows,
/// blocks and groups belong to one entry, which is then cast by itself: no block reaches from one entry into the next.
///
/// # Shapes
/// `x` `[B, M, K]`; `kernel` any shape whose elements, in order, are those of `[B, K, N]`; result `[B, M, N]` in x's dtype. The
/// gradient of the kernel has its shape.
///
/// # Errors
/// If a dtype, a device or a size does not fit.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use fp8_candle::linear::fp8_linear_batched;
/// use fp8_candle::{GemmPlan, LinearPlan, Quantizer};
/// use fp8_core::{Format, Granularity};
///
/// let x = Tensor::randn(0f32, 1., (3, 4, 8), &Device::Cpu)?;
/// let kernel = Var::randn(0f32, 1., (3, 8, 2, 5), &Device::Cpu)?;
/// let cast = Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise);
/// let plan = LinearPlan::new("experts").with_output(GemmPlan::new(cast.clone(), cast));
/// let y = fp8_linear_batched(&x, &kernel, None, &plan)?;
/// assert_eq!(y.dims(), [3, 4, 10]);
/// assert_eq!(y.sum_all()?.backward()?.get(&kernel).unwrap().dims(), [3, 8, 2, 5]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn fp8_linear_batched(
    x: &Tensor,
    kernel: &Tensor,
    cache: Option<&WeightCache>,
    plan: &LinearPlan,
) -> Result<Tensor> {
    let &[entries, m, k] = x.dims() else {
        return Err(shape_error(OP, "x", "[B, M, K]", x.dims()));
    };
    check_operands(OP, x, Some(kernel), None, x.device())?;
    let count = kernel.elem_count();
    if entries * k == 0 || !count.is_multiple_of(entries * k) {
        let expected = format!("{entries} times {k} times any number of elements");
        return Err(shape_error(OP, "kernel", expected, kernel.dims()));
    }
    let n = count / (entries * k);
    let tracks = (x.track_op(), kernel.track_op());
    let matrix = kernel_matrix(kernel, &[entries], k)?;
    let mut saved = SavedCasts::default();
    let rereads = tracks.0 && plan.rereads_weight();
    let y = match &plan.output {
        None => {
            saved.seen = rereads.then(|| Seen::of(kernel)).transpose()?;
            let kernel = matrix.transpose(1, 2)?.to_dtype(x.dtype())?;
            batched_product(&x.detach(), &kernel)?
        }
        Some(gemm) => {
            let again = |first: &Quantizer, gemm: Option<&Quantizer>| {
                gemm.is_some_and(|second| first.serves(second))
            };
            let for_weight = plan.grad_weight.as_ref().map(|gemm| &gemm.b);
            let for_input = plan.grad_input.as_ref().map(|gemm| &gemm.b);
            let both = tracks.1 && again(&gemm.a, for_weight);
            let x8 = cast_entries(&gemm.a, &x.detach(), Cols, both)?;
            let both = tracks.0 && again(&gemm.b, for_input);
            let w8 = match is_whole(&gemm.b) {
                true => {
                    let (w8, seen) =
                        quantize_weight(cache, kernel, &matrix, &gemm.b, Cols, both, rereads)?;
                    saved.seen = seen;
                    split(&w8)?
                }
                false => {
                    saved.seen = rereads.then(|| Seen::of(kernel)).transpose()?;
                    cast_entries(&gemm.b, &matrix, Cols, both)?
                }
            };
            let out = (x.dtype(), gemm.use_fast_accum);
            let y = products((&x8, Cols), (&w8, Cols), [m, n], out, plan.emulate)?;
            saved.keep(plan, gemm, (tracks.0, x8), (tracks.1, w8));
            y
        }
    };
    let y = recast(y, plan.results.output.as_ref())?;
    let result = Ready::new(take_storage(y)?, (entries, m, n))?;
    let (plan, sizes) = (plan.clone(), [entries, m, k, n]);
    attach(OP, [x, kernel], result, move |[x, kernel], _, grad| {
        let pass = Batched {
            plan: &plan,
            saved: &saved,
            x: x.detach(),
            kernel: kernel.detach(),
            grad: grad.contiguous()?,
            sizes,
        };
        let wanted = [x.track_op(), kernel.track_op(), false];
        let [grad_x, grad_kernel, _] = gradients(&pass, &plan, &saved, wanted)?;
        let grad_kernel = grad_kernel.map(|grad| kernel_gradient(&grad, kernel));
        Ok([grad_x, grad_kernel.transpose()?])
    })
}

/// Whether one cast serves all entries.
fn is_whole(quantizer: &Quantizer) -> bool {
    quantizer.spec.granularity == Granularity::Tensorwise
}

/// The casts of the entries of `[B, rows, cols]`.
fn cast_entries(
    quantizer: &Quantizer,
    values: &Tensor,
    contraction: Contraction,
    both: bool,
) -> Result<Vec<Fp8Tensor>> {
    if is_whole(quantizer) {
        let whole = quantizer.quantize_for(values, contraction, both)?;
        return split(&whole.tensor);
    }
    let entries = values.dims().first().copied().unwrap_or(0);
    let cast = |i| {
        Ok(quantizer
            .quantize_for(&values.get(i)?, contraction, both)?
            .tensor)
    };
    (0..entries).map(cast).collect()
}

/// The entries of a tensorwise cast of `[B, rows, cols]`.
fn split(whole: &Fp8Tensor) -> Result<Vec<Fp8Tensor>> {
    let entries = whole.dims().first().copied().unwrap_or(0);
    let entry = |i| {
        let codes = whole.codes().get(i)?.force_contiguous()?;
        let (granularity, contraction) = (whole.granularity(), whole.contraction());
        let scale = whole.dequant_scale().clone();
        Fp8Tensor::from_parts(codes, whole.format(), granularity, contraction, scale)
    };
    (0..entries).map(entry).collect()
}

/// The product of each pair of entries, `[B, rows, cols]`.
fn products(
    (a, a_contraction): (&[Fp8Tensor], Contraction),
    (b, b_contraction): (&[Fp8Tensor], Contraction),
    [rows, cols]: [usize; 2],
    (dtype, use_fast_accum): (DType, bool),
    emulate: bool,
) -> Result<Tensor> {
    let out = GemmOutput {
        dtype,
        bias: None,
        use_fast_accum,
    };
    let product = |(a, b)| {
        let storage = multiply((a, a_contraction), (b, b_contraction), &out, emulate)?;
        tensor_of(storage, (rows, cols))
    };
    let all = a.iter().zip(b).map(product).collect::<Result<Vec<_>>>()?;
    Ok(Tensor::stack(&all, 0)?)
}

/// `a[i] b[i]`, entry by entry: candle's batched product does not take every stride.
fn batched_product(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    Ok(a.contiguous()?.matmul(&b.contiguous()?)?)
}

/// The backward pass.
struct Batched<'a> {
    plan: &'a LinearPlan,
    saved: &'a SavedCasts<Vec<Fp8Tensor>>,
    /// `[B, M, K]`
    x: Tensor,
    kernel: Tensor,
    /// `[B, M, N]`
    grad: Tensor,
    /// B, M, K, N.
    sizes: [usize; 4],
}

impl Batched<'_> {
    /// The kernel as `[B, N, K]`.
    fn matrix(&self) -> Result<Tensor> {
        let [entries, _, k, _] = self.sizes;
        kernel_matrix(&self.kernel, &[entries], k)
    }

    fn check_kernel(&self) -> Result<()> {
        self.saved.check(&self.kernel, &self.plan.path)
    }

    fn decoded(&self, codes: &[Fp8Tensor]) -> Result<Tensor> {
        let values = codes.iter().map(|codes| codes.dequantize(DType::F32));
        Ok(Tensor::stack(&values.collect::<Result<Vec<_>>>()?, 0)?)
    }
}

impl BackwardProducts for Batched<'_> {
    type Cast = Vec<Fp8Tensor>;

    fn cast_input(&self, quantizer: &Quantizer) -> Result<Self::Cast> {
        cast_entries(quantizer, &self.x, Rows, false)
    }

    fn cast_weight(&self, quantizer: &Quantizer) -> Result<Self::Cast> {
        let codes = cast_entries(quantizer, &self.matrix()?, Rows, false)?;
        self.check_kernel()?;
        Ok(codes)
    }

    fn cast_grad_output(
        &self,
        quantizer: &Quantizer,
        contraction: Contraction,
        both: bool,
    ) -> Result<Self::Cast> {
        cast_entries(quantizer, &self.grad, contraction, both)
    }

    fn grad_bias(&self, _: Option<&Quantizer>) -> Result<(Tensor, Option<Self::Cast>)> {
        internal!("{OP} `{}`: it has no bias", self.plan.path)
    }

    /// `[B, M, K]`
    fn grad_input(&self, operands: Operands<Self::Cast>) -> Result<Tensor> {
        let ([_, m, k, _], dtype) = (self.sizes, self.x.dtype());
        match operands {
            Operands::HighPrecision => {
                let grad = batched_product(&self.grad, &self.matrix()?.to_dtype(dtype)?)?;
                self.check_kernel()?;
                Ok(grad)
            }
            Operands::OneCast(kernel) => {
                let grad = self.grad.to_dtype(DType::F32)?;
                Ok(batched_product(&grad, &self.decoded(&kernel)?)?.to_dtype(dtype)?)
            }
            Operands::Cast {
                grad_output,
                other,
                use_fast_accum,
            } => {
                let out = (dtype, use_fast_accum);
                let operands = ((&*grad_output, Cols), (&*other, Rows));
                products(operands.0, operands.1, [m, k], out, self.plan.emulate)
            }
        }
    }

    /// `[B, N, K]`
    fn grad_weight(&self, operands: Operands<Self::Cast>) -> Result<Tensor> {
        let ([_, _, k, n], dtype) = (self.sizes, self.kernel.dtype());
        match operands {
            Operands::HighPrecision => {
                let product = batched_product(&self.grad.transpose(1, 2)?, &self.x)?;
                Ok(product.to_dtype(dtype)?)
            }
            Operands::OneCast(x) => {
                let grad = self.grad.transpose(1, 2)?.to_dtype(DType::F32)?;
                Ok(batched_product(&grad, &self.decoded(&x)?)?.to_dtype(dtype)?)
            }
            Operands::Cast {
                grad_output,
                other,
                use_fast_accum,
            } => {
                let out = (dtype, use_fast_accum);
                let operands = ((&*grad_output, Rows), (&*other, Rows));
                products(operands.0, operands.1, [n, k], out, self.plan.emulate)
            }
        }
    }
}
