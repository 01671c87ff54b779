//! Statistics in a file, over the steps.

use candle_core::{Module, Tensor, Var};
use fp8::{
    Autocast, CastStats, PrepareOptions, RecipeName, StatsCurves, StatsLog, StatsQuantity, nn,
    prepare_fp8, with_fp8,
};
use fp8_test_support::{Warnings, device};

/// Steps of a layer whose inputs double in every step.
fn steps(log: &mut StatsLog, steps: std::ops::Range<u64>) -> Vec<usize> {
    let weight = Var::randn(0f32, 1., (16, 32), &device()).unwrap();
    let layer = nn::Linear::new(weight.as_tensor().clone(), None).with_path("a<b");
    prepare_fp8(&layer, &PrepareOptions::default()).unwrap();
    let stats = CastStats::default();
    let values: Vec<f32> = (0..64).map(|i| i as f32 / 63.).collect();
    let x = Tensor::from_vec(values, (2, 32), &device()).unwrap();
    let mut recorded = vec![];
    for step in steps {
        let x = (&x * 2f64.powi(step as i32)).unwrap();
        let autocast = Autocast::new(RecipeName::Tensorwise);
        let autocast = match log.is_due(step) {
            true => autocast.with_stats(&stats),
            false => autocast,
        };
        with_fp8(autocast, || layer.forward(&x)).unwrap();
        if let Some(report) = log.record(step, &stats) {
            assert!(stats.report().rows.is_empty(), "taken");
            recorded.push(report.rows.len());
        }
    }
    recorded
}

#[test]
fn every_nth_step_is_a_line_for_each_cast_and_a_resumed_run_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("stats.jsonl");
    let mut log = StatsLog::to_file(&path).every(3);
    // The weight is cast once, in the first step.
    assert_eq!(steps(&mut log, 0..8), [2, 1, 1]);
    // A line that a kill has cut off, then a run that does step 6 again.
    let mut text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(text.lines().count(), 4);
    text.push_str(r#"{"layer":"a<b","operand":"inp"#);
    std::fs::write(&path, text).unwrap();
    let mut log = StatsLog::to_file(&path).every(3);
    assert_eq!(steps(&mut log, 6..10), [2, 1]);
    assert!(log.failure().is_none());

    let curves = StatsCurves::from_file(&path).unwrap();
    assert_eq!(curves.steps(), [0, 3, 6, 9]);
    let amaxes = curves.of(StatsQuantity::Amax);
    let names: Vec<_> = amaxes.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["a<b.input", "a<b.weight"]);
    assert_eq!(amaxes[0].1, [(0, 1.), (3, 8.), (6, 64.), (9, 512.)]);
    let scales = &curves.of(StatsQuantity::QuantScale)[0].1;
    assert_eq!(scales[..], [(0, 448.), (3, 56.), (6, 7.), (9, 0.875)]);
    // Scaled by its own amax, the tensor is the same in all steps.
    let noise = &curves.of(StatsQuantity::Sqnr)[0].1;
    assert!(
        noise
            .iter()
            .all(|(_, db)| (db - noise[0].1).abs() < 1e-9 && *db > 25.)
    );
    assert_eq!(curves.of(StatsQuantity::Overflow)[0].1[0], (0, 0.));
}

