//! First values of parameters: flax's initializers, and candle's.

use crate::error::{DenseError, Result};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Init, VarBuilder};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::StandardNormal;

/// The standard deviation of a standard normal distribution cut off at two.
const CUT_DEVIATION: f64 = 0.879_625_661_034_239_8;

/// Which number of values the variance of an initializer follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FanMode {
    /// The number of inputs of an output.
    FanIn,
    /// The number of outputs of an input.
    FanOut,
    /// The mean of the two.
    FanAverage,
}

/// The distribution of an initializer that scales the variance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum InitDistribution {
    /// Normal, cut off at two standard deviations, with the variance of what is left.
    TruncatedNormal,
    /// Normal.
    Normal,
    /// Uniform around 0.
    Uniform,
}

/// The first values of a parameter. Those of flax have its distributions; the values differ, since the random generator does.
///
/// The fans are flax's: `fan_in` is the product of the batch and contracted sizes, `fan_out` that of the features.
///
/// ```
/// use fp8_recipes::nn::{Init, Initializer};
/// // flax's default for kernels, and one of candle's.
/// let kernel = Initializer::lecun_normal();
/// let bias: Initializer = Init::Const(0.).into();
/// # let _ = (kernel, bias);
/// ```
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Initializer {
    /// One of candle's, drawn for a weight `[fan_out, fan_in]`.
    Candle(Init),
    /// flax's `variance_scaling`: a variance of `scale` divided by the fan.
    VarianceScaling {
        /// The numerator.
        scale: f64,
        /// Which fan.
        mode: FanMode,
        /// The distribution.
        distribution: InitDistribution,
    },
    /// flax's `truncated_normal`: normal with this standard deviation before it is cut off at two of them.
    TruncatedNormal {
        /// The standard deviation.
        stddev: f64,
    },
    /// flax's `orthogonal`: rows or columns, whichever are fewer, are orthogonal and of this length.
    Orthogonal {
        /// The length.
        scale: f64,
    },
}

