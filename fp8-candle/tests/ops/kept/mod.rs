//! Wide nodes that keep values in FP8: results do not change, and gradients are those at the values that the codes stand for.

mod beside;

use candle_core::{DType, Device, Tensor, Var};
use fp8_candle::ops::{Activation, AttentionOptions};
use fp8_candle::wide::backward;
use fp8_candle::{Fp8Tensor, LinearWeight, Quantizer, Wide, WideNode};
use fp8_core::{Contraction, Format, Granularity};
use fp8_test_support::{rounding, wave};

type Error = Box<dyn std::error::Error>;
type Build<'a> = dyn Fn(&mut WideNode, &[Wide], &[Var]) -> Result<Wide, Error> + Sync + 'a;

const GROUP: usize = 16;

/// `x` in groups along its last dimension, decoded.
fn rounded(x: &Tensor) -> Result<Tensor, Error> {
    let groups = Granularity::Blockwise {
        rows: 1,
        cols: GROUP,
    };
    let cast = Quantizer::dynamic(Format::E4M3, groups).with_power_of_two(true);
    Ok(Fp8Tensor::quantize(x, &cast, Contraction::Cols)?.dequantize(x.dtype())?)
}

/// What `build` makes of sums with zeros: a node keeps its arguments as they are, but not what it computes. Returns the result and the gradients of
/// `x` and `vars`, and the bytes kept in FP8.
fn run(
    x: &[Tensor],
    vars: &[Var],
    groups: Option<usize>,
    build: &Build<'_>,
) -> Result<(Vec<Tensor>, usize), Error> {
    let x: Vec<Var> = x.iter().map(Var::from_tensor).collect::<Result<_, _>>()?;
    let mut node = WideNode::new("kept").with_kept_groups(groups);
    let mut sums = vec![];
    for x in &x {
        let (x, zero) = (node.argument(x), node.argument(&x.zeros_like()?));
        sums.push(node.add(&x, &zero)?);
    }
    let y = build(&mut node, &sums, vars)?;
    let bytes = node.bytes_in_fp8();
    drop(sums);
    let y = node.finish(y)?;
    let weights = wave(y.dims(), 5).to_dtype(y.dtype())?;
    let grads = backward(&(&y * weights)?.sum_all()?)?;
    let mut all = vec![y];
    for var in x.iter().chain(vars) {
        all.push(grads.get(var).ok_or("no gradient")?.clone());
    }
    Ok((all, bytes))
}

