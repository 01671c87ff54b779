//! The product of two E4M3 matrices against candle's bf16 product of the same shape.

use crate::race::Contestant;
use crate::rows::Metric;
use crate::session::{Measured, Session, check};
use anyhow::Result;
use candle_core::op::BackpropOp;
use candle_core::{DType, Tensor};
use fp8::fp8_candle::device::{GemmOutput, backend, take_gemm_paths};
use fp8::fp8_candle::{Fp8Tensor, Quantizer};
use fp8::fp8_core::{Contraction, Format, Granularity};

/// Scales, whether sums may be fast, and the name.
const KINDS: [(Granularity, bool, &str); 4] = [
    (Granularity::Tensorwise, true, "tensorwise fast"),
    (Granularity::Tensorwise, false, "tensorwise"),
    (Granularity::Rowwise, true, "rowwise fast"),
    (Granularity::Rowwise, false, "rowwise"),
];

/// Cubes.
pub fn run(session: &Session) -> Result<()> {
    for size in [1024, 2048, 4096, 8192, 16384] {
        let kinds: Vec<_> = KINDS
            .into_iter()
            .map(|(granularity, fast, name)| {
                let bar =
                    (size == 8192 && fast && granularity == Granularity::Tensorwise).then_some(1.6);
                (format!("gemm {size}^3 e4m3 {name}"), granularity, fast, bar)
            })
            .filter(|(case, ..)| session.wants(case))
            .collect();
        if !kinds.is_empty() {
            cube(session, session.size(size), kinds)?;
        }
    }
    Ok(())
}

/// Both operands as `[size, size]`, the sum along their rows.
struct Set {
    bf16: [Tensor; 2],
    tensorwise: [Fp8Tensor; 2],
    rowwise: [Fp8Tensor; 2],
}

impl Set {
    fn new(session: &Session, size: usize) -> Result<Self> {
        let values = || session.normal((size, size), DType::BF16);
        let bf16 = [values()?, values()?];
        let quantize = |granularity| -> Result<[Fp8Tensor; 2]> {
            let quantizer = Quantizer::dynamic(Format::E4M3, granularity);
            let one = |x| Fp8Tensor::quantize(x, &quantizer, Contraction::Cols);
            Ok([one(&bf16[0])?, one(&bf16[1])?])
        };
        Ok(Self {
            tensorwise: quantize(Granularity::Tensorwise)?,
            rowwise: quantize(Granularity::Rowwise)?,
            bf16,
        })
    }

    fn plain(&self) -> Result<Tensor> {
        let [a, b] = &self.bf16;
        Ok(a.matmul(&b.t()?)?)
    }

    fn fp8(&self, granularity: Granularity, fast: bool) -> Result<Tensor> {
        let [a, b] = match granularity {
            Granularity::Rowwise => &self.rowwise,
            _ => &self.tensorwise,
        };
        let out = GemmOutput {
            dtype: DType::BF16,
            bias: None,
            use_fast_accum: fast,
        };
        let (a, b) = (a.operand(Contraction::Cols), b.operand(Contraction::Cols));
        let shape = (a.kept(), b.kept());
        let storage = backend(self.bf16[0].device())?.gemm(&a, &b, &out)?;
        Ok(Tensor::from_storage(
            storage,
            shape,
            BackpropOp::none(),
            false,
        ))
    }
}

fn cube(
    session: &Session,
    size: usize,
    kinds: Vec<(String, Granularity, bool, Option<f64>)>,
) -> Result<()> {
    // The smallest operands of a contestant count.
    let sets = (0..session.sets(2 * size * size))
        .map(|_| Set::new(session, size))
        .collect::<Result<Vec<_>>>()?;
    let expected = sets[0].plain()?;
    for (case, granularity, fast, _) in &kinds {
        take_gemm_paths();
        check(case, &sets[0].fp8(*granularity, *fast)?, &expected, 0.1)?;
        session.multiplied_fp8(case)?;
    }
    let sets = &sets;
    let plain = Contestant::new(|turn| sets[turn % sets.len()].plain());
    let ours = kinds.iter().map(|&(_, granularity, fast, _)| {
        Contestant::new(move |turn| sets[turn % sets.len()].fp8(granularity, fast)).queued()
    });
    let contestants = [plain.queued()].into_iter().chain(ours).collect();
    let times = session.race(contestants)?;
    for ((case, _, _, bar), &ms) in kinds.into_iter().zip(&times[1..]) {
        let measured = Measured {
            ours_ms: ms,
            against_ms: Some(times[0]),
            flop: Some(2. * (size as f64).powi(3)),
            bytes: None,
        };
        session.report(case, (Metric::RatioBf16, None), bar, measured);
    }
    Ok(())
}
