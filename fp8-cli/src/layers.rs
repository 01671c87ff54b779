//! `fp8 bench --layers`: which linear layers are faster in FP8 on this machine.

use crate::model::{How, Source};
use crate::output::{print, print_json, table};
use crate::usage::{Usage, at_least};
use anyhow::Result;
use candle_core::Tensor;
use fp8::fp8_files::scheme::LayerScheme;
use fp8::timings::{Computation, LayerCase, LayerTimings};
use fp8::{Fp8Layer, Fp8Module, LayerKind, Recipe, Visitor};
use serde_json::json;
use std::path::PathBuf;
use std::time::Duration;

#[derive(clap::Args)]
#[command(next_help_heading = "Layers")]
pub struct Options {
    /// Time linear layers in FP8 and in high precision: those of the model, or of --shapes. FP8 layers of a file are timed as they
    /// are served, others as they train under --recipe
    #[arg(long)]
    pub layers: bool,
    /// Weights to time: outputs and inputs, as in 4096x1024, separated by commas
    #[arg(long, value_name = "OUTxIN", value_delimiter = ',', requires = "layers", value_parser = shape)]
    shapes: Vec<(usize, usize)>,
    /// Tokens of a call, separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',', requires = "layers", default_values_t = [1, 512], value_parser = at_least(1))]
    tokens: Vec<usize>,
    /// Recipe of layers in high precision
    #[arg(long, requires = "layers", default_value = "delayed", value_parser = |name: &str| name.parse::<Recipe>())]
    recipe: Recipe,
    /// Time forward passes of layers in high precision, with their codes kept, instead of training steps
    #[arg(long, requires = "layers")]
    evaluation: bool,
    /// Milliseconds for each layer and number of tokens; slow layers take more
    #[arg(long, value_name = "N", requires = "layers", default_value_t = 500, value_parser = at_least(1))]
    budget: usize,
    /// The file of times [default: fp8/layer_timings.json in the user's folder for caches]
    #[arg(long, value_name = "FILE", requires = "layers")]
    times: Option<PathBuf>,
    /// Measure everything, and keep nothing
    #[arg(long, requires = "layers", conflicts_with = "times")]
    fresh: bool,
}

fn shape(text: &str) -> Result<(usize, usize), String> {
    let sizes = text.split_once('x').and_then(|(n, k)| {
        let size = |text: &str| text.parse().ok().filter(|size| *size > 0);
        Some((size(n)?, size(k)?))
    });
    sizes.ok_or_else(|| "expected outputs and inputs, as in 4096x1024".to_string())
}

/// Layers of the same shape that compute in the same way.
struct Kind {
    computation: Computation,
    features: (usize, usize),
    layers: usize,
}

impl Options {
    fn timings(&self) -> LayerTimings {
        let timings = LayerTimings::new().with_budget(Duration::from_millis(self.budget as u64));
        match &self.times {
            Some(path) => timings.with_file(path),
            None if self.fresh => timings.without_file(),
            None => timings,
        }
    }

    /// How layers in high precision compute in FP8.
    fn computation(&self) -> Computation {
        match self.evaluation {
            true => Computation::evaluation(self.recipe.clone()),
            false => Computation::training(self.recipe.clone()),
        }
    }
}

/// Times the layers and prints the table.
pub fn run(options: &Options, model: Option<PathBuf>, how: How, json: bool) -> Result<()> {
    let (dtype, device) = (how.dtype(), how.device()?);
    let mut kinds = Kinds {
        plain: options.computation(),
        found: vec![],
    };
    match (model, how.of_a_model()) {
        (Some(model), _) => {
            Source { model, how }.load()?.0.visit(&mut kinds);
            // The layers that a file of FP8 has in high precision, such as the head, have no other form.
            let served = |kind: &Kind| kind.computation.recipe().is_none();
            if kinds.found.iter().any(served) {
                kinds.found.retain(served);
            }
        }
        (None, Some(flag)) => {
            let text = format!("{flag} is for the layers of a model, and only --shapes are timed");
            return Err(Usage(text).into());
        }
        (None, None) => {}
    }
    for &shape in &options.shapes {
        kinds.add(kinds.plain.clone(), shape);
    }
    let timings = options.timings();
    let mut rows = vec![];
    for kind in &kinds.found {
        for &tokens in &options.tokens {
            let case = LayerCase::new(kind.computation.clone(), kind.features, tokens);
            let case = case.with_dtype(dtype);
            rows.push((kind, tokens, timings.get(&case, &device)?));
        }
    }
    for warning in timings.warnings() {
        eprintln!("warning: {warning}");
    }
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let choice = |pays| if pays { "fp8" } else { "high precision" };
    if json {
        let rows = rows.iter().map(|(kind, tokens, timing)| {
            json!({
                "computation": kind.computation.to_string(),
                "out_features": kind.features.0,
                "in_features": kind.features.1,
                "layers": kind.layers,
                "tokens": tokens,
                "dtype": dtype.as_str(),
                "fp8_ms": ms(timing.fp8),
                "high_precision_ms": ms(timing.high_precision),
                "ratio": timing.speedup(),
                "choice": choice(timing.fp8_pays),
            })
        });
        return print_json(&rows.collect());
    }
    let high_precision = format!("{} ms", dtype.as_str());
    let header = [
        "computation",
        "[out, in]",
        "layers",
        "tokens",
        "fp8 ms",
        &high_precision,
        "ratio",
        "choice",
    ];
    let rows = rows.iter().map(|(kind, tokens, timing)| {
        vec![
            kind.computation.to_string(),
            format!("[{}, {}]", kind.features.0, kind.features.1),
            kind.layers.to_string(),
            tokens.to_string(),
            format!("{:.3}", ms(timing.fp8)),
            format!("{:.3}", ms(timing.high_precision)),
            format!("{:.2}", timing.speedup()),
            choice(timing.fp8_pays).to_string(),
        ]
    });
    print(&table(&header, 1, &rows.collect::<Vec<_>>()))
}

/// The kinds of layers of a model, in their order.
struct Kinds {
    plain: Computation,
    found: Vec<Kind>,
}

impl Kinds {
    fn add(&mut self, computation: Computation, features: (usize, usize)) {
        let mut kinds = self.found.iter_mut();
        let same = |kind: &&mut Kind| kind.features == features && kind.computation == computation;
        match kinds.find(same) {
            Some(kind) => kind.layers += 1,
            None => self.found.push(Kind {
                computation,
                features,
                layers: 1,
            }),
        }
    }
}

impl Visitor for Kinds {
    fn layer(&mut self, layer: &dyn Fp8Layer) {
        if layer.kind() != LayerKind::Linear {
            return;
        }
        let computation = match layer.static_weight() {
            Some(weight) => {
                let granularity = weight.weight().granularity();
                Computation::Served(LayerScheme::of(granularity, weight.input_scaling()))
            }
            None => self.plain.clone(),
        };
        self.add(computation, layer.features());
    }

    fn tensor(&mut self, _: Option<&str>, _: &Tensor) {}
}
