//! The forward pass, and the node of candle's graph.

use super::backward::LinearBackward;
use super::fetch::{codes_for_forward, values_for_forward};
use super::held::HeldWeight;
use super::plan::{GemmPlan, LinearPlan, LinearWeight, SavedCasts, kernel_matrix};
use crate::base::check::{check_device, check_dims, check_narrow};
use crate::base::data::matrix_dims;
use crate::base::data::storage::{take_storage, tensor_of};
use crate::base::error::{Error, Result, internal, shape_error};
use crate::cast::packed::PackedWeight;
use crate::cast::quantizer::{Quantizer, recast};
use crate::cast::tensor::{Fp8Tensor, add_bias, multiply};
use crate::cast::weight_cache::WeightCache;
use crate::cast::weight_version::Seen;
use crate::device::{GemmOutput, backend};
use crate::graph::wide::value::Value;
use crate::graph::{Ready, attach_all};
use candle_core::{Device, Storage, Tensor};
use fp8_core::Contraction;
use std::cell::OnceCell;

/// For calls with at most this many tokens, a weight that does not change is packed, in addition to its codes.
const FEW_ROWS: usize = 32;

/// `y = x weight^T + bias` with FP8 GEMMs.
///
/// # Shapes
/// `x` `[.., K]` with any number of leading dims, including none; weight `[N, K]`; bias `[N]`; result `[.., N]`.
///
/// # Dtypes
/// x, weight and bias are each f32, bf16 or f16; the result and grad_x have x's dtype, the other gradients that of
/// their tensor. Bias is added in the output dtype.
///
/// # Errors
/// If a dtype, a device or the number of features does not fit.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use fp8_candle::{GemmPlan, LinearPlan, LinearWeight, Quantizer, fp8_linear};
/// use fp8_core::{Format, Granularity};
///
/// let x = Tensor::randn(0f32, 1.0, (4, 8), &Device::Cpu)?;
/// let weight = Var::randn(0f32, 1.0, (16, 8), &Device::Cpu)?;
///
/// // The output in FP8; the gradients in high precision.
/// let cast = Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise);
/// let plan = LinearPlan::new("fc").with_output(GemmPlan::new(cast.clone(), cast));
/// let y = fp8_linear(&x, LinearWeight::HighPrecision(&weight, None), None, &plan)?;
/// assert_eq!(y.dims(), [4, 16]);
/// let grads = y.sum_all()?.backward()?;
/// assert!(grads.get(&weight).is_some());
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn fp8_linear(
    x: &Tensor,
    weight: LinearWeight<'_>,
    bias: Option<&Tensor>,
    plan: &LinearPlan,
) -> Result<Tensor> {
    let in_graph = weight.held();
    let tracks = (x.track_op(), in_graph.is_some_and(Tensor::track_op));
    let (storage, out_dims, saved) = compute(x, weight, bias, plan, tracks, None)?;
    let result = Ready::new(storage, out_dims)?;
    let args: Vec<&Tensor> = [Some(x), in_graph, bias].into_iter().flatten().collect();
    let has = [true, in_graph.is_some(), bias.is_some()];
    let (plan, weight) = (plan.clone(), HeldWeight::new(weight));
    attach_all("fp8_linear", &args, result, move |args, _, grad_output| {
        let mut given = args.iter().copied();
        let args = has.map(|has| given.by_ref().take(usize::from(has)).next());
        let [Some(x), _, bias] = args else {
            internal!("fp8_linear `{}`: no argument", plan.path);
        };
        let pass = LinearBackward {
            plan: &plan,
            saved: &saved,
            input: &|| Ok(x.detach()),
            dtype: x.dtype(),
            weight: &weight,
            bias: bias.map(Tensor::dtype),
            grad_output: &Value::Made(grad_output.clone()),
            matrix: OnceCell::new(),
        };
        let wanted = args.map(|arg| arg.is_some_and(Tensor::track_op));
        let [grad_x, grad_weight, grad_bias] = pass.gradients(wanted)?;
        let grad_x = grad_x.map(|grad| grad.reshape(x.shape())).transpose()?;
        let gradients = [grad_x, grad_weight, grad_bias].into_iter().zip(has);
        Ok(gradients
            .filter_map(|(grad, has)| has.then_some(grad))
            .collect())
    })
}

