//! Master weights: the copies that an optimizer updates, while the forward pass sees the variable.

use candle_core::{DType, Tensor, Var};
use fp8_core::StochasticKey;
use serde::{Deserialize, Serialize};

use super::error::{OptimError, Result};

/// Keeps the random bits apart from those of casts with the same seed.
const DOMAIN: u64 = 0x6D61_7374_6572_7321;

/// The dtype of master weights.
///
/// | masters | f16 variable | bf16 variable | f32 variable | f64 variable |
/// |---|---|---|---|---|
/// | f32 | f32 copy | f32 copy | itself | itself |
/// | bf16 | bf16 copy, stochastic | itself, stochastic | bf16 copy, stochastic | itself |
/// | f16 | itself, stochastic | f16 copy, stochastic | f16 copy, stochastic | itself |
///
/// "Itself": no copy is kept, since it would equal the variable.
///
/// "Stochastic": each step computes in f32 from the master and rounds the result up or down at random. The mean of the rounding is the
/// result itself, so updates below half a unit in the last place are not lost on average. The random bits follow from the optimizer's seed,
/// the step, the variable's place among the sorted names and the element's index; they do not depend on the number of threads, and are the
/// same after a resume.
///
/// The variable is the master rounded to nearest where it is narrower. A result beyond the range of f16 becomes its largest number, 65504
/// (and likewise in bf16): masters stay finite. A variable that holds a finite value beyond that range when its copy is made is refused
/// ([`OptimError::MasterOverflow`]). This applies to variables without a gradient too, such as the running statistics of a batch norm: use
/// `from_named` to leave them out where they may be so large.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use fp8_optim::{MasterDType, Sgd, SgdConfig};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // The FP8 Emulation Toolkit's masters: f16, of f32 variables.
/// let config = SgdConfig::default().with_masters(MasterDType::F16).with_seed(17);
/// let w = Var::ones(3, DType::F32, &Device::Cpu)?;
/// let mut optimizer = Sgd::from_named(vec![("w".into(), w.clone())], config)?;
/// optimizer.apply(&w.sqr()?.sum_all()?.backward()?)?;
/// assert_eq!(optimizer.state()?["w.master_param"].dtype(), DType::F16);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MasterDType {
    /// f32: nothing is rounded at random.
    #[default]
    F32,
    /// bf16, rounded at random.
    Bf16,
    /// f16, rounded at random.
    F16,
}

impl MasterDType {
    /// candle's name for it.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
            Self::F16 => DType::F16,
        }
    }
}

/// What is kept of a variable between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keeping {
    /// The variable alone, rounded to nearest.
    Variable,
    /// The variable alone, rounded at random.
    VariableAtRandom,
    /// A copy.
    Copy(MasterDType),
}

impl Keeping {
    pub(super) fn of(var: &Var, masters: Option<MasterDType>) -> Self {
        match (masters, var.dtype()) {
            (None, _) | (_, DType::F64) => Self::Variable,
            (Some(masters), dtype) if masters.dtype() != dtype => Self::Copy(masters),
            (Some(MasterDType::F32), _) => Self::Variable,
            _ => Self::VariableAtRandom,
        }
    }

    /// The dtype of the copy.
    pub(super) fn copy_dtype(self) -> Option<DType> {
        match self {
            Self::Copy(masters) => Some(masters.dtype()),
            _ => None,
        }
    }

    /// The random bits for variable number `id` in a step; None: it is rounded to nearest.
    pub(super) fn key(self, seed: u64, step: u64, id: u32) -> Option<StochasticKey> {
        match self {
            Self::Variable | Self::Copy(MasterDType::F32) => None,
            _ => Some(StochasticKey {
                seed: seed ^ DOMAIN,
                step: step as u32,
                tensor: id,
            }),
        }
    }

    /// A copy of the variable's present values, rounded to nearest.
    ///
    /// # Errors
    /// [`OptimError::MasterOverflow`] for a finite value that the copy cannot hold.
    pub(super) fn new_copy(self, name: &str, var: &Var) -> Result<Option<Tensor>> {
        let Some(dtype) = self.copy_dtype() else {
            return Ok(None);
        };
        if var.elem_count() == 0 {
            // A CUDA device launches no kernel over nothing.
            return Ok(Some(Tensor::zeros(var.shape(), dtype, var.device())?));
        }
        let copy = var.as_detached_tensor().to_dtype(dtype)?.contiguous()?;
        if dtype.size_in_bytes() < 4 {
            check_range(name, var, &copy)?;
        }
        Ok(Some(copy))
    }
}

fn check_range(name: &str, var: &Var, copy: &Tensor) -> Result<()> {
    let values = |t: &Tensor| -> candle_core::Result<Vec<f32>> {
        t.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
    };
    // The copy first: if all of it is finite, the variable need not be copied to the host.
    let copies = values(copy)?;
    if copies.iter().all(|copy| copy.is_finite()) {
        return Ok(());
    }
    let mut pairs = copies.iter().zip(values(var.as_tensor())?).enumerate();
    match pairs.find(|(_, (copy, value))| value.is_finite() && !copy.is_finite()) {
        None => Ok(()),
        Some((index, (_, value))) => Err(OptimError::MasterOverflow {
            name: name.to_string(),
            index,
            value: value.into(),
            dtype: copy.dtype(),
        }),
    }
}
