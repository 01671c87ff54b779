//! The options of the program.

use crate::device::DeviceName;
use crate::layer::attention::Operands;
use crate::layer::{LayerConfig, Precision};
use anyhow::{Result, bail, ensure};
use candle_core::DType;
use clap::{Parser, ValueEnum};
use fp8::RecipeName;

/// Compare forward and backward of a GPT encoder layer in f32, in mixed precision and in FP8.
#[derive(Parser)]
pub struct Args {
    /// Recipe of the linear layers of the FP8 run, such as delayed, tensorwise or rowwise, or off for no such run
    #[arg(long, default_value = "delayed", value_parser = recipe)]
    fp8: Fp8,
    /// Dtype of activations, and of products that are not in FP8, in the mixed run and the FP8 run; with f32 there is no mixed run
    #[arg(long, default_value = "bf16")]
    dtype: DTypeName,
    /// Dtype of activations in the FP8 run [default: that of --dtype on a GPU, f32 on a CPU]
    #[arg(long)]
    fp8_activations: Option<DTypeName>,
    /// Which runs to compare
    #[arg(long, value_delimiter = ',', default_value = "f32,mixed,fp8")]
    runs: Vec<RunName>,
    /// Where to run
    #[arg(long, default_value = "cpu")]
    pub device: DeviceName,
    /// The sizes of the published example, 4096 features and 8192 tokens, with 20 steps before 20 timed ones: the default on a GPU; hours
    /// on a CPU, where a turn of all three takes minutes: see --iterations and --warmup
    #[arg(long)]
    published: bool,
    /// Hidden size [default: 768]
    #[arg(long)]
    hidden: Option<usize>,
    /// Tokens of a sequence [default: 256]
    #[arg(long)]
    sequence: Option<usize>,
    /// Sequences [default: 2]
    #[arg(long)]
    batch: Option<usize>,
    /// Hidden size of the MLP [default: four times the hidden size]
    #[arg(long)]
    ffn: Option<usize>,
    /// Attention heads [default: 12]
    #[arg(long)]
    heads: Option<usize>,
    /// Let tokens attend to earlier ones only
    #[arg(long)]
    causal: bool,
    /// Operands of attention's products [default: bf16 with a recipe, else tensors as they are]
    #[arg(long)]
    attention: Option<Operands>,
    /// Let a GPU round the operands of f32 products to TF32
    #[arg(long)]
    pub tf32: bool,
    /// Timed steps of each run [default: 10]
    #[arg(long)]
    iterations: Option<usize>,
    /// Steps before them, at least 1, to make the first delayed scales [default: 3]
    #[arg(long)]
    warmup: Option<usize>,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DTypeName {
    F32,
    Bf16,
    F16,
}

impl DTypeName {
    fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
            Self::F16 => DType::F16,
        }
    }
}

/// One of the runs to compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RunName {
    /// Parameters, activations and products in f32
    F32,
    /// Parameters in f32, activations and products in --dtype
    Mixed,
    /// The products of linear layers in FP8
    Fp8,
}

impl RunName {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Mixed => "mixed",
            Self::Fp8 => "fp8",
        }
    }
}

/// None is `off`.
#[derive(Clone, Copy)]
struct Fp8(Option<RecipeName>);

fn recipe(text: &str) -> Result<Fp8> {
    Ok(Fp8(match text {
        "off" => None,
        name => Some(name.parse()?),
    }))
}

/// Timed steps, and steps before them.
#[derive(Clone, Copy, Debug)]
pub struct Steps {
    pub timed: usize,
    pub warmup: usize,
}

impl Args {
    fn is_large(&self) -> bool {
        self.published || self.device == DeviceName::Cuda
    }

    /// The sizes of the layer.
    ///
    /// # Errors
    /// If one is 0.
    pub fn layer(&self) -> Result<LayerConfig> {
        let default = match self.is_large() {
            true => LayerConfig::published(),
            false => LayerConfig::small(),
        };
        let hidden = self.hidden.unwrap_or(default.hidden);
        let config = LayerConfig {
            hidden,
            sequence: self.sequence.unwrap_or(default.sequence),
            batch: self.batch.unwrap_or(default.batch),
            ffn: self.ffn.unwrap_or(4 * hidden),
            heads: self.heads.unwrap_or(default.heads),
            causal: self.causal,
            attention: self.attention,
        };
        let sizes = [config.sequence, config.batch, config.ffn];
        ensure!(
            !sizes.contains(&0),
            "--sequence, --batch and --ffn are at least 1"
        );
        Ok(config)
    }

    /// # Errors
    /// If there is nothing to time.
    pub fn steps(&self) -> Result<Steps> {
        let (timed, warmup) = if self.is_large() { (20, 20) } else { (10, 3) };
        let steps = Steps {
            timed: self.iterations.unwrap_or(timed),
            warmup: self.warmup.unwrap_or(warmup).max(1),
        };
        ensure!(steps.timed > 0, "--iterations is at least 1");
        Ok(steps)
    }

    /// The runs in the order in which they take turns.
    ///
    /// # Errors
    /// If there is none.
    pub fn runs(&self) -> Result<Vec<(RunName, Precision)>> {
        let activations = match (self.fp8_activations, self.device) {
            (Some(dtype), _) => dtype,
            (None, DeviceName::Cuda) => self.dtype,
            (None, DeviceName::Cpu) => DTypeName::F32,
        };
        let all = [
            Some((RunName::F32, Precision::full())),
            (self.dtype != DTypeName::F32)
                .then(|| (RunName::Mixed, Precision::mixed(self.dtype.dtype()))),
            self.fp8.0.map(|recipe| {
                let precision = Precision::fp8(activations.dtype(), recipe);
                (RunName::Fp8, precision)
            }),
        ];
        let chosen = all.into_iter().flatten();
        let chosen: Vec<_> = chosen
            .filter(|(name, _)| self.runs.contains(name))
            .collect();
        if chosen.is_empty() {
            bail!("--runs, --fp8 and --dtype leave nothing to run");
        }
        Ok(chosen)
    }
}