/// The result of [`fp8_linear`] with its shape, and what its backward pass needs if gradients of x and weight are wanted
/// (`tracks`). `cast` is x already cast for this layer.
pub(crate) fn compute(
    x: &Tensor,
    weight: LinearWeight<'_>,
    bias: Option<&Tensor>,
    plan: &LinearPlan,
    tracks: (bool, bool),
    cast: Option<Fp8Tensor>,
) -> Result<(Storage, Vec<usize>, SavedCasts<Fp8Tensor>)> {
    let (x_tracks, w_tracks) = tracks;
    let (n, k) = check(x, weight, bias, plan)?;
    let out_dims = [&x.dims()[..x.rank() - 1], &[n]].concat();
    // Not from the number of elements, which is 0 if K is.
    let (m, _) = matrix_dims(x.dims());
    let x2 = || x.detach().contiguous()?.reshape((m, k));
    let bias_data = bias
        .map(|bias| bias.detach().to_dtype(x.dtype()))
        .transpose()?;

    let mut saved = SavedCasts::default();
    let rereads = x_tracks && plan.rereads_weight();
    // A weight in high precision: what changes, its values as `[N, K]`, and where its codes are kept.
    let values = match weight {
        LinearWeight::HighPrecision(weight, cache) => Some((weight, weight.detach(), cache)),
        LinearWeight::Kernel { kernel, cache, .. } => {
            Some((kernel, kernel_matrix(kernel, &[], k)?, cache))
        }
        LinearWeight::Fp8(_) | LinearWeight::Packed(_) | LinearWeight::Fetched(_) => None,
    };
    let storage = match &plan.output {
        None => {
            let weight = match (weight, &values) {
                (_, Some((held, matrix, _))) => {
                    saved.seen = rereads.then(|| Seen::of(held)).transpose()?;
                    matrix.clone()
                }
                (LinearWeight::Fetched(source), None) => {
                    values_for_forward(&**source, x_tracks, &mut saved)?
                }
                (LinearWeight::Fp8(weight), None) => weight.dequantize(x.dtype())?,
                (LinearWeight::Packed(weight), None) => weight.dequantize(x.dtype())?,
                (_, None) => internal!("fp8_linear `{}`: no weight", plan.path),
            };
            let bias = bias_data.as_ref();
            take_storage(match plan.independent_rows {
                true => crate::ops::linear(&x2()?, &weight.detach(), bias)?,
                false => add_bias(x2()?.matmul(&weight.to_dtype(x.dtype())?.t()?)?, bias)?,
            })?
        }
        Some(gemm) => {
            // Whether a backward GEMM uses the same codes, summing over the other dimension.
            let again = |first: &Quantizer, gemm: &Option<GemmPlan>| {
                gemm.as_ref().is_some_and(|gemm| first.serves(&gemm.b))
            };
            let x8 = match cast {
                Some(cast) => cast,
                None => {
                    let both = w_tracks && again(&gemm.a, &plan.grad_weight);
                    gemm.a.quantize_for(&x2()?, Contraction::Cols, both)?.tensor
                }
            };
            let out = GemmOutput {
                dtype: x.dtype(),
                bias: bias_data.as_ref(),
                use_fast_accum: gemm.use_fast_accum,
            };
            let product = |w8: &Fp8Tensor| {
                let operands = ((&x8, Contraction::Cols), (w8, Contraction::Cols));
                multiply(operands.0, operands.1, &out, plan.emulate)
            };
            let stream = |w8: &PackedWeight| {
                let x8 = x8.operand(Contraction::Cols);
                backend(x.device())?.gemm(&x8, &w8.operand(), &out)
            };
            match (weight, &values) {
                (_, &Some((held, ref matrix, cache))) => {
                    let both = x_tracks && again(&gemm.b, &plan.grad_input);
                    let cols = Contraction::Cols;
                    let (w8, seen) =
                        quantize_weight(cache, held, matrix, &gemm.b, cols, both, rereads)?;
                    saved.seen = seen;
                    // With few rows, reading the weight takes most of the time.
                    let packed = match cache {
                        Some(cache) if m <= FEW_ROWS && !plan.emulate => cache.packed(&w8)?,
                        _ => None,
                    };
                    let y = match packed {
                        Some(packed) => stream(&packed)?,
                        None => product(&w8)?,
                    };
                    saved.keep(plan, gemm, (x_tracks, x8), (w_tracks, w8));
                    y
                }
                (LinearWeight::Fetched(source), None) => {
                    let w8 = codes_for_forward(&**source, plan, gemm, x_tracks, &mut saved)?;
                    if w_tracks && plan.saves_input() {
                        saved.input = Some(x8.clone());
                    }
                    product(&w8)?
                }
                (LinearWeight::Fp8(w8), None) => product(w8)?,
                (LinearWeight::Packed(w8), None) if plan.emulate => product(&w8.unpack()?)?,
                (LinearWeight::Packed(w8), None) => stream(w8)?,
                (_, None) => internal!("fp8_linear `{}`: no weight", plan.path),
            }
        }
    };
    let storage = match &plan.results.output {
        None => storage,
        cast => take_storage(recast(tensor_of(storage, (m, n))?, cast.as_ref())?)?,
    };
    Ok((storage, out_dims, saved))
}

