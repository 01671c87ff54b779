//! Statistics of casts.

use candle_core::{Tensor, Var};
use fp8::fp8_core::{Cast, Format, Rounding};
use fp8::{Autocast, CastStats, RecipeName, StatsRow, with_fp8};
use fp8_test_support::{Model, device, flat};

fn model() -> (Var, Model) {
    let weight = Var::randn(0f32, 1., (24, 32), &device()).unwrap();
    let model = Model::prepared(weight.as_tensor(), None);
    (weight, model)
}

fn row<'a>(rows: &'a [StatsRow], operand: &str) -> &'a StatsRow {
    rows.iter().find(|row| row.operand == operand).unwrap()
}

#[test]
fn every_recipe_and_both_passes_are_measured_and_nothing_changes() {
    for name in RecipeName::ALL {
        let (_weight, model) = model();
        let x = Var::randn(0f32, 1., (16, 32), &device()).unwrap();
        let stats = CastStats::default();
        let forward = |autocast: Autocast| {
            with_fp8(autocast.training(false), || model.l.try_forward(&x)).unwrap()
        };
        let plain = forward(Autocast::new(name));
        let y = forward(Autocast::new(name).with_stats(&stats));
        assert_eq!(flat(&y), flat(&plain), "{name}: measuring changes nothing");
        // The weight's codes may have been kept from the first pass.
        let forward_rows = stats.report().rows;
        row(&forward_rows, "input");
        assert!(
            forward_rows.iter().all(|row| !row.operand.contains("grad")),
            "{name}"
        );
        y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        let report = stats.take();
        assert!(stats.report().rows.is_empty(), "{name}: taken");
        for operand in ["input", "grad_output"] {
            let row = row(&report.rows, operand);
            assert_eq!(
                (row.layer.as_str(), row.casts),
                ("l", 1),
                "{name} {operand}"
            );
            assert_eq!(
                row.elements,
                if operand == "input" { 16 * 32 } else { 16 * 24 }
            );
            assert_eq!(row.non_finite, 0);
            // Three bits of mantissa give 31 dB, two bits 25, and less where values are subnormal.
            // A gradient that was already cast as an output is exact.
            let exact = name == RecipeName::Direct && operand == "grad_output";
            assert_eq!(row.sqnr_db.is_none(), exact, "{name} {operand}: {row:?}");
            assert!(
                row.sqnr_db.is_none_or(|db| db > 20.),
                "{name} {operand}: {row:?}"
            );
        }
        let text = report.to_string();
        let rows = report.to_json();
        assert_eq!(text.lines().count(), 1 + report.rows.len(), "{text}");
        assert_eq!(rows.as_array().unwrap().len(), report.rows.len());
        assert_eq!(rows[0]["layer"], "l");
    }
}

#[test]
fn saturation_underflow_and_noise_are_counted_exactly() {
    let (_weight, model) = model();
    // The first step of delayed scaling casts with scale 1.
    let mut values: Vec<f32> = (0..32).map(|i| 0.25 + i as f32).collect();
    values[0] = 465.;
    values[1] = -1000.;
    // A tie, which rounds to the maximum: 448.
    values[2] = 464.;
    values[3] = 2f32.powi(-11);
    values[4] = 0.;
    values[5] = f32::INFINITY;
    let x = Tensor::from_slice(&values, (1, 32), &device()).unwrap();
    let stats = CastStats::default();
    let autocast = Autocast::new(RecipeName::Delayed).with_stats(&stats);
    with_fp8(autocast, || model.l.try_forward(&x)).unwrap();
    let report = stats.report();
    let row = row(&report.rows, "input");
    assert_eq!((row.saturated, row.underflowed, row.non_finite), (2, 1, 1));
    assert_eq!(
        (row.amax, row.quant_scale_min, row.quant_scale_max),
        (1000., 1., 1.)
    );
    assert_eq!(row.saturated_share, 2. / 32.);
    let cast = Cast::new(Format::E4M3);
    assert_eq!(cast.rounding, Rounding::NearestEven);
    let (mut signal, mut noise) = (0f64, 0f64);
    for &value in values.iter().filter(|value| value.is_finite()) {
        let back = Format::E4M3.decode(cast.encode(value, 0));
        signal += f64::from(value).powi(2);
        noise += (f64::from(value) - f64::from(back)).powi(2);
    }
    assert_eq!(row.sqnr_db, Some(10. * (signal / noise).log10()));
}
