//! Small models of several families, with weights of the size that networks have.

use fp8_core::{Cast, Format};
use fp8_files::audit::{AuditOptions, Report, audit_dir};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Sizes of the models: three layers, so that one can differ from the others.
pub const HIDDEN: usize = 128;
pub const INNER: usize = 192;
pub const LAYERS: usize = 3;
const VOCAB: usize = 64;
pub const BLOCK: usize = 64;

/// A tensor of a file.
#[derive(Debug, Clone)]
pub struct Entry {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

/// Which weights share a scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scheme {
    Tensor,
    Channel,
    Block,
    Mx,
}

/// A change of the folder.
pub type After = Box<dyn Fn(&Path)>;

/// A model that a case may damage before it is written, and its files afterwards.
pub struct Model {
    pub tensors: BTreeMap<String, Entry>,
    pub config: Value,
    /// Whether it is written in two files with an index.
    pub sharded: bool,
    /// What is done to the folder after the files are written.
    pub after: Vec<After>,
    pub options: AuditOptions,
}

/// Numbers that look like those of a normal distribution, the same in every run.
pub fn normal(count: usize, seed: usize) -> Vec<f32> {
    let mut state = (seed as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..count)
        .map(|_| (0..6).map(|_| uniform()).sum::<f32>() * 2f32.sqrt())
        .collect()
}

pub fn floats(shape: &[usize], values: &[f32]) -> Entry {
    let data = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    Entry {
        dtype: Dtype::F32,
        shape: shape.to_vec(),
        data,
    }
}

pub fn bf16(shape: &[usize], values: &[f32]) -> Entry {
    let bits = values.iter().map(|value| half::bf16::from_f32(*value));
    let data = bits.flat_map(|value| value.to_le_bytes()).collect();
    Entry {
        dtype: Dtype::BF16,
        shape: shape.to_vec(),
        data,
    }
}

/// Codes and dequant_scales of a matrix, with the shape of the scales. `largest` is the code value that the amax becomes.
pub fn quantize(
    values: &[f32],
    k: usize,
    scheme: Scheme,
    largest: f32,
) -> (Vec<u8>, Vec<f32>, Vec<usize>) {
    let n = values.len() / k;
    let (rows, cols) = match scheme {
        Scheme::Tensor => (n, k),
        Scheme::Channel => (1, k),
        Scheme::Block => (BLOCK, BLOCK),
        Scheme::Mx => (1, 32),
    };
    let (down, across) = (n.div_ceil(rows), k.div_ceil(cols));
    let mut amaxes = vec![0f32; down * across];
    for (at, value) in values.iter().enumerate() {
        let index = at / k / rows * across + at % k / cols;
        amaxes[index] = amaxes[index].max(value.abs());
    }
    let scale = |amax: &f32| match scheme {
        Scheme::Mx => (amax / largest).log2().ceil().exp2(),
        _ => amax / largest,
    };
    let scales: Vec<f32> = amaxes.iter().map(scale).collect();
    let cast = Cast::new(Format::E4M3);
    let code = |(at, value): (usize, &f32)| {
        cast.encode(value / scales[at / k / rows * across + at % k / cols], 0)
    };
    let codes = values.iter().enumerate().map(code).collect();
    let shape = match scheme {
        Scheme::Tensor => vec![],
        Scheme::Channel => vec![n, 1],
        Scheme::Block | Scheme::Mx => vec![down, across],
    };
    (codes, scales, shape)
}

/// The linear layers of the model, with their sizes.
pub fn layers() -> Vec<(String, usize, usize)> {
    let mut layers = vec![];
    for at in 0..LAYERS {
        for own in ["q_proj", "k_proj", "v_proj", "o_proj"] {
            layers.push((format!("model.layers.{at}.self_attn.{own}"), HIDDEN, HIDDEN));
        }
        for own in ["gate_proj", "up_proj"] {
            layers.push((format!("model.layers.{at}.mlp.{own}"), INNER, HIDDEN));
        }
        layers.push((format!("model.layers.{at}.mlp.down_proj"), HIDDEN, INNER));
    }
    layers
}

/// The weight of a layer: outputs are about as large as inputs.
pub fn weight(seed: usize, n: usize, k: usize) -> Vec<f32> {
    let size = 1. / (k as f32).sqrt();
    normal(n * k, seed)
        .into_iter()
        .map(|value| value * size)
        .collect()
}

impl Model {
    /// A Llama without FP8.
    pub fn plain() -> Self {
        let mut model = Self {
            tensors: BTreeMap::new(),
            config: json!({
                "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
                "num_hidden_layers": LAYERS, "vocab_size": VOCAB, "tie_word_embeddings": false,
            }),
            sharded: false,
            after: vec![],
            options: AuditOptions::default(),
        };
        for (seed, (path, n, k)) in layers().into_iter().enumerate() {
            model.set(
                &format!("{path}.weight"),
                bf16(&[n, k], &weight(seed, n, k)),
            );
        }
        for (name, seed) in [("model.embed_tokens.weight", 100), ("lm_head.weight", 101)] {
            model.set(name, bf16(&[VOCAB, HIDDEN], &weight(seed, VOCAB, HIDDEN)));
        }
        let ones = bf16(&[HIDDEN], &[1.; HIDDEN]);
        for at in 0..LAYERS {
            for own in ["input_layernorm", "post_attention_layernorm"] {
                model.set(&format!("model.layers.{at}.{own}.weight"), ones.clone());
            }
        }
        model.set("model.norm.weight", ones);
        model
    }

