//! Names and orders of rows, scales of caches, and the precedence of an index.

use super::*;

#[test]
fn mistrals_names_and_rows_become_those_of_transformers() {
    let (heads, kv_heads, head, k) = (4, 2, 8, 32);
    let sizes = [
        ("wq", heads * head),
        ("wk", kv_heads * head),
        ("wv", kv_heads * head),
    ];
    for (per_row, dynamic) in [(false, false), (true, false), (false, true)] {
        let mut tensors = vec![
            bf16s("tok_embeddings.weight", &[3, k], &scales(3 * k)),
            floats("layers.0.attention_norm.weight", &[k], &scales(k)),
            floats("norm.weight", &[k], &scales(k)),
            floats("output.weight", &[3, k], &scales(3 * k)),
            floats(
                "layers.0.attention.kv_fake_quantizer.qscale_act",
                &[],
                &[0.75],
            ),
            weight("layers.0.feed_forward.w2.weight", k, 64),
            floats("layers.0.feed_forward.w2.qscale_weight", &[], &[0.5]),
        ];
        if !dynamic {
            tensors.push(floats("layers.0.feed_forward.w2.qscale_act", &[], &[0.5]));
        }
        for (own, rows) in sizes {
            let name = |end: &str| format!("layers.0.attention.{own}.{end}");
            tensors.push(weight(&name("weight"), rows, k));
            tensors.push(match per_row {
                true => floats(&name("qscale_weight"), &[rows], &scales(rows)),
                false => floats(&name("qscale_weight"), &[], &[0.02]),
            });
            if !dynamic {
                tensors.push(floats(&name("qscale_act"), &[], &[0.5]));
            }
        }
        let quantization = match dynamic {
            true => json!({"qformat_weight": "fp8_e4m3", "qscheme_act": "NO_SCALES"}),
            false => json!({"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}),
        };
        let params = json!({"dim": k, "n_heads": heads, "n_kv_heads": kv_heads, "head_dim": head, "quantization": quantization});
        for in_two in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join("params.json"), params.to_string()).unwrap();
            match in_two {
                true => split(
                    dir.path(),
                    &tensors,
                    HashMap::new(),
                    "consolidated.safetensors",
                ),
                false => write(&dir.path().join("consolidated.safetensors"), &tensors, None),
            }
            let checkpoint = Checkpoint::open_dir(dir.path()).unwrap();
            let input = if dynamic { TOKEN } else { "Static" };
            for (own, rows) in sizes {
                let native = expected(
                    rows,
                    k,
                    |row, _| if per_row { scales(rows)[row] } else { 0.02 },
                );
                // view(heads, head / 2, 2, k).transpose(1, 2).reshape(rows, k)
                let mut values = native.clone();
                if own != "wv" {
                    for h in 0..rows / head {
                        for i in 0..head / 2 {
                            for j in 0..2 {
                                let (to, from) =
                                    (h * head + j * head / 2 + i, h * head + i * 2 + j);
                                values[to * k..][..k].copy_from_slice(&native[from * k..][..k]);
                            }
                        }
                    }
                }
                let path = format!("model.layers.0.self_attn.{}_proj", &own[1..]);
                check(
                    own,
                    &checkpoint,
                    &path,
                    FamilyName::MISTRAL_NATIVE,
                    input,
                    &values,
                );
                // The codes of an FP8 layer have the same rows.
                let vb = Checkpoint::open_dir(dir.path())
                    .unwrap()
                    .var_builder(DType::F32, &CPU)
                    .unwrap();
                let layer = nn::linear_no_bias(k, rows, vb.pp(&path)).unwrap();
                assert_eq!(
                    layer
                        .weight()
                        .unwrap()
                        .flatten_all()
                        .unwrap()
                        .to_vec1::<f32>()
                        .unwrap(),
                    values
                );
            }
            assert_eq!(
                value(&checkpoint, "model.layers.0.mlp.down_proj"),
                expected(k, 64, |_, _| 0.5)
            );
            let others = [
                "lm_head.weight",
                "model.embed_tokens.weight",
                "model.layers.0.input_layernorm.weight",
                "model.layers.0.self_attn.k_scale",
                "model.layers.0.self_attn.v_scale",
                "model.norm.weight",
            ];
            assert_eq!(checkpoint.other_names(), others);
            assert_eq!(
                bits(
                    &checkpoint
                        .tensor("model.layers.0.self_attn.v_scale", &CPU)
                        .unwrap()
                ),
                [0.75f32.to_bits()]
            );
            assert!(checkpoint.config().is_none());
        }
    }
}

