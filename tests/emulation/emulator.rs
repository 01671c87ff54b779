//! The emulator: patterns, loss scaling, statistics.

use crate::table::{Net, ids};
use candle_nn::VarMap;
use fp8::emulation::{EmulationMethod, Emulator, EmulatorOptions};
use fp8::optim::{LossScalerConfig, Sgd, SgdConfig};
use fp8::{CastStats, Error, with_fp8};

fn emulator(net: &Net, options: EmulatorOptions) -> fp8::Result<Emulator> {
    Emulator::initialize(net, EmulationMethod::Direct, options)
}

#[test]
fn patterns_that_name_nothing_are_errors_with_near_names() {
    let net = Net::new(&VarMap::new()).unwrap();
    let options = [
        EmulatorOptions::default().with_exempt("heed"),
        EmulatorOptions::default().with_output_fused("heed"),
    ];
    for options in options {
        let error = emulator(&net, options).unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(
                error,
                Error::Config(fp8::config::ConfigError::UnmatchedPattern { .. })
            ),
            "{text}"
        );
        assert!(text.contains("`heed`") && text.contains("head"), "{text}");
    }
    let error = emulator(&net, EmulatorOptions::default().with_exempt("[")).unwrap_err();
    assert!(
        matches!(&error, Error::Config(fp8::config::ConfigError::Pattern(error)) if error.pattern == "["),
        "{error}"
    );
    let scaler = LossScalerConfig::default().with_initial_loss_scale(f64::NAN);
    let text = emulator(&net, EmulatorOptions::default().with_loss_scaler(scaler));
    assert!(text.unwrap_err().to_string().contains("NaN"));
}

/// An infinite gradient skips one step, changes no weight and halves the loss scale.
#[test]
fn an_overflow_skips_one_step_and_backs_off() {
    let vars = VarMap::new();
    let net = Net::new(&vars).unwrap();
    let scaler = LossScalerConfig::default()
        .with_initial_loss_scale(4.)
        .with_growth_interval(3);
    let mut emulator = emulator(&net, EmulatorOptions::default().with_loss_scaler(scaler)).unwrap();
    let mut optimizer = Sgd::from_varmap(&vars, SgdConfig::default().with_lr(1e-3)).unwrap();
    let weights = || {
        let vars = vars.data().lock().unwrap();
        vars["up.weight"]
            .flatten_all()
            .unwrap()
            .to_vec1::<f32>()
            .unwrap()
    };
    let mut skipped = vec![];
    let mut scales = vec![];
    for step in 0..8 {
        let before = weights();
        let loss = with_fp8(emulator.autocast(), || net.loss(&ids())).unwrap();
        let loss = match step {
            2 => (loss * f64::INFINITY).unwrap(),
            _ => loss,
        };
        let step = emulator.optimizer_step(&mut optimizer, &loss).unwrap();
        skipped.push(step.skipped());
        scales.push(emulator.loss_scaler().loss_scale());
        assert_eq!(before == weights(), step.skipped());
    }
    let expected: Vec<bool> = (0..8).map(|step| step == 2).collect();
    assert_eq!(skipped, expected);
    assert_eq!(scales, [4., 4., 2., 2., 2., 4., 4., 4.]);
    assert_eq!(
        (
            emulator.global_steps(),
            emulator.loss_scaler().skipped_steps()
        ),
        (8, 1)
    );
}

#[test]
fn every_nth_step_is_measured() {
    let net = Net::new(&VarMap::new()).unwrap();
    let stats = CastStats::default();
    let options = EmulatorOptions::default().with_stats(&stats, 3);
    let mut emulator = emulator(&net, options).unwrap();
    let mut measured = vec![];
    for step in 0..7 {
        emulator.update_global_steps(step);
        with_fp8(emulator.autocast(), || net.loss(&ids())).unwrap();
        measured.push(!stats.take().rows.is_empty());
    }
    assert_eq!(measured, [true, false, false, true, false, false, true]);
}
