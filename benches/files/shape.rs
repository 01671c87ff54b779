//! Folders of the size of Llama 70B: real headers and scales; weights are holes in the files, or filled.

use anyhow::Result;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

const HIDDEN: usize = 8192;
const INTERMEDIATE: usize = 28672;
const KEYS: usize = 1024;
const VOCABULARY: usize = 128_256;
const SHARD_BYTES: usize = 5_000_000_000;

/// How the weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// High precision.
    Bf16,
    /// FP8 with a scale for each channel.
    Channel,
    /// FP8 with a scale for each block of 128 by 128.
    Block,
    /// FP8 with an E8M0 scale for each 32 weights.
    Microscaling,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Channel => "channel",
            Self::Block => "block",
            Self::Microscaling => "mx",
        }
    }

    fn config(self) -> Value {
        match self {
            Self::Bf16 => Value::Null,
            Self::Channel => {
                json!({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]})
            }
            Self::Block => {
                json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]})
            }
            Self::Microscaling => {
                json!({"quant_method": "modelopt", "quant_algo": "MXFP8", "kv_cache_quant_algo": null, "exclude_modules": ["lm_head"]})
            }
        }
    }
}

/// A tensor of the folder. Its bytes are `fill` again and again, or a hole.
struct Tensor {
    name: String,
    dtype: &'static str,
    shape: [usize; 2],
    bytes: usize,
    fill: Option<Vec<u8>>,
}

/// What the folder holds.
pub struct Shape {
    pub kind: Kind,
    pub layers: usize,
    /// Whether weights have bytes on the disk.
    pub dense: bool,
}

impl Shape {
    /// Writes it and returns the bytes of its tensors.
    pub fn write(&self, dir: &Path) -> Result<u64> {
        std::fs::create_dir_all(dir)?;
        let mut shards: Vec<(Vec<Tensor>, usize)> = vec![(vec![], 0)];
        for tensor in self.tensors() {
            if shards
                .last()
                .is_some_and(|(_, bytes)| bytes + tensor.bytes > SHARD_BYTES)
            {
                shards.push((vec![], 0));
            }
            if let Some((tensors, bytes)) = shards.last_mut() {
                *bytes += tensor.bytes;
                tensors.push(tensor);
            }
        }
        let mut map = serde_json::Map::new();
        for (i, (tensors, bytes)) in shards.iter().enumerate() {
            let name = format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len());
            map.extend(tensors.iter().map(|t| (t.name.clone(), json!(name))));
            write_shard(&dir.join(name), tensors, *bytes)?;
        }
        let total: usize = shards.iter().map(|(_, bytes)| bytes).sum();
        let index = json!({"metadata": {"total_size": total}, "weight_map": map});
        std::fs::write(dir.join("model.safetensors.index.json"), index.to_string())?;
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
            "num_hidden_layers": self.layers, "vocab_size": VOCABULARY, "tie_word_embeddings": false,
            "torch_dtype": "bfloat16", "quantization_config": self.kind.config(),
        });
        std::fs::write(dir.join("config.json"), config.to_string())?;
        Ok(total as u64)
    }

    fn tensors(&self) -> Vec<Tensor> {
        let vocabulary = [VOCABULARY, HIDDEN];
        let mut tensors = vec![self.values("model.embed_tokens.weight", vocabulary)];
        for layer in 0..self.layers {
            let at = |name: &str| format!("model.layers.{layer}.{name}");
            for name in ["input_layernorm.weight", "post_attention_layernorm.weight"] {
                tensors.push(norm(at(name)));
            }
            for (name, rows, columns) in [
                ("self_attn.q_proj", HIDDEN, HIDDEN),
                ("self_attn.k_proj", KEYS, HIDDEN),
                ("self_attn.v_proj", KEYS, HIDDEN),
                ("self_attn.o_proj", HIDDEN, HIDDEN),
                ("mlp.gate_proj", INTERMEDIATE, HIDDEN),
                ("mlp.up_proj", INTERMEDIATE, HIDDEN),
                ("mlp.down_proj", HIDDEN, INTERMEDIATE),
            ] {
                self.linear(&mut tensors, &at(name), rows, columns);
            }
        }
        tensors.push(norm("model.norm.weight".into()));
        tensors.push(self.values("lm_head.weight", vocabulary));
        tensors
    }

    fn linear(&self, tensors: &mut Vec<Tensor>, path: &str, rows: usize, columns: usize) {
        // Of weights of about 0.08 at most.
        let scale = 0.08f32 / 448.0;
        let (suffix, dtype, shape, fill) = match self.kind {
            Kind::Bf16 => {
                return tensors.push(self.values(&format!("{path}.weight"), [rows, columns]));
            }
            Kind::Channel => ("weight_scale", "BF16", [rows, 1], bf16(scale)),
            Kind::Block => {
                let blocks = [rows.div_ceil(128), columns.div_ceil(128)];
                (
                    "weight_scale_inv",
                    "F32",
                    blocks,
                    scale.to_le_bytes().to_vec(),
                )
            }
            Kind::Microscaling => {
                // As amaxes of groups vary: a few powers of two, in no order.
                let bytes = pattern(1 << 14, |bits| vec![112 + (bits % 5) as u8]);
                ("weight_scale", "U8", [rows, columns / 32], bytes)
            }
        };
        let mut codes = tensor(
            format!("{path}.weight"),
            "F8_E4M3",
            [rows, columns],
            1,
            None,
        );
        codes.fill = self
            .dense
            .then(|| pattern(DENSE, |bits| vec![bits as u8 & 0xbf]));
        tensors.push(codes);
        let element = match dtype {
            "F32" => 4,
            "BF16" => 2,
            _ => 1,
        };
        let name = format!("{path}.{suffix}");
        tensors.push(tensor(name, dtype, shape, element, Some(fill)));
    }

    fn values(&self, name: &str, shape: [usize; 2]) -> Tensor {
        let fill = self
            .dense
            .then(|| pattern(DENSE, |bits| bf16((bits as i16) as f32 * 2e-6)));
        tensor(name.into(), "BF16", shape, 2, fill)
    }
}

