//! Results of many rows: written past the caches, and with AVX-512.

use super::{Operand, multiply};
use crate::device::cpu::gemm::side::Side;
use fp8_core::Contraction::{Cols, Rows};
use fp8_core::{Format, Granularity, HighPrecision, Isa};
use half::{bf16, f16};

/// The rows of a product of many rows equal those of products of few, whose results stay in the caches.
fn check<T: HighPrecision>(isa: Isa, (m, n, k): (usize, usize, usize), bias: Option<&[f32]>) {
    const PART: usize = 150;
    let kind = (Format::E4M3, Granularity::Rowwise);
    let b = Operand::new(2, (n, k), (kind.0, kind.1, Rows));
    let a = Operand::new(1, (m, k), (kind.0, kind.1, Cols));
    let product = |a: &Side<'_>| multiply::<T>(isa, a, &b.row_major(), bias);
    let all = product(&a.row_major());
    for first in (0..m).step_by(PART) {
        let rows = first..m.min(first + PART);
        let part = Operand {
            codes: a.codes[rows.start * k..rows.end * k].to_vec(),
            scales: a.scales[rows.clone()].to_vec(),
            sizes: (rows.len(), k),
            ..a
        };
        let bits = |values: &[T]| -> Vec<u32> {
            let values = values.iter().map(|value| value.to_f32().to_bits());
            values.collect()
        };
        let few = product(&part.row_major());
        let of_all = bits(&all[rows.start * n..rows.end * n]);
        assert!(of_all == bits(&few), "{isa:?} {m}x{n}x{k}, rows {rows:?}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "takes hours")]
fn results_past_the_caches_are_those_within() {
    for isa in Isa::available() {
        for (m, n) in [(2100, 131), (4000, 33), (300, 1000)] {
            let bias: Vec<f32> = (0..n).map(|col| col as f32 - 20.).collect();
            for bias in [None, Some(&bias[..])] {
                check::<f32>(isa, (m, n, 32), bias);
                check::<bf16>(isa, (m, 2 * n + 1, 32), None);
                check::<f16>(isa, (m, n, 64), bias);
            }
            check::<bf16>(isa, (m, n, 40), Some(&bias));
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn rows_finished_with_avx512_are_those_of_the_definition() {
    use crate::base::parallel::shared::Shared;
    use crate::device::cpu::gemm::epilogue::Epilogue;
    use crate::device::cpu::gemm::finish_avx512;
    use crate::device::cpu::gemm::scales::Scales;
    use crate::device::cpu::gemm::stage::Finished;
    use rand::{Rng, SeedableRng, rngs::StdRng};
    use std::mem::MaybeUninit;

    fn both<T: HighPrecision>(epilogue: &Epilogue<'_>, sums: &[f32], n: usize, what: &str) {
        let rows = 0..sums.len() / n;
        let mut results = [false, true].map(|avx512| {
            let mut out = vec![MaybeUninit::new(T::default()); sums.len()];
            let mut finished = Finished {
                epilogue,
                rows: rows.clone(),
                cols: 0..n,
                sums,
                stride: n,
                out: Shared::new(&mut out),
                n,
                of_task: 0..n,
                stage: None,
            };
            if avx512 {
                // SAFETY: the caller has looked for the instructions.
                assert!(unsafe { finish_avx512::finish(&mut finished) });
            } else {
                finished.with(|row, first, sums, out| epilogue.finish_row(row, first, sums, out));
            }
            // SAFETY: all were initialized.
            let value = |out: MaybeUninit<T>| unsafe { out.assume_init() }.to_f32();
            out.into_iter().map(value).collect::<Vec<f32>>()
        });
        let [expected, got] = &mut results;
        for (at, (expected, got)) in expected.iter().zip(got).enumerate() {
            let same = expected.to_bits() == got.to_bits() || expected.is_nan() && got.is_nan();
            assert!(same, "{what} at {at}: {got:e}, expected {expected:e}");
        }
    }

    if Isa::available().all(|isa| isa.level() < fp8_core::IsaLevel::Avx512Bf16) {
        return;
    }
    let mut rng = StdRng::seed_from_u64(1);
    for n in [1, 31, 32, 33, 100, 128] {
        let rows = 40;
        // Bits of any kind, numbers of usual size, and subnormals.
        let sums: Vec<f32> = (0..rows * n)
            .map(|at| match at % 3 {
                0 => f32::from_bits(rng.random()),
                1 => rng.random_range(-100.0..100.),
                _ => f32::from_bits(rng.random::<u32>() & 0x80FF_FFFF),
            })
            .collect();
        let mut scales = |count: usize| -> Vec<f32> {
            (0..count)
                .map(|at| match at % 7 {
                    // Extreme.
                    5 => 1e-20,
                    _ => 2f32.powi(rng.random_range(-20..20)) * rng.random_range(1.0..2.),
                })
                .collect()
        };
        let (each, of_cols, bias) = (scales(rows), scales(n), scales(n));
        for bias in [None, Some(&bias[..])] {
            let scales = [
                (Scales::One(0.3), Scales::One(1.7)),
                (Scales::Each(each.clone()), Scales::Each(of_cols.clone())),
                (Scales::One(1e-20), Scales::Each(of_cols.clone())),
            ];
            for (of_rows, of_cols) in scales {
                let epilogue = Epilogue::new(of_rows, of_cols, bias);
                both::<f32>(&epilogue, &sums, n, "f32");
                both::<bf16>(&epilogue, &sums, n, "bf16");
            }
        }
    }
}
