//! `fp8 convert`: the same codes and scales in another spelling, or values in a GGUF file.

use crate::output::{Target, print, print_json, separate, size};
use crate::progress::{BYTES, Bar};
use crate::source::{self, Opening};
use crate::usage::{Usage, first_given};
use anyhow::Result;
use fp8::models::gguf::{GgufOptions, GgufReport, GgufType, is_gguf, write_gguf};
use fp8::rewrite::{self, Source, Spelling};
use serde_json::json;
use std::path::PathBuf;
use std::str::FromStr;

#[derive(clap::Args)]
pub struct Args {
    /// The checkpoint; for gguf also a model in high precision or a GGUF file
    dir: PathBuf,
    /// compressed-tensors, fp8-blocks (DeepSeek, Qwen), autofp8, modelopt, or gguf: a file for llama.cpp, without FP8
    #[arg(long, value_name = "SPELLING")]
    to: Form,
    /// How a GGUF file stores matrices: q8_0, bf16, f16 or f32 [default: q8_0]
    #[arg(long = "type", value_name = "TYPE")]
    tensor_type: Option<GgufType>,
    /// llama.cpp's name of the rule that splits text (`tokenizer.ggml.pre`), for a tokenizer whose rule is not recognized
    #[arg(long, value_name = "NAME")]
    pre: Option<String>,
    /// Where the target's configuration cannot say that input scales are powers of two, say so in metadata that only this library reads
    #[arg(long)]
    power_of_two_inputs: bool,
    #[command(flatten)]
    target: Target,
    #[command(flatten)]
    opening: Opening,
}

#[derive(Clone, Copy)]
enum Form {
    Spelling(Spelling),
    Gguf,
}

impl FromStr for Form {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.eq_ignore_ascii_case("gguf") {
            return Ok(Self::Gguf);
        }
        let spelling = text.parse::<Spelling>().map(Self::Spelling);
        spelling.map_err(|error| {
            let text = error.to_string();
            // The suggestion ends with a question mark, so it stays last.
            let (known, meant) = text.split_at(text.find("; did you mean").unwrap_or(text.len()));
            format!("{known}, or gguf{meant}")
        })
    }
}

pub fn run(args: &Args) -> Result<()> {
    match args.to {
        Form::Spelling(spelling) => respell(args, spelling),
        Form::Gguf => to_gguf(args),
    }
}

fn respell(args: &Args, spelling: Spelling) -> Result<()> {
    let given = [
        (args.tensor_type.is_some(), "--type"),
        (args.pre.is_some(), "--pre"),
    ];
    if let Some(flag) = first_given(given) {
        return Err(Usage(format!("{flag} is for --to gguf")).into());
    }
    args.target.check([&*args.dir])?;
    let checkpoint = args.opening.open(&args.dir)?;
    let mut bar = Bar::new("convert", BYTES)?;
    let out = &args.target.out;
    let options = args
        .target
        .options()
        .with_power_of_two_inputs(args.power_of_two_inputs);
    let report = rewrite::convert(&checkpoint, out, spelling, &options, &mut |p| bar.show(p))?;
    drop(bar);
    args.target.print(&report)
}

fn to_gguf(args: &Args) -> Result<()> {
    let powers = args.power_of_two_inputs.then_some("--power-of-two-inputs");
    let of_inputs = (!is_gguf(&args.dir))
        .then(|| args.opening.of_inputs())
        .flatten();
    if let Some(flag) = powers.or(args.target.of_directories()).or(of_inputs) {
        let text = format!("{flag} is for FP8 in a directory, and --to is gguf");
        return Err(Usage(text).into());
    }
    separate(&args.target.out, [&*args.dir])?;
    let model: Box<dyn Source> = match is_gguf(&args.dir) {
        true => {
            args.opening.check_gguf(&args.dir)?;
            source::open(&args.dir)?
        }
        false => Box::new(args.opening.open(&args.dir)?),
    };
    let mut options = GgufOptions::new(args.tensor_type.unwrap_or_default())
        .with_overwrite(args.target.overwrites());
    if let Some(pre) = &args.pre {
        options = options.with_pre_tokenizer(pre);
    }
    let mut bar = Bar::new("convert", BYTES)?;
    let out = &args.target.out;
    let report = write_gguf(&*model, out, &options, &mut |p| bar.show(p))?;
    drop(bar);
    show(&report, args.target.as_json())
}

fn show(report: &GgufReport, as_json: bool) -> Result<()> {
    if let Some(first) = report.not_in_blocks.first() {
        let count = report.not_in_blocks.len();
        eprintln!(
            "warning: {count} matrices are f16, as their rows do not divide into blocks of 32 (`{first}` is the first)"
        );
    }
    if as_json {
        return print_json(&json!({
            "file": report.path.to_string_lossy(),
            "architecture": report.architecture,
            "tensors": report.tensors,
            "not_in_blocks": report.not_in_blocks,
            "bytes": report.bytes,
        }));
    }
    print(&format!(
        "{}: {} tensors of a {} model, {}\n",
        report.path.display(),
        report.tensors,
        report.architecture,
        size(report.bytes)
    ))
}
