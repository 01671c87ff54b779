//! Steps whose gradients are not finite are skipped, and many in a row end the run.

use crate::support::*;
use candle_core::{DType, Device, Tensor};
use fp8::models::Model;
use fp8::training::{
    Error, Learner, NextToken, NotFinite, Objective, Part, Result, Rows, TrainableModel, Trainer,
};

/// A finite loss whose gradients are not finite in some steps.
struct Steep {
    inner: NextToken,
    is_steep: fn(u64) -> bool,
}

impl Objective<Model> for Steep {
    type Batch = (Rows, bool);

    fn micro_batch(&self, step: u64, part: Part) -> Result<Self::Batch> {
        // Steps are counted from 0 here.
        let rows = self.inner.micro_batch(step, part)?;
        Ok((rows, (self.is_steep)(step + 1)))
    }

    fn loss(&self, model: &Model, (rows, steep): &Self::Batch) -> Result<Tensor> {
        let loss = self.inner.loss(model, rows)?;
        match steep {
            // The slope of a root at 0 is infinite.
            true => Ok((&loss + (&loss - loss.detach())?.sqrt()?)?),
            false => Ok(loss),
        }
    }

    fn targets(&self, (rows, _): &Self::Batch) -> usize {
        self.inner.targets(rows)
    }

    fn tokens(&self, (rows, _): &Self::Batch) -> usize {
        self.inner.tokens(rows)
    }

    fn fingerprint(&self) -> String {
        self.inner.fingerprint()
    }
}

fn run(dir: &std::path::Path, is_steep: fn(u64) -> bool) -> Result<Trainer<Model, Steep>> {
    let base = TrainableModel::open(dir, DType::F32, &Device::Cpu)?;
    let inner = objective(dir);
    let objective = Steep { inner, is_steep };
    let trainer = Trainer::new("run", base.model, base.vars, objective, settings("f32", 1))?;
    Ok(trainer.with_checkpoint(dir.join("run.safetensors")))
}

fn values(run: &Trainer<Model, Steep>) -> Vec<Vec<u32>> {
    let vars = run.vars().all_vars();
    vars.iter().map(|var| fp8_test_support::bits(var)).collect()
}

#[test]
fn twenty_in_a_row_end_the_run() -> Outcome {
    let dir = folder();
    let mut run = run(dir.path(), |step| step > 2)?;
    run.train_step()?;
    run.train_step()?;
    run.save()?;
    let mut records = run.read_steps()?;
    let before = values(&run);
    for _ in 0..19 {
        run.train_step()?;
        records.extend(run.read_steps()?);
    }
    assert_eq!(records.len(), 21, "they are counted");
    assert!(records.iter().all(|record| record.loss.is_finite()));
    assert!(values(&run) == before, "they change nothing");
    run.train_step()?;
    let error = run.read_steps().expect_err("the twentieth");
    let Error::NotFinite {
        step,
        what,
        checkpoint,
        ..
    } = error
    else {
        panic!("{error}");
    };
    assert_eq!((step, what), (22, NotFinite::Gradients(20)));
    assert_eq!(checkpoint.map(|(_, step)| step), Some(2));
    Ok(())
}

#[test]
fn fewer_do_not() -> Outcome {
    let dir = folder();
    let mut run = run(dir.path(), |step| !step.is_multiple_of(20))?;
    for _ in 0..45 {
        run.train_step()?;
        run.read_steps()?;
    }
    assert_eq!(run.step(), 45);
    Ok(())
}
