//! Models with scaled parameters in code for plain ones, which must get values, never unscaled data.

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::scaled::ScaledVarMap;
use fp8::{
    Autocast, Fp8Module, PrepareOptions, PtqScheme, RecipeName, nn, prepare_fp8, quantize_model,
    save_calibrated, with_fp8,
};
use fp8_test_support::{largest, rounding::two_orders};

#[derive(Fp8Module)]
struct Net {
    embed: nn::Embedding,
    norm: nn::LayerNorm,
    fc: nn::Linear,
    head: nn::Linear,
}

impl Net {
    fn forward(&self, ids: &Tensor) -> candle_core::Result<Tensor> {
        let x = self.embed.forward(ids)?.to_dtype(DType::F32)?;
        self.head
            .forward(&self.fc.forward(&self.norm.forward(&x)?)?)
    }
}

/// Parameters whose scales are far from 1.
fn net() -> anyhow::Result<(Net, ScaledVarMap)> {
    let vars = ScaledVarMap::new(DType::F16, &Device::Cpu)?;
    let vb = vars.var_builder();
    let net = Net {
        embed: nn::embedding(16, 32, vb.pp("embed"))?,
        norm: nn::layer_norm(32, 1e-5, vb.pp("norm"))?,
        fc: nn::linear(32, 32, vb.pp("fc"))?,
        head: nn::linear(32, 16, vb.pp("head"))?,
    };
    for (name, size) in [
        ("fc.weight", 1e-3),
        ("fc.bias", 1e-7),
        ("norm.weight", 300.),
    ] {
        let value = vars.get(name)?.value().to_tensor(DType::F32)?;
        vars.set(name, &(value * size)?)?;
    }
    Ok((net, vars))
}

fn ids() -> candle_core::Result<Tensor> {
    Tensor::from_vec((0..16).collect::<Vec<u32>>(), 16, &Device::Cpu)
}

#[test]
fn an_export_holds_values() -> anyhow::Result<()> {
    let (net, vars) = net()?;
    prepare_fp8(&net, &PrepareOptions::default())?;
    let calibrating = Autocast::new(RecipeName::Delayed).calibrating(true);
    with_fp8(calibrating, || net.forward(&ids()?))?;
    let dir = tempfile::tempdir()?;
    let report = save_calibrated(&net, dir.path())?;
    assert!(report.quantized.contains(&"fc".to_string()), "{report:?}");
    let loaded = VarMap::new();
    let vb = VarBuilder::from_varmap(&loaded, DType::F32, &Device::Cpu);
    for var in vars.vars() {
        vb.get(var.dims(), var.name())?;
    }
    fp8::load::dequantize_into(&loaded, &[&report.model])?;
    for var in vars.vars() {
        let expected = var.value().to_tensor(DType::F32)?;
        let got = vb.get(var.dims(), var.name())?;
        // Half an ulp of E4M3 at the largest value of the tensor; tensors that are not cast are exact.
        let cast = report
            .quantized
            .iter()
            .any(|path| var.name() == format!("{path}.weight"));
        let allowed = if cast { largest(&expected) / 16. } else { 0. };
        let error = largest(&(got - expected)?);
        assert!(error <= allowed, "{}: {error} beyond {allowed}", var.name());
    }
    // A training step after the calibration is noticed.
    let weight = vars.get("fc.weight")?;
    weight.set(&weight.value().mul_constant(1.5)?)?;
    let error = save_calibrated(&net, dir.path()).unwrap_err();
    assert!(
        matches!(
            error,
            fp8::Error::Export(fp8::ExportError::ChangedSinceCalibration { .. })
        ),
        "{error}"
    );
    Ok(())
}

#[test]
fn a_quantized_model_computes_with_values() -> anyhow::Result<()> {
    let (net, vars) = net()?;
    let exact = net.forward(&ids()?)?;
    let options = PrepareOptions::default();
    let quantized = quantize_model(&net, PtqScheme::E4m3, &options, || net.forward(&ids()?))?;
    let run = || with_fp8(quantized.autocast(), || net.forward(&ids()?));
    let error = largest(&(run()? - &exact)?);
    assert!(error > 0. && error < 0.1 * largest(&exact), "{error}");
    // The value changes, the data do not: an FP8 copy must not be used any longer.
    let head = vars.get("head.weight")?;
    let before = run()?;
    head.changed(fp8::scaled::Scale::power_of_two(
        head.scale().exponent().unwrap_or(0) + 1,
    ));
    let bias = vars.get("head.bias")?;
    let plain = |y: Tensor| y.broadcast_sub(&bias.value().to_tensor(DType::F32)?);
    let (once, twice) = (plain(before)?, plain(run()?)?);
    // The same codes, so three roundings: the scale, and the bias added and subtracted.
    assert!(largest(&(twice - (&once * 2.)?)?) <= two_orders(3) * largest(&once));
    Ok(())
}

#[test]
fn a_layer_shows_its_value() -> anyhow::Result<()> {
    let (net, vars) = net()?;
    let value = vars.get("fc.weight")?.value().to_tensor(DType::F32)?;
    assert_eq!(net.fc.weight()?.to_vec2::<f32>()?, value.to_vec2::<f32>()?);
    let parameter = net.fc.scaled_weight().map(|var| var.name().to_string());
    assert_eq!(parameter.as_deref(), Some("fc.weight"));
    assert!(nn::Linear::new(value, None).scaled_weight().is_none());
    Ok(())
}

#[test]
fn a_fused_convolution_has_the_value() -> anyhow::Result<()> {
    let (scaled, plain) = (ScaledVarMap::new(DType::F32, &Device::Cpu)?, VarMap::new());
    let conv = nn::conv2d(2, 4, 3, Default::default(), scaled.var_builder().pp("conv"))?;
    let vb = VarBuilder::from_varmap(&plain, DType::F32, &Device::Cpu);
    let bn = nn::batch_norm(4, 1e-5, vb.pp("bn"))?;
    let x = Tensor::randn(0f32, 1., (1, 2, 8, 8), &Device::Cpu)?;
    let two = nn::ModuleT::forward_t(&bn, &conv.forward(&x)?, false)?;
    let one = nn::fuse_batch_norm(&conv, &bn)?.forward(&x)?;
    // Sums of 18 products, and four operations of the norm.
    assert!(largest(&(&one - two)?) <= two_orders(18 + 4) * largest(&one));
    Ok(())
}
