//! The machine's own peaks: multiply-adds in f32 and bf16 on one thread, and reading from memory.

use crate::inputs::last_level_cache;
use crate::rows::Work;
use crate::timing::thread_cpu;
use fp8::fp8_core::Isa;
use std::fmt;
use std::hint::black_box;
use std::time::Instant;

/// Operations and bytes per second; None where the processor has no such instruction.
#[derive(Clone, Copy, Debug)]
pub struct Peaks {
    threads: usize,
    fma_avx2: Option<f64>,
    fma_avx512: Option<f64>,
    vdpbf16ps: Option<f64>,
    tdpbf16ps: Option<f64>,
    read_one: f64,
    read_all: f64,
}

impl Peaks {
    /// Takes about two seconds.
    pub fn measure(threads: usize) -> Self {
        let (read_one, read_all) = read_bandwidth(threads);
        let mut peaks = Self {
            threads,
            fma_avx2: None,
            fma_avx512: None,
            vdpbf16ps: None,
            tdpbf16ps: None,
            read_one,
            read_all,
        };
        #[cfg(target_arch = "x86_64")]
        {
            use fp8::fp8_core::IsaLevel;
            let best = Isa::best().level();
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                // SAFETY: the processor has avx2 and fma.
                peaks.fma_avx2 = Some(best_rate(|| unsafe { x86::fma_avx2() }));
            }
            if is_x86_feature_detected!("avx512f") {
                // SAFETY: the processor has avx512f.
                peaks.fma_avx512 = Some(best_rate(|| unsafe { x86::fma_avx512() }));
            }
            if is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512f") {
                // SAFETY: the processor has avx512bf16 and avx512f.
                peaks.vdpbf16ps = Some(best_rate(|| unsafe { x86::vdpbf16ps() }));
            }
            if best == IsaLevel::Amx {
                // SAFETY: this level is chosen only where the system has granted the tiles to the process.
                peaks.tdpbf16ps = Some(best_rate(|| unsafe { x86::tdpbf16ps() }));
            }
        }
        peaks
    }

    /// Whether `vdpbf16ps` runs at twice the rate of f32 multiply-adds, as its bars assume. Intel's processors with AMX
    /// issue one every other cycle.
    pub fn bf16_doubles_f32(&self) -> bool {
        match (self.vdpbf16ps, self.fma_avx2) {
            (Some(bf16), Some(f32)) => bf16 > 1.6 * f32,
            _ => false,
        }
    }

    /// The part of the peak that `work` in `ms` reaches. Products are compared with `vdpbf16ps` if FP8_ISA=`isa` allows it,
    /// with tiles or without, and with f32 multiply-adds otherwise.
    pub fn fraction(&self, work: Work, ms: f64, threads: usize, isa: Option<&str>) -> Option<f64> {
        let peak = match work {
            Work::Flop(_) => {
                let isa = isa.unwrap_or(Isa::best().level().name());
                let one = match isa {
                    "avx512bf16" | "amx" => self.vdpbf16ps,
                    "avx512" => self.fma_avx512,
                    "avx2" => self.fma_avx2,
                    _ => None,
                };
                one? * threads as f64
            }
            Work::Read(_) if threads == 1 => self.read_one,
            Work::Read(_) => self.read_all,
        };
        let (Work::Flop(amount) | Work::Read(amount)) = work;
        Some(amount / (ms * 1e-3) / peak)
    }
}

impl fmt::Display for Peaks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let giga = |rate: Option<f64>| rate.map_or("-".into(), |r| format!("{:.0}", r / 1e9));
        write!(
            f,
            "peaks of one thread, GFLOP/s: f32 fma {} (avx2) {} (avx512), vdpbf16ps {}, tdpbf16ps {}; \
             reading, GB/s: {:.1} one thread, {:.1} {} threads",
            giga(self.fma_avx2),
            giga(self.fma_avx512),
            giga(self.vdpbf16ps),
            giga(self.tdpbf16ps),
            self.read_one / 1e9,
            self.read_all / 1e9,
            self.threads
        )
    }
}

/// Multiply-adds of f32 as fast as one thread makes them at the level `isa`, for about two milliseconds; the call returns how many
/// operations it was. None at levels that multiply in bf16, and without vectors.
pub fn multiply_adds(isa: &str) -> Option<fn() -> f64> {
    #[cfg(target_arch = "x86_64")]
    match isa {
        // SAFETY: the level needs a processor with avx2 and fma.
        "avx2" => return Some(|| unsafe { x86::fma_avx2() }),
        // SAFETY: the level needs a processor with avx512f.
        "avx512" => return Some(|| unsafe { x86::fma_avx512() }),
        _ => {}
    }
    let _ = isa;
    None
}

