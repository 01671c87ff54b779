//! Spans: every layer that has a checkpoint path enters one of level TRACE with that path, once in a forward pass.

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8_ranks::{DeviceMesh, ProcessGroup};
use fp8_recipes::nn::{self, DenseConfig, LayerInputs, LoraConfig, ModuleT, RNN};
use fp8_recipes::scaled::{Layer, ScaledVarMap};
use fp8_recipes::with_tracing;
use fp8_scaled::{Scaled, as_scaled};
use fp8_test_support::cpu_tensor;
use std::sync::{Arc, Mutex};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

const CPU: &Device = &Device::Cpu;

/// Spans as texts, such as `norm kind=rms-norm path=blocks.0.norm`.
#[derive(Default)]
struct Spans {
    made: Vec<String>,
    entered: Vec<String>,
}

/// A subscriber that keeps the spans of level TRACE.
#[derive(Clone, Default)]
struct Keep(Arc<Mutex<Spans>>);

impl Subscriber for Keep {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_span() && *metadata.level() == Level::TRACE
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        struct Text(String);
        impl Visit for Text {
            fn record_str(&mut self, field: &Field, value: &str) {
                self.0 += &format!(" {}={value}", field.name());
            }

            fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!(" {}={value:?}", field.name());
            }
        }
        let mut text = Text(attributes.metadata().name().to_string());
        attributes.record(&mut text);
        let mut spans = self.0.lock().unwrap();
        spans.made.push(text.0);
        Id::from_u64(spans.made.len() as u64)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}

    fn enter(&self, id: &Id) {
        let mut spans = self.0.lock().unwrap();
        let text = spans.made[id.into_u64() as usize - 1].clone();
        spans.entered.push(text);
    }

    fn exit(&self, _: &Id) {}
}

/// `f` enters these spans, in this order.
#[track_caller]
fn assert_spans(expected: &[&str], f: impl Fn() -> Result<()>) {
    let run = || {
        let keep = Keep::default();
        tracing::subscriber::with_default(keep.clone(), &f).unwrap();
        std::mem::take(&mut keep.0.lock().unwrap().entered)
    };
    // The place of a span that a thread without a subscriber comes to first is off until there is a new subscriber. After one run
    // all places are known.
    run();
    assert_eq!(run(), expected);
}

