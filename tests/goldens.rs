//! Linear layers and checkpoints against what torchao, flax and compressed-tensors computed themselves.

mod common;

use candle_core::{D, DType, IndexOp, Module, Result, Tensor, Var};
use candle_nn::VarBuilder;
use common::{
    Model, Step, assert_same_bits, assert_within, device, flat, golden, largest, levels, normal,
    on_cuda, sqnr, ulp,
};
use fp8::candle::{Fp8Tensor, Quantizer, ScaleSource, fake_quantize, ops};
use fp8::core::{Cast, Contraction, Format, Granularity};
use fp8::recipes::config::Operand;
use fp8::recipes::nn::{InputScaling, Linear, linear_no_bias};
use fp8::recipes::{DelayedScaling, Fp8LinearConfig, RecipeName, Role, load};
use safetensors::SafeTensors;
use serde_json::Value;
use std::collections::HashMap;

type Tensors = HashMap<String, Tensor>;

fn load_tensors(name: &str) -> Tensors {
    candle_core::safetensors::load(golden(name), &device()).unwrap()
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key]
        .as_str()
        .unwrap_or_else(|| panic!("no {key} in {value}"))
}

/// One of torchao's casts: which of ours it is, the name of its tensor and the dimension of the GEMM.
const TORCHAO_CASTS: [(&str, Operand, &str, Contraction); 6] = [
    ("x_fwd", Operand::Input, "x", Contraction::Cols),
    ("w_fwd", Operand::Weight, "w", Contraction::Cols),
    ("g_dgrad", Operand::GradOutput, "g", Contraction::Cols),
    (
        "w_dgrad",
        Operand::WeightForGradInput,
        "w",
        Contraction::Rows,
    ),
    (
        "g_wgrad",
        Operand::GradOutputForGradWeight,
        "g",
        Contraction::Rows,
    ),
    (
        "x_wgrad",
        Operand::InputForGradWeight,
        "x",
        Contraction::Rows,
    ),
];

struct TorchaoCase<'a> {
    key: &'a str,
    info: &'a Value,
    tensors: &'a Tensors,
    config: Fp8LinearConfig,
}

impl<'a> TorchaoCase<'a> {
    fn new(info: &'a Value, tensors: &'a Tensors) -> Self {
        let name: RecipeName = text(info, "recipe").parse().unwrap();
        let config = Fp8LinearConfig::from_recipe_name(name)
            .with_round_scales_to_power_of_two(info["pow2"] == true);
        Self {
            key: text(info, "key"),
            info,
            tensors,
            config,
        }
    }

    fn input(&self, name: &str) -> &Tensor {
        &self.tensors[&format!("{}.{name}", text(self.info, "inputs"))]
    }

    fn output(&self, name: &str) -> &Tensor {
        &self.tensors[&format!("{}.{name}", self.key)]
    }

    /// The step of a layer of ours.
    fn run(&self, emulate: bool) -> Result<Step> {
        // Prepared with zeros: a weight with NaN or Inf in it would be left alone.
        let (w, b) = (self.input("w"), self.input("b"));
        let (weight, bias) = (Var::from_tensor(&w.zeros_like()?)?, Var::from_tensor(b)?);
        let model = Model::prepared(&weight, Some(&bias));
        weight.set(w)?;
        let x = Var::from_tensor(self.input("x"))?;
        let step = model.step(
            &x,
            self.input("g"),
            self.config.clone().with_emulate(emulate),
        )?;
        let expected = match text(self.info, "recipe") {
            "tensorwise" => 3,
            "rowwise" => 6,
            _ => 4,
        };
        assert_eq!(model.casts(), expected, "{}: tensors cast", self.key);
        Ok(step)
    }

    fn check_step(&self, step: &Step, emulate: bool) {
        let bias = flat(self.input("b"));
        for (name, ours) in [
            ("y", &step.y),
            ("gx", step.grad_x()),
            ("gw", step.grad_weight()),
            ("gb", step.grad_bias()),
        ] {
            let theirs = self.output(name);
            let summation = 1e-6 * largest(theirs);
            let what = format!("{} emulate={emulate} {name}", self.key);
            assert_within(&what, ours, theirs, |at, value| {
                // The output is rounded before the bias is added and after.
                let before = if name == "y" {
                    bias[at % bias.len()].abs()
                } else {
                    0.
                };
                // Instructions on bf16 flush subnormals: torch's in its matmul, candle's where it adds gradients up.
                let flushed = if ours.dtype() == DType::BF16 {
                    f32::MIN_POSITIVE.into()
                } else {
                    0.
                };
                summation + ulp(ours.dtype(), value.abs() + before) + flushed
            });
        }
    }