#[test]
fn scales_of_caches_have_one_name() {
    let attention = "model.layers.0.self_attn";
    let (k, v) = (
        format!("{attention}.k_scale"),
        format!("{attention}.v_scale"),
    );
    let cases: [(&[&str], &[usize]); 7] = [
        (&["k_scale", "v_scale"], &[1]),
        (&["k_scale", "v_scale"], &[3, 1, 1]),
        (&["k_proj.output_scale", "v_proj.output_scale"], &[]),
        (&["k_proj.k_scale", "v_proj.v_scale"], &[]),
        (&["qkv_proj.k_scale", "qkv_proj.v_scale"], &[1]),
        (&["k_cache.scale", "v_cache.scale"], &[]),
        (&["kv_scale"], &[]),
    ];
    for (spellings, shape) in cases {
        let config = quantized(json!({"quant_method": "fp8", "activation_scheme": "dynamic"}));
        let mut tensors = vec![
            weight("fc.weight", N, K),
            floats("fc.weight_scale", &[], &[0.02]),
        ];
        let len = shape.iter().product::<usize>();
        for own in spellings {
            tensors.push(bf16s(&format!("{attention}.{own}"), shape, &vec![1.5; len]));
        }
        let checkpoint = Model::new(config, &tensors).open().unwrap();
        assert_eq!(checkpoint.other_names(), [k.as_str(), &v], "{spellings:?}");
        for name in [&k, &v] {
            assert_eq!(checkpoint.shape(name), Some(&[len][..]));
            let scale = checkpoint.tensor(name, &CPU).unwrap();
            assert_eq!(scale.to_vec1::<f32>().unwrap(), vec![1.5; len]);
        }
        let vb = checkpoint.var_builder(DType::F32, &CPU).unwrap();
        assert!(vb.contains_tensor(&k) && vb.get(len, &v).is_ok());
    }
}

#[test]
fn scales_of_queries_and_probabilities_have_one_name() {
    let attention = "model.layers.0.self_attn";
    for (own, canonical) in [
        ("q_scale", "q_scale"),
        ("q.scale", "q_scale"),
        ("q_proj.output_scale", "q_scale"),
        ("prob_output_scale", "prob_output_scale"),
    ] {
        let config = quantized(json!({"quant_method": "fp8", "activation_scheme": "dynamic"}));
        let tensors = [
            weight("fc.weight", N, K),
            floats("fc.weight_scale", &[], &[0.02]),
            bf16s(&format!("{attention}.{own}"), &[], &[1.5]),
        ];
        let checkpoint = opened(own, &Model::new(config, &tensors));
        let name = format!("{attention}.{canonical}");
        assert_eq!(checkpoint.other_names(), [name.as_str()], "{own}");
        let vb = checkpoint.var_builder(DType::F32, &CPU).unwrap();
        let scale = vb.get(1, &name).unwrap();
        assert_eq!(scale.to_vec1::<f32>().unwrap(), [1.5], "{own}");
    }
}

/// Some writers store a scale under two names, because engines know one or the other.
#[test]
fn a_scale_of_a_cache_under_two_names_is_one_scale() {
    let attention = "model.layers.0.self_attn";
    let open = |second: f32, shape: &[usize]| {
        let config = quantized(json!({"quant_method": "fp8", "activation_scheme": "dynamic"}));
        let len = shape.iter().product();
        let tensors = [
            weight("fc.weight", N, K),
            floats("fc.weight_scale", &[], &[0.02]),
            bf16s(&format!("{attention}.k_scale"), &[1], &[1.5]),
            floats(
                &format!("{attention}.k_proj.k_scale"),
                shape,
                &vec![second; len],
            ),
            floats(&format!("{attention}.kv_scale"), &[], &[1.5]),
        ];
        Model::new(config, &tensors).open()
    };
    let checkpoint = open(1.5, &[]).unwrap();
    let names = ["k_scale", "v_scale"].map(|own| format!("{attention}.{own}"));
    assert_eq!(checkpoint.other_names(), names);
    let scale = checkpoint.tensor(&names[0], &CPU).unwrap();
    assert_eq!(scale.to_vec1::<f32>().unwrap(), [1.5]);
    // Different numbers for the same keys, or different counts of heads.
    let error = open(0.75, &[]).unwrap_err();
    assert!(
        matches!(error, fp8_files::Error::TensorValue { index: 0, .. }),
        "{error}"
    );
    let text = error.to_string();
    for part in ["k_scale`", "1.5", "0.75"] {
        assert!(text.contains(part), "{text}");
    }
    let error = open(1.5, &[2, 1, 1]).unwrap_err();
    assert!(
        matches!(error, fp8_files::Error::Ambiguous { .. }),
        "{error}"
    );
}

#[test]
fn a_scale_of_0_over_codes_of_0_becomes_1() {
    let config = quantized(
        json!({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [N / 2, K]}),
    );
    let mut codes = codes(N * K);
    codes[..N / 2 * K].fill(0);
    let tensors = [
        entry("fc.weight", Dtype::F8_E4M3, &[N, K], codes),
        floats("fc.weight_scale_inv", &[2, 1], &[0., 0.5]),
    ];
    let checkpoint = Model::new(config, &tensors).open().unwrap();
    let layer = checkpoint.stored_layer("fc", &CPU).unwrap();
    let scales = layer.codes.dequant_scale().flatten_all().unwrap();
    assert_eq!(scales.to_vec1::<f32>().unwrap(), [1., 0.5]);
    assert_eq!(value(&checkpoint, "fc")[..N / 2 * K], vec![0.; N / 2 * K]);
}

