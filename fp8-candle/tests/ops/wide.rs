//! Wide nodes against the same operations as separate nodes.

use candle_core::{DType, Device, Tensor, Var};
use fp8_candle::ops::{Activation, AttentionOptions, attention_tokens_first, layer_norm};
use fp8_candle::wide::backward;
use fp8_candle::{
    GemmPlan, LinearPlan, LinearWeight, Quantizer, Wide, WideLinear, WideNode, fp8_linear,
};
use fp8_core::{Format, Granularity};
use fp8_test_support::{rounding::two_orders, wave};

type Error = Box<dyn std::error::Error>;

struct Block {
    norm: [Var; 2],
    qkv: [Var; 3],
    qkv_bias: [Var; 3],
    up: Var,
    up_bias: Var,
    down: Var,
    plan: Option<LinearPlan>,
}

const TOKENS: usize = 5;
const HIDDEN: usize = 32;
const HEADS: usize = 2;

fn plan(granularity: Granularity) -> LinearPlan {
    let cast = |format| Quantizer::dynamic(format, granularity);
    let gemm = |a, b| GemmPlan::new(cast(a), cast(b));
    LinearPlan::new("layer")
        .with_output(gemm(Format::E4M3, Format::E4M3))
        .with_grad_input(gemm(Format::E5M2, Format::E4M3))
        .with_grad_weight(gemm(Format::E5M2, Format::E4M3))
}

impl Block {
    fn new(plan: Option<LinearPlan>, dtype: DType) -> Result<Self, Error> {
        let mut seed = 0;
        let mut var = |dims: &[usize], size: f64| -> Result<Var, Error> {
            seed += 1;
            Ok(Var::from_tensor(
                &(wave(dims, seed) * size)?.to_dtype(dtype)?,
            )?)
        };
        let d = HIDDEN;
        Ok(Self {
            norm: [var(&[d], 1.)?, var(&[d], 0.3)?],
            qkv: [var(&[d, d], 0.3)?, var(&[d, d], 0.3)?, var(&[d, d], 0.3)?],
            qkv_bias: [var(&[d], 0.1)?, var(&[d], 0.1)?, var(&[d], 0.1)?],
            up: var(&[4 * d, d], 0.3)?,
            up_bias: var(&[4 * d], 0.1)?,
            down: var(&[d, 4 * d], 0.3)?,
            plan,
        })
    }

    fn vars(&self) -> Vec<&Var> {
        let all = self.norm.iter().chain(&self.qkv).chain(&self.qkv_bias);
        all.chain([&self.up, &self.up_bias, &self.down]).collect()
    }

    fn composed(&self, x: &Tensor) -> Result<Tensor, Error> {
        let linear = |x: &Tensor, weight: &Var, bias: Option<&Var>| -> Result<Tensor, Error> {
            let plan = self
                .plan
                .clone()
                .unwrap_or_else(|| LinearPlan::new("plain"));
            let weight = LinearWeight::HighPrecision(weight, None);
            let bias = bias.map(Var::as_tensor);
            Ok(fp8_linear(x, weight, bias, &plan)?)
        };
        let [gain, shift] = &self.norm;
        let normed = layer_norm(x, gain, Some(shift), 1e-5)?;
        let mut heads = vec![];
        for (weight, bias) in self.qkv.iter().zip(&self.qkv_bias) {
            let y = linear(&normed, weight, Some(bias))?;
            heads.push(y.reshape((1, TOKENS, HEADS, HIDDEN / HEADS))?);
        }
        let causal = AttentionOptions::default().with_causal(true);
        let y = attention_tokens_first(&heads[0], &heads[1], &heads[2], causal)?;
        let x = (x + y.reshape(x.dims())?)?;
        let hidden = linear(&x, &self.up, Some(&self.up_bias))?;
        let hidden = fp8_candle::ops::gelu(&hidden)?;
        Ok((&x + linear(&hidden, &self.down, None)?)?)
    }

