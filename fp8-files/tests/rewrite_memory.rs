//! Memory of a rewrite: bounded by what is worked on, not by the model.

use candle_core::{DType, Device, Tensor};
use fp8_files::Result;
use fp8_files::rewrite::{self, QuantizeOptions, Scheme, Source, WriteOptions};
use fp8_test_support::memory::{Counting, peak};
use serde_json::Value;
use std::ops::Range;
use std::path::PathBuf;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Layers whose values are made when they are asked for.
struct Made {
    layers: usize,
    rows: usize,
    /// Of the embedding.
    tokens: usize,
    in_parts: bool,
}

const WIDTH: usize = 1024;

impl Source for Made {
    fn names(&self) -> Vec<String> {
        let layer = |i| format!("model.layers.{i}.mlp.up_proj.weight");
        let embedding = "model.embed_tokens.weight".to_string();
        (0..self.layers).map(layer).chain([embedding]).collect()
    }
    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        let rows = match name.contains("embed") {
            true => self.tokens,
            false => self.rows,
        };
        Some(vec![rows, WIDTH])
    }
    fn dtype(&self, _: &str) -> Option<DType> {
        Some(DType::BF16)
    }
    fn value(&self, name: &str, dtype: DType) -> Result<Tensor> {
        made(0..self.shape(name).unwrap_or_default()[0], dtype)
    }
    fn rows(&self, _: &str, rows: Range<usize>, dtype: DType) -> Result<Option<Tensor>> {
        self.in_parts.then(|| made(rows, dtype)).transpose()
    }
    fn config(&self) -> Option<&Value> {
        None
    }
    fn directory(&self) -> Option<PathBuf> {
        None
    }
}

fn made(rows: Range<usize>, dtype: DType) -> Result<Tensor> {
    let value = |i| (i * 7 % 1000) as f32 / 1000.;
    let values: Vec<f32> = (rows.start * WIDTH..rows.end * WIDTH).map(value).collect();
    let shape = (rows.end - rows.start, WIDTH);
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?)
}

#[test]
fn memory_is_bounded_by_the_layers_in_the_works() {
    const MIB: isize = 1 << 20;
    let memory = 24 * MIB;
    for scheme in [
        Scheme::ChannelToken,
        Scheme::Block128,
        Scheme::Mxfp8,
        Scheme::DynamicTensor,
    ] {
        let mut peaks = vec![];
        for (threads, layers) in [(4, 4), (4, 12), (1, 12)] {
            let source = Made {
                layers,
                rows: 1024,
                // As large as all layers.
                tokens: 1024 * layers,
                in_parts: true,
            };
            let dir = tempfile::tempdir().unwrap();
            let write = WriteOptions::new()
                .with_threads(threads)
                .with_memory(memory as u64);
            let options = QuantizeOptions::new(scheme).with_write(write);
            let to = dir.path().join("out");
            let (written, most) =
                peak(|| rewrite::quantize(&source, &to, &options, &mut rewrite::quiet));
            written.unwrap();
            peaks.push(most);
        }
        let [few, many, alone] = peaks[..] else {
            unreachable!()
        };
        let whole = 12 * 1024 * WIDTH as isize * 4;
        println!(
            "{scheme}: {} kB for 4 layers, {} for 12, {} in one thread; f32 has {}",
            few / 1000,
            many / 1000,
            alone / 1000,
            whole / 1000
        );
        assert!(
            few <= memory && many <= memory && alone <= memory,
            "{scheme}"
        );
        assert!(
            alone <= memory / 3,
            "{scheme}: one layer and a part of it in f32"
        );
    }
    bounded_without_parts();
}

/// Whole tensors count as such: as many are worked on as the memory is for.
fn bounded_without_parts() {
    const MIB: isize = 1 << 20;
    let source = Made {
        layers: 5,
        rows: 4096,
        tokens: 4096,
        in_parts: false,
    };
    let memory = 100 * MIB;
    let write = WriteOptions::new()
        .with_threads(4)
        .with_memory(memory as u64);
    let dir = tempfile::tempdir().unwrap();
    let options = QuantizeOptions::new(Scheme::ChannelToken).with_write(write.clone());
    let quantize = || {
        let to = dir.path().join("fp8");
        rewrite::quantize(&source, to, &options, &mut rewrite::quiet)
    };
    let dequantize = || {
        let to = dir.path().join("bf16");
        rewrite::dequantize(&source, to, DType::BF16, &write, &mut rewrite::quiet)
    };
    for (case, (written, most)) in [
        ("quantize", peak(quantize)),
        ("dequantize", peak(dequantize)),
    ] {
        written.unwrap();
        println!("{case} of whole tensors: {} kB", most / 1000);
        assert!(most <= memory, "{case}: {most} bytes");
    }
}
