//! The checkpoints of compressed-tensors.

use super::*;
use candle_core::{D, DType, IndexOp, Module, Result, Tensor};
use candle_nn::VarBuilder;
use fp8::fp8_candle::{Fp8Tensor, ops};
use fp8::fp8_core::{Cast, Format};
use fp8::load;
use fp8::nn::{InputScaling, Linear, linear_no_bias};
use fp8_test_support::rounding::product_bound;
use fp8_test_support::{device, flat64, golden, normal, on_cuda, sqnr};
use safetensors::SafeTensors;
use std::collections::HashMap;

const CHECKPOINTS: [&str; 2] = ["static_tensor", "dynamic_channel"];

/// The value of an E4M3 code, from its bits.
fn e4m3_value(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = match exponent {
        15 if code & 7 == 7 => f64::NAN,
        0 => mantissa / 8. * 2f64.powi(-6),
        _ => (1. + mantissa / 8.) * 2f64.powi(exponent - 7),
    };
    if code & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

/// The nearest E4M3 value, found by search; of two equally near ones, that with the even code.
fn nearest_e4m3(x: f64) -> f64 {
    let distance = |code: u8| (e4m3_value(code) - x.abs()).abs();
    let nearest = (0..0x7F).min_by(|&a, &b| {
        distance(a)
            .total_cmp(&distance(b))
            .then((a & 1).cmp(&(b & 1)))
    });
    e4m3_value(nearest.unwrap()).copysign(x)
}

/// The weight of a layer from the bytes of the file, decoded and scaled in f64, with its shape.
fn raw_weight(file: &SafeTensors<'_>, path: &str) -> (Vec<f64>, usize, usize) {
    let weight = file.tensor(&format!("{path}.weight")).unwrap();
    assert_eq!(weight.dtype(), safetensors::Dtype::F8_E4M3, "{path}");
    let (n, k) = (weight.shape()[0], weight.shape()[1]);
    let scales = raw_f32(file, &format!("{path}.weight_scale"));
    let values = weight.data().iter().enumerate();
    let scaled = values.map(|(at, &code)| e4m3_value(code) * scales[at / k % scales.len()]);
    (scaled.collect(), n, k)
}

fn raw_f32(file: &SafeTensors<'_>, name: &str) -> Vec<f64> {
    let tensor = file.tensor(name).unwrap();
    assert_eq!(tensor.dtype(), safetensors::Dtype::F32, "{name}");
    let values = tensor.data().as_chunks::<4>().0;
    values
        .iter()
        .map(|&bytes| f64::from(f32::from_le_bytes(bytes)))
        .collect()
}

fn checkpoint_builders(name: &str) -> [(&'static str, VarBuilder<'static>); 2] {
    let path = golden(&format!("checkpoints/{name}/model.safetensors"));
    let ours = load::var_builder(&[&path], DType::F32, &device()).unwrap();
    // SAFETY: the committed file does not change while the test maps it.
    let candles =
        unsafe { VarBuilder::from_mmaped_safetensors(&[&path], DType::F32, &device()).unwrap() };
    [("our VarBuilder", ours), ("candle's VarBuilder", candles)]
}

const LLAMA_LINEARS: [&str; 7] = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

#[test]
fn compressed_tensors_layers() -> Result<()> {
    for name in CHECKPOINTS {
        let bytes =
            std::fs::read(golden(&format!("checkpoints/{name}/model.safetensors"))).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        for (builder, vb) in checkpoint_builders(name) {
            for layer in 0..2 {
                for linear in LLAMA_LINEARS {
                    let path = format!("model.layers.{layer}.{linear}");
                    let what = format!("{name} by {builder}: {path}");
                    let (weight, n, k) = raw_weight(&file, &path);
                    let l = linear_no_bias(k, n, vb.pp(&path))?;
                    check_static_layer(&what, &l, name == "static_tensor", &file, &path, &weight)?;
                }
            }
            let head = linear_no_bias(64, 128, vb.pp("lm_head"))?;
            assert!(
                head.static_weight().is_none(),
                "{name} by {builder}: lm_head"
            );
            let stored = raw_f32(&file, "lm_head.weight");
            assert_eq!(
                flat64(&head.weight()?),
                stored,
                "{name} by {builder}: lm_head"
            );
        }
    }
    Ok(())
}

fn check_static_layer(
    what: &str,
    l: &Linear,
    is_static: bool,
    file: &SafeTensors<'_>,
    path: &str,
    weight: &[f64],
) -> Result<()> {
    let (n, k) = l.features();
    assert_eq!(l.path(), Some(path), "{what}");
    let held = l
        .static_weight()
        .unwrap_or_else(|| panic!("{what}: high precision"));
    // Checked first: a packed weight makes a copy once its codes are asked for in their own order.
    let scales = if is_static { 1 } else { n };
    assert_eq!(l.weight_bytes(), n * k + 4 * scales, "{what}: bytes held");
    let raw = file.tensor(&format!("{path}.weight")).unwrap();
    assert_eq!(
        held.codes().codes().flatten_all()?.to_vec1::<u8>()?,
        raw.data(),
        "{what}: codes"
    );
    let input_scale = match held.input_scaling() {
        InputScaling::Static(_) if is_static => {
            Some(raw_f32(file, &format!("{path}.input_scale"))[0])
        }
        InputScaling::DynamicPerToken { .. } if !is_static => None,
        other => panic!("{what}: {other:?}"),
    };

    // Some values lie outside the range of the static scale.
    let m = 15;
    let x = (normal(7, (3, 5, k)) * 3.)?;
    let mut x_values = flat64(&x);
    for row in x_values.chunks_mut(k) {
        let quant_scale = match input_scale {
            Some(dequant_scale) => 1. / dequant_scale as f32,
            None => 448. / row.iter().fold(0f64, |amax, x| amax.max(x.abs())) as f32,
        };
        let dequant_scale = input_scale.unwrap_or(f64::from(1. / quant_scale));
        for x in row {
            *x = nearest_e4m3(f64::from(*x as f32 * quant_scale)) * dequant_scale;
        }
    }
    let y = l.forward(&x)?;
    assert_eq!(
        (y.dims(), y.dtype()),
        (&[3, 5, n][..], DType::F32),
        "{what}"
    );
    let y = flat64(&y);
    for row in 0..m {
        for col in 0..n {
            let terms = (0..k).map(|at| x_values[row * k + at] * weight[col * k + at]);
            let (sum, magnitude, square) =
                terms.fold((0., 0., 0.), |(sum, magnitude, square), term| {
                    (sum + term, magnitude + term.abs(), square + term * term)
                });
            let got = y[row * n + col];
            assert!(
                (got - sum).abs() <= product_bound(k, magnitude, square),
                "{what} [{row}, {col}]: {got:e}, expected {sum:e}"
            );
        }
    }
    Ok(())
}

/// The two-layer Llama of the checkpoints.
struct Llama {
    embeddings: Tensor,
    layers: Vec<HashMap<&'static str, Linear>>,
    norms: Vec<[Tensor; 2]>,
    norm: Tensor,
    head: Linear,
    cos: Tensor,
    sin: Tensor,
}

const EPS: f64 = 1e-6;
const HEAD: usize = 16;

impl Llama {
    fn new(vb: &VarBuilder<'_>, time: usize) -> Result<Self> {
        let vb_model = vb.pp("model");
        let (mut layers, mut norms) = (vec![], vec![]);
        for layer in 0..2 {
            let vb = vb_model.pp("layers").pp(layer);
            let linear = |&name: &&'static str| {
                let (n, k) = match name {
                    "self_attn.k_proj" | "self_attn.v_proj" => (32, 64),
                    "mlp.gate_proj" | "mlp.up_proj" => (160, 64),
                    "mlp.down_proj" => (64, 160),
                    _ => (64, 64),
                };
                Ok((name, linear_no_bias(k, n, vb.pp(name))?))
            };
            layers.push(LLAMA_LINEARS.iter().map(linear).collect::<Result<_>>()?);
            norms.push([
                vb.get(64, "input_layernorm.weight")?,
                vb.get(64, "post_attention_layernorm.weight")?,
            ]);
        }
        let angles: Vec<f32> = (0..time)
            .flat_map(|t| {
                (0..HEAD / 2).map(move |j| t as f32 / 1e4f32.powf(2. * j as f32 / HEAD as f32))
            })
            .collect();
        let angles = Tensor::from_vec(angles, (time, HEAD / 2), &device())?;
        Ok(Self {
            embeddings: vb_model.get((128, 64), "embed_tokens.weight")?,
            layers,
            norms,
            norm: vb_model.get(64, "norm.weight")?,
            head: linear_no_bias(64, 128, vb.pp("lm_head"))?,
            cos: angles.cos()?,
            sin: angles.sin()?,
        })
    }

    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let (batch, time) = ids.dims2()?;
        let mut x = self
            .embeddings
            .index_select(&ids.flatten_all()?, 0)?
            .reshape((batch, time, 64))?;
        for (linears, [norm1, norm2]) in self.layers.iter().zip(&self.norms) {
            let h = ops::rms_norm(&x, norm1, EPS)?;
            let heads = |name| {
                let y = linears[name].forward(&h)?;
                y.reshape((batch, time, (), HEAD))?
                    .transpose(1, 2)?
                    .contiguous()
            };
            let q = ops::rope(&heads("self_attn.q_proj")?, &self.cos, &self.sin)?;
            let k = ops::rope(&heads("self_attn.k_proj")?, &self.cos, &self.sin)?;
            let (k, v) = (twice(&k)?, twice(&heads("self_attn.v_proj")?)?);
            let scores = q.matmul(&k.t()?)?;
            let attention = ops::causal_softmax(&scores, 1. / (HEAD as f64).sqrt())?;
            let mixed = attention
                .matmul(&v)?
                .transpose(1, 2)?
                .reshape((batch, time, 64))?;
            x = (x + linears["self_attn.o_proj"].forward(&mixed)?)?;
            let h = ops::rms_norm(&x, norm2, EPS)?;
            let gate = linears["mlp.gate_proj"].forward(&h)?.silu()?;
            let h = (gate * linears["mlp.up_proj"].forward(&h)?)?;
            x = (x + linears["mlp.down_proj"].forward(&h)?)?;
        }
        self.head.forward(&ops::rms_norm(&x, &self.norm, EPS)?)
    }
}

