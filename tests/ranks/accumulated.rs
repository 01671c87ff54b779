//! Micro-batches that each rank adds up before the ranks share their gradients.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarMap;
use fp8::optim::{
    AdamW, AdamWConfig, DataParallel, DataParallelOptions, GradAccumulator, GradientTravel,
};
use fp8::ranks::threads;
use fp8_test_support::{bits, cpu_tensor, flat};

const NAMES: [&str; 3] = ["a", "b", "c"];

/// Elements of a variable: whole groups of codes that share a scale.
const LEN: usize = 256;

const STEPS: usize = 2;

/// The gradient of each variable, and the weight.
type MicroBatch = (Vec<Option<Tensor>>, f64);

/// After a step: the bits of each gradient, and of each variable.
type Left = (Vec<Option<Vec<u32>>>, Vec<Vec<u32>>);

struct Run {
    vars: VarMap,
    all: Vec<Var>,
    optimizer: AdamW,
    accumulator: GradAccumulator,
}

impl Run {
    fn new(dtype: DType) -> Self {
        let vars = VarMap::new();
        let mut all = vec![];
        for (seed, name) in NAMES.iter().enumerate() {
            let values = cpu_tensor(seed as u64, &[LEN]).to_dtype(dtype).unwrap();
            let var = Var::from_tensor(&values).unwrap();
            let mut named = vars.data().lock().unwrap();
            named.insert(name.to_string(), var.clone());
            all.push(var);
        }
        let config = AdamWConfig {
            lr: 0.05,
            ..AdamWConfig::default()
        };
        Self {
            optimizer: AdamW::from_varmap(&vars, config).unwrap(),
            accumulator: GradAccumulator::new(&vars),
            vars,
            all,
        }
    }

    fn add(&mut self, (gradients, weight): MicroBatch) {
        let mut loss = Tensor::zeros((), DType::F32, &Device::Cpu).unwrap();
        for (var, gradient) in self.all.iter().zip(gradients) {
            if let Some(gradient) = gradient {
                let gradient = gradient.to_dtype(var.dtype()).unwrap();
                let product = (var.as_tensor() * gradient).unwrap();
                let sum = product.to_dtype(DType::F32).unwrap().sum_all().unwrap();
                loss = (loss + sum).unwrap();
            }
        }
        let grads = loss.backward().unwrap();
        self.accumulator.add_weighted(grads, weight).unwrap();
    }

    fn step(&mut self, grads: &GradStore) -> Left {
        assert_eq!(self.accumulator.micro_batches(), 0);
        let gradient = |var: &Var| {
            let grad = grads.get(var)?;
            assert_eq!(grad.dtype(), var.dtype());
            Some(bits(grad))
        };
        let gradients = self.all.iter().map(gradient).collect();
        let report = self.optimizer.apply(grads).unwrap();
        assert!(!report.skipped().unwrap());
        (gradients, self.all.iter().map(|var| bits(var)).collect())
    }
}

/// Steps of one process that adds up the micro-batches of all ranks; `batches` gives those of a step and a rank.
fn alone(
    dtype: DType,
    ranks: usize,
    batches: impl Fn(usize, usize) -> Vec<MicroBatch>,
) -> Vec<Left> {
    let mut run = Run::new(dtype);
    let step = |step| {
        for rank in 0..ranks {
            for batch in batches(step, rank) {
                run.add(batch);
            }
        }
        let grads = run.accumulator.finish_mean().unwrap();
        run.step(&grads)
    };
    (0..STEPS).map(step).collect()
}

/// The same steps of each rank.
fn on_ranks(
    dtype: DType,
    ranks: usize,
    options: &DataParallelOptions,
    batches: impl Fn(usize, usize) -> Vec<MicroBatch> + Sync,
) -> Vec<Vec<Left>> {
    threads::run(ranks, |group| {
        let mut run = Run::new(dtype);
        let mut parallel = DataParallel::new(&group, &run.vars, options.clone()).unwrap();
        let step = |step| {
            for batch in batches(step, group.rank()) {
                run.add(batch);
            }
            let grads = parallel.mean_of(&mut run.accumulator).unwrap();
            run.step(&grads)
        };
        (0..STEPS).map(step).collect()
    })
}

