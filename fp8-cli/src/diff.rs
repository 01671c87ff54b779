//! `fp8 diff`: how much the weights of two checkpoints differ.

use crate::output::{print, print_json, table};
use crate::progress::{BYTES, Bar};
use crate::source;
use anyhow::{Result, bail};
use candle_core::DType;
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

/// Bytes that are compared at a time.
const PIECE: usize = 1 << 20;

/// Two tensors of one name.
struct Row {
    name: String,
    difference: Difference,
    /// Whether either of them is FP8.
    fp8: bool,
    shapes: [Vec<usize>; 2],
}

/// How two tensors differ.
#[derive(Clone, Copy, PartialEq)]
enum Difference {
    /// Every value is the same, NaN at the same places included.
    None,
    Shapes,
    /// They are of a dtype that has no numbers here, and not the same bytes.
    Bytes,
    /// A value that is not finite, by this name, which the other tensor lacks; in which of the two.
    NotFinite(&'static str, &'static str),
    /// 20 log10 of the norm of the first over the norm of the difference; minus infinity if the first is 0.
    Sqnr(f64),
}

impl Difference {
    /// How good the second tensor is, for differences of values.
    fn rank(self) -> Option<(bool, f64)> {
        match self {
            Self::NotFinite(..) => Some((false, f64::NEG_INFINITY)),
            Self::Sqnr(sqnr) => Some((true, sqnr)),
            Self::None | Self::Shapes | Self::Bytes => None,
        }
    }
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
        let raw = [a, b].map(|source| source.raw_dtype(name));
        let difference = match shapes[0] == shapes[1] {
            false => Difference::Shapes,
            true if raw == [None, None] => {
                let values = |source: &dyn Source| -> Result<Vec<f32>> {
                    let value = source.value(name, DType::F32)?;
                    Ok(value.flatten_all()?.to_vec1()?)
                };
                of_values(&values(a)?, &values(b)?)
            }
            true if raw[0] == raw[1] && same_bytes(a, b, name)? => Difference::None,
            true => Difference::Bytes,
        };
        let is_fp8 =
            |source: &dyn Source| source.dtype(name).is_none() && source.raw_dtype(name).is_none();
        rows.push(Row {
            name: name.clone(),
            difference,
            fp8: is_fp8(a) || is_fp8(b),
            shapes,
        });
        done += bytes(name);
    }
    Ok(Report { rows, only })
}

/// Whether a tensor that candle cannot hold is the same in both, which have it in one dtype and shape.
fn same_bytes(a: &dyn Source, b: &dyn Source, name: &str) -> Result<bool> {
    let Some(dtype) = a.raw_dtype(name) else {
        return Ok(false);
    };
    let elements: usize = a.shape(name).unwrap_or_default().iter().product();
    let all = elements * dtype.bitsize() / 8;
    for first in (0..all).step_by(PIECE) {
        let piece = first..all.min(first + PIECE);
        if a.raw_bytes(name, piece.clone())? != b.raw_bytes(name, piece)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn of_values(a: &[f32], b: &[f32]) -> Difference {
    let (mut signal, mut noise) = (0f64, 0f64);
    // Whether NaN is among the values that differ, and in which of the tensors some of them are not finite.
    let (mut has_nan, mut sides) = (false, [false; 2]);
    for (&a, &b) in a.iter().zip(b) {
        let (wide_a, wide_b) = (f64::from(a), f64::from(b));
        if a.is_finite() {
            signal += wide_a * wide_a;
        }
        if a == b || (a.is_nan() && b.is_nan()) {
            continue;
        }
        if a.is_finite() && b.is_finite() {
            noise += (wide_a - wide_b) * (wide_a - wide_b);
            continue;
        }
        has_nan |= a.is_nan() || b.is_nan();
        sides = [sides[0] || !a.is_finite(), sides[1] || !b.is_finite()];
    }
    let side = match sides {
        [false, false] if noise == 0. => return Difference::None,
        [false, false] => return Difference::Sqnr(10. * (signal / noise).log10()),
        [true, false] => "the first",
        [false, true] => "the second",
        [true, true] => "both",
    };
    let name = match has_nan {
        true => "NaN",
        false => "Inf",
    };
    Difference::NotFinite(name, side)
}

fn as_json(report: &Report) -> Value {
    let rows = report.rows.iter().map(|row| {
        let sqnr = match row.difference {
            Difference::Sqnr(sqnr) => Some(sqnr).filter(|sqnr| sqnr.is_finite()),
            _ => None,
        };
        json!({
            "name": row.name,
            "fp8": row.fp8,
            "equal": row.difference == Difference::None,
            "sqnr_db": sqnr,
            "verdict": verdict(row),
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
    let equal = |row: &&Row| row.difference == Difference::None;
    // Equal tensors in high precision would only fill the screen.
    let shown = report.rows.iter().filter(|row| row.fp8 || !equal(row));
    let cells: Vec<Vec<String>> = shown
        .map(|row| vec![row.name.clone(), verdict(row)])
        .collect();
    if !cells.is_empty() {
        text += &table(&["tensor", "SQNR in dB"], 1, &cells);
        text += "\n";
    }
    let ranked = report.rows.iter();
    let ranked = ranked.filter_map(|row| Some((row, row.difference.rank()?)));
    let worst = ranked.min_by(|(_, a), (_, b)| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
    let equal = report.rows.iter().filter(equal).count();
    write!(
        text,
        "{} tensors in both, {equal} of them equal",
        report.rows.len()
    )?;
    match worst {
        Some((row, (true, sqnr))) => writeln!(text, "; worst {} at {sqnr:.2} dB", row.name)?,
        Some((row, _)) => writeln!(text, "; worst {}: {}", row.name, verdict(row))?,
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
    match row.difference {
        Difference::None => "equal".into(),
        Difference::Shapes => format!("shapes {:?} and {:?}", row.shapes[0], row.shapes[1]),
        Difference::Bytes => "different".into(),
        Difference::NotFinite(name, side) => format!("{name} in {side}"),
        Difference::Sqnr(sqnr) => format!("{sqnr:.2}"),
    }
}