/// Operations per second of CPU time, in the best of some runs of `kernel`, which returns its number of operations.
#[cfg(target_arch = "x86_64")]
fn best_rate(kernel: impl Fn() -> f64) -> f64 {
    let rates = (0..12).map(|_| {
        let began = thread_cpu();
        let operations = kernel();
        operations / (thread_cpu() - began)
    });
    rates.fold(0., f64::max)
}

/// Bytes per second with one thread and with all.
fn read_bandwidth(threads: usize) -> (f64, f64) {
    let bytes = (2 * last_level_cache()).clamp(1 << 30, 4 << 30);
    let data = vec![1u64; bytes / 8];
    let one = (0..4).map(|_| {
        let began = thread_cpu();
        black_box(sum(black_box(&data)));
        bytes as f64 / (thread_cpu() - began)
    });
    let one = one.fold(0., f64::max);
    let all = (0..4).map(|_| {
        let began = Instant::now();
        std::thread::scope(|scope| {
            for part in data.chunks(data.len().div_ceil(threads)) {
                scope.spawn(|| black_box(sum(black_box(part))));
            }
        });
        bytes as f64 / began.elapsed().as_secs_f64()
    });
    (one, all.fold(one, f64::max))
}

/// The sum of all, as fast as they come from memory.
pub fn sum(data: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has avx512f.
        return unsafe { x86::sum_avx512(data) };
    } else if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has avx2.
        return unsafe { x86::sum_avx2(data) };
    }
    sum_body(data)
}

/// Eight AVX-512 accumulators.
#[inline(always)]
fn sum_body(data: &[u64]) -> u64 {
    let mut sums = [0u64; 64];
    for chunk in data.chunks_exact(64) {
        for (sum, value) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(*value);
        }
    }
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::*;
    use std::hint::black_box;

    const ROUNDS: usize = 1_000_000;
    /// Independent sums: more than latency times throughput, and no more than there are registers.
    const SUMS: usize = 12;

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn fma_avx2() -> f64 {
        let (a, b) = (
            _mm256_set1_ps(black_box(0.999)),
            _mm256_set1_ps(black_box(1e-3)),
        );
        let mut sums = [b; SUMS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(a, *sum, b);
            }
        }
        black_box(sums);
        (ROUNDS * SUMS * 8 * 2) as f64
    }

    #[target_feature(enable = "avx512f")]
    pub(super) fn fma_avx512() -> f64 {
        let (a, b) = (
            _mm512_set1_ps(black_box(0.999)),
            _mm512_set1_ps(black_box(1e-3)),
        );
        let mut sums = [b; SUMS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(a, *sum, b);
            }
        }
        black_box(sums);
        (ROUNDS * SUMS * 16 * 2) as f64
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) fn vdpbf16ps() -> f64 {
        let a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(black_box(0.5)), _mm512_set1_ps(0.25));
        let b = _mm512_cvtne2ps_pbh(_mm512_set1_ps(black_box(0.125)), _mm512_set1_ps(1.));
        let mut sums = [_mm512_setzero_ps(); SUMS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, a, b);
            }
        }
        black_box(sums);
        (ROUNDS * SUMS * 32 * 2) as f64
    }

    /// Palette 1 and eight tiles of 16 rows of 64 bytes.
    #[repr(C, align(64))]
    struct TileConfig {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        bytes_per_row: [u16; 16],
        rows: [u8; 16],
    }

    /// # Safety
    /// The processor has AMX with bf16, and the system has granted its tiles to the process.
    pub(super) unsafe fn tdpbf16ps() -> f64 {
        const ROUNDS: usize = 100_000;
        let mut config = TileConfig {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            bytes_per_row: [0; 16],
            rows: [0; 16],
        };
        config.bytes_per_row[..8].fill(64);
        config.rows[..8].fill(16);
        // SAFETY: the caller vouches for the tiles; `config` is a valid configuration of 64 bytes, no tile is loaded
        // from or stored to memory, and the tiles are released before the block ends.
        unsafe {
            asm!(
                "ldtilecfg [{config}]",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "tilezero tmm4",
                "tilezero tmm5",
                "tilezero tmm6",
                "tilezero tmm7",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {rounds}",
                "jnz 2b",
                "tilerelease",
                config = in(reg) &config,
                rounds = inout(reg) ROUNDS => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
        (ROUNDS * 4 * 16 * 16 * 32 * 2) as f64
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn sum_avx2(data: &[u64]) -> u64 {
        super::sum_body(data)
    }

    #[target_feature(enable = "avx512f")]
    pub(super) fn sum_avx512(data: &[u64]) -> u64 {
        super::sum_body(data)
    }
}