    fn wide(&self, x: &Tensor, recompute: bool) -> Result<Tensor, Error> {
        let plan = self.plan.as_ref();
        let mut node = WideNode::new("block").with_recomputation(recompute);
        let x = node.argument(x);
        let [gain, shift] = &self.norm;
        let normed = node.layer_norm(&x, gain, Some(shift), 1e-5)?;
        let joint: Vec<_> = (self.qkv.iter().zip(&self.qkv_bias))
            .map(|(weight, bias)| {
                let weight = LinearWeight::HighPrecision(weight, None);
                WideLinear::new(weight, Some(bias), plan)
            })
            .collect();
        let mut heads = vec![];
        for y in node.linear_joint(&normed, &joint)? {
            heads.push(node.reshape(&y, &[1, TOKENS, HEADS, HIDDEN / HEADS])?);
        }
        let causal = AttentionOptions::default().with_causal(true);
        let y = node.attention([&heads[0], &heads[1], &heads[2]], &causal)?;
        let y = node.reshape(&y, x.dims())?;
        let x = node.add(&x, &y)?;
        let up = LinearWeight::HighPrecision(&self.up, None);
        let hidden = node.linear(&x, up, Some(&self.up_bias), plan)?;
        let hidden = node.activation(&hidden, Activation::Gelu)?;
        let down = LinearWeight::HighPrecision(&self.down, None);
        let y = node.linear(&hidden, down, None, plan)?;
        let sum = node.add(&x, &y)?;
        Ok(node.finish(sum)?)
    }
}

/// The result and the gradients of x and all variables.
fn run(
    block: &Block,
    forward: impl Fn(&Tensor) -> Result<Tensor, Error>,
    collect: bool,
) -> Result<Vec<Vec<f64>>, Error> {
    let dtype = block.up.dtype();
    let x = Var::from_tensor(&wave(&[1, TOKENS, HIDDEN], 77).to_dtype(dtype)?)?;
    let y = forward(&x)?;
    let weights = wave(y.dims(), 5).to_dtype(dtype)?;
    let loss = (&y * weights)?.sum_all()?;
    let grads = match collect {
        true => backward(&loss)?,
        false => loss.backward()?,
    };
    let flat =
        |x: &Tensor| -> Result<_, Error> { Ok(x.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?) };
    let mut all = vec![flat(&y)?];
    for var in [&x].into_iter().chain(block.vars()) {
        let grad = grads.get(var).ok_or("a variable without a gradient")?;
        assert_eq!(grad.dims(), var.dims());
        all.push(flat(grad)?);
    }
    Ok(all)
}

fn largest_difference(a: &[Vec<f64>], b: &[Vec<f64>]) -> f64 {
    assert_eq!(a.len(), b.len());
    let mut largest = 0f64;
    for (a, b) in a.iter().zip(b) {
        assert_eq!(a.len(), b.len());
        let size = b.iter().fold(0f64, |max, b| max.max(b.abs()));
        for (a, b) in a.iter().zip(b) {
            // `f64::max` passes over NaN. Gradients may be 0.
            let far = if a == b { 0. } else { (a - b).abs() / size };
            assert!(!far.is_nan(), "{a} {b} of {size}");
            largest = largest.max(far);
        }
    }
    largest
}

#[test]
fn a_wide_node_has_the_results_and_gradients_of_its_operations() -> Result<(), Error> {
    let plans = [
        None,
        Some(plan(Granularity::Tensorwise)),
        Some(plan(Granularity::Rowwise)),
    ];
    for plan in plans {
        // At most three gradients meet, in two additions.
        for (dtype, tolerance) in [(DType::F32, two_orders(2)), (DType::BF16, 0.02)] {
            let block = Block::new(plan.clone(), dtype)?;
            let expected = run(&block, |x| block.composed(x), false)?;
            let plain = run(&block, |x| block.wide(x, false), false)?;
            // Gradients that meet are added in another order, and rounded in between in bf16; a sum on the edge of a
            // code may then be cast to its neighbour.
            let tolerance = match (&plan, dtype) {
                (Some(_), DType::BF16) => 0.1,
                _ => tolerance,
            };
            let far = largest_difference(&plain, &expected);
            assert!(far <= tolerance, "{dtype:?} {plan:?}: {far}");
            // Recomputation, and collecting gradients outside candle's store, change no bit.
            assert_eq!(run(&block, |x| block.wide(x, true), false)?, plain);
            assert_eq!(run(&block, |x| block.wide(x, false), true)?, plain);
            assert_eq!(run(&block, |x| block.wide(x, true), true)?, plain);
        }
    }
    Ok(())
}

