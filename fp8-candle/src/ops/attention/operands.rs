//! What the products of attention read, and what is kept of it for the backward pass.

use crate::base::data::attention_products::Operand;
use crate::base::error::{Result, internal};
use crate::cast::kept::KeptTensor;
use crate::cast::quantizer::Quantizer;
use crate::cast::spec::ScaleSource;
use crate::cast::tensor::Fp8Tensor;
use crate::device::ScalePolicy;
use crate::device::cpu::elements::to_bf16;
use candle_core::{DType, Tensor};
use fp8_core::{Cast, Contraction, Format, Granularity};

/// `x` with a scale for each row of its last dimension: the definition of an operand's cast.
pub(super) fn cast_rows(x: &Tensor, format: Format) -> Result<Fp8Tensor> {
    let source = ScaleSource::Current {
        policy: ScalePolicy::Mx,
        power_of_two: false,
    };
    let cast = Quantizer::new(Cast::new(format), Granularity::Rowwise, source);
    Fp8Tensor::quantize(x, &cast, Contraction::Cols)
}

/// q, k, v or the gradient of the result, as the products of a pass read it: as FP8 codes, in high precision, or both.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub(super) values: Option<Tensor>,
    pub(super) codes: Option<Fp8Tensor>,
}

impl Part {
    /// `x` for products that are FP8 or not.
    pub(super) fn new(x: &Tensor, format: Format, fp8: &[bool]) -> Result<Self> {
        let codes = match fp8.contains(&true) {
            true => Some(cast_rows(x, format)?),
            false => None,
        };
        Ok(Self {
            values: Some(x.clone()),
            codes,
        })
    }

    /// What these products still need.
    pub(super) fn kept(self, fp8: &[bool], in_bf16: bool) -> Result<Self> {
        let Self { values, codes } = self;
        let values = match values.filter(|_| fp8.contains(&false)) {
            Some(x) if in_bf16 && x.dtype() == DType::F32 => Some(to_bf16(&x)?),
            values => values,
        };
        Ok(Self {
            values,
            codes: codes.filter(|_| fp8.contains(&true)),
        })
    }

    pub(super) fn operand(&self, fp8: bool) -> Result<Operand<'_>> {
        match (fp8, &self.codes, &self.values) {
            (true, Some(codes), _) => Ok(Operand::Codes {
                codes: codes.codes(),
                dequant_scale: codes.dequant_scale(),
                format: codes.format(),
            }),
            (false, _, Some(values)) => Ok(Operand::Values(values)),
            _ => internal!("an operand of attention was not kept"),
        }
    }

    /// `x` for kernels that round it themselves while reading, if its product is FP8.
    pub(super) fn read_once(x: &Tensor, format: Format, fp8: bool) -> Operand<'_> {
        match fp8 {
            true => Operand::Rounded(x, format),
            false => Operand::Values(x),
        }
    }
}

/// Kept codes of q, k or v, with a scale for each row of features.
pub(super) struct CodeRows {
    codes: Tensor,
    format: Format,
    dequant_scale: Tensor,
}

/// Those of q, k and v, where they are kept so.
pub(super) fn code_rows(kept: &[KeptTensor; 3]) -> Result<[Option<CodeRows>; 3]> {
    let of = |kept: &KeptTensor| -> Result<_> {
        let rows = kept.code_rows()?;
        Ok(rows.map(|(codes, format, dequant_scale)| CodeRows {
            codes,
            format,
            dequant_scale,
        }))
    };
    let [q, k, v] = kept.each_ref().map(of);
    Ok([q?, k?, v?])
}

impl CodeRows {
    pub(super) fn operand(&self) -> Operand<'_> {
        Operand::Codes {
            codes: &self.codes,
            dequant_scale: &self.dequant_scale,
            format: self.format,
        }
    }
}

/// q, k and v for the backward pass.
#[derive(Debug, Clone)]
pub(crate) struct KeptOperands {
    pub(super) qkv: [Part; 3],
    /// The dtype of q.
    pub(super) dtype: DType,
}

/// What a backward pass needs besides q, k and v.
#[derive(Debug, Clone, Default)]
pub(crate) struct Saved {
    /// The log-sum-exp of each query, if there are kernels.
    pub(crate) lse: Option<Tensor>,
    /// The result, if the kernels need it.
    pub(crate) result: Option<Tensor>,
    /// q, k and v themselves, if products are in FP8: then `Attention::backward` reads nothing of the tensors.
    pub(crate) operands: Option<KeptOperands>,
}

impl Saved {
    /// The values of q, k and v that are kept because not all products are in FP8: for a caller who keeps them in another way.
    pub(crate) fn take_values(&mut self) -> [Option<Tensor>; 3] {
        match &mut self.operands {
            Some(operands) => operands.qkv.each_mut().map(|part| part.values.take()),
            None => [None, None, None],
        }
    }

    /// The same with these values in place of those taken.
    pub(crate) fn with_values(&self, values: [Option<Tensor>; 3]) -> Self {
        let mut saved = self.clone();
        if let Some(operands) = &mut saved.operands {
            for (part, values) in operands.qkv.iter_mut().zip(values) {
                part.values = values;
            }
        }
        saved
    }
}
