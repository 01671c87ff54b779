//! All experts of a layer in one tensor, with scales of every shape.

use super::*;

const EXPERTS: &str = "model.layers.0.mlp.experts";
const COUNT: usize = 2;
const HIDDEN: usize = 32;
const INNER: usize = 16;

/// The scale of a row, from the number of the expert, of its projection and of the row.
type ScaleOf = fn(usize, usize, usize) -> usize;

/// Shapes of the scales of both tensors, with the index of each row's scale.
type Case = (Vec<usize>, ScaleOf, Vec<usize>, ScaleOf);

#[test]
fn scales_of_all_experts_go_to_each() {
    let cases: [Case; 4] = [
        (
            vec![COUNT],
            |expert, _, _| expert,
            vec![COUNT],
            |expert, _, _| expert,
        ),
        // One for the gate and one for the up projection.
        (
            vec![COUNT, 2],
            |expert, half, _| 2 * expert + half,
            vec![COUNT, 1],
            |expert, _, _| expert,
        ),
        (
            vec![COUNT, 1, 1],
            |expert, _, _| expert,
            vec![COUNT, 1, 1],
            |expert, _, _| expert,
        ),
        // One for each row.
        (
            vec![COUNT, 2 * INNER, 1],
            |expert, half, row| (2 * expert + half) * INNER + row,
            vec![COUNT, HIDDEN, 1],
            |expert, _, row| expert * HIDDEN + row,
        ),
    ];
    let config = json!({"model_type": "qwen3_moe",
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}});
    for (both, of_both, down, of_down) in cases {
        let stacked = |own: &str, dims: [usize; 3]| {
            let codes = codes(dims.iter().product());
            entry(&format!("{EXPERTS}.{own}"), Dtype::F8_E4M3, &dims, codes)
        };
        let scale = |own: &str, dims: &[usize]| {
            let numbers = scales(dims.iter().product());
            floats(&format!("{EXPERTS}.{own}_scale"), dims, &numbers)
        };
        let tensors = [
            stacked("gate_up_proj", [COUNT, 2 * INNER, HIDDEN]),
            scale("gate_up_proj", &both),
            stacked("down_proj", [COUNT, HIDDEN, INNER]),
            scale("down_proj", &down),
        ];
        let case = format!("{both:?}");
        let model = Model::new(Some(config.clone()), &tensors);
        let checkpoint = opened(&case, &model);
        assert_eq!(checkpoint.layer_paths().len(), 3 * COUNT, "{case}");
        assert!(checkpoint.other_names().is_empty(), "{case}");
        let check_rows = |path: String,
                          rows: usize,
                          cols: usize,
                          first: usize,
                          of_row: &dyn Fn(usize) -> f32| {
            let codes = codes(first + rows * cols);
            let values = codes[first..].iter().enumerate();
            let values = values.map(|(at, code)| decode(*code) * of_row(at / cols));
            let values: Vec<f32> = values.collect();
            check(
                &case,
                &checkpoint,
                &path,
                FamilyName::AUTO_FP8,
                TOKEN,
                &values,
            );
        };
        for expert in 0..COUNT {
            for (half, own) in ["gate_proj", "up_proj"].into_iter().enumerate() {
                let numbers = scales(both.iter().product());
                let first = (2 * expert + half) * INNER * HIDDEN;
                let of_row = |row| numbers[of_both(expert, half, row)];
                check_rows(
                    format!("{EXPERTS}.{expert}.{own}"),
                    INNER,
                    HIDDEN,
                    first,
                    &of_row,
                );
            }
            let numbers = scales(down.iter().product());
            let first = expert * HIDDEN * INNER;
            let of_row = |row| numbers[of_down(expert, 0, row)];
            check_rows(
                format!("{EXPERTS}.{expert}.down_proj"),
                HIDDEN,
                INNER,
                first,
                &of_row,
            );
        }
    }
}