#[test]
fn layers_enter_a_span_with_their_path() -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, CPU).pp("net");
    let ids = Tensor::new(&[[0u32, 2]], CPU)?;
    let rows = cpu_tensor(1, &[2, 4]);
    let line = cpu_tensor(2, &[2, 4, 8]);
    let image = cpu_tensor(3, &[2, 4, 6, 6]);
    let mesh = DeviceMesh::new(&ProcessGroup::single(), &[("model", 1)]).unwrap();
    let dense = || DenseConfig::new([3]);
    let part = dense().with_bias(false);
    let kernel = cpu_tensor(4, &[4, 3]);
    let heads = nn::ParallelDense::new(kernel, None, part, None, &mesh, "net.heads")?;
    let modules: Vec<(&str, Box<dyn Module>, &Tensor)> = vec![
        (
            "linear path=net.fc",
            Box::new(nn::linear(4, 6, vb.pp("fc"))?),
            &rows,
        ),
        (
            "linear",
            Box::new(nn::Linear::new(cpu_tensor(5, &[6, 4]), None)),
            &rows,
        ),
        (
            "dense_general path=net.dense",
            Box::new(nn::dense_general(&[2, 4], dense(), vb.pp("dense"))?),
            &rows,
        ),
        (
            "dense_general path=net.lazy",
            Box::new(nn::Dense::new(dense(), vb.pp("lazy"))),
            &rows,
        ),
        (
            "linear path=net.up",
            Box::new(nn::column_parallel_linear(
                4,
                6,
                vb.pp("up"),
                &mesh,
                "model",
            )?),
            &rows,
        ),
        (
            "linear path=net.down",
            Box::new(nn::row_parallel_linear(
                4,
                6,
                vb.pp("down"),
                &mesh,
                "model",
            )?),
            &rows,
        ),
        ("dense_general path=net.heads", Box::new(heads), &rows),
        (
            "norm kind=layer-norm path=net.norm",
            Box::new(nn::layer_norm(4, 1e-5, vb.pp("norm"))?),
            &rows,
        ),
        (
            "norm kind=rms-norm path=net.rms",
            Box::new(nn::rms_norm(4, 1e-5, vb.pp("rms"))?),
            &rows,
        ),
        (
            "norm kind=rms-norm path=net.traced",
            Box::new(with_tracing::RmsNorm::new(4, 1e-5, vb.pp("traced"))?),
            &rows,
        ),
        (
            "norm kind=group-norm path=net.groups",
            Box::new(nn::group_norm(2, 4, 1e-5, vb.pp("groups"))?),
            &line,
        ),
        (
            "embedding path=net.words",
            Box::new(nn::embedding(5, 4, vb.pp("words"))?),
            &ids,
        ),
        (
            "embedding path=net.places",
            Box::new(with_tracing::Embedding::new(5, 4, vb.pp("places"))?),
            &ids,
        ),
        (
            "conv kind=conv1d path=net.conv1d",
            Box::new(nn::conv1d(4, 6, 3, Default::default(), vb.pp("conv1d"))?),
            &line,
        ),
        (
            "conv kind=conv2d path=net.conv2d",
            Box::new(nn::conv2d(4, 6, 3, Default::default(), vb.pp("conv2d"))?),
            &image,
        ),
        (
            "conv kind=conv-transpose1d path=net.up1d",
            Box::new(nn::conv_transpose1d(
                4,
                6,
                3,
                Default::default(),
                vb.pp("up1d"),
            )?),
            &line,
        ),
        (
            "conv kind=conv-transpose2d path=net.up2d",
            Box::new(nn::conv_transpose2d(
                4,
                6,
                3,
                Default::default(),
                vb.pp("up2d"),
            )?),
            &image,
        ),
    ];
    for (expected, layer, x) in modules {
        assert_spans(&[expected], || layer.forward(x).map(drop));
    }
    let base = nn::linear(4, 6, vb.pp("lora"))?;
    let lora = nn::LoraLinear::new(base, LoraConfig::new(2), vb.pp("lora"))?;
    assert_spans(&["linear path=net.lora", "lora path=net.lora"], || {
        lora.forward(&rows).map(drop)
    });
    let bn = nn::batch_norm(4, 1e-5, vb.pp("bn"))?;
    for train in [true, false] {
        assert_spans(&["norm kind=batch-norm path=net.bn"], || {
            bn.forward_t(&image, train).map(drop)
        });
    }
    Ok(())
}

#[test]
fn recurrent_layers_enter_a_span_at_each_step() -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, CPU).pp("net");
    let x = cpu_tensor(1, &[2, 3, 4]);
    let lstm = nn::lstm(4, 5, Default::default(), vb.pp("lstm"))?;
    assert_spans(&["rnn kind=lstm path=net.lstm"; 3], || {
        lstm.seq(&x).map(drop)
    });
    let gru = nn::gru(4, 5, Default::default(), vb.pp("gru"))?;
    assert_spans(&["rnn kind=gru path=net.gru"; 3], || gru.seq(&x).map(drop));
    Ok(())
}

#[test]
fn operators_enter_a_span_with_their_name() {
    let (a, b) = (cpu_tensor(1, &[4, 4]), cpu_tensor(2, &[4, 4]));
    let (matmul, add) = (nn::Matmul::new("scores"), nn::Add::new("residual"));
    let (mul, div) = (nn::Mul::new("gate"), nn::Div::new("ratio"));
    assert_spans(&["operator kind=matmul path=scores"], || {
        Ok(matmul.forward(&a, &b).map(drop)?)
    });
    assert_spans(&["operator kind=add path=residual"], || {
        Ok(add.forward(&a, &b).map(drop)?)
    });
    assert_spans(&["operator kind=mul path=gate"], || {
        Ok(mul.forward(&a, &b).map(drop)?)
    });
    assert_spans(&["operator kind=div path=ratio"], || {
        Ok(div.forward(&a, &b).map(drop)?)
    });
}

