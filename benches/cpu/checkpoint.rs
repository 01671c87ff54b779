//! An FP8 checkpoint of a language model against candle-transformers' f32 and Q8_0 of the same weights.
//!
//! The model has the sizes of SmolLM2-135M and random weights, so nothing is downloaded; embeddings are in bf16, as in its file.

use crate::rows::Metric;
use crate::session::{Field, Session, Times};
use crate::timing::Contestant;
use anyhow::{Context, Result, ensure};
use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use candle_core::{D, DType, Device, IndexOp, Tensor};
use candle_transformers::models::llama::{Cache, Config, Llama as PlainLlama, LlamaConfig};
use candle_transformers::models::quantized_llama::ModelWeights;
use fp8::load::Checkpoint;
use fp8::models::{self, CausalLm, Llama, ModelOptions};
use fp8::rewrite::{self, QuantizeOptions, Scheme};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::collections::HashMap;
use std::io::Cursor;
use std::path::Path;

const HIDDEN: usize = 576;
const INTERMEDIATE: usize = 1536;
const HEADS: usize = 9;
const KV_HEADS: usize = 3;
const VOCABULARY: usize = 49152;
const PROMPT: usize = 512;
/// Tokens before the decoded ones.
const SEEN: usize = 16;

/// Names of a layer's matrices here and in GGUF files, outputs and inputs.
const MATRICES: [(&str, &str, usize, usize); 7] = [
    ("self_attn.q_proj", "attn_q", HIDDEN, HIDDEN),
    ("self_attn.k_proj", "attn_k", HIDDEN / 3, HIDDEN),
    ("self_attn.v_proj", "attn_v", HIDDEN / 3, HIDDEN),
    ("self_attn.o_proj", "attn_output", HIDDEN, HIDDEN),
    ("mlp.gate_proj", "ffn_gate", INTERMEDIATE, HIDDEN),
    ("mlp.up_proj", "ffn_up", INTERMEDIATE, HIDDEN),
    ("mlp.down_proj", "ffn_down", HIDDEN, INTERMEDIATE),
];

/// Decoding, and reading a prompt.
pub fn run(session: &Session) -> Result<()> {
    let prefill = session.name(format!("checkpoint prefill {PROMPT}, 135M"));
    let decode = session.name("checkpoint decode, 135M");
    if !session.wants(&prefill) && !session.wants(&decode) {
        return Ok(());
    }
    let layers = if session.quick() { 6 } else { 30 };
    let tensors = weights(layers)?;
    let folder = tempfile::tempdir()?;
    let ours = fp8_model(&tensors, layers, folder.path())?;
    let ours = ours.llama().context("a Llama")?;
    let config = config(layers);
    let plain_config: LlamaConfig = serde_json::from_value(config)?;
    let plain_config = plain_config.into_config(false);
    let quantized = RefCell::new(quantized(&tensors, layers)?);
    let vb = candle_nn::VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    let plain = PlainLlama::load(vb, &plain_config)?;

    let race = Race {
        session,
        ours,
        plain,
        plain_config,
        quantized,
    };
    race.check()?;
    if session.wants(&prefill) {
        race.prefill(prefill)?;
    }
    if session.wants(&decode) {
        race.decode(decode)?;
    }
    Ok(())
}

struct Race<'a> {
    session: &'a Session,
    ours: &'a Llama,
    plain: PlainLlama,
    plain_config: Config,
    quantized: RefCell<ModelWeights>,
}