/// Repeats each key or value head for the two query heads that share it.
fn twice(x: &Tensor) -> Result<Tensor> {
    let (batch, heads, time, size) = x.dims4()?;
    let x = x.unsqueeze(2)?.expand((batch, heads, 2, time, size))?;
    x.reshape((batch, heads * 2, time, size))
}

#[test]
fn compressed_tensors_llama() -> Result<()> {
    for name in CHECKPOINTS {
        let expected = load_tensors(&format!("checkpoints/{name}/expected.safetensors"));
        let ids = &expected["input_ids"];
        for (builder, vb) in checkpoint_builders(name) {
            let logits = Llama::new(&vb, ids.dim(D::Minus1)?)?.forward(ids)?;
            let to_fp8 = sqnr(&expected["logits_fp8"], &logits);
            let to_f32 = sqnr(&expected["logits_f32"], &logits);
            println!(
                "{name} by {builder}: {to_fp8:.1} dB to the peer's FP8, {to_f32:.1} dB to f32"
            );
            // FP8 tensor cores keep 14 bits of a sum, so where a sum is the input of the next cast, some codes are neighbours of the
            // peer's. If casts had nothing in common, both results would have errors of their own, twice the power of one.
            let least = if on_cuda() { to_f32 - 3.1 } else { 120. };
            assert!(to_fp8 >= least, "{name} by {builder}: {to_fp8:.1} dB");
            assert!(
                (18. ..30.).contains(&to_f32),
                "{name} by {builder}: {to_f32:.1} dB to f32"
            );
        }
    }
    Ok(())
}

