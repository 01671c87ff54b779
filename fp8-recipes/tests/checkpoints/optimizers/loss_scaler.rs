//! A loss scaler in training checkpoints.

use super::*;
use fp8_recipes::optim::{
    DynamicLossScaler, LossScaled, LossScalerConfig, MasterDType, Sgd, SgdConfig,
};

fn scaled(vars: &VarMap) -> LossScaled<Sgd> {
    let config = SgdConfig::default().with_lr(0.1).with_momentum(0.9);
    let sgd = Sgd::from_varmap(vars, config.with_masters(MasterDType::F16)).unwrap();
    let config = LossScalerConfig::default().with_growth_interval(3);
    LossScaled::new(sgd, DynamicLossScaler::new(config).unwrap())
}

impl Run<LossScaled<Sgd>> {
    /// Batch 2 overflows.
    fn scaled_step(&mut self, batch: u32) -> bool {
        let x = Tensor::from_vec(
            fp8_test_support::steps(100 + batch, 64),
            (4, 16),
            &Device::Cpu,
        )
        .unwrap();
        let y = with_fp8(recipe(), || self.fc.forward(&x)).unwrap();
        let factor = if batch == 2 { f64::INFINITY } else { 1. };
        let loss = (y.sqr().unwrap().mean_all().unwrap() * factor).unwrap();
        self.optimizer.backward_step(&loss).unwrap().skipped()
    }
}

#[test]
fn a_run_goes_on_bit_for_bit_over_a_skipped_step() -> Outcome {
    let dir = tempfile::tempdir()?;
    for saved_before in [2, 3, 4] {
        let mut straight = Run::new(1, scaled);
        let mut resumed = Run::new(2, scaled);
        for batch in 0..7 {
            if batch == saved_before {
                straight.save(&file(&dir));
                resumed.resume(&file(&dir))?;
                assert_eq!(resumed.optimizer.scaler, straight.optimizer.scaler);
            }
            assert_eq!(straight.scaled_step(batch), batch == 2);
            if batch >= saved_before {
                assert_eq!(resumed.scaled_step(batch), batch == 2);
                assert_eq!(straight.bits(), resumed.bits(), "{saved_before} {batch}");
            }
        }
        let scaler = &resumed.optimizer.scaler;
        // Down after batch 2, up after batches 3 to 5.
        assert_eq!((scaler.loss_scale(), scaler.clean_steps()), (65536., 1));
        assert_eq!(
            (
                scaler.skipped_steps(),
                resumed.optimizer.optimizer.steps().unwrap()
            ),
            (1, 6)
        );
    }
    Ok(())
}

/// Checkpoints of an optimizer alone load with a scaler around it, and the other way round.
#[test]
fn with_and_without_a_scaler() -> Outcome {
    let dir = tempfile::tempdir()?;
    let alone = |vars: &VarMap| scaled(vars).optimizer;
    let mut plain = Run::new(1, alone);
    plain.step(0);
    plain.save(&file(&dir));
    let mut run = Run::new(2, scaled);
    run.scaled_step(2);
    let before = run.optimizer.scaler.clone();
    run.resume(&file(&dir))?;
    assert_eq!((run.bits(), &run.optimizer.scaler), (plain.bits(), &before));

    run.scaled_step(1);
    run.save(&file(&dir));
    let mut plain = Run::new(3, alone);
    plain.resume(&file(&dir))?;
    assert_eq!(plain.bits(), run.bits());
    assert_eq!(plain.optimizer.steps().unwrap(), 2);
    Ok(())
}

/// A loss scale that the scaler cannot have changes nothing.
#[test]
fn a_loss_scale_that_does_not_fit_is_refused() -> Outcome {
    let dir = tempfile::tempdir()?;
    let mut saved = Run::new(1, scaled);
    saved.scaled_step(0);
    saved.save(&file(&dir));
    let mut run = Run::new(2, |vars| {
        let config = LossScalerConfig::default()
            .with_initial_loss_scale(2.)
            .with_max_loss_scale(4.);
        LossScaled::new(
            scaled(vars).optimizer,
            DynamicLossScaler::new(config).unwrap(),
        )
    });
    let before = run.bits();
    let error = run.resume(&file(&dir)).unwrap_err().to_string();
    assert!(
        error.contains("loss_scale = 65536 is not allowed"),
        "{error}"
    );
    assert_eq!(
        (run.bits(), run.optimizer.optimizer.steps().unwrap()),
        (before, 0)
    );
    Ok(())
}