impl Race<'_> {
    fn new_cache(&self) -> Result<Cache> {
        Ok(Cache::new(
            true,
            DType::F32,
            &self.plain_config,
            &Device::Cpu,
        )?)
    }

    /// All three compute the same model.
    fn check(&self) -> Result<()> {
        let prompt = prompt(SEEN)?;
        let want = self.plain.forward(&prompt, 0, &mut self.new_cache()?)?;
        let mut cache = self.ours.new_cache(1, SEEN)?;
        let ours = self.ours.last_logits(&prompt, &mut cache)?;
        let q8_0 = self.quantized.borrow_mut().forward(&prompt, 0)?;
        for (name, got) in [("ours", ours), ("Q8_0", q8_0)] {
            let error = (&got - &want)?.sqr()?.sum_all()?.to_scalar::<f32>()?;
            let error = (error / want.sqr()?.sum_all()?.to_scalar::<f32>()?).sqrt();
            ensure!(
                error < 0.25,
                "the logits of {name} are {error} from those of f32"
            );
        }
        Ok(())
    }

    fn prefill(&self, case: String) -> Result<()> {
        let prompt = prompt(PROMPT)?;
        let times = self.session.time(Field {
            ours: Contestant::new(|| {
                let mut cache = self.ours.new_cache(1, PROMPT)?;
                self.ours.last_logits(&prompt, &mut cache)?;
                Ok(())
            }),
            f32: Some(Contestant::new(|| {
                self.plain.forward(&prompt, 0, &mut self.new_cache()?)?;
                Ok(())
            })),
            bf16: None,
            q8_0: Some(
                Contestant::new(|| {
                    self.quantized.borrow_mut().forward(&prompt, 0)?;
                    Ok(())
                })
                .optional(),
            ),
        })?;
        let bar = if self.session.has_f32_units() {
            1.8
        } else {
            2.
        };
        self.report(case, bar, None, times)
    }

    fn decode(&self, case: String) -> Result<()> {
        let steps = if self.session.quick() { 4 } else { 16 };
        let prompt = prompt(SEEN)?;
        let next = |logits: Tensor| logits.argmax(D::Minus1)?.reshape((1, 1));
        let mut cache = self.ours.new_cache(1, SEEN + steps)?;
        let first = next(self.ours.last_logits(&prompt, &mut cache)?)?;
        let mut seen = self.new_cache()?;
        self.plain.forward(&prompt, 0, &mut seen)?;
        let plain_cache = RefCell::new(seen.clone());
        let times = self.session.time(Field {
            ours: Contestant::new(|| {
                cache.truncate(SEEN);
                let mut token = first.clone();
                for _ in 0..steps {
                    token = next(self.ours.last_logits(&token, &mut cache)?)?;
                }
                Ok(())
            })
            .with_calls(steps),
            f32: Some(
                Contestant::new(|| {
                    let mut token = first.clone();
                    let cache = &mut plain_cache.borrow_mut();
                    for step in 0..steps {
                        token = next(self.plain.forward(&token, SEEN + step, cache)?)?;
                    }
                    Ok(())
                })
                .with_setup(|| {
                    *plain_cache.borrow_mut() = seen.clone();
                    Ok(())
                })
                .with_calls(steps),
            ),
            bf16: None,
            q8_0: Some(
                Contestant::new(|| {
                    let mut token = first.clone();
                    let model = &mut self.quantized.borrow_mut();
                    for step in 0..steps {
                        token = next(model.forward(&token, SEEN + step)?)?;
                    }
                    Ok(())
                })
                // At position 0 its cache starts over.
                .with_setup(|| {
                    self.quantized.borrow_mut().forward(&prompt, 0)?;
                    Ok(())
                })
                .with_calls(steps),
            ),
        })?;
        self.report(case, 2.5, Some(1.1), times)
    }

    fn report(&self, case: String, bar: f64, q8_0_bar: Option<f64>, times: Times) -> Result<()> {
        let ours = times.ours.unwrap_or(f64::NAN);
        let ratio = |other: Option<f64>| other.unwrap_or(f64::NAN) / ours;
        let plain = (Metric::TokensRatio, ratio(times.f32));
        let q8_0 = (Metric::TokensRatioQ80, ratio(times.q8_0));
        self.session
            .report(case.clone(), plain, Some(bar), times, None)?;
        self.session.report(case, q8_0, q8_0_bar, times, None)
    }
}

fn prompt(tokens: usize) -> Result<Tensor> {
    let ids: Vec<u32> = (0..tokens)
        .map(|i| (i * 7919 % VOCABULARY) as u32)
        .collect();
    Ok(Tensor::from_vec(ids, (1, tokens), &Device::Cpu)?)
}

fn config(layers: usize) -> Value {
    json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 100000.0,
        "tie_word_embeddings": true,
    })
}

/// Random weights under their names in safetensors files; the embedding is exact in bf16.
pub fn weights(layers: usize) -> Result<HashMap<String, Tensor>> {
    let device = Device::Cpu;
    let random = |rows: usize, cols: usize| {
        let deviation = 1. / (cols as f32).sqrt();
        Tensor::randn(0f32, deviation, (rows, cols), &device)
    };
    let table = random(VOCABULARY, HIDDEN)?.to_dtype(DType::BF16)?;
    let norm = Tensor::ones(HIDDEN, DType::F32, &device)?;
    let mut tensors = HashMap::from([
        (
            "model.embed_tokens.weight".to_string(),
            table.to_dtype(DType::F32)?,
        ),
        ("model.norm.weight".to_string(), norm.clone()),
    ]);
    for layer in 0..layers {
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        for part in ["input_layernorm", "post_attention_layernorm"] {
            tensors.insert(name(part), norm.clone());
        }
        for (part, _, outputs, inputs) in MATRICES {
            tensors.insert(name(part), random(outputs, inputs)?);
        }
    }
    Ok(tensors)
}

