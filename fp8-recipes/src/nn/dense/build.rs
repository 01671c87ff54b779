//! Making a dense layer, or reading one of its stored forms.

use super::axes::{Axes, sizes};
use super::axis_rules::check_count;
use super::{DenseConfig, DenseGeneral, Weight};
use crate::error::{DenseError, Result};
use crate::nn::StaticWeight;
use crate::nn::identity::SharedState;
use crate::nn::scaled_parameter::refuse_scaled;
use candle_core::Tensor;
use candle_nn::VarBuilder;
use fp8_files::names::join;
use std::sync::Arc;

/// Makes a [`DenseGeneral`] for inputs like one of the shape `input`, or reads it where `vb` holds its parameters. Only the sizes along
/// batch and contracted axes count; later inputs may differ in the others, and in their number where axes are negative.
///
/// # Errors
/// [`DenseError`] if options, axes or names do not fit, or a stored tensor has none of the forms that are read; if a tensor is missing.
pub fn dense_general(
    input: &[usize],
    config: DenseConfig,
    vb: VarBuilder<'_>,
) -> Result<DenseGeneral> {
    let path = vb.prefix();
    config.check(&path)?;
    let axes = Axes::of(&path, input, &config.axis, &config.batch_axis)?;
    let batch = sizes(input, &axes.batch);
    let contracted = sizes(input, &axes.contracted);
    let parts = Parts {
        batch,
        contracted,
        config,
        path,
    };
    parts.check_sizes()?;
    let [k, n] = parts.matrix();
    let coded = match parts.batch.is_empty() {
        true => fp8_files::static_weight(n, k, &vb)?,
        false => None,
    };
    if holds(&vb, "kernel") && (coded.is_some() || holds(&vb, "weight")) {
        return Err(DenseError::Ambiguous {
            path: parts.shown_path(),
            first: parts.name("kernel"),
            second: parts.name("weight"),
        }
        .into());
    }
    let seed = parts.config.seed.unwrap_or_else(rand::random);
    let weight = match coded {
        Some(weight) => Weight::Fp8(weight.into()),
        None => Weight::Kernel(parts.kernel(&vb, seed)?),
    };
    let bias = match parts.config.bias {
        true => Some(parts.bias(&vb, seed)?),
        false => None,
    };
    parts.finish(weight, bias)
}

impl DenseGeneral {
    /// A layer with a kernel in flax's shape, and a bias if the configuration has one, without a path.
    ///
    /// # Errors
    /// [`DenseError`] if a shape or an option does not fit.
    pub fn new(kernel: Tensor, bias: Option<Tensor>, config: DenseConfig) -> Result<Self> {
        config.check(NO_PATH)?;
        let (batch, axes) = (config.batch_axis.len(), config.axis.len());
        let rank = batch + axes + config.features.len();
        let dims = kernel.dims();
        if dims.len() != rank || dims[batch + axes..] != config.features {
            return Err(DenseError::StoredShape {
                tensor: "kernel".into(),
                got: dims.to_vec(),
                expected: format!(
                    "{batch} batch sizes, {axes} contracted sizes, then the features {:?}",
                    config.features
                ),
            }
            .into());
        }
        let parts = Parts {
            batch: dims[..batch].to_vec(),
            contracted: dims[batch..batch + axes].to_vec(),
            config,
            path: String::new(),
        };
        parts.check_sizes()?;
        parts.with_bias(Weight::Kernel(kernel), bias)
    }

    /// A layer with fp8layers' stored kernel, `[product of contracted sizes, product of features]`, without a path. `contracted` are the
    /// sizes of the contracted dimensions in the order of the input.
    ///
    /// # Errors
    /// As [`DenseGeneral::new`]; for a layer with batch axes, which fp8layers does not have.
    pub fn from_matrix(
        matrix: Tensor,
        bias: Option<Tensor>,
        contracted: &[usize],
        config: DenseConfig,
    ) -> Result<Self> {
        let config = config.with_stored_as_matrix(true);
        let parts = Parts::of_matrix(contracted, config)?;
        let [k, n] = parts.matrix();
        if matrix.dims() != [k, n] {
            return Err(parts.misshapen("kernel", matrix.dims(), format!("[{k}, {n}]")));
        }
        parts.with_bias(Weight::Kernel(matrix), bias)
    }

