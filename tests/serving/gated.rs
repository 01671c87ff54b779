//! A model that computes only when a test lets it, and whose next token is a function of the last one and the position.

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use fp8::models::{CausalLm, Error, KvCache, Llama, LlamaConfig, Result};
use fp8::serving::{Server, ServerOptions};
use serde_json::json;
use std::sync::{Arc, Condvar, Mutex};

pub const VOCAB: usize = 64;
/// After this token there are NaN logits, an error, a panic.
pub const NAN: u32 = 61;
pub const FAILS: u32 = 62;
pub const PANICS: u32 = 63;
/// A cache of so many tokens panics.
pub const NO_CACHE: usize = 99;
/// Positions of the model.
pub const POSITIONS: usize = 200;

/// Calls of the model: how many tokens of a prompt, or how many rows of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    Part(usize),
    Step(usize),
}

#[derive(Debug, Default)]
struct Gate {
    /// Calls that may begin; None: all.
    permits: Option<usize>,
    /// Calls that have begun to wait.
    arrived: usize,
    calls: Vec<Call>,
}

pub struct Gated {
    llama: Llama,
    /// The token after `n` tokens; without a script it follows from the last token and `n`.
    script: Option<Vec<u32>>,
    gate: Mutex<Gate>,
    changed: Condvar,
}

impl Gated {
    /// Gives the tokens of `script`, if there is one; computes so many calls at once, or all.
    pub fn new(script: Option<Vec<u32>>, permits: Option<usize>) -> Arc<Self> {
        let config = json!({
            "model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
            "hidden_act": "silu", "max_position_embeddings": POSITIONS,
        });
        let config = LlamaConfig::parse("config.json", &config).expect("a configuration");
        let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
        Arc::new(Self {
            llama: Llama::new(&config, vb).expect("a model"),
            script,
            gate: Mutex::new(Gate {
                permits,
                ..Gate::default()
            }),
            changed: Condvar::new(),
        })
    }

    /// Computes at once.
    pub fn open() -> Arc<Self> {
        Self::new(None, None)
    }

    /// Computes only what [`Gated::permit`] lets through.
    pub fn closed() -> Arc<Self> {
        Self::new(None, Some(0))
    }

    pub fn server(self: &Arc<Self>, options: &ServerOptions) -> Server {
        Server::start(self.clone(), options).expect("a server")
    }

    /// Lets more calls through.
    pub fn permit(&self, calls: usize) {
        let mut gate = self.gate.lock().unwrap();
        gate.permits = gate.permits.map(|permits| permits + calls);
        self.changed.notify_all();
    }

    /// Lets all calls through from now on.
    pub fn let_all(&self) {
        self.gate.lock().unwrap().permits = None;
        self.changed.notify_all();
    }

    /// Waits until so many calls in all have begun, the last of which may wait for its permit.
    pub fn arrived(&self, calls: usize) {
        let gate = self.gate.lock().unwrap();
        drop(self.changed.wait_while(gate, |gate| gate.arrived < calls));
    }

    /// The calls so far.
    pub fn calls(&self) -> Vec<Call> {
        self.gate.lock().unwrap().calls.clone()
    }

    fn pass(&self, call: Call) {
        let mut gate = self.gate.lock().unwrap();
        gate.arrived += 1;
        self.changed.notify_all();
        let closed = |gate: &mut Gate| gate.permits == Some(0);
        let mut gate = self.changed.wait_while(gate, closed).unwrap();
        gate.permits = gate.permits.map(|permits| permits - 1);
        gate.calls.push(call);
    }

    /// The token after `len` tokens, the last of which is `last`.
    pub fn next(&self, last: u32, len: usize) -> u32 {
        match &self.script {
            Some(script) => script[(len - 1) % script.len()],
            None => (last * 7 + len as u32 * 3) % 50,
        }
    }

    fn logits(&self, ids: &[u32], cache: &mut KvCache) -> Result<Vec<f32>> {
        // Checks the ids and the room.
        let tokens = Tensor::from_slice(ids, (1, ids.len()), &Device::Cpu)?;
        self.llama.last_logits(&tokens, cache)?;
        let last = ids[ids.len() - 1];
        match last {
            NAN => return Ok(vec![f32::NAN; VOCAB]),
            FAILS => return Err(Error::Candle(candle_core::Error::msg("it fails"))),
            PANICS => panic!("it panics"),
            _ => {}
        }
        let mut logits = vec![0.; VOCAB];
        logits[self.next(last, cache.len()) as usize] = 1.;
        Ok(logits)
    }
}

/// The tokens that follow a prompt.
pub fn expected(model: &Gated, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut ids = prompt.to_vec();
    for _ in 0..count {
        ids.push(model.next(ids[ids.len() - 1], ids.len()));
    }
    ids.split_off(prompt.len())
}

impl CausalLm for Gated {
    fn forward_cached(&self, ids: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
        self.llama.forward_cached(ids, cache)
    }

    fn last_logits(&self, ids: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
        let ids = ids.flatten_all()?.to_vec1::<u32>()?;
        self.pass(Call::Part(ids.len()));
        Ok(Tensor::from_vec(
            self.logits(&ids, cache)?,
            (1, VOCAB),
            &Device::Cpu,
        )?)
    }

    fn step(&self, ids: &[u32], caches: &mut [&mut KvCache]) -> Result<Tensor> {
        self.pass(Call::Step(ids.len()));
        let mut all = vec![];
        for (id, cache) in ids.iter().zip(caches) {
            all.extend(self.logits(&[*id], cache)?);
        }
        Ok(Tensor::from_vec(all, (ids.len(), VOCAB), &Device::Cpu)?)
    }

    fn new_cache(&self, batch: usize, capacity: usize) -> Result<KvCache> {
        assert!(capacity != NO_CACHE, "no cache");
        self.llama.new_cache(batch, capacity)
    }

    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn device(&self) -> &Device {
        self.llama.device()
    }

    fn max_positions(&self) -> Option<usize> {
        Some(POSITIONS)
    }
}