fn norm(name: String) -> Tensor {
    tensor(name, "BF16", [HIDDEN, 0], 2, Some(bf16(1.0)))
}

/// `columns` 0 for a vector.
fn tensor(
    name: String,
    dtype: &'static str,
    shape: [usize; 2],
    element: usize,
    fill: Option<Vec<u8>>,
) -> Tensor {
    let bytes = shape[0] * shape[1].max(1) * element;
    Tensor {
        name,
        dtype,
        shape,
        bytes,
        fill,
    }
}

fn bf16(value: f32) -> Vec<u8> {
    half::bf16::from_f32(value).to_le_bytes().to_vec()
}

/// Bytes of the pattern of weights.
const DENSE: usize = 1 << 20;

/// `len` bytes of what `value` makes of pseudorandom bits.
fn pattern(len: usize, value: impl Fn(u32) -> Vec<u8>) -> Vec<u8> {
    let mut state = 1u64;
    let mut bits = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) as u32
    };
    let mut bytes = vec![];
    while bytes.len() < len {
        bytes.extend(value(bits()));
    }
    bytes
}

fn write_shard(path: &Path, tensors: &[Tensor], bytes: usize) -> Result<()> {
    let mut header = serde_json::Map::new();
    let mut offset = 0;
    for t in tensors {
        let shape = if t.shape[1] == 0 {
            json!([t.shape[0]])
        } else {
            json!(t.shape)
        };
        let entry =
            json!({"dtype": t.dtype, "shape": shape, "data_offsets": [offset, offset + t.bytes]});
        header.insert(t.name.clone(), entry);
        offset += t.bytes;
    }
    let mut header = Value::Object(header).to_string();
    header.extend(std::iter::repeat_n(
        ' ',
        header.len().next_multiple_of(8) - header.len(),
    ));
    let mut file = File::create(path)?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let data = file.stream_position()?;
    file.set_len(data + bytes as u64)?;
    let mut offset = 0;
    for t in tensors {
        if let Some(fill) = &t.fill {
            file.seek(SeekFrom::Start(data + offset as u64))?;
            let piece = fill.repeat(((1 << 20) / fill.len()).max(1));
            let mut left = t.bytes;
            while left > 0 {
                let n = left.min(piece.len());
                file.write_all(&piece[..n])?;
                left -= n;
            }
        }
        offset += t.bytes;
    }
    file.sync_all()?;
    Ok(())
}