    /// A layer whose weight is FP8 codes, `[product of features, product of contracted sizes]`.
    ///
    /// # Errors
    /// As [`DenseGeneral::from_matrix`].
    pub fn from_static(
        weight: StaticWeight,
        bias: Option<Tensor>,
        contracted: &[usize],
        config: DenseConfig,
        path: impl Into<Arc<str>>,
    ) -> Result<Self> {
        let parts = Parts::of_matrix(contracted, config)?;
        let [k, n] = parts.matrix();
        if weight.weight().dims() != [n, k] {
            return Err(parts.misshapen("weight", weight.weight().dims(), format!("[{n}, {k}]")));
        }
        let layer = parts.with_bias(Weight::Fp8(weight.into()), bias)?;
        Ok(layer.with_path(path))
    }
}

/// What messages print for a layer without a path.
const NO_PATH: &str = "without a path";

/// A layer without its parameters.
struct Parts {
    batch: Vec<usize>,
    contracted: Vec<usize>,
    config: DenseConfig,
    path: String,
}

impl Parts {
    /// A layer without batch axes.
    fn of_matrix(contracted: &[usize], config: DenseConfig) -> Result<Self> {
        config.check(NO_PATH)?;
        let fits = contracted.len() == config.axis.len() && config.batch_axis.is_empty();
        let parts = Self {
            batch: vec![],
            contracted: contracted.to_vec(),
            path: String::new(),
            config,
        };
        if !fits {
            let axes = (&parts.config.axis, &parts.config.batch_axis);
            let got = format!(
                "{contracted:?} for axis {:?} and batch_axis {:?}",
                axes.0, axes.1
            );
            return Err(DenseError::Option {
                path: parts.shown_path(),
                what: "contracted",
                got,
                expected: "one size for each contracted axis, and no batch axis".into(),
            }
            .into());
        }
        parts.check_sizes()?;
        Ok(parts)
    }

    /// The path in messages.
    fn shown_path(&self) -> String {
        match self.path.as_str() {
            "" => NO_PATH.to_string(),
            path => path.to_string(),
        }
    }

    fn name(&self, own: &str) -> String {
        join(&self.path, own)
    }

    /// Contracted sizes and features of one product.
    fn matrix(&self) -> [usize; 2] {
        [&self.contracted, &self.config.features].map(|sizes| sizes.iter().product())
    }

    fn kernel_dims(&self) -> Vec<usize> {
        [&*self.batch, &*self.contracted, &*self.config.features].concat()
    }

    /// The shape of a new kernel.
    fn new_dims(&self) -> Vec<usize> {
        match self.config.stored_as_matrix {
            true => self.matrix().to_vec(),
            false => self.kernel_dims(),
        }
    }

    fn bias_dims(&self) -> Vec<usize> {
        [&*self.batch, &*self.config.features].concat()
    }

    fn misshapen(&self, own: &str, got: &[usize], expected: String) -> crate::Error {
        DenseError::StoredShape {
            tensor: self.name(own),
            got: got.to_vec(),
            expected,
        }
        .into()
    }

    fn check_sizes(&self) -> Result<()> {
        for (what, sizes) in [
            ("contracted sizes", &self.contracted),
            ("batch sizes", &self.batch),
        ] {
            if sizes.contains(&0) {
                return Err(DenseError::Option {
                    path: self.shown_path(),
                    what,
                    got: format!("{sizes:?}"),
                    expected: "at least 1".into(),
                }
                .into());
            }
        }
        let kernel = self.kernel_dims();
        match (kernel.iter()).try_fold(1usize, |count, &size| count.checked_mul(size)) {
            Some(_) => Ok(()),
            None => Err(DenseError::Option {
                path: self.shown_path(),
                what: "the kernel",
                got: format!("{kernel:?}"),
                expected: "sizes whose product fits into a usize".into(),
            }
            .into()),
        }
    }

    /// The kernel in one of its stored forms, or a new one.
    fn kernel(&self, vb: &VarBuilder<'_>, seed: u64) -> Result<Tensor> {
        let [k, n] = self.matrix();
        let forms = match self.batch.is_empty() {
            true => vec![self.kernel_dims(), vec![k, n]],
            false => vec![self.kernel_dims()],
        };
        if let Some(kernel) = self.stored(vb, "kernel", &forms)? {
            return Ok(kernel);
        }
        if holds(vb, "weight") {
            return self.exported(vb);
        }
        let rows = self.batch.iter().product::<usize>() * k;
        let init = &self.config.kernel_init;
        init.create(vb, "kernel", &self.new_dims(), [rows, n], seed)
    }

