//! Opens the checkpoint that a command reads.

use crate::usage::{Usage, at_least, first_given};
use anyhow::{Result, anyhow, bail};
use fp8::fp8_files::adapter::AdapterFile;
use fp8::load::{Checkpoint, Inputs, OpenOptions};
use fp8::models::gguf::{GgufFile, GgufSource, is_gguf};
use fp8::rewrite::Source;
use std::io::ErrorKind;
use std::path::{Component, Path};

/// What begins the name of a model on the hub.
pub const HUB: &str = "hf://";
/// Bytes of the longest text file.
pub const MAX_TEXT: u64 = 1 << 30;

/// How an FP8 checkpoint is opened.
#[derive(Default, clap::Args)]
pub struct Opening {
    /// Scale inputs in groups of N, whatever the checkpoint says (ModelOpt's fp8_pb_wo runs with 128)
    #[arg(long, value_name = "N", conflicts_with = "weight_only", value_parser = at_least(1))]
    groups: Option<usize>,
    /// Leave inputs in high precision, whatever the checkpoint says
    #[arg(long)]
    weight_only: bool,
    /// Accept FP8 tensors that have no scale in the files, as if it were 1
    #[arg(long)]
    allow_unscaled: bool,
}

impl Opening {
    /// The first given flag, if any.
    pub fn given(&self) -> Option<&'static str> {
        first_given([
            (self.groups.is_some(), "--groups"),
            (self.weight_only, "--weight-only"),
            (self.allow_unscaled, "--allow-unscaled"),
        ])
    }

    /// The first given flag that is about the inputs of FP8 layers, if any.
    pub fn of_inputs(&self) -> Option<&'static str> {
        first_given([
            (self.groups.is_some(), "--groups"),
            (self.weight_only, "--weight-only"),
        ])
    }

    /// Fails for flags that change nothing about the GGUF file at `path`.
    pub fn check_gguf(&self, path: &Path) -> Result<()> {
        match self.given() {
            None => Ok(()),
            Some(flag) => Err(Usage(needs_fp8(flag, path)).into()),
        }
    }

    /// A directory, or a single safetensors file.
    pub fn open(&self, path: &Path) -> Result<Checkpoint> {
        if is_gguf(path) {
            bail!(
                "{} is a GGUF file, which holds no FP8: quantize, generate, eval, logits, bench and diff take it, and \
                 `fp8 quantize` makes an FP8 checkpoint of it",
                path.display()
            );
        }
        found(path)?;
        let inputs = match self.groups {
            Some(size) => Inputs::Groups(size),
            None if self.weight_only => Inputs::WeightOnly,
            None => Inputs::AsStored,
        };
        let options = OpenOptions::new().with_inputs(inputs);
        open_with(path, &options.with_allow_unscaled(self.allow_unscaled))
    }
}

/// The message for a flag of FP8 layers beside a GGUF file.
pub fn needs_fp8(flag: &str, path: &Path) -> String {
    format!(
        "{flag} is for FP8 layers, and {} is a GGUF file, which has none",
        path.display()
    )
}

/// Fails for a path that is no model, if it shows what was meant: a name on the hub, the folder of a run, or an adapter.
pub fn found(path: &Path) -> Result<()> {
    let shown = path.display();
    if let Some(hub) = path.to_str().and_then(|text| text.strip_prefix(HUB)) {
        let (id, revision) = match hub.split_once('@') {
            Some((id, revision)) => (id, format!(" --revision {revision}")),
            None => (hub, String::new()),
        };
        let name = id.rsplit('/').next().unwrap_or(id);
        bail!(
            "{shown}: only `fp8 check` reads models on the hub; for other commands, download it first: hf download {id}{revision} \
             --local-dir {name}"
        );
    }
    if let Err(error) = std::fs::metadata(path) {
        let (is_name, name) = match *path.components().collect::<Vec<_>>() {
            [Component::Normal(_), Component::Normal(name)] => (true, name.to_string_lossy()),
            _ => (false, "".into()),
        };
        let hint = match path.parent() {
            Some(run) if run.join(RUN).is_file() && run.join("adapter").is_dir() => format!(
                "; {} is the run of an adapter: merge it into its base with `fp8 merge`",
                run.display()
            ),
            Some(parent) if parent.is_dir() => String::new(),
            _ if is_name && error.kind() == ErrorKind::NotFound => format!(
                "; a model on the hub has to be downloaded first: hf download {shown} --local-dir {name}"
            ),
            _ => String::new(),
        };
        bail!("{shown}: {error}{hint}");
    }
    if path.join(RUN).is_file() && !path.join(CONFIG).is_file() {
        let [model, adapter] = ["model", "adapter"].map(|own| path.join(own));
        if model.is_dir() {
            bail!(
                "{shown} is the folder of a run: its model is {}",
                model.display()
            );
        }
        bail!(
            "{shown} is the folder of a run, not a model: give its base, and where a command has it, --adapter {}",
            adapter.display()
        );
    }
    if path.join(ADAPTER).is_file() && !path.join(CONFIG).is_file() {
        bail!(
            "{shown} is an adapter, not a model: `fp8 eval` and `fp8 generate` take its base and --adapter {shown}. To train on from it, train the \
             folder that `fp8 merge BASE {shown} --out DIR` writes"
        );
    }
    Ok(())
}

/// Fails for the folder of a run in place of its adapter.
pub fn found_adapter(path: &Path) -> Result<()> {
    let own = path.join("adapter");
    match !path.join(ADAPTER).exists() && own.join(ADAPTER).is_file() {
        true => bail!(
            "{} is the folder of a run; did you mean its adapter, {}?",
            path.display(),
            own.display()
        ),
        false => Ok(()),
    }
}

/// An error of an adapter on a base, with the name of the base that the adapter was made for. An adapter that cannot be read has none.
pub fn on_base(error: impl std::fmt::Display, adapter: &Path) -> anyhow::Error {
    let file = AdapterFile::open(adapter);
    match file.ok().and_then(|file| file.config().base_model.clone()) {
        Some(base) => anyhow!("{error}; {} was made for {base}", adapter.display()),
        None => anyhow!("{error}"),
    }
}

/// Files that say what a folder is.
const CONFIG: &str = "config.json";
const RUN: &str = "run.json";
const ADAPTER: &str = "adapter_config.json";

/// A directory, a single safetensors file, or a GGUF file.
pub fn open(path: &Path) -> Result<Box<dyn Source>> {
    found(path)?;
    Ok(match is_gguf(path) {
        true => Box::new(GgufSource::new(GgufFile::open(path)?)?),
        false => Box::new(open_with(path, &OpenOptions::new())?),
    })
}

fn open_with(path: &Path, options: &OpenOptions) -> Result<Checkpoint> {
    if path.is_dir() {
        return Ok(Checkpoint::open_dir_with(path, options)?);
    }
    Ok(Checkpoint::open_with(&[path], options)?)
}