#[test]
fn any_number_of_arguments() -> Result<(), Error> {
    for count in 1..=20 {
        let vars = (0..count)
            .map(|i| Var::new(&[i as f32 + 1.], &Device::Cpu))
            .collect::<Result<Vec<_>, _>>()?;
        // Computed arguments and constants as well.
        let twice = (vars[0].as_tensor() * 2.)?;
        let constant = Tensor::new(&[5f32], &Device::Cpu)?;
        for collect in [false, true] {
            let mut node = WideNode::new("sum");
            let mut sum: Option<Wide> = None;
            let all = vars.iter().map(Var::as_tensor);
            for arg in all.chain([&twice, &constant, vars[0].as_tensor()]) {
                let arg = node.argument(arg);
                sum = Some(match sum {
                    None => arg,
                    Some(sum) => node.add(&sum, &arg)?,
                });
            }
            let y = node.finish(sum.ok_or("no sum")?)?;
            let loss = y.sqr()?.sum_all()?;
            // Twice, since a graph may be used for several backward passes.
            for _ in 0..2 {
                let grads = if collect {
                    backward(&loss)?
                } else {
                    loss.backward()?
                };
                let total = y.to_vec1::<f32>()?[0];
                for (i, var) in vars.iter().enumerate() {
                    let grad = grads.get(var).ok_or("no gradient")?.to_vec1::<f32>()?[0];
                    let uses = if i == 0 { 4. } else { 1. };
                    assert_eq!(grad, uses * 2. * total, "{i} of {count}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_result_that_reaches_only_some_arguments() -> Result<(), Error> {
    let (a, b) = (
        Var::new(&[2f32], &Device::Cpu)?,
        Var::new(&[3f32], &Device::Cpu)?,
    );
    let computed = (b.as_tensor() * 2.)?;
    let mut node = WideNode::new("one");
    let first = node.argument(&a);
    let _unused = node.argument(&computed);
    let y = node.finish(first)?;
    let grads = (y + &computed)?.sum_all()?.backward()?;
    assert_eq!(grads.get(&a).ok_or("a")?.to_vec1::<f32>()?, [1.]);
    assert_eq!(grads.get(&b).ok_or("b")?.to_vec1::<f32>()?, [2.]);
    Ok(())
}

/// A function with operations of this crate inside a node, where the sweep around it collects.
#[test]
fn applied_functions_have_their_own_collection() -> Result<(), Error> {
    let x = Var::from_tensor(&wave(&[3, 8], 1))?;
    let weight = Var::from_tensor(&wave(&[8], 2))?;
    let run = |collects: bool| -> Result<[Tensor; 2], Error> {
        let mut node = WideNode::new("applied");
        let (a, b) = (node.argument(&x), node.argument(&weight));
        let y = node.apply(&[&a, &b], |args| layer_norm(&args[0], &args[1], None, 1e-5))?;
        let loss = node.finish(y)?.sqr()?.sum_all()?;
        let grads = match collects {
            true => backward(&loss)?,
            false => loss.backward()?,
        };
        let grad = |var: &Var| grads.get(var).cloned().ok_or("no gradient");
        Ok([grad(&x)?, grad(&weight)?])
    };
    let (got, want) = (run(true)?, run(false)?);
    for (got, want) in got.iter().zip(&want) {
        let (got, want) = (got.flatten_all()?, want.flatten_all()?);
        assert_eq!(got.to_vec1::<f64>()?, want.to_vec1::<f64>()?);
        assert!(want.abs()?.sum_all()?.to_scalar::<f64>()? > 0.);
    }
    Ok(())
}