    /// The kernel from an exported `[out_features, in_features]`.
    fn exported(&self, vb: &VarBuilder<'_>) -> Result<Tensor> {
        let [k, n] = self.matrix();
        let forms = match self.batch.is_empty() {
            true => vec![vec![n, k]],
            false => vec![],
        };
        match self.stored(vb, "weight", &forms)? {
            Some(found) if !found.is_variable() => {
                Ok(found.t()?.contiguous()?.reshape(self.kernel_dims())?)
            }
            _ => {
                let expected = "the name `kernel`: a `weight` is read from an exported file, and is not trained";
                Err(self.misshapen("weight", &[n, k], expected.into()))
            }
        }
    }

    /// The bias, which may be stored flat.
    fn bias(&self, vb: &VarBuilder<'_>, seed: u64) -> Result<Tensor> {
        let dims = self.bias_dims();
        let count: usize = dims.iter().product();
        if let Some(bias) = self.stored(vb, "bias", &[dims.clone(), vec![count]])? {
            return Ok(bias);
        }
        let init = &self.config.bias_init;
        // Other random numbers than those of the kernel.
        init.create(vb, "bias", &dims, [1, count], seed.wrapping_add(1))
    }

    /// A tensor that `vb` holds, in one of these shapes.
    fn stored(
        &self,
        vb: &VarBuilder<'_>,
        own: &str,
        forms: &[Vec<usize>],
    ) -> Result<Option<Tensor>> {
        if !holds(vb, own) {
            return Ok(None);
        }
        if let Ok(found) = vb.get_unchecked(own) {
            if forms.iter().any(|dims| dims == found.dims()) {
                return Ok(Some(found));
            }
            let forms: Vec<String> = forms.iter().map(|dims| format!("{dims:?}")).collect();
            let expected = match forms.is_empty() {
                true => format!("`kernel` {:?}", self.kernel_dims()),
                false => forms.join(" or "),
            };
            return Err(self.misshapen(own, found.dims(), expected));
        }
        // A VarMap gives a tensor to those who know its shape.
        let mut refused = None;
        for dims in forms {
            match vb.get(dims.as_slice(), own) {
                Ok(found) => return Ok(Some(found)),
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        match refused {
            Some(error) => Err(error.into()),
            None => Ok(None),
        }
    }

    fn with_bias(self, weight: Weight, bias: Option<Tensor>) -> Result<DenseGeneral> {
        let dims = self.bias_dims();
        let expected = match (&bias, self.config.bias) {
            (Some(bias), true) if bias.dims() == dims => None,
            (Some(bias), true) if bias.dims() == [dims.iter().product::<usize>()] => None,
            (None, false) => None,
            (_, true) => Some(format!("{dims:?}")),
            (Some(_), false) => Some("no bias, as configured".into()),
        };
        if let Some(expected) = expected {
            let got = bias.as_ref().map_or(&[][..], Tensor::dims);
            return Err(self.misshapen("bias", got, expected));
        }
        Ok(DenseGeneral {
            path: None,
            ..self.finish(weight, bias)?
        })
    }

    fn finish(self, weight: Weight, bias: Option<Tensor>) -> Result<DenseGeneral> {
        let tensors: Vec<&Tensor> = match &weight {
            Weight::Kernel(kernel) => [Some(kernel), bias.as_ref()]
                .into_iter()
                .flatten()
                .collect(),
            Weight::Fp8(_) => bias.iter().collect(),
        };
        refuse_scaled("a general dense layer", &self.path, &tensors)?;
        let (kernel, config) = (self.name("kernel"), &self.config);
        let rank = match &weight {
            Weight::Kernel(kernel) => kernel.rank(),
            Weight::Fp8(_) if config.kernel_axes.len() == 2 => 2,
            Weight::Fp8(_) => self.kernel_dims().len(),
        };
        check_count(&kernel, &config.kernel_axes, rank)?;
        let names = self.name("bias");
        check_count(&names, &config.bias_axes, self.bias_dims().len())?;
        if let Some(rules) = &config.axis_rules {
            rules.assign(&kernel, &config.kernel_axes)?;
            rules.assign(&names, &config.bias_axes)?;
        }
        Ok(DenseGeneral {
            weight,
            bias,
            batch: self.batch,
            contracted: self.contracted,
            config: Arc::new(self.config),
            path: Some(self.path.into()),
            shards: None,
            state: SharedState::default(),
        })
    }
}

/// Whether `vb` holds a tensor of this name. One that makes tensors of any name holds none.
fn holds(vb: &VarBuilder<'_>, name: &str) -> bool {
    vb.contains_tensor(name) && !vb.contains_tensor("a name that no file has")
}
