//! Trains candle-transformers' Llama in FP8: its own file, carried over by two `use` lines and a derive line per struct.
//!
//! ```text
//! cargo run --release -p fp8-stock-models --example stock_model
//! ```

use anyhow::Result;
use candle::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::nn::loss::cross_entropy;
use fp8::optim::{AdamW, AdamWConfig};
use fp8::{check_gradients, fp8_autocast, prepare_fp8, PrepareOptions, Recipe};
use fp8_stock_models::llama::{Cache, Config, Llama};
use fp8_stock_models::{Change, CARRIED};

const STEPS: usize = 30;

fn main() -> Result<()> {
    print_diff();
    let config = Config {
        hidden_size: 64,
        intermediate_size: 128,
        vocab_size: 32,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        use_flash_attn: false,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: 32,
        tie_word_embeddings: false,
    };
    let device = Device::Cpu;
    let vars = VarMap::new();
    let model = Llama::load(VarBuilder::from_varmap(&vars, DType::F32, &device), &config)?;
    let report = prepare_fp8(&model, &PrepareOptions::default())?;
    println!("{} linear layers run in FP8", report.converted());

    let recipe: Recipe = "delayed".parse()?;
    let config_of_steps = AdamWConfig {
        lr: 2e-3,
        ..AdamWConfig::default()
    };
    let mut optimizer = AdamW::from_varmap(&vars, config_of_steps)?;
    for step in 0..STEPS {
        // Each row counts on from its first token; the model predicts the token after the last.
        let first = |row: u32| row * 3 + step as u32;
        let tokens = (0..8).flat_map(|row| (0..16).map(move |at| (first(row) + at) % 32));
        let tokens = Tensor::from_iter(tokens, &device)?.reshape((8, 16))?;
        let next = (0..8).map(|row| (first(row) + 16) % 32);
        let next = Tensor::from_iter(next, &device)?;

        let mut cache = Cache::new(false, DType::F32, &config, &device)?;
        let guard = fp8_autocast(recipe.clone())?;
        let logits = model.forward(&tokens, 0, &mut cache)?;
        guard.close()?;
        let loss = cross_entropy(&logits, &next)?;
        let grads = loss.backward()?;
        if step == 0 {
            let missing = check_gradients(&vars, &grads);
            println!("variables without a gradient: {missing:?}");
        }
        optimizer.apply(&grads)?;
        if step % 5 == 0 || step + 1 == STEPS {
            println!("step {step}: loss {:.4}", loss.to_scalar::<f32>()?);
        }
    }
    Ok(())
}

/// What was changed in the file.
fn print_diff() {
    let Some(file) = CARRIED.iter().find(|file| file.name == "llama") else {
        return;
    };
    println!(
        "candle-transformers' {}.rs, {} lines:",
        file.name,
        file.stock.lines().count()
    );
    for change in file.changes() {
        match change {
            Change::ReplacedUse(stock, ours) => println!("-{stock}\n+{ours}"),
            Change::AddedUse(ours) => println!("+{ours}"),
            Change::Derive(derive, below) => println!("+{derive}\n {below}"),
            Change::Other(stock, ours) => println!("?{stock:?} {ours:?}"),
        }
    }
}
