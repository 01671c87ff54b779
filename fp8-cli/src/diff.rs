//! `fp8 diff`: how much the weights of two checkpoints differ.

use crate::output::{print, print_json, table};
use crate::progress::{BYTES, Bar};
use crate::source;
use anyhow::{Result, bail};
use candle_core::{DType, Tensor};
use fp8::rewrite::Source;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// The reference checkpoint
    a: PathBuf,
    /// The checkpoint to compare with it
    b: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Two tensors of one name.
struct Row {
    name: String,
    /// 20 log10 of the norm over the norm of the difference; infinite for equal tensors, NaN for different shapes.
    sqnr: f64,
    /// Whether either of them is FP8.
    fp8: bool,
    shapes: [Vec<usize>; 2],
}

struct Report {
    rows: Vec<Row>,
    only: [Vec<String>; 2],
}

pub fn run(args: &Args) -> Result<()> {
    let (a, b) = (source::open(&args.a)?, source::open(&args.b)?);
    let report = compare(&*a, &*b)?;
    match args.json {
        true => print_json(&as_json(&report)),
        false => print(&as_text(&report, args)?),
    }
}

fn compare(a: &dyn Source, b: &dyn Source) -> Result<Report> {
    let names = |source: &dyn Source| source.names().into_iter().collect::<BTreeSet<_>>();
    let (in_a, in_b) = (names(a), names(b));
    let without = |x: &BTreeSet<String>, y: &BTreeSet<String>| x.difference(y).cloned().collect();
    let only = [without(&in_a, &in_b), without(&in_b, &in_a)];
    let common: Vec<&String> = in_a.intersection(&in_b).collect();
    let bytes = |name: &str| a.shape(name).unwrap_or_default().iter().product::<usize>() as u64;
    let total = common.iter().map(|name| bytes(name)).sum();
    let mut bar = Bar::new("diff", BYTES)?;
    let (mut rows, mut done) = (vec![], 0);
    for name in common {
        if bar.at(name, done, total).is_break() {
            bail!("cancelled");
        }
        let shapes = [a, b].map(|source| source.shape(name).unwrap_or_default());
        let sqnr = match shapes[0] == shapes[1] {
            true => sqnr(&a.value(name, DType::F32)?, &b.value(name, DType::F32)?)?,
            false => f64::NAN,
        };
        rows.push(Row {
            name: name.clone(),
            sqnr,
            fp8: a.dtype(name).is_none() || b.dtype(name).is_none(),
            shapes,
        });
        done += bytes(name);
    }
    Ok(Report { rows, only })
}

fn sqnr(a: &Tensor, b: &Tensor) -> Result<f64> {
    let values = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
    let (a, b) = (values(a)?, values(b)?);
    let square = |x: f64| x * x;
    let signal: f64 = a.iter().map(|a| square(f64::from(*a))).sum();
    let pairs = a.iter().zip(&b);
    let noise: f64 = pairs
        .map(|(a, b)| square(f64::from(*a) - f64::from(*b)))
        .sum();
    Ok(match noise == 0. {
        true => f64::INFINITY,
        false => 10. * (signal / noise).log10(),
    })
}

fn as_json(report: &Report) -> Value {
    let rows = report.rows.iter().map(|row| {
        json!({
            "name": row.name,
            "fp8": row.fp8,
            "equal": row.sqnr == f64::INFINITY,
            "sqnr_db": row.sqnr.is_finite().then_some(row.sqnr),
            "shapes": row.shapes,
        })
    });
    json!({
        "tensors": rows.collect::<Vec<_>>(),
        "only_in_a": report.only[0],
        "only_in_b": report.only[1],
    })
}

fn as_text(report: &Report, args: &Args) -> Result<String> {
    let mut text = String::new();
    let equal = |row: &&Row| row.sqnr == f64::INFINITY;
    // Equal tensors in high precision would only fill the screen.
    let shown = report.rows.iter().filter(|row| row.fp8 || !equal(row));
    let cells: Vec<Vec<String>> = shown
        .map(|row| vec![row.name.clone(), verdict(row)])
        .collect();
    if !cells.is_empty() {
        text += &table(&["tensor", "SQNR in dB"], 1, &cells);
        text += "\n";
    }
    let finite = report.rows.iter().filter(|row| row.sqnr.is_finite());
    let worst = finite.min_by(|a, b| a.sqnr.total_cmp(&b.sqnr));
    let equal = report.rows.iter().filter(equal).count();
    write!(
        text,
        "{} tensors in both, {equal} of them equal",
        report.rows.len()
    )?;
    match worst {
        Some(row) => writeln!(text, "; worst {} at {:.2} dB", row.name, row.sqnr)?,
        None => writeln!(text)?,
    }
    for (names, path) in report.only.iter().zip([&args.a, &args.b]) {
        for name in names {
            writeln!(text, "only in {}: {name}", path.display())?;
        }
    }
    Ok(text)
}

fn verdict(row: &Row) -> String {
    match row.sqnr {
        sqnr if sqnr.is_nan() => format!("shapes {:?} and {:?}", row.shapes[0], row.shapes[1]),
        f64::INFINITY => "equal".into(),
        sqnr => format!("{sqnr:.2}"),
    }
}
