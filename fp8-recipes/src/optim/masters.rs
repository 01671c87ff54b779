//! Master weights: what an optimizer updates and keeps, while the variable is what the forward pass sees.

use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use fp8_core::StochasticKey;
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use super::elements::Element;
use super::{OptimError, error};

/// Elements of one task. Bits of an element follow from its index, so the split never changes one.
const BLOCK: usize = 1 << 14;
/// Keeps the bits of masters apart from those of casts that are given the same seed.
const DOMAIN: u64 = 0x6D61_7374_6572_7321;

/// The dtype of master weights.
///
/// | masters | f16 variable | bf16 variable | f32 variable | f64 variable |
/// |---|---|---|---|---|
/// | f32 | f32 copy | f32 copy | itself | itself |
/// | bf16 | bf16 copy, stochastic | itself, stochastic | bf16 copy, stochastic | itself |
/// | f16 | itself, stochastic | f16 copy, stochastic | f16 copy, stochastic | itself |
///
/// "Stochastic": each step computes in f32 from the master and rounds the result up or down at random, so that the mean is the result
/// itself and updates below half a unit in the last place are not lost on average. The bits follow from the optimizer's seed, the step, the variable's
/// place among the sorted names and the element's index: not from the number of threads, and the same after a resume. The variable is the master, rounded
/// to nearest where it is narrower. A result beyond the range of f16 becomes its largest number, 65504 (that of bf16 likewise): masters stay
/// finite. A variable that holds a finite value beyond it when its copy is made is refused
/// ([`OptimError::MasterOverflow`]); variables without a gradient have copies too, such as the
/// running statistics of a batch norm: leave them out with `from_named` where they may be so large. "Itself": no copy is kept, since it could hold nothing that the variable does not.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device, Var};
/// use fp8::optim::{MasterDType, Sgd, SgdConfig};
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
pub(super) enum Kept {
    /// The variable alone, rounded to nearest.
    Variable,
    /// The variable alone, rounded at random.
    VariableAtRandom,
    /// A copy.
    Copy(MasterDType),
}

impl Kept {
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

    /// The bits of a step, for what is rounded at random.
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

    /// A copy of the variable as it is, rounded to nearest.
    ///
    /// # Errors
    /// [`OptimError::MasterOverflow`] for a finite value that the copy cannot hold.
    pub(super) fn new_copy(self, name: &str, var: &Var) -> error::Result<Option<Tensor>> {
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

fn check_range(name: &str, var: &Var, copy: &Tensor) -> error::Result<()> {
    let values = |t: &Tensor| t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
    // Copies first: where none is Inf, the variable need not come to the host.
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

/// A copy in host memory.
pub(super) enum HostMaster {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl HostMaster {
    pub(super) fn from_tensor(tensor: &Tensor) -> Result<Self> {
        let flat = tensor.to_device(&Device::Cpu)?.flatten_all()?;
        match tensor.dtype() {
            DType::BF16 => flat.to_vec1().map(Self::Bf16),
            DType::F16 => flat.to_vec1().map(Self::F16),
            _ => flat.to_vec1().map(Self::F32),
        }
    }

    pub(super) fn to_tensor(&self, shape: &Shape) -> Result<Tensor> {
        match self {
            Self::F32(values) => Tensor::from_slice(values, shape, &Device::Cpu),
            Self::Bf16(values) => Tensor::from_slice(values, shape, &Device::Cpu),
            Self::F16(values) => Tensor::from_slice(values, shape, &Device::Cpu),
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
            Self::F16(values) => values.len(),
        }
    }
}

/// The value that a step begins with, in `dtype`: the master's, where nobody has written to the variable.
pub(super) fn current(var: &Var, master: Option<&Tensor>, dtype: DType) -> Result<Tensor> {
    let current = var.as_detached_tensor();
    match master {
        None => current.to_dtype(dtype),
        Some(master) => master
            .to_dtype(var.dtype())?
            .eq(&current)?
            .where_cond(&master.to_dtype(dtype)?, &current.to_dtype(dtype)?),
    }
}

/// Puts the result of a step into master and variable.
pub(super) fn store(
    var: &Var,
    next: Tensor,
    master: &mut Option<Tensor>,
    key: Option<StochasticKey>,
) -> Result<()> {
    let next = match (key, &master) {
        (None, _) => next,
        (Some(key), Some(master)) => at_random(&next, master.dtype(), key)?,
        (Some(key), None) => at_random(&next, var.dtype(), key)?,
    };
    let rounded = next.to_dtype(var.dtype())?;
    if let Some(master) = master {
        *master = next;
        // A variable of the master's dtype would share its memory.
        return var.set(&rounded.copy()?);
    }
    var.set(&rounded)
}

/// `values` rounded at random on the host: no device computes these bits itself.
fn at_random(values: &Tensor, dtype: DType, key: StochasticKey) -> Result<Tensor> {
    let wide = values.to_dtype(DType::F32)?.flatten_all()?;
    let wide = wide.to_device(&Device::Cpu)?.to_vec1::<f32>()?;
    fn run<T: Element>(wide: &[f32], key: StochasticKey) -> Vec<T> {
        let mut out = vec![T::default(); wide.len()];
        let tasks = out.chunks_mut(BLOCK).zip(wide.chunks(BLOCK));
        fp8_candle::parallel::for_each(tasks.enumerate(), |(i, (out, wide))| {
            T::stochastic(key, (i * BLOCK) as u64, wide, out);
        });
        out
    }
    let (shape, device) = (values.shape(), values.device());
    match dtype {
        DType::BF16 => Tensor::from_vec(run::<bf16>(&wide, key), shape, device),
        _ => Tensor::from_vec(run::<f16>(&wide, key), shape, device),
    }
}