    /// A few cases were also run through `torch._scaled_mm`, which rounds rowwise products to bf16. Returns how many
    /// tensors were compared.
    fn check_scaled_mm(&self, step: &Step) -> usize {
        let mut compared = 0;
        for (name, ours) in [
            ("y", &step.y),
            ("gx", step.grad_x()),
            ("gw", step.grad_weight()),
        ] {
            if let Some(theirs) = self.tensors.get(&format!("{}.scaledmm.{name}", self.key)) {
                let got = sqnr(theirs, ours);
                assert!(got >= 48., "{} {name}: {got:.1} dB to _scaled_mm", self.key);
                compared += 1;
            }
        }
        compared
    }

    /// Returns how many codes were compared.
    fn check_casts(&self) -> Result<usize> {
        let config = self.config.resolve().unwrap();
        let mut codes = 0;
        for (name, operand, tensor, contraction) in TORCHAO_CASTS {
            let what = format!("{} {name}", self.key);
            let info = &self.info["operands"][name];
            let cast = config.cast(operand);
            if info.is_null() {
                assert!(cast.is_disabled(), "{what}: {}", cast.short());
                continue;
            }
            let axis = info["axiswise_dim"].as_i64();
            let granularity = if axis.is_some() {
                Granularity::Rowwise
            } else {
                Granularity::Tensorwise
            };
            assert_eq!(cast.granularity, granularity, "{what}");
            let format: Format = text(info, "dtype").parse().unwrap();
            assert_eq!(cast.format, Some(format), "{what}");

            let quantizer = Quantizer::dynamic(format, granularity)
                .with_power_of_two(self.config.round_scales_to_power_of_two);
            let ours = quantizer.quantize(self.input(tensor), contraction)?;
            // Theirs is the cast of the transposed weight; x and g may have two leading dims.
            let as_theirs = |ours: &Tensor, theirs: &Tensor| {
                let ours = if tensor == "w" {
                    ours.t()?
                } else {
                    ours.clone()
                };
                ours.reshape(theirs.shape())
            };
            let theirs = self.output(&format!("scale.{name}"));
            let scale = as_theirs(&ours.quant_scale, theirs)?;
            assert_same_bits(&format!("scale of {what}"), &scale, theirs);
            if let Some(theirs) = self.tensors.get(&format!("{}.codes.{name}", self.key)) {
                let ours = as_theirs(ours.tensor.codes(), theirs)?
                    .flatten_all()?
                    .to_vec1::<u8>()?;
                for (at, (ours, theirs)) in ours
                    .into_iter()
                    .zip(theirs.flatten_all()?.to_vec1::<u8>()?)
                    .enumerate()
                {
                    let same = ours == theirs || format.is_nan(ours) && format.is_nan(theirs);
                    assert!(
                        same,
                        "code of {what} at {at}: {ours:#04x}, expected {theirs:#04x}"
                    );
                    codes += 1;
                }
            }
        }
        Ok(codes)
    }
}

