//! `fp8 inspect`: the family of a checkpoint, and each FP8 layer.

use crate::output::{print, print_json, size, table};
use crate::progress::{BYTES, Bar};
use crate::source::Opening;
use anyhow::{Result, bail};
use candle_core::Device;
use fp8::load::{Checkpoint, StoredLayer};
use fp8::nn::InputScaling;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// The checkpoint: a directory or a safetensors file
    dir: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    opening: Opening,
}

/// What is shown about a layer.
struct Row {
    path: String,
    shape: Vec<usize>,
    granularity: String,
    /// Whether the file has FP4 codes.
    fp4: bool,
    inputs: String,
    /// The static dequant_scale of its inputs.
    input_scale: Option<f32>,
    /// Smallest and largest dequant_scale.
    scales: (f32, f32),
    /// Codes of the largest magnitude, 448.
    saturated: usize,
    zeros: usize,
    codes: usize,
    /// Codes, and scales as f32.
    bytes: u64,
}

pub fn run(args: &Args) -> Result<()> {
    let checkpoint = args.opening.open(&args.dir)?;
    let rows = rows(&checkpoint)?;
    let others = others(&checkpoint);
    match args.json {
        true => print_json(&as_json(&checkpoint, &rows, &others)),
        false => print(&as_text(&checkpoint, &rows, &others)?),
    }
}

fn rows(checkpoint: &Checkpoint) -> Result<Vec<Row>> {
    let paths = checkpoint.layer_paths();
    let elements = |path: &String| -> u64 {
        let shape = checkpoint.shape(&format!("{path}.weight"));
        shape.unwrap_or_default().iter().product::<usize>() as u64
    };
    let total = paths.iter().map(elements).sum();
    let mut bar = Bar::new("inspect", BYTES)?;
    let (mut rows, mut done) = (vec![], 0);
    for path in &paths {
        if bar.at(path, done, total).is_break() {
            bail!("cancelled");
        }
        let mut row = row(&checkpoint.stored_layer(path, &Device::Cpu)?)?;
        row.fp4 = checkpoint.is_fp4(path);
        rows.push(row);
        done += elements(path);
    }
    Ok(rows)
}

fn row(layer: &StoredLayer) -> Result<Row> {
    // A code without its sign: 448 and 0.
    const LARGEST: u8 = 0x7E;
    let codes = layer.codes.codes().flatten_all()?.to_vec1::<u8>()?;
    let count = |magnitude: u8| {
        codes
            .iter()
            .filter(|code| *code & 0x7F == magnitude)
            .count()
    };
    let scales = layer
        .codes
        .dequant_scale()
        .flatten_all()?
        .to_vec1::<f32>()?;
    let bounds = (f32::INFINITY, f32::NEG_INFINITY);
    let scales = scales
        .iter()
        .fold(bounds, |(low, high), s| (low.min(*s), high.max(*s)));
    let input_scale = match &layer.input {
        InputScaling::Static(scale) => Some(scale.flatten_all()?.to_vec1::<f32>()?[0]),
        _ => None,
    };
    Ok(Row {
        path: layer.path.clone(),
        shape: layer.codes.dims().to_vec(),
        granularity: layer.codes.granularity().to_string(),
        fp4: false,
        inputs: inputs(&layer.input),
        input_scale,
        scales,
        saturated: count(LARGEST),
        zeros: count(0),
        codes: codes.len(),
        bytes: layer.codes.size_in_bytes() as u64,
    })
}

fn inputs(scaling: &InputScaling) -> String {
    let named = |name: &str, power_of_two: bool, bound: Option<f32>| {
        let mut text = name.to_string();
        if power_of_two {
            text += ", powers of two";
        }
        if let Some(bound) = bound {
            text += &format!(", amax up to {bound}");
        }
        text
    };
    match scaling {
        InputScaling::None => "high precision".into(),
        InputScaling::Static(_) => "static".into(),
        InputScaling::DynamicPerToken {
            power_of_two,
            amax_bound,
        } => named("per token", *power_of_two, *amax_bound),
        InputScaling::DynamicPerTensor {
            power_of_two,
            amax_bound,
        } => named("per tensor", *power_of_two, *amax_bound),
        InputScaling::DynamicPerGroup { size, power_of_two } => {
            named(&format!("per group of {size}"), *power_of_two, None)
        }
        InputScaling::DynamicMx => "mx".into(),
    }
}

