//! The parent process: peaks, children, table, JSON.

use crate::args::{Args, Group};
use crate::inputs::last_level_cache;
use crate::json::{check_target, write_json};
use crate::peaks::Peaks;
use crate::rows::{Bars, Measured, Row, print_header, print_row};
use anyhow::{Context, Result, ensure};
use fp8::fp8_core::Isa;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Instant;

/// Runs everything.
pub fn run(args: &Args) -> Result<()> {
    let began = Instant::now();
    if let Some(path) = &args.common.json {
        check_target(path)?;
    }
    let load = load_average();
    let threads = candle_core::utils::get_num_threads();
    let peaks = Peaks::measure(threads);
    println!("{}", processor());
    println!(
        "instruction set {}, {threads} threads, last-level cache {} MiB",
        Isa::best().level().name(),
        last_level_cache() >> 20
    );
    println!("{peaks}");
    if load > 0.5 {
        println!(
            "load average {load}: other work on this machine distorts rows of several threads"
        );
    }
    println!();
    print_header();

    let mut rows = vec![];
    let mut group = |group: Group, threads: usize, isa: Option<&str>| -> Result<()> {
        child(args, group, threads, isa, |measured| {
            let mut row = measured.row;
            let of_peak = || {
                let (work, ms) = measured.work.zip(row.ours_ms)?;
                peaks.fraction(work, ms, row.threads, isa)
            };
            row.peak_fraction = row.peak_fraction.or_else(of_peak);
            if isa == Some("avx512bf16") && !peaks.bf16_doubles_f32() {
                row.bars = Bars::default();
            }
            print_row(&row);
            rows.push(row);
        })
    };
    let both = if threads > 1 {
        vec![1, threads]
    } else {
        vec![1]
    };
    for &threads in &both {
        group(Group::Kernels, threads, None)?;
    }
    let best = Isa::best();
    for isa in Isa::available().filter(|&isa| isa < best) {
        let name = isa.level().name();
        for &threads in both.iter().filter(|_| name != "portable") {
            group(Group::Gemms, threads, Some(name))?;
        }
    }
    group(Group::Models, threads, None)?;

    summarize(&rows, began);
    if best.level().name() == "amx" && !peaks.bf16_doubles_f32() {
        println!(
            "vdpbf16ps is not twice as fast as AVX2 here: rows that are forced to it have no bar"
        );
    }
    if let Some(path) = &args.common.json {
        write_json(path, &rows)?;
        println!("written: {}", path.display());
    }
    Ok(())
}

fn summarize(rows: &[Row], began: Instant) {
    let asked = rows.iter().filter(|row| row.has_bar()).count();
    let missed = rows.iter().filter(|row| row.misses()).count();
    println!(
        "\n{} rows, {} of {asked} bars reached, {:.0} s",
        rows.len(),
        asked - missed,
        began.elapsed().as_secs_f64()
    );
}

/// Runs a group in a separate process and passes its rows to `each` as they come.
fn child(
    args: &Args,
    group: Group,
    threads: usize,
    isa: Option<&str>,
    mut each: impl FnMut(Measured),
) -> Result<()> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--child", group.name()]);
    command.args(args.common.quick.then_some("--quick"));
    if let Some(filter) = &args.common.filter {
        command.args(["--filter", filter]);
    }
    let threads = threads.to_string();
    command.env("RAYON_NUM_THREADS", &threads);
    command.env("CANDLE_NUM_THREADS", &threads);
    if let Some(isa) = isa {
        command.env("FP8_ISA", isa);
    }
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let stdout = child.stdout.take().context("the child has no stdout")?;
    for line in BufReader::new(stdout).lines() {
        let line = line?;
        let measured = serde_json::from_str(&line)
            .with_context(|| format!("a child printed a line that is not a row: {line}"))?;
        each(measured);
    }
    let status = child.wait()?;
    ensure!(
        status.success(),
        "the cases `{}` with {threads} threads failed: {status}",
        group.name()
    );
    Ok(())
}

fn processor() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find(|line| line.starts_with("model name"));
    let name = model.and_then(|line| line.split_once(": "));
    name.map_or("unknown processor", |(_, name)| name)
        .to_string()
}

/// Load average of the last minute, before the benchmark adds to it; 0 if the system does not report it.
fn load_average() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let first = text.split(' ').next().and_then(|first| first.parse().ok());
    first.unwrap_or(0.)
}
