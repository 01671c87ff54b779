//! Small versions of the four models, beside the stock ones on the same variables.

use candle::{DType, Device, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_transformers::models as stock;
use fp8::Fp8Module;
use fp8_stock_models as ours;
use std::cell::RefCell;
use std::rc::Rc;

/// A ported model, ready to run, and the result of the stock one.
pub struct Case {
    pub name: &'static str,
    pub vars: VarMap,
    pub model: Box<dyn Fp8Module>,
    pub forward: Box<dyn Fn() -> Result<Tensor>>,
    pub stock: Box<dyn Fn() -> Result<Tensor>>,
    /// Linear layers that can be prepared.
    pub linears: usize,
}

pub fn all() -> Vec<Case> {
    vec![llama(false), bert(), vit(), whisper()]
}

/// Values in (-1, 1) without a pattern, for which no model curves so much that differences miss its slope.
pub fn wave(seed: usize, shape: &[usize]) -> Tensor {
    let count: usize = shape.iter().product();
    let value = |i: usize| (((i + 3) * (2 * seed + 7)) as f32 * 12.9898).sin();
    Tensor::from_vec((0..count).map(value).collect(), shape, &Device::Cpu).unwrap()
}

/// The names of all variables, sorted.
pub fn names(vars: &VarMap) -> Vec<String> {
    let mut names: Vec<String> = vars.data().lock().unwrap().keys().cloned().collect();
    names.sort();
    names
}

/// Weights that keep activations near 1; norms near the identity.
fn fill(vars: &VarMap) {
    for (seed, name) in names(vars).iter().enumerate() {
        let vars = vars.data().lock().unwrap();
        let var = &vars[name];
        let values = wave(seed, var.dims());
        let values = match var.dims() {
            [_] if name.ends_with("weight") => values.affine(0.2, 1.),
            [_] => values.affine(0.2, 0.),
            [_, fan_in @ ..] => {
                let fan_in: usize = fan_in.iter().product();
                values.affine(1.5 / (fan_in as f64).sqrt(), 0.)
            }
            [] => unreachable!("no variable of these models is a scalar"),
        };
        var.set(&values.unwrap()).unwrap();
    }
}

fn builder(vars: &VarMap) -> VarBuilder<'static> {
    VarBuilder::from_varmap(vars, DType::F32, &Device::Cpu)
}

fn ids(rows: [[u32; 5]; 2]) -> Tensor {
    Tensor::new(&rows, &Device::Cpu).unwrap()
}

/// With `tied` the head is the embedding.
pub fn llama(tied: bool) -> Case {
    macro_rules! config {
        ($models:ident) => {
            $models::llama::Config {
                hidden_size: 16,
                intermediate_size: 24,
                vocab_size: 20,
                num_hidden_layers: 2,
                num_attention_heads: 4,
                num_key_value_heads: 2,
                use_flash_attn: false,
                rms_norm_eps: 1e-5,
                rope_theta: 10_000.,
                bos_token_id: None,
                eos_token_id: None,
                rope_scaling: None,
                max_position_embeddings: 16,
                tie_word_embeddings: tied,
            }
        };
    }
    let vars = VarMap::new();
    let (config, stock_config) = (config!(ours), config!(stock));
    let model = Rc::new(ours::llama::Llama::load(builder(&vars), &config).unwrap());
    let stock_model = stock::llama::Llama::load(builder(&vars), &stock_config).unwrap();
    fill(&vars);
    let x = ids([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]);
    let (input, shared) = (x.clone(), model.clone());
    Case {
        name: "llama",
        vars,
        model: Box::new(model),
        forward: Box::new(move || {
            let mut cache = ours::llama::Cache::new(false, DType::F32, &config, &Device::Cpu)?;
            shared.forward(&input, 0, &mut cache)
        }),
        stock: Box::new(move || {
            let mut cache =
                stock::llama::Cache::new(false, DType::F32, &stock_config, &Device::Cpu)?;
            stock_model.forward(&x, 0, &mut cache)
        }),
        linears: 2 * 7 + usize::from(!tied),
    }
}