/// Writes an FP8 directory and opens the model from it.
pub fn fp8_model(
    tensors: &HashMap<String, Tensor>,
    layers: usize,
    folder: &Path,
) -> Result<models::Model> {
    let (source, target) = (folder.join("bf16"), folder.join("fp8"));
    std::fs::create_dir(&source)?;
    std::fs::write(source.join("config.json"), config(layers).to_string())?;
    let name = "model.embed_tokens.weight";
    let mut stored = tensors.clone();
    stored.insert(name.into(), tensors[name].to_dtype(DType::BF16)?);
    candle_core::safetensors::save(&stored, source.join("model.safetensors"))?;
    let options = QuantizeOptions::new(Scheme::ChannelToken);
    let source = Checkpoint::open_dir(&source)?;
    rewrite::quantize(&source, &target, &options, &mut rewrite::quiet)?;
    Ok(models::open(&target, &ModelOptions::new())?)
}

/// candle-transformers' model with all matrices in Q8_0.
fn quantized(tensors: &HashMap<String, Tensor>, layers: usize) -> Result<ModelWeights> {
    let mut file: Vec<(String, QTensor)> = vec![];
    let mut add = |name: String, from: &str, dtype: GgmlDType| -> Result<()> {
        let tensor = permuted(from, &tensors[from])?;
        file.push((name, QTensor::quantize(&tensor, dtype)?));
        Ok(())
    };
    add(
        "token_embd.weight".into(),
        "model.embed_tokens.weight",
        GgmlDType::Q8_0,
    )?;
    add(
        "output_norm.weight".into(),
        "model.norm.weight",
        GgmlDType::F32,
    )?;
    for layer in 0..layers {
        let (to, from) = (format!("blk.{layer}"), format!("model.layers.{layer}"));
        for (to_part, part) in [
            ("attn_norm", "input_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
        ] {
            let dtype = GgmlDType::F32;
            add(
                format!("{to}.{to_part}.weight"),
                &format!("{from}.{part}.weight"),
                dtype,
            )?;
        }
        for (part, to_part, ..) in MATRICES {
            let dtype = GgmlDType::Q8_0;
            add(
                format!("{to}.{to_part}.weight"),
                &format!("{from}.{part}.weight"),
                dtype,
            )?;
        }
    }
    let u32 = |value: usize| gguf_file::Value::U32(value as u32);
    let metadata = [
        ("llama.attention.head_count", u32(HEADS)),
        ("llama.attention.head_count_kv", u32(KV_HEADS)),
        ("llama.block_count", u32(layers)),
        ("llama.embedding_length", u32(HIDDEN)),
        ("llama.rope.dimension_count", u32(HIDDEN / HEADS)),
        ("llama.rope.freq_base", gguf_file::Value::F32(100_000.)),
        (
            "llama.attention.layer_norm_rms_epsilon",
            gguf_file::Value::F32(1e-5),
        ),
    ];
    let metadata: Vec<_> = metadata
        .iter()
        .map(|(name, value)| (*name, value))
        .collect();
    let tensors: Vec<_> = file
        .iter()
        .map(|(name, tensor)| (name.as_str(), tensor))
        .collect();
    let mut bytes = Cursor::new(vec![]);
    gguf_file::write(&mut bytes, &metadata, &tensors)?;
    bytes.set_position(0);
    let content = gguf_file::Content::read(&mut bytes)?;
    Ok(ModelWeights::from_gguf(content, &mut bytes, &Device::Cpu)?)
}

/// GGUF files store the two features of a rotated pair side by side, safetensors files in two halves.
fn permuted(name: &str, x: &Tensor) -> Result<Tensor> {
    let heads = match name {
        _ if name.ends_with("q_proj.weight") => HEADS,
        _ if name.ends_with("k_proj.weight") => KV_HEADS,
        _ => return Ok(x.clone()),
    };
    let (rows, cols) = x.dims2()?;
    let x = x.reshape((heads, 2, rows / heads / 2, cols))?;
    Ok(x.transpose(1, 2)?
        .contiguous()?
        .reshape((rows, cols))?
        .i(..)?)
}