fn torchao(check: impl Fn(&TorchaoCase<'_>) -> Result<()>) -> Result<()> {
    let tensors = load_tensors("torchao_float8linear.safetensors");
    let json = std::fs::read(golden("torchao_float8linear.json")).unwrap();
    let index: Value = serde_json::from_slice(&json).unwrap();
    let cases = index["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 112);
    cases
        .iter()
        .try_for_each(|info| check(&TorchaoCase::new(info, &tensors)))
}

#[test]
fn every_instruction_set_passes() {
    if !on_cuda() {
        levels::run_again_on_each();
    }
}

#[test]
fn torchao_layers() -> Result<()> {
    let scaled_mm = std::cell::Cell::new(0);
    torchao(|case| {
        for emulate in [false, true] {
            let step = case.run(emulate)?;
            case.check_step(&step, emulate);
            scaled_mm.set(scaled_mm.get() + case.check_scaled_mm(&step));
        }
        Ok(())
    })?;
    assert_eq!(
        scaled_mm.get(),
        2 * 8 * 3,
        "8 cases, both paths, y, gx and gw"
    );
    Ok(())
}

#[test]
fn torchao_scales_and_codes() -> Result<()> {
    let codes = std::cell::Cell::new(0);
    torchao(|case| {
        codes.set(codes.get() + case.check_casts()?);
        Ok(())
    })?;
    assert!(
        codes.get() > 50_000,
        "only {} codes are stored",
        codes.get()
    );
    Ok(())
}

/// flax divides by a scale rounded to the compute dtype, in that dtype, and clips before the cast. In f32, and with
/// a power of two in bf16, that is our cast to the bit; another scale in bf16 moves a value by up to one code.
#[test]
fn flax_quantize_dequantize() -> Result<()> {
    let tensors = load_tensors("flax_fp8dense.safetensors");
    for (dtype, dtype_name) in [(DType::F32, "f32"), (DType::BF16, "bf16")] {
        let x = tensors[&format!("qdq.{dtype_name}.x")].to_dtype(dtype)?;
        for format in [Format::E4M3, Format::E5M2] {
            for scale in ["0.01", "0.125", "1.0", "37.5"] {
                let key = format!("qdq.{dtype_name}.{format}.{scale}");
                let dequant_scale: f32 = scale.parse().unwrap();
                let source = ScaleSource::Fixed {
                    dequant_scale: Tensor::from_slice(&[dequant_scale], 1, &device())?,
                };
                let quantizer = Quantizer {
                    source,
                    ..Quantizer::dynamic(format, Granularity::Tensorwise)
                };
                let ours = fake_quantize(&x, &quantizer, Contraction::Cols)?;
                let theirs = tensors[&key].to_dtype(dtype)?;
                if dtype == DType::F32 || scale == "0.125" || scale == "1.0" {
                    assert_same_bits(&key, &ours, &theirs);
                    continue;
                }
                // One step of the format, and what rounding to bf16 does to equal codes.
                let bits = if format == Format::E4M3 { 3 } else { 2 };
                let subnormal = f64::from(dequant_scale) * f64::from(format.decode(1));
                let rounding = |value: f64| 2. * ulp(dtype, value);
                assert_within(&key, &ours, &theirs, |_, value| {
                    subnormal.max(value.abs() * 2f64.powi(-bits)) + rounding(value)
                });
                let pairs: Vec<_> = flat(&ours).into_iter().zip(flat(&theirs)).collect();
                let same = pairs
                    .iter()
                    .filter(|(a, b)| (a - b).abs() <= rounding(*b))
                    .count();
                assert!(
                    same * 20 >= 19 * pairs.len(),
                    "{key}: {same} of {} codes",
                    pairs.len()
                );
            }
        }
    }
    Ok(())
}

/// flax keeps `dequant_scale` and makes it at the start of a step, from the history before it; here a `quant_scale`
/// is made at the end, from the history that the step has just extended. So flax's `*_scale` after step t is the
/// reciprocal of ours before step t, and `*_amax_history` after step t is ours after step t. Its kernel is
/// `[in, out]`, its gradient likewise. The kernel stays the same over the six steps.
#[test]
fn flax_delayed_dense() -> Result<()> {
    let tensors = load_tensors("flax_fp8dense.safetensors");
    for (dtype, dtype_name) in [(DType::F32, "f32"), (DType::BF16, "bf16")] {
        for mode in ["direct", "qdq"] {
            let case = format!("dense.{mode}.{dtype_name}.h1");
            let get = |name: &str| tensors[&format!("{case}.{name}")].to_dtype(dtype);
            // flax casts its f32 parameters to the compute dtype before anything else.
            let weight = Var::from_tensor(&get("kernel")?.t()?.contiguous()?)?;
            let bias = Var::from_tensor(&get("bias")?)?;
            let model = Model::prepared(&weight, Some(&bias));
            let state = model.l.fp8_state().unwrap().clone();
            let slots = [
                ("input", state.slot(Role::Input).unwrap()),
                ("kernel", state.slot(Role::Weight).unwrap()),
                ("output_grad", state.slot(Role::GradOutput).unwrap()),
            ];
            let recipe = DelayedScaling::default().with_amax_history_len(1);
            for t in 0..6 {
                let stored = |name: &str| &tensors[&format!("{case}.t{t}.{name}")];
                for (name, slot) in slots {
                    let what = format!("{case} {name} scale of step {t}");
                    let theirs = stored(&format!("{name}_scale"));
                    assert_same_bits(&what, &slot.tensors()?.dequant_scale, theirs);
                }
                let x = Var::from_tensor(&get(&format!("t{t}.x"))?)?;
                let step = model.step(&x, &get(&format!("t{t}.g"))?, recipe.clone())?;
                for (name, slot) in slots {
                    let what = format!("{case} {name} history after step {t}");
                    let theirs = stored(&format!("{name}_amax_history"));
                    assert_same_bits(&what, &slot.tensors()?.amax_history, theirs);
                }
                for (name, ours) in [
                    ("y", step.y.clone()),
                    ("gx", step.grad_x().clone()),
                    ("gk", step.grad_weight().t()?),
                    ("gb", step.grad_bias().clone()),
                ] {
                    let what = format!("{case} {name} of step {t}");
                    let theirs = stored(name).to_dtype(dtype)?;
                    if dtype == DType::F32 {
                        let bound = 1e-6 * largest(&theirs);
                        assert_within(&what, &ours, &theirs, |_, _| bound);
                    } else {
                        // In bf16 flax rounds the scales, the scaled values and the products to bf16.
                        // Its bias gradient is a sum in bf16.
                        let floor = match (name, t) {
                            ("gb", _) => 40.,
                            (_, 0) => 60.,
                            _ => 25.,
                        };
                        let got = sqnr(&theirs, &ours);
                        assert!(got >= floor, "{what}: {got:.1} dB");
                    }
                }
            }
        }
    }
    Ok(())
}

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

/// The nearest E4M3 value, by search; of two equally near the one with the even code.
fn nearest_e4m3(x: f64) -> f64 {
    let distance = |code: u8| (e4m3_value(code) - x.abs()).abs();
    let nearest = (0..0x7F).min_by(|&a, &b| {
        distance(a)
            .total_cmp(&distance(b))
            .then((a & 1).cmp(&(b & 1)))
    });
    e4m3_value(nearest.unwrap()).copysign(x)
}

/// The raw weight of a layer, decoded and scaled in f64, with its shape.
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
    // SAFETY: nobody changes the committed file while the test maps it.
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
                flat(&head.weight()?),
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
    // Before anything asks for the codes in their own order, of which a packed weight makes a copy.
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
        InputScaling::DynamicPerToken if !is_static => None,
        other => panic!("{what}: {other:?}"),
    };

    // Some values lie beyond what the static scale covers.
    let m = 15;
    let x = (normal(7, (3, 5, k)) * 3.)?;
    let mut x_values = flat(&x);
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
    let y = flat(&y);
    for row in 0..m {
        for col in 0..n {
            let terms = (0..k).map(|at| x_values[row * k + at] * weight[col * k + at]);
            let (sum, magnitude) = terms.fold((0., 0.), |(sum, magnitude), term| {
                (sum + term, magnitude + term.abs())
            });
            let got = y[row * n + col];
            assert!(
                (got - sum).abs() <= 1e-6 * magnitude,
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

/// Two query heads share each key and value head.
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
            assert!(to_fp8 > 35., "{name} by {builder}: {to_fp8:.1} dB");
            assert!(
                (18. ..30.).contains(&to_f32),
                "{name} by {builder}: {to_f32:.1} dB to f32"
            );
        }
    }
    Ok(())
}

/// The values that a stock model gets from our VarBuilder are the dequantized ones.
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
        for (at, (got, expected)) in flat(&got).into_iter().zip(weight).enumerate() {
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
        // The oracle of these tests agrees with the definition of the cast.
        assert_eq!(
            nearest_e4m3(value),
            f64::from(Format::E4M3.decode(cast.encode(value as f32, 0)))
        );
    }
    Ok(())
}