fn values(x: &Tensor) -> Result<Vec<f64>, Error> {
    Ok(x.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
}

/// Bits, so that NaN equals itself.
fn bits(x: &Tensor) -> Result<Vec<u64>, Error> {
    Ok(values(x)?.into_iter().map(f64::to_bits).collect())
}

fn inputs(count: usize, dims: &[usize], dtype: DType) -> Result<Vec<Tensor>, Error> {
    let one = |i: usize| Ok((wave(dims, 10 + i) * 3.)?.to_dtype(dtype)?);
    (0..count).map(one).collect()
}

fn parameters(dims: &[&[usize]], dtype: DType) -> Result<Vec<Var>, Error> {
    let one =
        |(i, dims): (usize, &&[usize])| Ok(Var::from_tensor(&wave(dims, 40 + i).to_dtype(dtype)?)?);
    dims.iter().enumerate().map(one).collect()
}

/// The result of `build`, and its gradients at the rounded inputs, must be those of a node that keeps codes, to the bit.
fn assert_reads_codes(
    x: &[Tensor],
    vars: &[Var],
    copies: usize,
    build: &Build<'_>,
) -> Result<(), Error> {
    let (plain, none) = run(x, vars, None, build)?;
    let (coded, bytes) = run(x, vars, Some(GROUP), build)?;
    assert_eq!(none, 0);
    let codes = x[0].elem_count();
    let last = x[0].dims().last().copied().unwrap_or(0);
    let scales = 4 * codes / last * last.div_ceil(GROUP);
    assert_eq!(bytes, copies * (codes + scales), "one copy of each input");
    assert_eq!(bits(&coded[0])?, bits(&plain[0])?, "the result");
    let near = x.iter().map(rounded).collect::<Result<Vec<_>, _>>()?;
    let (expected, _) = run(&near, vars, None, build)?;
    let mut differ = false;
    assert_eq!((coded.len(), plain.len()), (expected.len(), expected.len()));
    for (i, (got, want)) in coded.iter().zip(&expected).enumerate().skip(1) {
        assert_eq!(bits(got)?, bits(want)?, "gradient {i}");
        differ |= bits(got)? != bits(&plain[i])?;
    }
    assert!(differ, "gradients of exact values");
    Ok(())
}

#[test]
fn norms_and_activations_read_codes() -> Result<(), Error> {
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        // The last group of a row is partial.
        let x = inputs(1, &[3, 7, 40], dtype)?;
        let vars = parameters(&[&[40], &[40]], dtype)?;
        assert_reads_codes(&x, &vars, 1, &|node, x, vars| {
            Ok(node.layer_norm(&x[0], &vars[0], Some(&vars[1]), 1e-5)?)
        })?;
        assert_reads_codes(&x, &vars[..1], 1, &|node, x, vars| {
            Ok(node.rms_norm(&x[0], &vars[0], 1e-5)?)
        })?;
        assert_reads_codes(&x, &[], 1, &|node, x, _| {
            Ok(node.activation(&x[0], Activation::Silu)?)
        })?;
        let pair = inputs(2, &[3, 7, 40], dtype)?;
        assert_reads_codes(&pair, &[], 2, &|node, x, _| {
            Ok(node.gated_activation(&x[0], &x[1], Activation::SwiGlu)?)
        })?;
    }
    Ok(())
}

fn product(node: &mut WideNode, x: &Wide, weight: &Var) -> Result<Wide, Error> {
    Ok(node.linear(x, LinearWeight::HighPrecision(weight, None), None, None)?)
}

/// Of one value, also through a view, there is one copy, and what is computed from it again is not kept.
#[test]
fn readers_of_one_value_share_its_codes() -> Result<(), Error> {
    let x = inputs(1, &[2, 5, 32], DType::F32)?;
    let vars = parameters(&[&[32], &[24, 32], &[24, 32], &[24, 32]], DType::F32)?;
    for recomputes in [false, true] {
        assert_reads_codes(&x, &vars, 1, &|node, x, vars| {
            *node = std::mem::take(node).with_recomputation(recomputes);
            let normed = node.rms_norm(&x[0], &vars[0], 1e-5)?;
            let view = node.reshape(&x[0], &[1, 10, 32])?;
            let active = node.activation(&view, Activation::Relu)?;
            let active = node.reshape(&active, &[2, 5, 32])?;
            let a = product(node, &normed, &vars[1])?;
            let b = product(node, &active, &vars[2])?;
            let c = product(node, &x[0], &vars[3])?;
            let sum = node.add(&a, &b)?;
            Ok(node.add(&sum, &c)?)
        })?;
    }
    Ok(())
}

/// candle's graph holds arguments in any case, and a value without a gradient is not read.
#[test]
fn arguments_and_constants_have_no_codes() -> Result<(), Error> {
    let x = Var::from_tensor(&inputs(1, &[4, 32], DType::F32)?[0])?;
    let gain = parameters(&[&[32]], DType::F32)?;
    let grads = |groups| -> Result<_, Error> {
        let mut node = WideNode::new("kept").with_kept_groups(groups);
        let (a, b) = (node.argument(&x), node.argument(&x.detach()));
        let a = node.rms_norm(&a, &gain[0], 1e-5)?;
        let b = node.rms_norm(&b, &gain[0].detach(), 1e-5)?;
        let b = node.activation(&b, Activation::Gelu)?;
        let sum = node.add(&a, &b)?;
        assert_eq!(node.bytes_in_fp8(), 0);
        let grads = backward(&node.finish(sum)?.sqr()?.sum_all()?)?;
        Ok([
            bits(grads.get(&x).ok_or("x")?)?,
            bits(grads.get(&gain[0]).ok_or("gain")?)?,
        ])
    };
    assert_eq!(grads(Some(GROUP))?, grads(None)?);
    Ok(())
}