/// The codes of `matrix`, the values of `weight` in the order in which a layer casts them, and with `rereads` the values of the
/// weight that they were made from.
pub(crate) fn quantize_weight(
    cache: Option<&WeightCache>,
    weight: &Tensor,
    matrix: &Tensor,
    quantizer: &Quantizer,
    contraction: Contraction,
    both: bool,
    rereads: bool,
) -> Result<(Fp8Tensor, Option<Seen>)> {
    if let Some(cache) = cache {
        let (codes, seen) = cache.quantize_as(weight, matrix, quantizer, contraction, both)?;
        return Ok((codes, rereads.then_some(seen)));
    }
    let seen = rereads.then(|| Seen::of(weight)).transpose()?;
    let codes = quantizer.quantize_for(matrix, contraction, both)?.tensor;
    Ok((codes, seen))
}

/// Checks dtypes, devices and sizes; returns (N, K).
fn check(
    x: &Tensor,
    weight: LinearWeight<'_>,
    bias: Option<&Tensor>,
    plan: &LinearPlan,
) -> Result<(usize, usize)> {
    const OP: &str = "fp8_linear";
    let (dims, device) = match weight {
        LinearWeight::HighPrecision(weight, _) => (weight.dims(), weight.device()),
        LinearWeight::Kernel { kernel, .. } => (kernel.dims(), kernel.device()),
        LinearWeight::Fetched(source) => (source.dims(), source.device()),
        LinearWeight::Fp8(weight) => (weight.dims(), weight.device()),
        LinearWeight::Packed(weight) => (weight.dims(), weight.device()),
    };
    let (n, k) = match (weight, dims) {
        (
            LinearWeight::Kernel {
                kernel,
                in_features,
                ..
            },
            _,
        ) => {
            let count = kernel.elem_count();
            if in_features == 0 || !count.is_multiple_of(in_features) {
                let expected = format!("a multiple of {in_features} elements, more than 0");
                return Err(shape_error(OP, "kernel", expected, dims));
            }
            (count / in_features, in_features)
        }
        (_, &[n, k]) => (n, k),
        _ => {
            let expected = "[out_features, in_features]";
            return Err(shape_error(OP, "weight", expected, dims));
        }
    };
    check_operands(OP, x, weight.held(), bias, device)?;
    let features = x.dims().last().copied();
    if features != Some(k) {
        return Err(Error::InFeatures {
            path: plan.path.to_string(),
            expected: k,
            got: features.unwrap_or(0),
            shape: x.dims().to_vec(),
        });
    }
    if let Some(bias) = bias {
        check_dims(OP, "bias", bias, &[n])?;
    }
    Ok((n, k))
}

/// Checks that these are f32, bf16 or f16 on `device`.
pub(crate) fn check_operands(
    op: &'static str,
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    device: &Device,
) -> Result<()> {
    for (what, tensor) in [("x", Some(x)), ("weight", weight), ("bias", bias)] {
        if let Some(tensor) = tensor {
            check_narrow(op, what, tensor)?;
            check_device(op, what, tensor, device)?;
        }
    }
    Ok(())
}
