//! Tables of embeddings in FP8.

use super::*;
use fp8_core::Granularity;

const TABLE: &str = "model.embed_tokens";

/// The table as a stock layer gets it.
fn looked_up(checkpoint: Checkpoint) -> Vec<f32> {
    let name = format!("{TABLE}.weight");
    let vb = checkpoint.var_builder(DType::F32, &CPU).unwrap();
    let table = vb.get((N, K), &name).unwrap();
    table.flatten_all().unwrap().to_vec1().unwrap()
}

/// transformers' `FP8Embedding` has one scale for the table, though the configuration declares blocks.
#[test]
fn a_table_beside_blocks_has_one_scale() {
    let config = || {
        quantized(
            json!({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
            "weight_block_size": [128, 128], "modules_to_convert": ["embed_tokens"]}),
        )
    };
    let layer = [
        weight("fc.weight", N, K),
        floats("fc.weight_scale_inv", &[1, 2], &scales(2)),
    ];
    let table = |own: &str, scale: &[f32]| {
        [
            weight(&format!("{TABLE}.weight"), N, K),
            bf16s(&format!("{TABLE}.{own}"), &[scale.len()], scale),
        ]
    };
    for own in ["weight_scale", "weight_scale_inv"] {
        let tensors = [layer.clone(), table(own, &[0.25])].concat();
        let model = Model::new(config(), &tensors);
        let checkpoint = opened(own, &model);
        let blocks = "DynamicPerGroup { size: 128, power_of_two: false }";
        let values = expected(N, K, |_, col| scales(2)[col / 128]);
        let family = FamilyName::FP8_BLOCKS;
        check(own, &checkpoint, "fc", family, blocks, &values);
        let values = expected(N, K, |_, _| 0.25);
        check(own, &checkpoint, TABLE, family, "None", &values);
        let scheme = checkpoint.layer_scheme(TABLE).unwrap();
        assert_eq!(scheme.weight, Granularity::Tensorwise);
        assert_eq!(looked_up(checkpoint), values);
    }
    // With two scales it is a table in blocks of the wrong shape; with a grid it is one in blocks.
    let tensors = table("weight_scale", &[0.25, 0.5]);
    let error = Model::new(config(), &tensors).open().unwrap_err();
    assert!(
        matches!(&error, fp8_files::Error::TensorShape { tensor, .. } if *tensor == format!("{TABLE}.weight_scale")),
        "{error}"
    );
    let tensors = [
        weight(&format!("{TABLE}.weight"), N, K),
        floats(&format!("{TABLE}.weight_scale_inv"), &[1, 2], &scales(2)),
    ];
    let checkpoint = Model::new(config(), &tensors).open().unwrap();
    let values = expected(N, K, |_, col| scales(2)[col / 128]);
    assert_eq!(looked_up(checkpoint), values);
}

/// Each file of torchao describes its own tensors, and embeddings may be among them.
#[test]
fn shards_of_torchao_describe_a_table_and_a_layer() {
    let describe = |path: &str, block: [usize; 2]| {
        let data = json!({"block_size": block, "act_quant_kwargs": null});
        let tensor = json!({"_type": "Float8Tensor", "_data": data, "_tensor_data_names": ["qdata", "scale"]});
        let name = format!("{path}.weight");
        let names = json!([&name]).to_string();
        let entries = [
            ("tensor_names".to_string(), names),
            (name, tensor.to_string()),
        ];
        Some(HashMap::from(entries))
    };
    let part = |path: &str, shape: &[usize], numbers: &[f32]| {
        [
            weight(&format!("{path}._weight_qdata"), N, K),
            floats(&format!("{path}._weight_scale"), shape, numbers),
        ]
    };
    let table = part(TABLE, &[N, 1], &scales(N));
    let layer = part("fc", &[1, 1], &[0.02]);
    let dir = tempfile::tempdir().unwrap();
    let mut map = serde_json::Map::new();
    for (file, tensors, metadata) in [
        (
            "model-00001-of-00002.safetensors",
            &table,
            describe(TABLE, [1, K]),
        ),
        (
            "model-00002-of-00002.safetensors",
            &layer,
            describe("fc", [N, K]),
        ),
    ] {
        write(&dir.path().join(file), tensors, metadata);
        map.extend(
            tensors
                .iter()
                .map(|tensor| (tensor.name.clone(), json!(file))),
        );
    }
    let index = json!({"weight_map": map}).to_string();
    fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
    let checkpoint = Checkpoint::open_dir(dir.path()).unwrap();
    let (family, values) = (FamilyName::TORCHAO, expected(N, K, |_, _| 0.02));
    check("layer", &checkpoint, "fc", family, "None", &values);
    let values = expected(N, K, |row, _| scales(N)[row]);
    check("table", &checkpoint, TABLE, family, "None", &values);
    assert_eq!(looked_up(checkpoint), values);
}