const TOKENS: usize = 12;
const HEADS: [usize; 2] = [4, 2];
const DIM: usize = 24;

fn heads() -> Result<Vec<Tensor>, Error> {
    let dims = |heads| [2, TOKENS, heads * DIM];
    let [q, kv] = HEADS.map(dims);
    let mut all = inputs(3, &q, DType::F32)?;
    all[1] = inputs(1, &kv, DType::F32)?.remove(0);
    all[2] = (wave(&kv, 3) * 2.)?.to_dtype(DType::F32)?;
    Ok(all)
}

fn attend(node: &mut WideNode, x: &[Wide], operands: Option<DType>) -> Result<Wide, Error> {
    let options = AttentionOptions::default()
        .with_causal(true)
        .with_operands(operands);
    let [q, k, v] = [0, 1, 2].map(|i| {
        let heads = x[i].dims()[2] / DIM;
        node.reshape(&x[i], &[2, TOKENS, heads, DIM])
    });
    Ok(node.attention([&q?, &k?, &v?], &options)?)
}

#[test]
fn attention_reads_codes_of_queries_keys_and_values() -> Result<(), Error> {
    let x = heads()?;
    for operands in [None, Some(DType::BF16)] {
        let build: &Build<'_> = &|node, x, _| attend(node, x, operands);
        let (plain, _) = run(&x, &[], None, build)?;
        let (coded, bytes) = run(&x, &[], Some(GROUP), build)?;
        let elements: usize = x.iter().map(Tensor::elem_count).sum();
        assert_eq!(bytes, elements + 4 * elements / GROUP);
        assert_eq!(bits(&coded[0])?, bits(&plain[0])?);
        // With bf16 products, the codes are those of the rounded operands.
        let operand = |x: &Tensor| match operands {
            Some(dtype) => x.to_dtype(dtype)?.to_dtype(DType::F32),
            None => Ok(x.clone()),
        };
        let near = x.iter().map(|x| rounded(&operand(x)?));
        let near = near.collect::<Result<Vec<_>, _>>()?;
        let (expected, _) = run(&near, &[], None, build)?;
        for (i, (got, want)) in coded.iter().zip(&expected).enumerate().skip(1) {
            let (got, want) = (values(got)?, values(want)?);
            let size = want.iter().fold(0f64, |max, x| max.max(x.abs()));
            // Probabilities differ in their roundings alone: of the sum over keys, the exponential and the quotient. bf16 products round them
            // once more, and a probability on an edge then takes its neighbour.
            let bound = match operands {
                None => rounding::two_orders(2 * TOKENS + DIM + 16),
                Some(_) => 2f64.powi(-7),
            };
            assert_eq!(got.len(), want.len(), "{i}");
            for (got, want) in got.iter().zip(&want) {
                assert!((got - want).abs() <= bound * size, "{i}: {got} {want}");
            }
        }
    }
    Ok(())
}

/// Rounded queries and keys have other scores. Their probabilities still add up to 1: where all keys are equal, and so all scores, the
/// query has no gradient.
#[test]
fn probabilities_of_rounded_keys_add_up_to_one() -> Result<(), Error> {
    let mut x = heads()?;
    let key = x[1].narrow(1, 0, 1)?;
    x[1] = key.broadcast_as(x[1].dims())?.contiguous()?;
    // Scores far from those of the codes.
    x[0] = (&x[0] * 5.)?;
    let (grads, _) = run(&x, &[], Some(GROUP), &|node, x, _| attend(node, x, None))?;
    let [dq, dv] = [1, 3].map(|i| values(&grads[i]));
    let largest = |x: Vec<f64>| x.iter().fold(0f64, |max, x| max.max(x.abs()));
    // |dq| <= softmax_scale |k| sum |ds|, where the ds of a query would cancel; dp has DIM products.
    let [k, v] = [1, 2].map(|i| values(&x[i]).map(largest));
    let dp = DIM as f64 * v?;
    let bound = rounding::two_orders(TOKENS + DIM + 16) * k? * dp * 2.;
    let dq = largest(dq?);
    assert!(dq <= bound, "{dq} of {bound}");
    assert!(largest(dv?) > 0.1);
    Ok(())
}

