//! `fp8 check`: whether a checkpoint is what it says.

use crate::output::{print, print_json};
use crate::source::{HUB, found};
use crate::usage::Usage;
use anyhow::Result;
use fp8::audit::{AuditOptions, Codes, Finding, Report, Severity, audit_dir};
use fp8::models::gguf::is_gguf;
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

#[derive(clap::Args)]
pub struct Args {
    /// The checkpoint: a directory, a safetensors file, or hf://OWNER/NAME[@REVISION]
    model: String,
    /// Read all codes, not only samples
    #[arg(long, conflicts_with = "scales_only")]
    weights: bool,
    /// Read headers and scales only, as for a model on the hub
    #[arg(long, conflicts_with = "samples")]
    scales_only: bool,
    /// Read samples of codes from the hub too
    #[arg(long, conflicts_with = "weights")]
    samples: bool,
    /// Accept FP8 tensors in files without any scale
    #[arg(long)]
    allow_unscaled: bool,
    /// Exit with code 1 for warnings too
    #[arg(long)]
    deny_warnings: bool,
    /// Name every tensor, not only the first few of a fault
    #[arg(long)]
    all: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// How many tensors are named for each fault.
const SHOWN: usize = 3;

/// Prints the findings. The exit code is 1 if there are errors.
pub fn run(args: &Args) -> Result<ExitCode> {
    let codes = match (args.model.strip_prefix(HUB), args.weights) {
        (_, true) => Codes::All,
        _ if args.scales_only => Codes::None,
        (Some(_), false) if !args.samples => Codes::None,
        _ => Codes::Samples,
    };
    let options = AuditOptions::default()
        .with_codes(codes)
        .with_allow_unscaled(args.allow_unscaled);
    let report = match args.model.strip_prefix(HUB) {
        Some(name) => remote(name, &options)?,
        None => local(Path::new(&args.model), &options)?,
    };
    match args.json {
        true => print_json(&as_json(args, &report))?,
        false => print(&as_text(args, &report)?)?,
    }
    let least = match args.deny_warnings {
        true => Severity::Warning,
        false => Severity::Error,
    };
    Ok(match report.has(least) {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    })
}

fn local(path: &Path, options: &AuditOptions) -> Result<Report> {
    if !path.exists() {
        let message = format!("{}: there is no such directory or file", path.display());
        return Err(Usage(message).into());
    }
    if is_gguf(path) {
        let why = "is a GGUF file, which holds no FP8: `fp8 check` reads safetensors";
        return Err(Usage(format!("{} {why}", path.display())).into());
    }
    found(path).map_err(|error| Usage(error.to_string()))?;
    Ok(audit_dir(path, options))
}

#[cfg(feature = "hub")]
fn remote(name: &str, options: &AuditOptions) -> Result<Report> {
    use fp8::models::hub::{HubError, HubOptions};
    let (model, hub) = match name.split_once('@') {
        Some((model, revision)) => (model, HubOptions::default().with_revision(revision)),
        None => (name, HubOptions::default()),
    };
    let report = fp8::models::remote::audit(model, &hub, options);
    report.map_err(|error| match error {
        HubError::Name { .. } => Usage(error.to_string()).into(),
        error => error.into(),
    })
}

#[cfg(not(feature = "hub"))]
fn remote(_: &str, _: &AuditOptions) -> Result<Report> {
    let message = "this program was built without the feature `hub`, which hf:// needs";
    Err(Usage(message.to_string()).into())
}

fn shown<'a>(args: &Args, found: &'a [&'a Finding]) -> &'a [&'a Finding] {
    match args.all {
        true => found,
        false => &found[..found.len().min(SHOWN)],
    }
}

fn as_json(args: &Args, report: &Report) -> Value {
    let groups = report.groups();
    let findings = groups.iter().map(|(fault, found)| {
        let places = shown(args, found).iter().map(|finding| {
            json!({
                "subject": finding.subject,
                "found": finding.found,
                "expected": finding.expected,
            })
        });
        json!({
            "code": fault.code(),
            "severity": fault.severity().to_string(),
            "what": fault.what(),
            "help": fault.help(),
            "count": found.len(),
            "places": places.collect::<Vec<_>>(),
        })
    });
    json!({
        "model": args.model,
        "family": report.family.to_string(),
        "files": report.files,
        "tensors": report.tensors,
        "fp8_layers": report.layers,
        "bytes_read": report.bytes_read,
        "errors": report.count(Severity::Error),
        "warnings": report.count(Severity::Warning),
        "findings": findings.collect::<Vec<_>>(),
    })
}

fn as_text(args: &Args, report: &Report) -> Result<String> {
    let mut text = String::new();
    for (fault, found) in report.groups() {
        let count = match found.len() {
            1 => String::new(),
            count => format!(" ({count} times)"),
        };
        writeln!(
            text,
            "{}[{fault}]: {}{count}",
            fault.severity(),
            fault.what()
        )?;
        for finding in shown(args, &found) {
            let Finding {
                subject,
                found,
                expected,
                ..
            } = finding;
            writeln!(text, "  {subject}: {found}; expected {expected}")?;
        }
        if shown(args, &found).len() < found.len() {
            let rest = found.len() - SHOWN;
            writeln!(text, "  .. and {rest} more (--all names them)")?;
        }
        writeln!(text, "  {}\n", fault.help())?;
    }
    let (errors, warnings) = (
        report.count(Severity::Error),
        report.count(Severity::Warning),
    );
    let verdict = match (errors, warnings) {
        (0, 0) => "no faults".to_string(),
        (errors, warnings) => format!("kinds of errors: {errors}, of warnings: {warnings}"),
    };
    writeln!(
        text,
        "{}: {} in {} files, {} tensors, {} FP8 layers; {verdict}",
        args.model, report.family, report.files, report.tensors, report.layers
    )?;
    Ok(text)
}
