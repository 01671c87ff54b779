//! Prompts of unequal lengths in one batch, caches that grow, and where texts end.

use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::models::{
    CausalLm, Error, FinishReason, GenerationOptions, KvCache, Llama, LlamaConfig, Result,
    TextError, generate,
};
use fp8_test_support::{assert_close, rounding::two_orders};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::ops::ControlFlow;

/// A small Llama with random weights, which counts its calls.
struct Counted {
    llama: Llama,
    /// Shapes of the ids of each call.
    calls: RefCell<Vec<Vec<usize>>>,
}

fn model(more: &[(&str, Value)]) -> Counted {
    let mut config = json!({
        "model_type": "mistral", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    });
    for (key, value) in more {
        config[*key] = value.clone();
    }
    let config = LlamaConfig::parse("config.json", &config).expect("a configuration");
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let llama = Llama::new(&config, vb).expect("a model");
    for (name, var) in vars.data().lock().unwrap().iter() {
        let seed = name
            .bytes()
            .fold(7, |hash, b| hash * 31 % 9973 + u64::from(b));
        if var.rank() == 2 {
            var.set(
                &(fp8_test_support::normal(seed, var.dims())
                    .to_device(&Device::Cpu)
                    .unwrap()
                    * 0.3)
                    .unwrap(),
            )
            .unwrap();
        }
    }
    Counted {
        llama,
        calls: RefCell::default(),
    }
}

impl CausalLm for Counted {
    fn forward_cached(&self, ids: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
        self.llama.forward_cached(ids, cache)
    }

    fn last_logits(&self, ids: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
        self.calls.borrow_mut().push(ids.dims().to_vec());
        self.llama.last_logits(ids, cache)
    }

    fn new_cache(&self, batch: usize, capacity: usize) -> Result<KvCache> {
        self.llama.new_cache(batch, capacity)
    }

    fn vocab_size(&self) -> usize {
        self.llama.vocab_size()
    }

    fn device(&self) -> &Device {
        self.llama.device()
    }

    fn takes_unequal_rows(&self) -> bool {
        self.llama.takes_unequal_rows()
    }

    fn max_positions(&self) -> Option<usize> {
        self.llama.max_positions()
    }

    fn eos_tokens(&self) -> &[u32] {
        self.llama.eos_tokens()
    }
}

/// Lengths 3, 70, 1, 12, 3, 9.
fn prompts() -> Vec<Vec<u32>> {
    let lengths = [3, 70, 1, 12, 3, 9].into_iter().enumerate();
    lengths
        .map(|(i, length)| {
            (0..length)
                .map(|t| (t * 7 + i as u32 * 13 + 1) % 64)
                .collect()
        })
        .collect()
}

fn run(
    model: &Counted,
    prompts: &[Vec<u32>],
    options: &GenerationOptions,
) -> Vec<(Vec<u32>, FinishReason)> {
    let outputs = generate(model, prompts, options, &mut |_| ControlFlow::Continue(())).unwrap();
    outputs
        .into_iter()
        .map(|output| (output.tokens, output.finish))
        .collect()
}

#[test]
fn prompts_of_all_lengths_run_together_and_get_what_they_get_alone() {
    let options = GenerationOptions::default().with_max_new_tokens(80);
    for (case, more) in [
        ("plain", vec![]),
        ("window", vec![("sliding_window", json!(8))]),
        ("qk norm", vec![("model_type", json!("qwen3"))]),
    ] {
        let model = model(&more);
        let together = run(&model, &prompts(), &options);
        let calls = model.calls.take();
        // One call for each of the five lengths, then one call per token for all rows.
        assert_eq!(calls.len(), 5 + 79, "{case}");
        assert!(
            calls[5..].iter().all(|shape| *shape == [6, 1]),
            "{case}: {calls:?}"
        );
        assert_eq!(together.len(), prompts().len(), "{case}");
        for (prompt, output) in prompts().iter().zip(&together) {
            let alone = run(&model, std::slice::from_ref(prompt), &options);
            assert_eq!(*output, alone[0], "{case}: {} tokens", prompt.len());
        }
    }
}

