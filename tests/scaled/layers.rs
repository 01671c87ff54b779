//! One definition for plain and scaled tensors.

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::scaled::{Array, Layer, Scaled, ScaledVarMap, as_scaled};
use fp8::{Error, Fp8Module, PrepareOptions, RecipeName, nn, prepare_fp8, with_fp8};
use fp8_test_support::rounding::{roundings, two_orders};
use fp8_test_support::{apart, assert_differ, assert_same, largest};

#[derive(Fp8Module)]
struct Net {
    embed: nn::Embedding,
    conv: nn::Conv2d,
    norm: nn::LayerNorm,
    root: nn::RmsNorm,
    layers: Vec<nn::Linear>,
    activation: nn::Activation,
}

impl Net {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        let config = nn::Conv2dConfig {
            padding: 1,
            ..Default::default()
        };
        Ok(Self {
            embed: nn::embedding(10, 16, vb.pp("embed"))?,
            conv: nn::conv2d(1, 2, 3, config, vb.pp("conv"))?,
            norm: nn::layer_norm(32, 1e-5, vb.pp("norm"))?,
            root: nn::rms_norm(32, 1e-5, vb.pp("root"))?,
            layers: vec![
                nn::linear(32, 32, vb.pp("layers.0"))?,
                nn::linear(32, 32, vb.pp("layers.1"))?,
            ],
            activation: nn::Activation::NewGelu,
        })
    }

    /// ids `[batch]` to `[batch, 32]`.
    fn forward<A: Array>(&self, ids: &Tensor) -> fp8::Result<A> {
        let x: A = self.embed.lookup(ids)?;
        let batch = x.dims()[0];
        let x = self.conv.apply(&x.reshape(&[batch, 1, 4, 4])?)?;
        let x = self.norm.apply(&x.reshape(&[batch, 32])?)?;
        let y = self.activation.apply(&self.layers.apply(&x)?)?;
        self.root.apply(&x.add(&y)?)
    }
}

fn ids() -> candle_core::Result<Tensor> {
    Tensor::new(&[3u32, 1, 4, 1, 5, 9], &Device::Cpu)
}

#[test]
fn a_generic_model_computes_what_the_layers_do() -> anyhow::Result<()> {
    let vars = VarMap::new();
    let net = Net::new(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
    let x = net.embed.forward(&ids()?)?.reshape((6, 1, 4, 4))?;
    let x = net.norm.forward(&net.conv.forward(&x)?.reshape((6, 32))?)?;
    let y = net.layers[1].forward(&net.layers[0].forward(&x)?)?;
    let by_hand = net.root.forward(&(&x + net.activation.forward(&y)?)?)?;
    let generic: Tensor = net.forward(&ids()?)?;
    assert_eq!(generic.to_vec2::<f32>()?, by_hand.to_vec2::<f32>()?);
    assert!(generic.sum_all()?.backward()?.get_ids().count() > 0);
    Ok(())
}

#[test]
fn scaled_and_plain_agree_and_so_do_recipes() -> anyhow::Result<()> {
    let vars = ScaledVarMap::new(DType::F32, &Device::Cpu)?;
    let net = Net::new(vars.var_builder())?;
    let scaled: Scaled = net.forward(&ids()?)?;
    let plain: Tensor = net.forward(&ids()?)?;
    // f32 data: only the order of operations differs.
    let error = apart(&plain, &scaled.value()?);
    // A convolution of 9 products, two norms and two layers of 32.
    let bound = two_orders(9 + 4 * roundings(32)) * largest(&plain);
    assert!(error <= bound, "{error}");
    let grads = scaled.square()?.sum_all()?.backward()?;
    for var in vars.vars() {
        assert!(grads.get(&var).is_some(), "{}", var.name());
    }
    // A recipe's guard around a model with scaled parameters multiplies by their values.
    let values = vars.vars().into_iter().map(|var| {
        let value = var.value().to_tensor(DType::F32)?;
        Ok((var.name().to_string(), value))
    });
    let values = values.collect::<fp8::Result<_>>()?;
    let of_values = Net::new(VarBuilder::from_tensors(values, DType::F32, &Device::Cpu))?;
    let cast = |net: &Net| -> anyhow::Result<Tensor> {
        prepare_fp8(net, &PrepareOptions::default())?;
        Ok(with_fp8(RecipeName::Rowwise, || {
            net.forward::<Tensor>(&ids()?)
        })?)
    };
    let got = cast(&net)?;
    assert_same("a guard", &got, &cast(&of_values)?);
    assert_differ("a guard", &got, &plain);
    Ok(())
}

#[test]
fn a_plain_layer_refuses_scaled_input_by_name() -> anyhow::Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let fc = nn::linear(4, 4, vb.pp("fc"))?;
    let x = as_scaled(&Tensor::ones((2, 4), DType::F32, &Device::Cpu)?, None)?;
    let error = fc.apply(&x).unwrap_err();
    assert!(
        matches!(&error, Error::NotScaled { tensor } if tensor == "fc.weight"),
        "{error}"
    );
    Ok(())
}

#[test]
fn layers_without_a_scaled_form_are_not_built_on_scaled_parameters() -> anyhow::Result<()> {
    let vars = ScaledVarMap::new(DType::F16, &Device::Cpu)?;
    let vb = vars.var_builder();
    let error = nn::lstm(4, 4, Default::default(), vb.pp("lstm")).unwrap_err();
    assert!(error.to_string().contains("`lstm`"), "{error}");
    let error = nn::gru(4, 4, Default::default(), vb.pp("gru")).unwrap_err();
    assert!(error.to_string().contains("`gru`"), "{error}");
    Ok(())
}

#[test]
fn interleaved_rotary_embeddings_have_no_rule_for_scales() -> anyhow::Result<()> {
    let half = Tensor::ones((3, 2), DType::F16, &Device::Cpu)?;
    let x = as_scaled(&Tensor::ones((1, 1, 3, 4), DType::F16, &Device::Cpu)?, None)?;
    let error = x.rope_i(&half, &half).unwrap_err();
    let Error::Scaled(inner) = &error else {
        panic!("{error}");
    };
    assert!(
        matches!(
            **inner,
            fp8::fp8_scaled::Error::NoScaleRule { op: "rope_i" }
        ),
        "{error}"
    );
    Ok(())
}

#[test]
fn wrong_features_are_named() -> anyhow::Result<()> {
    let vars = ScaledVarMap::new(DType::F16, &Device::Cpu)?;
    let fc = nn::linear(4, 4, vars.var_builder().pp("fc"))?;
    let x = as_scaled(&Tensor::ones((2, 5), DType::F16, &Device::Cpu)?, None)?;
    let message = fc.apply(&x).unwrap_err().to_string();
    assert!(
        message.contains("`fc`") && message.contains("[2, 5]"),
        "{message}"
    );
    Ok(())
}