/// Number and bytes of the tensors that do not belong to FP8 layers, by dtype.
fn others(checkpoint: &Checkpoint) -> BTreeMap<String, (usize, u64)> {
    let mut others: BTreeMap<String, (usize, u64)> = BTreeMap::new();
    for name in checkpoint.other_names() {
        let (Some(dtype), Some(shape)) = (checkpoint.dtype(&name), checkpoint.shape(&name)) else {
            continue;
        };
        let (count, bytes) = others.entry(format!("{dtype:?}")).or_default();
        *count += 1;
        *bytes += (shape.iter().product::<usize>() * dtype.bitsize() / 8) as u64;
    }
    others
}

fn share(part: usize, of: usize) -> f64 {
    part as f64 / of.max(1) as f64
}

fn as_json(
    checkpoint: &Checkpoint,
    rows: &[Row],
    others: &BTreeMap<String, (usize, u64)>,
) -> Value {
    let layers = rows.iter().map(|row| {
        json!({
            "path": row.path,
            "shape": row.shape,
            "granularity": row.granularity,
            "fp4": row.fp4,
            "inputs": row.inputs,
            "input_dequant_scale": row.input_scale,
            "dequant_scale": { "min": row.scales.0, "max": row.scales.1 },
            "saturated": share(row.saturated, row.codes),
            "zeros": share(row.zeros, row.codes),
            "bytes": row.bytes,
        })
    });
    let others = others.iter().map(|(dtype, (count, bytes))| {
        let value = json!({ "tensors": count, "bytes": bytes });
        (dtype.clone(), value)
    });
    json!({
        "family": checkpoint.family().to_string(),
        "layers": layers.collect::<Vec<_>>(),
        "others": others.collect::<serde_json::Map<_, _>>(),
        "fp8_bytes": rows.iter().map(|row| row.bytes).sum::<u64>(),
    })
}

fn as_text(
    checkpoint: &Checkpoint,
    rows: &[Row],
    others: &BTreeMap<String, (usize, u64)>,
) -> Result<String> {
    let mut text = format!("family: {}\n", checkpoint.family());
    if !rows.is_empty() {
        let cells: Vec<Vec<String>> = rows.iter().map(cells).collect();
        let header = [
            "layer",
            "shape",
            "granularity",
            "inputs",
            "dequant_scale",
            "saturated",
            "zero",
            "bytes",
        ];
        text += "\n";
        text += &table(&header, 5, &cells);
        text += "\n";
    }
    let bytes: u64 = rows.iter().map(|row| row.bytes).sum();
    let sum = |part: fn(&Row) -> usize| rows.iter().map(part).sum::<usize>();
    let codes = sum(|row| row.codes);
    writeln!(
        text,
        "{} FP8 layers, {}: {:.3}% of the codes saturated, {:.3}% zero",
        rows.len(),
        size(bytes),
        100. * share(sum(|row| row.saturated), codes),
        100. * share(sum(|row| row.zeros), codes),
    )?;
    for (dtype, (count, bytes)) in others {
        writeln!(text, "{count} other tensors in {dtype}, {}", size(*bytes))?;
    }
    Ok(text)
}

fn cells(row: &Row) -> Vec<String> {
    let (low, high) = row.scales;
    let inputs = match row.input_scale {
        Some(scale) => format!("{} {scale:.3e}", row.inputs),
        None => row.inputs.clone(),
    };
    vec![
        row.path.clone(),
        format!("{:?}", row.shape),
        match row.fp4 {
            true => format!("{}, FP4 in the file", row.granularity),
            false => row.granularity.clone(),
        },
        inputs,
        match low == high {
            true => format!("{low:.3e}"),
            false => format!("{low:.3e} to {high:.3e}"),
        },
        format!("{:.3}%", 100. * share(row.saturated, row.codes)),
        format!("{:.3}%", 100. * share(row.zeros, row.codes)),
        row.bytes.to_string(),
    ]
}