macro_rules! scaling {
    ($($(#[$doc:meta])* $name:ident: $scale:literal, $mode:ident, $distribution:ident;)*) => {
        impl Initializer {$(
            $(#[$doc])*
            pub const fn $name() -> Self {
                Self::VarianceScaling {
                    scale: $scale,
                    mode: FanMode::$mode,
                    distribution: InitDistribution::$distribution,
                }
            }
        )*}
    };
}

scaling! {
    /// Variance 1 / fan_in: flax's default for kernels.
    lecun_normal: 1., FanIn, TruncatedNormal;
    /// Variance 1 / fan_in, uniform.
    lecun_uniform: 1., FanIn, Uniform;
    /// Variance 2 / (fan_in + fan_out), Xavier's.
    glorot_normal: 1., FanAverage, TruncatedNormal;
    /// Variance 2 / (fan_in + fan_out), uniform.
    glorot_uniform: 1., FanAverage, Uniform;
    /// Variance 2 / fan_in, Kaiming's.
    he_normal: 2., FanIn, TruncatedNormal;
    /// Variance 2 / fan_in, uniform.
    he_uniform: 2., FanIn, Uniform;
}

impl From<Init> for Initializer {
    fn from(init: Init) -> Self {
        Self::Candle(init)
    }
}

impl Initializer {
    /// Values for a parameter whose elements, in order, are a matrix `[fan_in, fan_out]`. Equal seeds give equal values, except for
    /// candle's initializers, which take the device's generator.
    ///
    /// # Errors
    /// [`DenseError::Initializer`] for a scale or standard deviation that is negative or not finite; errors of the device.
    pub fn matrix(
        &self,
        [fan_in, fan_out]: [usize; 2],
        dtype: DType,
        device: &Device,
        seed: u64,
    ) -> Result<Tensor> {
        self.check()?;
        let count = fan_in * fan_out;
        let mut rng = StdRng::seed_from_u64(seed);
        let values: Vec<f64> = match *self {
            Self::Candle(init) => {
                let var = init.var((fan_out, fan_in), dtype, device)?;
                return Ok(var.as_detached_tensor().t()?.contiguous()?);
            }
            Self::VarianceScaling {
                scale,
                mode,
                distribution,
            } => {
                let fan = match mode {
                    FanMode::FanIn => fan_in as f64,
                    FanMode::FanOut => fan_out as f64,
                    FanMode::FanAverage => (fan_in + fan_out) as f64 / 2.,
                };
                let stddev = (scale / fan.max(1.)).sqrt();
                let draw = |rng: &mut StdRng| match distribution {
                    InitDistribution::TruncatedNormal => truncated(rng) * (stddev / CUT_DEVIATION),
                    InitDistribution::Normal => normal(rng) * stddev,
                    InitDistribution::Uniform => {
                        rng.random_range(-1f64..1.) * (3f64.sqrt() * stddev)
                    }
                };
                (0..count).map(|_| draw(&mut rng)).collect()
            }
            Self::TruncatedNormal { stddev } => {
                (0..count).map(|_| truncated(&mut rng) * stddev).collect()
            }
            Self::Orthogonal { scale } => orthogonal(&mut rng, fan_in, fan_out, scale),
        };
        let values = Tensor::from_vec(values, (fan_in, fan_out), &Device::Cpu)?;
        Ok(values.to_dtype(dtype)?.to_device(device)?)
    }

    fn check(&self) -> Result<()> {
        let (what, value) = match *self {
            Self::Candle(_) => return Ok(()),
            Self::VarianceScaling { scale, .. } => ("the scale", scale),
            Self::TruncatedNormal { stddev } => ("the stddev", stddev),
            Self::Orthogonal { scale } => ("the scale", scale),
        };
        match value.is_finite() && value >= 0. {
            true => Ok(()),
            false => Err(DenseError::Initializer { what, value }.into()),
        }
    }

    /// The parameter `name` of `vb`, which holds none of this name yet, with first values.
    pub(super) fn create(
        &self,
        vb: &VarBuilder<'_>,
        name: &str,
        dims: &[usize],
        fans: [usize; 2],
        seed: u64,
    ) -> Result<Tensor> {
        if let Self::Candle(init @ (Init::Const(_) | Init::Randn { .. } | Init::Uniform { .. })) =
            *self
        {
            return Ok(vb.get_with_hints(dims, name, init)?);
        }
        let made = vb.get_with_hints(dims, name, Init::Const(0.))?;
        // A VarMap has made a variable; a file would have had the tensor, or an error.
        if made.is_variable() {
            let values = self.matrix(fans, made.dtype(), made.device(), seed)?;
            Var::from_tensor(&made)?.set(&values.reshape(dims)?)?;
        }
        Ok(made)
    }
}

fn normal(rng: &mut StdRng) -> f64 {
    rng.sample(StandardNormal)
}

/// Standard normal within two standard deviations.
fn truncated(rng: &mut StdRng) -> f64 {
    loop {
        let value = normal(rng);
        if value.abs() <= 2. {
            return value;
        }
    }
}

/// `[rows, cols]`, row-major. Each new vector of the shorter side loses its parts along the earlier ones, twice, for the sake of rounding.
fn orthogonal(rng: &mut StdRng, rows: usize, cols: usize, scale: f64) -> Vec<f64> {
    let (few, long) = (rows.min(cols), rows.max(cols));
    let mut vectors: Vec<Vec<f64>> = vec![];
    while vectors.len() < few {
        let mut new: Vec<f64> = (0..long).map(|_| normal(rng)).collect();
        for _ in 0..2 {
            for old in &vectors {
                let along: f64 = old.iter().zip(&new).map(|(a, b)| a * b).sum();
                new.iter_mut().zip(old).for_each(|(x, o)| *x -= along * o);
            }
        }
        let length = new.iter().map(|x| x * x).sum::<f64>().sqrt();
        // A vector that lies along the others by chance is drawn again.
        if length > 1e-6 {
            new.iter_mut().for_each(|x| *x /= length);
            vectors.push(new);
        }
    }
    let at = |row: usize, col: usize| match rows <= cols {
        true => vectors[row][col],
        false => vectors[col][row],
    };
    let all = (0..rows * cols).map(|i| at(i / cols, i % cols) * scale);
    all.collect()
}
