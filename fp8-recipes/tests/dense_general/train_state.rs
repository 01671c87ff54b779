//! Training runs as one value: resumed to the bit, FP8 state apart from the optimizer, shared layers merged.

use candle_core::{DType, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8_recipes::checkpoint::fp8_state;
use fp8_recipes::config::DelayedScaling;
use fp8_recipes::nn::{self, DenseConfig, DenseGeneral};
use fp8_recipes::optim::{AdamW, AdamWConfig, NamedOptimizer, ResumableOptimizer, Sgd, SgdConfig};
use fp8_recipes::{
    Error, Fp8Module, PrepareOptions, Recipe, Role, TrainState, TrainingCheckpointError, end_step,
    with_fp8,
};
use fp8_test_support::{assert_same, bits, device, flat, tensor};

type Run = TrainState<Block, AdamW>;

/// One layer that is scanned over, between two others.
#[derive(Fp8Module)]
struct Block {
    first: DenseGeneral,
    scanned: DenseGeneral,
    last: DenseGeneral,
}

impl Block {
    fn new(vars: &VarMap, seed: u64) -> fp8_recipes::Result<Self> {
        let vb = VarBuilder::from_varmap(vars, DType::F32, &device());
        let layer = |name: &str, shape: &[usize], features: &[usize], axis: &[isize]| {
            let config = DenseConfig::new(features).with_axis(axis).with_seed(seed);
            nn::dense_general(shape, config, vb.pp(name))
        };
        Ok(Self {
            first: layer("first", &[8, 12], &[4, 6], &[-1])?,
            scanned: layer("scanned", &[8, 4, 6], &[4, 6], &[-2, -1])?,
            last: layer("last", &[8, 4, 6], &[3], &[1, 2])?,
        })
    }

    fn loss(&self, x: &Tensor, depth: usize) -> fp8_recipes::Result<Tensor> {
        let mut hidden = self.first.forward(x)?;
        for _ in 0..depth {
            hidden = self.scanned.forward(&hidden)?.tanh()?;
        }
        Ok(self.last.forward(&hidden)?.sqr()?.mean_all()?)
    }
}

fn recipe() -> Recipe {
    DelayedScaling::default().with_amax_history_len(3).into()
}

fn create(seed: u64, recipe: Option<Recipe>) -> fp8_recipes::Result<Run> {
    let vars = VarMap::new();
    let model = Block::new(&vars, seed)?;
    let tx = |vars: &VarMap| AdamW::from_varmap(vars, AdamWConfig::default());
    TrainState::create(model, vars, recipe, &PrepareOptions::default(), tx)
}

fn train(state: &mut Run, steps: std::ops::Range<u64>) -> fp8_recipes::Result<Vec<u32>> {
    let mut losses = vec![];
    for step in steps {
        let x = tensor(step, &[8, 12]);
        let (loss, grads) = state.gradients(|model| model.loss(&x, 3))?;
        let report = state.apply_gradients(&grads)?;
        assert_eq!(report.updated, 6);
        losses.extend(bits(&loss));
    }
    Ok(losses)
}

#[test]
fn a_resumed_run_repeats_every_loss() -> Result<(), Box<dyn std::error::Error>> {
    for recipe in [None, Some(recipe()), Some("rowwise".parse()?)] {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("run.safetensors");
        let mut whole = create(1, recipe.clone())?;
        whole.extra = serde_json::json!({ "batch": 8 });
        train(&mut whole, 0..5)?;
        whole.save(&path)?;
        let expected = train(&mut whole, 5..10)?;

        // Other first values, all of which the file replaces.
        let mut resumed = create(2, recipe.clone())?;
        resumed.resume(&path)?;
        assert_eq!((resumed.step(), &resumed.extra), (5, &whole.extra));
        assert_eq!(train(&mut resumed, 5..10)?, expected, "{recipe:?}");
        assert_eq!(resumed.step(), 10);
        end_step()?;
        assert_eq!(fp8_state(resumed.model())?, fp8_state(whole.model())?);
        for (name, var) in resumed.vars().data().lock().map_err(|_| "a lock")?.iter() {
            let others = whole.vars().data().lock().map_err(|_| "a lock")?;
            assert_same(name, var.as_tensor(), others[name].as_tensor());
        }
        let mut other = create(1, Some("tensorwise".parse()?))?;
        let error = other.resume(&path).expect_err("another recipe");
        assert!(error.to_string().contains("recipe"), "{error}");
        assert_eq!(other.step(), 0);
    }
    Ok(())
}

/// The optimizer has the six variables and moments of them, and changing them is all that it does.
#[test]
fn fp8_state_never_reaches_the_optimizer() -> fp8_recipes::Result<()> {
    let mut state = create(1, Some(recipe()))?;
    train(&mut state, 0..3)?;
    let names: Vec<String> = state
        .optimizer()
        .named_vars()
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    let own = ["first", "last", "scanned"];
    let expected: Vec<String> = own
        .iter()
        .flat_map(|path| ["bias", "kernel"].map(|name| format!("{path}.{name}")))
        .collect();
    assert_eq!(names, expected);
    let optimizer = state.optimizer().optimizer_state()?;
    // Two moments of each.
    assert!(optimizer.tensors().len() >= 2 * expected.len());
    for name in optimizer.tensors().keys() {
        let known = expected.iter().any(|own| name.starts_with(own.as_str()));
        assert!(known || name == "step", "{name}");
    }
    // A step of the optimizer alone leaves the FP8 state as it is.
    end_step()?;
    let before = fp8_state(state.model())?;
    let x = tensor(9, &[8, 12]);
    let loss = with_fp8(fp8_recipes::Autocast::disabled(), || {
        state.model().loss(&x, 3)
    })?;
    state.apply_gradients(&fp8_recipes::backward(&loss)?)?;
    end_step()?;
    assert_eq!(fp8_state(state.model())?, before);
    assert_eq!(before.len(), 9);
    Ok(())
}

/// A failed loss leaves no trace.
#[test]
fn an_error_in_the_loss_discards_the_step() -> fp8_recipes::Result<()> {
    let mut state = create(1, Some(recipe()))?;
    train(&mut state, 0..2)?;
    end_step()?;
    let before = fp8_state(state.model())?;
    let large = (tensor(9, &[8, 12]) * 100.)?;
    let failed = state.gradients(|model| -> fp8_recipes::Result<Tensor> {
        model.loss(&large, 3)?;
        Err(candle_core::Error::Msg("out of data".into()).into())
    });
    let Err(error) = failed else {
        panic!("no error");
    };
    let error = error.to_string();
    assert!(error.contains("out of data"), "{error}");
    end_step()?;
    assert_eq!(fp8_state(state.model())?, before);
    assert_eq!(state.step(), 2);
    Ok(())
}

/// The amax of a layer that is used several times in a step is the largest of its uses, for each role; its gradients add up.
#[test]
fn uses_of_a_shared_layer_merge_by_maximum() -> fp8_recipes::Result<()> {
    let state = create(1, Some(recipe()))?;
    let layer = &state.model().scanned;
    let inputs: Vec<Tensor> = [(1, 0.5), (2, 7.), (3, 2.)]
        .into_iter()
        .map(|(seed, size)| tensor(seed, &[8, 4, 6]) * size)
        .collect::<candle_core::Result<_>>()?;
    let weights = [3., 1., 5.];
    let amax = |x: &Tensor| x.abs()?.max_all()?.to_scalar::<f32>();
    let gradient = tensor(4, &[8, 4, 6]);
    let (_, grads) = state.gradients(|_| -> fp8_recipes::Result<Tensor> {
        // One use is a clone of the layer, as a model may hold it in two places.
        let clone = layer.clone();
        let mut loss = Tensor::zeros((), DType::F32, &device())?;
        for (i, (x, weight)) in inputs.iter().zip(weights).enumerate() {
            let y = if i == 1 {
                clone.forward(x)?
            } else {
                layer.forward(x)?
            };
            loss = (loss + ((y * &gradient)?.sum_all()? * weight)?)?;
        }
        Ok(loss)
    })?;
    end_step()?;
    let slots = layer.fp8_state().expect("a prepared layer");
    let newest = |role| {
        let slot = slots.slot(role).expect("a slot");
        Ok::<f32, Error>(flat(&slot.tensors()?.amax_history)[0])
    };
    let amaxes: Vec<f32> = inputs
        .iter()
        .map(amax)
        .collect::<candle_core::Result<_>>()?;
    assert_eq!(
        newest(Role::Input)?,
        amaxes.iter().copied().fold(0., f32::max)
    );
    assert_eq!(newest(Role::Input)?, amaxes[1]);
    assert_eq!(newest(Role::Weight)?, amax(&layer.kernel()?)?);
    assert_eq!(newest(Role::GradOutput)?, amax(&(gradient * 5.)?)?);
    let kernel = layer.stored_kernel().expect("a kernel");
    assert!(grads.get(kernel).is_some());
    assert_eq!(slots.table().save()?.len(), 9);
    Ok(())
}

/// A variable that the VarMap does not hold would be missing in every checkpoint.
#[test]
fn an_optimizer_of_other_variables_is_refused() -> fp8_recipes::Result<()> {
    let (vars, others) = (VarMap::new(), VarMap::new());
    let model = Block::new(&vars, 1)?;
    Block::new(&others, 1)?;
    let tx = |_: &VarMap| Sgd::from_varmap(&others, SgdConfig::default());
    let state = TrainState::create(model, vars, Some(recipe()), &PrepareOptions::default(), tx);
    let error = state.map(|_| ()).expect_err("other variables");
    let foreign = TrainingCheckpointError::ForeignVariable {
        name: "first.bias".into(),
    };
    assert_eq!(error.to_string(), foreign.to_string());
    Ok(())
}