/// Such names do not belong to a layer: paths join with dots.
#[test]
fn names_without_a_path_are_kept() {
    for name in ["weight", ".weight"] {
        let tensors = [
            weight(name, N, K),
            floats(&format!("{name}_scale"), &[], &[0.5]),
        ];
        let checkpoint = Model::new(None, &tensors).open().unwrap();
        for path in checkpoint.layer_paths() {
            assert_eq!(path, "");
            assert_eq!(value(&checkpoint, ""), expected(N, K, |_, _| 0.5));
        }
        for name in checkpoint.other_names() {
            checkpoint.tensor(&name, &CPU).unwrap();
        }
    }
}

#[test]
fn an_index_decides_between_files() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (
        dir.path().join("a.safetensors"),
        dir.path().join("b.safetensors"),
    );
    write(
        &a,
        &[floats("x", &[1], &[1.]), floats("y", &[1], &[2.])],
        None,
    );
    write(&b, &[floats("x", &[1], &[3.])], None);
    let index = json!({"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}});
    fs::write(
        dir.path().join("model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();
    let checkpoint = Checkpoint::open_dir(dir.path()).unwrap();
    assert_eq!(checkpoint.family(), FamilyName::HIGH_PRECISION);
    assert_eq!(
        checkpoint
            .tensor("x", &CPU)
            .unwrap()
            .to_vec1::<f32>()
            .unwrap(),
        [3.]
    );
    assert_eq!(
        checkpoint
            .tensor("y", &CPU)
            .unwrap()
            .to_vec1::<f32>()
            .unwrap(),
        [2.]
    );
}

/// Scales move with their rows. A block whose rows would be separated is rejected.
#[test]
fn scales_along_rows_follow_the_rows_of_mistral() {
    let (heads, head, k) = (4, 8, 64);
    let rows = heads * head;
    let open = |format: &str, args: Value, scale: Entry| {
        let params = json!({"n_heads": heads, "quantization": {"quant_method": "compressed-tensors", "format": format,
            "config_groups": {"g": {"targets": ["Linear"], "weights": args}}}});
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("params.json"), params.to_string()).unwrap();
        let tensors = [
            weight("layers.0.attention.wq.weight", rows, k),
            floats("tok_embeddings.weight", &[1], &[1.]),
            scale,
        ];
        write(&dir.path().join("consolidated.safetensors"), &tensors, None);
        (Checkpoint::open_dir(dir.path()), dir)
    };
    let permuted = |native: Vec<f32>| {
        let from =
            |row: usize| row / head * head + row % head % (head / 2) * 2 + row % head / (head / 2);
        let row = |row: usize| native[from(row) * k..][..k].to_vec();
        (0..rows).flat_map(row).collect::<Vec<f32>>()
    };
    const PATH: &str = "model.layers.0.self_attn.q_proj";
    const SCALE: &str = "layers.0.attention.wq.weight_scale";

    let (bytes, numbers) = powers(rows * 2);
    let args = json!({"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"});
    let scale = entry(SCALE, Dtype::U8, &[rows, 2], bytes);
    let (checkpoint, _dir) = open("mxfp8-quantized", args, scale);
    let checkpoint = checkpoint.unwrap();
    let native = expected(rows, k, |row, col| numbers[row * 2 + col / 32]);
    assert_eq!(value(&checkpoint, PATH), permuted(native));

    // Blocks of one row, one head, two heads, and more rows than the weight.
    for high in [1, head, 2 * head, 4 * rows] {
        let grid = rows.div_ceil(high);
        let args = json!({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [high, 32]});
        let scale = floats(SCALE, &[grid, 2], &scales(grid * 2));
        let (checkpoint, _dir) = open("float-quantized", args, scale);
        let checkpoint = checkpoint.unwrap();
        let native = expected(rows, k, |row, col| {
            scales(grid * 2)[row / high * 2 + col / 32]
        });
        assert_eq!(value(&checkpoint, PATH), permuted(native), "{high}");
    }
    for high in [2, head / 2, head + 4] {
        let grid = rows.div_ceil(high);
        let args = json!({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [high, 32]});
        let scale = floats(SCALE, &[grid, 2], &scales(grid * 2));
        let error = open("float-quantized", args, scale).0.unwrap_err();
        assert!(
            matches!(error, fp8_files::Error::TensorShape { .. }),
            "{error}"
        );
        let text = error.to_string();
        assert!(
            text.contains(SCALE) && text.contains("heads of 8 rows"),
            "{text}"
        );
    }
}