/// Whole numbers, of which the sum with the weights 1 and 3 is one that E4M3 holds. Some of them are its largest number, so scales are 1:
/// codes are exact, and so are sums in any order.
fn whole(step: usize, rank: usize, batch: usize, place: usize) -> Tensor {
    let value = |i: usize| {
        let other = 7 * i + 3 * place + 5 * rank + 11 * step;
        match (i % 128, batch) {
            (5, 0) => 256f32,
            (5, _) => 64.,
            (_, 0) => (other % 5) as f32 - 2.,
            _ => (other % 4) as f32 - 1.,
        }
    };
    Tensor::from_iter((0..LEN).map(value), &Device::Cpu).unwrap()
}

/// Values between those of every format.
fn random(step: usize, rank: usize, place: usize) -> Tensor {
    cpu_tensor((100 + 16 * step + 4 * rank + place) as u64, &[LEN])
}

/// Whether a rank has a gradient of a variable; if `missing`, rank 1 has none of the second.
fn has(missing: bool, rank: usize, place: usize) -> bool {
    !(missing && rank == 1 && place == 1)
}

#[test]
fn micro_batches_of_ranks_equal_those_of_one_process() {
    const WEIGHTS: [f64; 2] = [1., 3.];
    for missing in [false, true] {
        let batches = |step: usize, rank: usize| -> Vec<MicroBatch> {
            let batch = |(i, weight): (usize, f64)| -> MicroBatch {
                let gradient =
                    |place| has(missing, rank, place).then(|| whole(step, rank, i, place));
                ((0..NAMES.len()).map(gradient).collect(), weight)
            };
            WEIGHTS.into_iter().enumerate().map(batch).collect()
        };
        for dtype in [DType::F32, DType::BF16] {
            let expected = alone(dtype, 2, batches);
            for travel in [GradientTravel::Unchanged, GradientTravel::Fp8] {
                for bucket_bytes in [1, usize::MAX] {
                    let options = DataParallelOptions::default()
                        .with_travel(travel)
                        .with_bucket_bytes(bucket_bytes);
                    let all = on_ranks(dtype, 2, &options, batches);
                    for (rank, got) in all.iter().enumerate() {
                        let case = format!("{dtype:?}, {missing}, {options:?}, rank {rank}");
                        assert!(*got == expected, "{case}");
                    }
                }
            }
        }
    }
}

/// One micro-batch of each rank with a weight of its own. The mean of gradients that do not travel as codes is that of one process whatever
/// their values, and all ranks have the same in any case.
#[test]
fn one_micro_batch_of_each_rank() {
    const WEIGHTS: [f64; 3] = [1., 2., 4.];
    for missing in [false, true] {
        let batches = |step: usize, rank: usize| -> Vec<MicroBatch> {
            let gradient = |place| has(missing, rank, place).then(|| random(step, rank, place));
            vec![((0..NAMES.len()).map(gradient).collect(), WEIGHTS[rank])]
        };
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let expected = alone(dtype, 3, batches);
            for bucket_bytes in [1, usize::MAX] {
                let options = DataParallelOptions::default().with_bucket_bytes(bucket_bytes);
                for got in on_ranks(dtype, 3, &options, batches) {
                    assert!(got == expected, "{dtype:?}, {missing}, {bucket_bytes}");
                }
                let options = options.with_travel(GradientTravel::Fp8);
                let all = on_ranks(dtype, 3, &options, batches);
                for got in &all {
                    assert!(*got == all[0], "{dtype:?}, {missing}, {options:?}");
                }
            }
        }
    }
}

/// A loss scaler leaves gradients of f16 in f32. A rank that has no gradient cannot tell.
#[test]
fn gradients_in_f32_of_f16_variables() {
    for travel in [GradientTravel::Unchanged, GradientTravel::Fp8] {
        let all = threads::run(2, |group| {
            let vars = VarMap::new();
            let init = candle_nn::Init::Const(1.);
            let get = |name| vars.get(2, name, init, DType::F16, &Device::Cpu).unwrap();
            let [a, b] = ["a", "b"].map(get);
            let options = DataParallelOptions::default()
                .with_travel(travel)
                .with_bucket_bytes(1);
            let mut parallel = DataParallel::new(&group, &vars, options).unwrap();
            let own = if group.rank() == 0 { &a } else { &b };
            let mut grads = own.sum_all().unwrap().backward().unwrap();
            let wide = grads.get(own).unwrap().to_dtype(DType::F32).unwrap();
            grads.insert(own, wide);
            let grads = parallel.mean(grads).unwrap();
            [a, b].map(|var| {
                let grad = grads.get(&var).unwrap();
                (grad.dtype(), flat(grad))
            })
        });
        let half = (DType::F16, vec![0.5; 2]);
        for got in all {
            assert_eq!(got, [half.clone(), half.clone()], "{travel:?}");
        }
    }
}