/// A stock model gets the dequantized values from our VarBuilder.
#[test]
fn stock_layers_get_dequantized_weights() -> Result<()> {
    for name in CHECKPOINTS {
        let bytes =
            std::fs::read(golden(&format!("checkpoints/{name}/model.safetensors"))).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let [(_, vb), _] = checkpoint_builders(name);
        let path = "model.layers.1.mlp.down_proj";
        let (weight, n, k) = raw_weight(&file, path);
        let got = candle_nn::linear_no_bias(k, n, vb.pp(path))?
            .weight()
            .clone();
        for (at, (got, expected)) in flat64(&got).into_iter().zip(weight).enumerate() {
            assert_eq!(got, f64::from(expected as f32), "{name} at {at}");
        }
        let l = linear_no_bias(k, n, vb.pp(path))?;
        let codes: &Fp8Tensor = l.static_weight().unwrap().codes();
        assert_eq!(
            codes.dequantize(DType::F32)?.i(0)?.to_vec1::<f32>()?,
            got.i(0)?.to_vec1::<f32>()?
        );
    }
    let cast = Cast::new(Format::E4M3);
    for value in [0., 0.3, 1.0625, 17., 450., -3.3e-3] {
        // The search that these tests round with agrees with the cast itself.
        assert_eq!(
            nearest_e4m3(value),
            f64::from(Format::E4M3.decode(cast.encode(value as f32, 0)))
        );
    }
    Ok(())
}