/// The gradient of a weight in high precision, against f64 and the largest error of the rounding.
#[test]
fn gradients_differ_by_no_more_than_the_rounding_of_codes() -> Result<(), Error> {
    let (m, n, k) = (64, 8, 48);
    let x = inputs(1, &[m, k], DType::F32)?;
    let weight = parameters(&[&[n, k]], DType::F32)?;
    let build: &Build<'_> = &|node, x, vars| product(node, &x[0], &vars[0]);
    let (coded, _) = run(&x, &weight, Some(GROUP), build)?;
    let (got, x) = (values(&coded[2])?, values(&x[0])?);
    let g = values(&wave(&[m, n], 5).to_dtype(DType::F32)?)?;
    // A normal code is within 2^-4 of its value, a subnormal one within half of a step of 2^-9.
    let error = |row: usize, col: usize| {
        let group = &x[row * k + col / GROUP * GROUP..][..GROUP];
        let amax = group.iter().fold(0f64, |max, x| max.max(x.abs()));
        (x[row * k + col].abs() / 16.).max(amax / 448. / 1024.)
    };
    let mut largest = 0f64;
    for i in 0..n {
        for j in 0..k {
            let terms = || (0..m).map(|row| (g[row * n + i], x[row * k + j], error(row, j)));
            let exact: f64 = terms().map(|(g, x, _)| g * x).sum();
            let size: f64 = terms().map(|(g, x, _)| (g * x).abs()).sum();
            let bound: f64 = terms().map(|(g, _, error)| g.abs() * error).sum();
            let bound = bound + rounding::gamma(m + 4) * size;
            let far = (got[i * k + j] - exact).abs();
            assert!(far <= bound, "{far} of {bound}");
            largest = largest.max(far / bound);
        }
    }
    // The bound is of the right size: the rounding is seen.
    assert!(largest > 0.02, "{largest}");
    Ok(())
}

/// Inf and NaN make their group NaN, and with it the gradients, whatever the codes of others.
#[test]
fn inf_and_nan_are_seen() -> Result<(), Error> {
    for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let mut x = wave(&[2, 40], 1)
            .to_dtype(DType::F32)?
            .flatten_all()?
            .to_vec1::<f32>()?;
        x[20] = bad;
        let x = Tensor::from_vec(x, (2, 40), &Device::Cpu)?;
        let (grads, _) = run(&[x], &[], Some(GROUP), &|node, x, _| {
            Ok(node.activation(&x[0], Activation::Silu)?)
        })?;
        let dx = values(&grads[1])?;
        for (i, dx) in dx.iter().enumerate() {
            // Elements 16 to 31 of the first row.
            assert_eq!(dx.is_nan(), (16..32).contains(&i), "{bad} {i}");
        }
    }
    Ok(())
}

/// Codes and their scales do not depend on how the work is divided.
#[test]
fn any_number_of_threads_gives_the_same_codes() -> Result<(), Error> {
    let x = inputs(1, &[300, 200], DType::F32)?;
    let vars = parameters(&[&[200], &[200]], DType::F32)?;
    let build: &Build<'_> = &|node, x, vars| {
        let y = node.layer_norm(&x[0], &vars[0], Some(&vars[1]), 1e-5)?;
        Ok(node.activation(&y, Activation::Gelu)?)
    };
    let grads = |threads| -> Result<Vec<Vec<u64>>, Error> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()?;
        pool.install(|| {
            let (all, _) = run(&x, &vars, Some(GROUP), build).map_err(|e| e.to_string())?;
            let all = all.iter().map(bits).collect::<Result<_, _>>();
            all.map_err(|e: Error| e.to_string())
        })
        .map_err(Error::from)
    };
    let one = grads(1)?;
    for threads in [2, 5] {
        assert_eq!(grads(threads)?, one);
    }
    Ok(())
}
