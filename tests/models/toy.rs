//! A model whose next token depends on every token before it, and whose rows are independent.

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use fp8::models::{CausalLm, KvCache, Llama, LlamaConfig, Result};
use serde_json::json;
use std::cell::RefCell;

pub const VOCAB: usize = 50;

/// Logits from a hash of the row so far. A small Llama makes the caches; this type keeps the tokens of the newest one.
pub struct Toy {
    llama: Llama,
    rows: RefCell<Vec<Vec<u32>>>,
}

impl Toy {
    pub fn new() -> Self {
        let config = json!({
            "model_type": "llama", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
            "hidden_act": "silu", "max_position_embeddings": 1000,
        });
        let config = LlamaConfig::parse("config.json", &config).expect("a configuration");
        let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
        Self {
            llama: Llama::new(&config, vb).expect("a model"),
            rows: RefCell::default(),
        }
    }
}

impl CausalLm for Toy {
    fn forward_cached(&self, ids: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
        // Checks the ids and the room.
        self.llama.forward_cached(ids, cache)?;
        let mut rows = self.rows.borrow_mut();
        let mut logits = vec![];
        for (row, new) in rows.iter_mut().zip(ids.to_vec2::<u32>()?) {
            for id in new {
                row.push(id);
                logits.extend(logits_after(row));
            }
        }
        let shape = (ids.dim(0)?, ids.dim(1)?, VOCAB);
        Ok(Tensor::from_vec(logits, shape, &Device::Cpu)?)
    }

    fn last_logits(&self, ids: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
        let logits = self.forward_cached(ids, cache)?;
        let last = logits.narrow(1, logits.dim(1)? - 1, 1)?;
        // In bf16, as a model in half precision gives them.
        Ok(last.squeeze(1)?.to_dtype(DType::BF16)?)
    }

    fn new_cache(&self, batch: usize, capacity: usize) -> Result<KvCache> {
        self.rows.replace(vec![vec![]; batch]);
        self.llama.new_cache(batch, capacity)
    }

    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn device(&self) -> &Device {
        self.llama.device()
    }
}

/// A hash of the tokens so far and each candidate.
pub fn logits_after(ids: &[u32]) -> Vec<f32> {
    let hash = |start: u64, id: u32| {
        let mixed = (start ^ u64::from(id)).wrapping_mul(0x9e3779b97f4a7c15);
        mixed ^ (mixed >> 29)
    };
    let state = ids
        .iter()
        .fold(0xcbf29ce484222325, |state, id| hash(state, *id));
    let logit = |id| (hash(state, id) >> 40) as u8 as f32 / 64.0;
    (0..VOCAB as u32).map(logit).collect()
}