/// As a single node of the graph and layer by layer. A node multiplies by the three projections of attention together.
#[test]
fn layers_of_a_module_enter_their_spans() -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, CPU).pp("net");
    let layer = nn::transformer_layer(&nn::TransformerConfig::new(16, 2), vb)?;
    let x = cpu_tensor(1, &[2, 5, 16]);
    let together = ["linear path=net.self_attn.q_proj, net.self_attn.k_proj, net.self_attn.v_proj"];
    let apart = [
        "linear path=net.self_attn.q_proj",
        "linear path=net.self_attn.k_proj",
        "linear path=net.self_attn.v_proj",
    ];
    let before = ["norm kind=layer-norm path=net.input_layernorm"];
    let after = [
        "linear path=net.self_attn.o_proj",
        "norm kind=layer-norm path=net.post_attention_layernorm",
        "linear path=net.mlp.up_proj",
        "linear path=net.mlp.down_proj",
    ];
    for (single, projections) in [(true, &together[..]), (false, &apart[..])] {
        let layer = layer.clone().with_single_node(single);
        let expected = [&before[..], projections, &after[..]].concat();
        assert_spans(&expected, || {
            Ok(layer.forward(&x, &LayerInputs::default()).map(drop)?)
        });
    }
    Ok(())
}

#[test]
fn layers_enter_the_same_spans_on_scaled_tensors() -> Result<()> {
    let vars = ScaledVarMap::new(DType::F32, CPU).unwrap();
    let vb = vars.var_builder().pp("net");
    let scaled = |seed, dims: &[usize]| as_scaled(&cpu_tensor(seed, dims), None).unwrap();
    let rows = scaled(1, &[2, 4]);
    let line = scaled(2, &[2, 4, 8]);
    let image = scaled(3, &[2, 4, 6, 6]);
    let layers: Vec<(&str, Box<dyn Layer<Scaled>>, &Scaled)> = vec![
        (
            "linear path=net.fc",
            Box::new(nn::linear(4, 6, vb.pp("fc"))?),
            &rows,
        ),
        (
            "norm kind=layer-norm path=net.norm",
            Box::new(nn::layer_norm(4, 1e-5, vb.pp("norm"))?),
            &rows,
        ),
        (
            "norm kind=rms-norm path=net.rms",
            Box::new(nn::rms_norm(4, 1e-5, vb.pp("rms"))?),
            &rows,
        ),
        (
            "norm kind=group-norm path=net.groups",
            Box::new(nn::group_norm(2, 4, 1e-5, vb.pp("groups"))?),
            &line,
        ),
        (
            "conv kind=conv2d path=net.conv2d",
            Box::new(nn::conv2d(4, 6, 3, Default::default(), vb.pp("conv2d"))?),
            &image,
        ),
    ];
    for (expected, layer, x) in layers {
        assert_spans(&[expected], || Ok(layer.apply(x).map(drop)?));
    }
    let words = nn::embedding(5, 4, vb.pp("words"))?;
    let ids = Tensor::new(&[[0u32, 2]], CPU)?;
    assert_spans(&["embedding path=net.words"], || {
        Ok(words.lookup::<Scaled>(&ids).map(drop)?)
    });
    let bn = nn::batch_norm(4, 1e-5, vb.pp("bn"))?;
    for train in [true, false] {
        assert_spans(&["norm kind=batch-norm path=net.bn"], || {
            Ok(bn.apply_t(&image, train).map(drop)?)
        });
    }
    Ok(())
}
