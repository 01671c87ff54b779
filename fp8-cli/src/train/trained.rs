//! The model that a run trains.

use super::settings::{Operands, Settings, Stored};
use crate::device::DeviceName;
use crate::usage::Usage;
use anyhow::{Result, anyhow, bail};
use candle_core::{DType, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::fp8_candle::ops::multiplies_bf16;
use fp8::fp8_files::adapter::{AdapterConfig, Targets};
use fp8::models::{Model, ModelOptions, open};
use fp8::rewrite::hub_name;
use fp8::training::{TrainableModel, initialize_adapter};
use fp8::{Fp8Layer, Fp8Module, Visitor};

/// The name of a run's adapter.
pub const ADAPTER: &str = "default";

/// A model, its variables, and the file of one that is trained in full.
type Opened = (Model, VarMap, Option<Box<dyn fp8::rewrite::Source>>);

/// The model with its variables: its parameters, or those of adapters. An encoder gets a classifier for the `labels`, if there are any.
pub fn model(stored: &Stored, labels: &[String]) -> Result<Opened> {
    let settings = &stored.settings;
    let device = &settings.device.open()?;
    let (mut model, vars, source) = match settings.lora {
        None => {
            let (path, seed) = (&stored.model, settings.seed);
            let base = match labels.is_empty() {
                true => TrainableModel::open(path, DType::F32, device)?.without_classifier()?,
                false => TrainableModel::open_classifier(path, labels, seed, DType::F32, device)?,
            };
            (base.model, base.vars, Some(base.source))
        }
        Some(rank) => {
            let mut model = open(&stored.model, &ModelOptions::new().with_device(device))?;
            let vars = VarMap::new();
            let vb = VarBuilder::from_varmap(&vars, DType::F32, device);
            let config = adapter(stored, rank, &mut model, labels)?;
            model.add_adapter(ADAPTER, &config, vb)?;
            check_rank(rank, &vars)?;
            initialize_adapter(&vars, settings.seed)?;
            (model, vars, None)
        }
    };
    match &mut model {
        Model::Llama(llama) => llama.set_recomputation(settings.recompute),
        _ if settings.recompute => {
            bail!(Usage("--recompute is for language models".into()));
        }
        Model::Bert(_) if settings.no_packing => {
            bail!(Usage(
                "--no-packing is for language models: a text of an encoder has a row of its own"
                    .into()
            ));
        }
        _ => {}
    }
    Ok((model, vars, source))
}

/// What a new run rounds the operands of products in high precision to.
pub fn operands(settings: &Settings, model: &Model) -> Result<Operands> {
    let in_bf16 = match (settings.operands, model) {
        (Some(Operands::Bf16), Model::Bert(_)) => {
            let text = "--operands is bf16, which is for language models";
            return Err(Usage(text.into()).into());
        }
        (Some(asked), _) => return Ok(asked),
        (None, Model::Bert(_)) => false,
        // GPUs multiply bf16, and not every processor does.
        (None, _) if settings.device == DeviceName::Cpu && !multiplies_bf16() => false,
        (None, _) => settings.trains_in_fp8() || holds_codes(model),
    };
    Ok(match in_bf16 {
        true => Operands::Bf16,
        false => Operands::F32,
    })
}

/// Whether a layer of the model holds FP8 codes.
fn holds_codes(model: &Model) -> bool {
    struct Codes(bool);
    impl Visitor for Codes {
        fn layer(&mut self, layer: &dyn Fp8Layer) {
            self.0 |= layer.static_weight().is_some();
        }

        fn tensor(&mut self, _: Option<&str>, _: &Tensor) {}
    }
    let mut codes = Codes(false);
    model.visit(&mut codes);
    codes.0
}

/// Fails for a rank that no matrix of a layer can have.
fn check_rank(rank: usize, vars: &VarMap) -> Result<()> {
    let vars = vars.data().lock();
    let vars = vars.map_err(|_| anyhow!("the variables are locked"))?;
    let widths = vars.iter().filter_map(|(name, var)| {
        let is_matrix = name.contains(".lora_A.") || name.contains(".lora_B.");
        let &[one, other] = var.dims() else {
            return None;
        };
        // One is the rank, the other the layer's width.
        let width = if one == rank { other } else { one };
        (is_matrix && width < rank).then_some((width, name))
    });
    match widths.min() {
        None => Ok(()),
        Some((width, name)) => Err(Usage(format!(
            "--lora is {rank}, and a layer has only {width} inputs or outputs ({name}): its rank is at most {width}"
        ))
        .into()),
    }
}

/// The configuration of a run's adapters.
fn adapter(
    stored: &Stored,
    rank: usize,
    model: &mut Model,
    labels: &[String],
) -> Result<AdapterConfig> {
    let settings = &stored.settings;
    let default = match model {
        Model::Bert(_) => ["query", "value"],
        _ => ["q_proj", "v_proj"],
    };
    let targets = match settings.target.as_deref() {
        None => Targets::names(default),
        Some([all]) if all == "all-linear" => Targets::AllLinear,
        Some(names) => Targets::names(names.iter().map(String::as_str)),
    };
    let mut config = AdapterConfig::new(rank)
        .with_alpha(settings.alpha.unwrap_or(2. * rank as f64))
        .with_targets(targets);
    config.dropout = settings.dropout.unwrap_or(0.) as f32;
    let hub = settings.card.base_model.clone();
    let hub = hub.or_else(|| hub_name(&stored.model));
    config.base_model = Some(hub.unwrap_or_else(|| stored.model.display().to_string()));
    if let (Model::Bert(bert), false) = (model, labels.is_empty()) {
        config.saved = vec!["classifier".into()];
        if !bert.has_pooler() {
            config.saved.push("pooler".into());
        }
        bert.set_labels(labels.to_vec())?;
        config.labels = labels.to_vec();
    }
    Ok(config)
}