#[test]
fn a_cache_takes_memory_as_it_fills() -> Result<()> {
    let model = model(&[]);
    let mut cache = model.new_cache(2, 1000)?;
    let token = 2 * 2 * 2 * 8 * 2 * 4; // keys and values of two layers, two rows, two heads of 8 features in f32
    assert_eq!(cache.capacity(), 1000);
    assert!(cache.size_in_bytes() <= 100 * token);
    let ids = Tensor::from_vec(
        (0..2 * 90).map(|i| i % 64).collect::<Vec<u32>>(),
        (2, 90),
        &Device::Cpu,
    )?;
    let whole = model.llama.forward(&ids)?;
    let mut last = None;
    for (start, tokens) in [(0, 60), (60, 5), (65, 1), (66, 24)] {
        last = Some(model.last_logits(&ids.narrow(1, start, tokens)?, &mut cache)?);
    }
    assert_eq!(cache.len(), 90);
    assert!(cache.size_in_bytes() <= 200 * token);
    let last = last.expect("logits");
    // Two blocks of sums over 32 features (norms, projections), 48 (the MLP) and 90 keys, and the head.
    let roundings = 2 * (5 * 32 + 48 + 90) + 32;
    let expected = whole.narrow(1, 89, 1)?.squeeze(1)?;
    assert_close("grown", &last, &expected, two_orders(roundings));
    let endless = model.new_cache(1, 1 << 50);
    assert!(
        matches!(endless, Err(Error::CacheMemory { .. })),
        "{endless:?}"
    );
    let mut full = model.new_cache(1, 65)?;
    let ids = ids.narrow(0, 0, 1)?.contiguous()?;
    let refused = model.last_logits(&ids.narrow(1, 0, 66)?, &mut full);
    assert!(
        matches!(refused, Err(Error::CacheFull { capacity: 65, .. })),
        "{refused:?}"
    );
    Ok(())
}

#[test]
fn texts_end_at_the_positions_and_at_the_tokens_of_the_model() {
    let free = run(
        &model(&[]),
        &prompts(),
        &GenerationOptions::default().with_max_new_tokens(30),
    );
    let few = model(&[("max_position_embeddings", json!(80))]);
    let options = GenerationOptions::default().with_max_new_tokens(30);
    let ended = run(&few, &prompts(), &options);
    assert_eq!([ended.len(), free.len()], [prompts().len(); 2]);
    for ((output, free), prompt) in ended.iter().zip(&free).zip(prompts()) {
        let (room, finish) = match prompt.len() {
            70 => (10, FinishReason::Positions),
            _ => (30, FinishReason::Length),
        };
        assert_eq!(*output, (free.0[..room].to_vec(), finish));
    }
    // No memory has room for so many tokens, and none is needed.
    let endless = options.clone().with_max_new_tokens(1 << 50);
    for (output, prompt) in run(&few, &prompts(), &endless).iter().zip(prompts()) {
        let expected = (80 - prompt.len(), FinishReason::Positions);
        assert_eq!((output.0.len(), output.1), expected);
    }
    let long = vec![vec![1; 80], vec![1; 81]];
    let refused = generate(&few, &long, &options, &mut |_| ControlFlow::Continue(()));
    assert!(
        matches!(
            refused,
            Err(Error::Text(TextError::TooManyTokens {
                prompt: 1,
                tokens: 81,
                positions: 80
            }))
        ),
        "{refused:?}"
    );

    let eos = free[0].0[3];
    let speaking = model(&[("eos_token_id", json!(eos))]);
    let ended = run(&speaking, &prompts()[..1], &options);
    let first = free[0].0.iter().position(|&id| id == eos).unwrap();
    assert_eq!(
        ended[0],
        (free[0].0[..=first].to_vec(), FinishReason::StopToken)
    );
    let on = run(
        &speaking,
        &prompts()[..1],
        &options.clone().with_ignore_eos(true),
    );
    assert_eq!(on[0], free[0]);
}
