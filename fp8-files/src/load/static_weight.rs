//! The FP8 weight of a linear layer, from the VarBuilder of a checkpoint or a stock one.

use super::backend::{holds, is_checked, scheme as scheme_of};
use crate::check::check_scale_values;
use crate::error::{Error, Result};
use crate::names::join;
use crate::scheme::{InputScheme, LayerScheme, granularity_by_shape, shapes_text};
use candle_core::{DType, Tensor};
use candle_nn::VarBuilder;
use fp8_candle::{Fp8Tensor, StaticWeight};
use fp8_core::{Cast, Contraction, Format, Granularity};

/// Loads the `[n, k]` tensor `weight` with its `weight_scale` and, if there is one, `input_scale`. Returns `None` if `vb` has no
/// `weight_scale`, which marks an FP8 weight. The VarBuilder of a [`Checkpoint`](super::Checkpoint) knows how the layer is stored; with
/// any other the shapes decide.
///
/// # Errors
/// [`Error::TensorShape`], [`Error::TensorDType`] or [`Error::TensorValue`] for a tensor that does not fit the others, and if a tensor
/// cannot be read.
pub fn static_weight(n: usize, k: usize, vb: &VarBuilder<'_>) -> Result<Option<StaticWeight>> {
    let path = vb.prefix();
    let name = join(&path, "weight");
    if !holds(vb, "weight_scale") {
        if let Ok(Some(LayerScheme { weight, .. })) = scheme_of(vb) {
            tracing::info!(
                layer = path,
                "in high precision, though the configuration gives it {weight} FP8 weights"
            );
        }
        return Ok(None);
    }
    let scheme = scheme_of(vb)?;
    // A Checkpoint's VarBuilder returns the bytes of the file as the codes, without a copy.
    let stored = match scheme {
        Some(_) => DType::U8,
        None => DType::F8E4M3,
    };
    let weight = vb.get_with_hints_dtype((n, k), "weight", Default::default(), stored)?;
    check_payload(vb, &weight, &name, (n, k))?;
    let scale_name = join(&path, "weight_scale");
    let scale = vb.get_unchecked_dtype("weight_scale", DType::F32)?;
    // A Checkpoint has checked the scales.
    if scheme.is_none() {
        check_scale_values(&scale_name, &scale)?;
    }
    let granularity = match scheme {
        Some(scheme) => scheme.weight,
        None => granularity_by_shape(scale.dims(), n, k).ok_or_else(|| Error::TensorShape {
            tensor: scale_name,
            got: scale.dims().to_vec(),
            expected: shapes_text(None, n, k),
        })?,
    };
    let (scale, along) = (scale.contiguous()?, Contraction::Cols);
    let codes = match scheme {
        Some(_) => Fp8Tensor::from_parts(weight, Format::E4M3, granularity, along, scale)?,
        None => Fp8Tensor::from_f8e4m3(&weight, granularity, along, scale)?,
    };
    let input = match scheme {
        Some(scheme) => scheme.input,
        None if vb.contains_tensor("input_scale") => InputScheme::Static(()),
        None => InputScheme::per_token(),
    };
    let input = input.with_scale(|()| input_scale(vb, &path))?;
    Ok(Some(StaticWeight::new(&codes, input, &path)?))
}

/// Fails for a weight in high precision whose values are FP8 codes without their scale. A stock VarBuilder returns them without an error;
/// a [`Checkpoint`](super::Checkpoint) has checked the dtypes of the file.
///
/// # Errors
/// [`Error::MissingScale`].
pub fn refuse_codes(vb: &VarBuilder<'_>, weight: &Tensor) -> Result<()> {
    if is_checked(vb) || !is_unscaled_fp8(weight)? {
        return Ok(());
    }
    let path = vb.prefix();
    Err(Error::MissingScale {
        tensor: join(&path, "weight"),
        missing: join(&path, "weight_scale"),
        path: None,
    })
}

/// The static scale of a layer's inputs, f32 `[1]`.
fn input_scale(vb: &VarBuilder<'_>, path: &str) -> Result<Tensor> {
    let name = join(path, "input_scale");
    let scale = vb.get_unchecked_dtype("input_scale", DType::F32)?;
    if scale.elem_count() != 1 {
        return Err(Error::TensorShape {
            tensor: name,
            got: scale.dims().to_vec(),
            expected: "one element".into(),
        });
    }
    check_scale_values(&name, &scale)?;
    Ok(scale.reshape(1)?)
}

/// Checks that the tensor behind `codes` is FP8. A stock VarBuilder casts any tensor to the requested dtype, so codes that do not decode
/// to the stored values were cast.
fn check_payload(
    vb: &VarBuilder<'_>,
    codes: &Tensor,
    name: &str,
    shape: (usize, usize),
) -> Result<()> {
    // A Checkpoint has checked the dtype, and returns scaled values below. On a GPU candle 0.11 casts nothing to or from F8E4M3, so
    // codes that arrive there were stored as such.
    if is_checked(vb) || codes.device().is_cuda() {
        return Ok(());
    }
    let unscaled = Fp8Tensor::from_f8e4m3(
        codes,
        Granularity::Tensorwise,
        Contraction::Cols,
        Tensor::ones(1, DType::F32, codes.device())?,
    )?;
    let stored = vb.get_with_hints_dtype(shape, "weight", Default::default(), DType::F32)?;
    let decoded = unscaled.dequantize(DType::F32)?;
    let differing = stored
        .ne(&decoded)?
        .to_dtype(DType::U32)?
        .sum_all()?
        .to_scalar::<u32>()?;
    let nans = decoded
        .ne(&decoded)?
        .to_dtype(DType::U32)?
        .sum_all()?
        .to_scalar::<u32>()?;
    if differing > nans {
        return Err(Error::TensorDType {
            tensor: name.to_string(),
            got: "another dtype than FP8, beside a weight_scale".into(),
            expected: "F8_E4M3".into(),
        });
    }
    Ok(())
}

/// Whether high-precision values are FP8 codes without their scale: all are E4M3 values, and the largest is near the top of the format,
/// which happens in quantized weights only.
fn is_unscaled_fp8(weight: &Tensor) -> Result<bool> {
    const FULL: f32 = 224.;
    if weight.elem_count() == 0 {
        return Ok(false);
    }
    let first = weight
        .flatten_all()?
        .narrow(0, 0, weight.elem_count().min(64))?;
    if !all_e4m3(&first)? {
        return Ok(false);
    }
    let amax = weight
        .to_dtype(DType::F32)?
        .abs()?
        .flatten_all()?
        .max(0)?
        .to_scalar::<f32>()?;
    Ok(amax >= FULL && all_e4m3(&weight.flatten_all()?)?)
}

fn all_e4m3(x: &Tensor) -> Result<bool> {
    let values = x.to_dtype(DType::F32)?.to_vec1::<f32>()?;
    let cast = Cast::new(Format::E4M3);
    Ok(values
        .iter()
        .all(|&value| Format::E4M3.decode(cast.encode(value, 0)) == value))
}
