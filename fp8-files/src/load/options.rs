//! Options for opening a checkpoint.

/// How the inputs of FP8 layers are scaled.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::Device;
/// use fp8::load::{Checkpoint, Inputs, OpenOptions};
/// use fp8::nn::InputScaling;
/// # let dir = tempfile::tempdir()?;
/// # fp8_test_support::files::fp8_model(dir.path());
/// let options = OpenOptions::new().with_inputs(Inputs::WeightOnly);
/// let checkpoint = Checkpoint::open_dir_with(dir.path(), &options)?;
/// let layer = checkpoint.stored_layer("fc", &Device::Cpu)?;
/// assert!(matches!(layer.input, InputScaling::None));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Inputs {
    /// As the checkpoint declares; with ModelOpt's `fp8_pb_wo` they stay in high precision.
    #[default]
    AsStored,
    /// They stay in high precision, whatever the checkpoint declares, and are multiplied by dequantized weights.
    WeightOnly,
    /// Each group of this many inputs of a token is cast with a scale from its amax. Engines run `fp8_pb_wo` this way, with 128.
    Groups(usize),
}

/// Options of [`Checkpoint::open_dir_with`](super::Checkpoint::open_dir_with) and [`Checkpoint::open_with`](super::Checkpoint::open_with).
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
    /// Scales inputs as stored, and requires a scale for every FP8 weight.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets how the inputs of FP8 layers are scaled.
    pub fn with_inputs(mut self, inputs: Inputs) -> Self {
        self.inputs = inputs;
        self
    }

    /// Sets whether to open files of plain casts, whose values are the codes: no tensor in them is a scale, and no configuration declares
    /// any. Such a file looks like one that has lost its scales, so the caller has to confirm it.
    pub fn with_allow_unscaled(mut self, allow: bool) -> Self {
        self.allow_unscaled = allow;
        self
    }
}