#[test]
fn a_drawing_holds_a_line_for_each_cast() {
    let rows: Vec<String> = (0..40)
        .map(|i| {
            let (layer, step) = (format!("a<{}", i / 2), i % 2 * 100);
            format!(
                r#"{{"step":{step},"layer":"{layer}","operand":"input","amax":{},"quant_scale_max":1e38,"saturated_share":0.5,"underflowed_share":0,"sqnr_db":null}}"#,
                10f64.powi(i % 2)
            )
        })
        .collect();
    let curves = StatsCurves::from_json_lines(&rows.join("\n"));
    let svg = curves.to_svg(StatsQuantity::Amax);
    assert_eq!(svg.matches("<polyline").count(), 20);
    assert!(svg.contains("a&lt;3.input") && !svg.contains("a<3"));
    assert!(svg.contains("and 15 more in gray"));
    // From the lower left of the frame to its upper right: one power of ten in 100 steps.
    assert!(svg.contains(r#"points="80.0,256.0 690.0,76.0""#), "{svg}");
    for quantity in StatsQuantity::ALL {
        let svg = curves.to_svg(quantity);
        let lines = if quantity == StatsQuantity::Sqnr {
            0
        } else {
            20
        };
        assert_eq!(svg.matches("<polyline").count(), lines, "{quantity:?}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{quantity:?}");
    }
    let empty = StatsCurves::default().to_svg(StatsQuantity::Amax);
    assert!(empty.ends_with("</svg>\n") && !empty.contains("NaN"));
}

/// The labels left of the panels, from top to bottom, the names beside them and the operands above them.
fn texts(svg: &str) -> (Vec<&str>, Vec<&str>, Vec<&str>) {
    let after = |mark: &'static str, end: &'static str| -> Vec<&str> {
        let parts = svg.split(mark).skip(1);
        let parts = parts.map(|part| part.split_once('>').unwrap().1);
        parts.map(|part| part.split_once(end).unwrap().0).collect()
    };
    (
        after(r##"stroke="#e0e0e0"/><text x="72""##, "</text>"),
        after(r#"stroke-width="3"/><text"#, " <tspan"),
        after(r#"font-weight="bold""#, "</text>"),
    )
}

#[test]
fn a_drawing_has_a_panel_for_each_operand_and_names_its_worst_layers_beside_round_numbers() {
    let mut rows = vec![];
    for layer in 0..9 {
        for (operand, base) in [("grad_output", 1e-4), ("weight", 0.7), ("input", 3.1)] {
            for step in [0, 37, 74] {
                let amax = base * (1. + f64::from(layer * step) / 74.);
                let (share, noise) = (1e-3 * f64::from(layer), 33. - f64::from(layer));
                rows.push(format!(
                    r#"{{"step":{step},"layer":"fc{layer}","operand":"{operand}","amax":{amax},"saturated_share":{share},"sqnr_db":{noise}}}"#
                ));
            }
        }
    }
    let curves = StatsCurves::from_json_lines(&rows.join("\n"));
    let worst = ["fc8", "fc7", "fc6", "fc5", "fc4"];
    for (quantity, of_a_panel) in [
        (
            StatsQuantity::Sqnr,
            vec!["24", "26", "28", "30", "32", "34"],
        ),
        (
            StatsQuantity::Overflow,
            vec!["0.0", "0.2", "0.4", "0.6", "0.8"],
        ),
    ] {
        let svg = curves.to_svg(quantity);
        let (labels, names, operands) = texts(&svg);
        assert_eq!(
            operands,
            ["input", "weight", "grad_output"],
            "as they occur in a step"
        );
        assert_eq!(names, [worst, worst, worst].concat(), "{quantity:?}");
        let panels = [of_a_panel.clone(), of_a_panel.clone(), of_a_panel];
        assert_eq!(labels, panels.concat(), "{quantity:?}");
        assert_eq!(svg.matches("and 4 more in gray").count(), 3);
    }
    let svg = curves.to_svg(StatsQuantity::Amax);
    let (labels, names, _) = texts(&svg);
    assert_eq!(names[..5], worst);
    let expected = [
        vec!["2", "5", "10", "20", "50"],
        vec!["0.5", "1", "2", "5", "10"],
        vec!["1e-4", "2e-4", "5e-4", "0.001"],
    ];
    assert_eq!(labels, expected.concat(), "of each operand its own");
    for step in ["0", "20", "40", "60"] {
        assert_eq!(
            svg.matches(&format!(r#"text-anchor="middle">{step}<"#))
                .count(),
            3
        );
    }
}

#[test]
fn a_file_that_holds_no_statistics_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("stats.jsonl");
    let error = |path: &std::path::Path| StatsCurves::from_file(path).unwrap_err().to_string();
    assert!(error(&path).contains("stats.jsonl"));
    assert!(error(directory.path()).contains("directory"));
    std::fs::write(&path, "loss 3\n").unwrap();
    assert!(error(&path).contains("no line of it"));
    std::fs::write(&path, "").unwrap();
    assert!(StatsCurves::from_file(&path).unwrap().steps().is_empty());
}

#[test]
fn a_file_that_cannot_be_written_is_one_warning_and_training_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing/stats.jsonl");
    for path in [missing.as_path(), directory.path()] {
        let kept = Warnings::default();
        let mut log = StatsLog::to_file(path);
        let recorded = tracing::subscriber::with_default(kept.clone(), || steps(&mut log, 0..4));
        assert_eq!(recorded, [2, 1, 1, 1], "the reports are there all the same");
        let said = kept.texts();
        let of_this = said.iter().filter(|text| text.contains("statistics"));
        assert_eq!(of_this.count(), 1, "{said:?}");
        assert!(said[0].contains(&path.display().to_string()), "{said:?}");
        assert!(log.failure().is_some());
    }
}