fn bert() -> Case {
    macro_rules! config {
        ($models:ident) => {
            $models::bert::Config {
                vocab_size: 20,
                hidden_size: 16,
                num_hidden_layers: 2,
                num_attention_heads: 4,
                intermediate_size: 24,
                max_position_embeddings: 8,
                ..Default::default()
            }
        };
    }
    let vars = VarMap::new();
    let model = ours::bert::BertForMaskedLM::load(builder(&vars), &config!(ours));
    let model = Rc::new(model.unwrap());
    let stock_model = stock::bert::BertForMaskedLM::load(builder(&vars), &config!(stock)).unwrap();
    fill(&vars);
    let x = ids([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]);
    let types = ids([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]);
    // The last token of the second row is padding.
    let mask = ids([[1; 5], [1, 1, 1, 1, 0]]);
    let (input, shared) = ((x.clone(), types.clone(), mask.clone()), model.clone());
    Case {
        name: "bert",
        vars,
        model: Box::new(model),
        forward: Box::new(move || shared.forward(&input.0, &input.1, Some(&input.2))),
        stock: Box::new(move || stock_model.forward(&x, &types, Some(&mask))),
        linears: 2 * 6 + 2,
    }
}

macro_rules! vit_config {
    ($models:ident) => {
        $models::vit::Config {
            hidden_size: 16,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            intermediate_size: 24,
            hidden_act: candle_nn::Activation::Gelu,
            layer_norm_eps: 1e-6,
            image_size: 8,
            patch_size: 4,
            num_channels: 3,
            qkv_bias: true,
        }
    };
}

pub fn vit_config() -> ours::vit::Config {
    vit_config!(ours)
}

pub fn vit_input() -> Tensor {
    wave(77, &[2, 3, 8, 8])
}

fn vit() -> Case {
    let vars = VarMap::new();
    let model = Rc::new(ours::vit::Model::new(&vit_config(), 5, builder(&vars)).unwrap());
    let stock_model = stock::vit::Model::new(&vit_config!(stock), 5, builder(&vars)).unwrap();
    fill(&vars);
    let shared = model.clone();
    Case {
        name: "vit",
        vars,
        model: Box::new(model),
        forward: Box::new(move || shared.forward(&vit_input())),
        stock: Box::new(move || stock_model.forward(&vit_input())),
        linears: 2 * 6 + 1,
    }
}

/// Encoder and decoder; the output holds what both compute.
fn whisper() -> Case {
    let config = || stock::whisper::Config {
        num_mel_bins: 4,
        max_source_positions: 6,
        d_model: 16,
        encoder_attention_heads: 4,
        encoder_layers: 2,
        vocab_size: 20,
        max_target_positions: 8,
        decoder_attention_heads: 4,
        decoder_layers: 1,
        suppress_tokens: vec![],
    };
    let vars = VarMap::new();
    let model = ours::whisper::model::Whisper::load(&builder(&vars), config()).unwrap();
    let ours::whisper::model::Whisper {
        encoder, decoder, ..
    } = model;
    let model = Rc::new(RefCell::new((encoder, decoder)));
    let stock_model = stock::whisper::model::Whisper::load(&builder(&vars), config()).unwrap();
    let stock_model = RefCell::new(stock_model);
    fill(&vars);
    let (mel, x) = (
        wave(78, &[2, 4, 12]),
        ids([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]),
    );
    let (input, shared) = ((mel.clone(), x.clone()), model.clone());
    let both = |audio: Tensor, logits: Tensor| {
        Tensor::cat(&[audio.flatten_all()?, logits.flatten_all()?], 0)
    };
    Case {
        name: "whisper",
        vars,
        model: Box::new(model),
        forward: Box::new(move || {
            let (encoder, decoder) = &mut *shared.borrow_mut();
            let audio = encoder.forward(&input.0, true)?;
            let y = decoder.forward(&input.1, &audio, true)?;
            both(audio, decoder.final_linear(&y)?)
        }),
        stock: Box::new(move || {
            let model = &mut *stock_model.borrow_mut();
            let audio = model.encoder.forward(&mel, true)?;
            let y = model.decoder.forward(&x, &audio, true)?;
            both(audio, model.decoder.final_linear(&y)?)
        }),
        // The encoder's layers, and one of the decoder with its second attention.
        linears: 2 * 6 + 10,
    }
}