    /// The same with FP8 weights, their scales under `own`.
    pub fn quantized(scheme: Scheme, own: &str, config: Value) -> Self {
        let mut model = Self::plain();
        for (seed, (path, n, k)) in layers().into_iter().enumerate() {
            model.requantize(&path, own, &weight(seed, n, k), k, scheme, 448.);
            debug_assert_eq!(model.tensors[&format!("{path}.weight")].shape, [n, k]);
        }
        model.config["quantization_config"] = config;
        model
    }

    /// Replaces the weight of the layer at `path`.
    pub fn requantize(
        &mut self,
        path: &str,
        own: &str,
        values: &[f32],
        k: usize,
        scheme: Scheme,
        largest: f32,
    ) {
        let (codes, scales, shape) = quantize(values, k, scheme, largest);
        let weight = Entry {
            dtype: Dtype::F8_E4M3,
            shape: vec![values.len() / k, k],
            data: codes,
        };
        self.set(&format!("{path}.weight"), weight);
        let scale = match scheme {
            Scheme::Mx => {
                let data = scales
                    .iter()
                    .map(|scale| (scale.log2() + 127.) as u8)
                    .collect();
                Entry {
                    dtype: Dtype::U8,
                    shape,
                    data,
                }
            }
            _ => floats(&shape, &scales),
        };
        self.set(&format!("{path}.{own}"), scale);
    }

    /// Adds a static scale for the inputs of every layer.
    pub fn with_inputs(mut self, own: &str) -> Self {
        for (path, _, _) in layers() {
            let amax = if path.contains("down_proj") { 12. } else { 6. };
            self.set(&format!("{path}.{own}"), floats(&[], &[amax / 448.]));
        }
        self
    }

    /// Adds scales of caches.
    pub fn with_cache(mut self) -> Self {
        for at in 0..LAYERS {
            for own in ["k_scale", "v_scale"] {
                let name = format!("model.layers.{at}.self_attn.{own}");
                self.set(&name, floats(&[1], &[(at + 3) as f32 / 448.]));
            }
        }
        self
    }

    pub fn set(&mut self, name: &str, entry: Entry) {
        self.tensors.insert(name.to_string(), entry);
    }

    pub fn get(&mut self, name: &str) -> &mut Entry {
        self.tensors
            .get_mut(name)
            .unwrap_or_else(|| panic!("no tensor {name}"))
    }

    pub fn remove(&mut self, name: &str) -> Entry {
        self.tensors
            .remove(name)
            .unwrap_or_else(|| panic!("no tensor {name}"))
    }

    pub fn rename(&mut self, from: &str, to: &str) {
        let entry = self.remove(from);
        self.set(to, entry);
    }

    /// Changes the numbers of every F32 tensor whose name ends with `end`.
    pub fn numbers(&mut self, end: &str, change: impl Fn(usize, f32) -> f32) {
        let mut found = false;
        for (_, entry) in self
            .tensors
            .iter_mut()
            .filter(|(name, _)| name.ends_with(end))
        {
            found = true;
            let numbers = entry
                .data
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            let changed = numbers.enumerate().map(|(at, number)| change(at, number));
            entry.data = changed.flat_map(f32::to_le_bytes).collect();
        }
        assert!(found, "no tensor ends with {end}");
    }

    pub fn quantization(&mut self) -> &mut Value {
        &mut self.config["quantization_config"]
    }

    pub fn then(&mut self, after: impl Fn(&Path) + 'static) {
        self.after.push(Box::new(after));
    }

    /// Writes the model, and does to the folder what follows.
    pub fn write(&self) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("config.json"), self.config.to_string()).unwrap();
        let all: Vec<_> = self.tensors.iter().collect();
        if self.sharded {
            let (first, second) = all.split_at(all.len() / 2);
            let mut map = serde_json::Map::new();
            for (name, part) in [(SHARDS[0], first), (SHARDS[1], second)] {
                write_file(&at(name), part);
                map.extend(
                    part.iter()
                        .map(|(tensor, _)| ((*tensor).clone(), json!(name))),
                );
            }
            std::fs::write(at(INDEX), json!({ "weight_map": map }).to_string()).unwrap();
        } else {
            write_file(&at("model.safetensors"), &all);
        }
        self.after.iter().for_each(|after| after(dir.path()));
        dir
    }

    pub fn check(&self) -> (TempDir, Report) {
        let dir = self.write();
        let report = audit_dir(dir.path(), &self.options);
        (dir, report)
    }
}

pub const SHARDS: [&str; 2] = [
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
];
pub const INDEX: &str = "model.safetensors.index.json";

fn write_file(path: &Path, tensors: &[(&String, &Entry)]) {
    let views = tensors.iter().map(|(name, entry)| {
        let view = TensorView::new(entry.dtype, entry.shape.clone(), &entry.data).unwrap();
        (name.as_str(), view)
    });
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// A folder of golden data.
pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/golden")
        .join(name)
}
