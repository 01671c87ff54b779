//! How a checkpoint is opened.

/// What becomes of the inputs of FP8 layers.
///
/// ```
/// # use fp8_recipes as fp8;
/// # use candle_core::{DType, Device, Tensor};
/// # use fp8_recipes::load::Checkpoint;
/// # use fp8_recipes::rewrite::{self, QuantizeOptions, Scheme};
/// # let dir = tempfile::tempdir()?;
/// # let weight = Tensor::ones((32, 64), DType::F32, &Device::Cpu)?;
/// # let bias = Tensor::zeros(32, DType::F32, &Device::Cpu)?;
/// # let tensors = [("fc.weight", weight), ("fc.bias", bias)].into();
/// # candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors"))?;
/// # let (model, fp8) = (Checkpoint::open_dir(dir.path())?, dir.path().join("fp8"));
/// # rewrite::quantize(&model, &fp8, &QuantizeOptions::new(Scheme::ChannelToken), &mut rewrite::quiet)?;
/// use fp8::load::{Inputs, OpenOptions};
/// use fp8::nn::InputScaling;
/// let options = OpenOptions::new().with_inputs(Inputs::WeightOnly);
/// let checkpoint = Checkpoint::open_dir_with(&fp8, &options)?;
/// let layer = checkpoint.stored_layer("fc", &Device::Cpu)?;
/// assert!(matches!(layer.input, InputScaling::None));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Inputs {
    /// As the checkpoint says; ModelOpt's `fp8_pb_wo` says that they stay in high precision.
    #[default]
    AsStored,
    /// They stay in high precision, whatever the checkpoint says, and are multiplied by dequantized weights.
    WeightOnly,
    /// Every so many inputs of a token are cast with a scale from their amax, as engines run `fp8_pb_wo` with 128.
    Groups(usize),
}

/// How [`Checkpoint::open_dir_with`](super::Checkpoint::open_dir_with) takes what it finds.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::load::{Inputs, OpenOptions};
/// let options = OpenOptions::new().with_inputs(Inputs::Groups(128));
/// assert_eq!(options.inputs, Inputs::Groups(128));
/// assert!(!options.allow_unscaled);
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenOptions {
    /// See [`OpenOptions::with_inputs`].
    pub inputs: Inputs,
    /// See [`OpenOptions::with_allow_unscaled`].
    pub allow_unscaled: bool,
}

impl OpenOptions {
    /// Inputs as stored, every FP8 weight with its scale.
    pub fn new() -> Self {
        Self::default()
    }

    /// What becomes of the inputs of FP8 layers.
    pub fn with_inputs(mut self, inputs: Inputs) -> Self {
        self.inputs = inputs;
        self
    }

    /// Whether to open files of plain casts: FP8 tensors in a set of files in which nothing has a scale and no configuration speaks of
    /// any. Their values are their codes. Such a file looks like one that has lost its scales, so it takes this word.
    pub fn with_allow_unscaled(mut self, allow: bool) -> Self {
        self.allow_unscaled = allow;
        self
    }
}
