//! Checks of the assembled kernels for Hopper, which need no GPU: registers, the length of the code, how many bytes a thread waits
//! for at once, and how many bytes a product of tensor cores reads from shared memory.

use super::tests::{all, modules};
use std::collections::BTreeMap;

/// The longest kernel that is expected, in instructions of 16 bytes: twice the code of a cast of 64 values of which each takes 30,
/// once for each format, and what moves the codes. Longer code does not stay in the instruction caches.
const MOST_INSTRUCTIONS: usize = 5000;

/// Memory-bound kernels, by the beginning of their names, and the fewest bytes that each of their threads must have in flight at
/// once. A chip of 3.35 TB/s and 132 multiprocessors, whose memory answers within 0.7 microseconds, needs 18 KB in
/// flight on each of them: 36 bytes for each of 512 threads, 18 for each of 1024.
const LOADS: [(&str, usize); 15] = [
    ("fp8_cast_stored", 128),
    ("fp8_cast_transpose", 128),
    ("fp8_cast_flat", 128),
    ("fp8_cast_blocks", 96),
    ("fp8_cast_columns", 96),
    ("fp8_cast_norm", 96),
    // Three blocks share a multiprocessor where a thread reads two tensors.
    ("fp8_cast_activation", 48),
    ("fp8_cast_rows", 32),
    ("fp8_cast_groups", 32),
    ("fp8_round_rows", 16),
    ("fp8_dequantize", 16),
    ("fp8_amax_tensor", 48),
    ("fp8_amax_cols", 48),
    ("fp8_amax_groups", 64),
    ("fp8_transpose_tiles", 64),
];

/// Kernels of attention for 16-bit elements, by the beginning of their names, and the most bytes of matrices that their longest loop
/// reads from shared memory for each product of 16x8x16. A multiprocessor reads 128 bytes in the 1.6 clocks or so in which it does
/// `mma.sync` once, 205 in all. The backward pass exchanges another 21 to 64 between warps. Products of warpgroups take 1 clock,
/// so these may read 128.
const MATRICES: [(&str, usize); 16] = [
    ("fp8_attention_forward_fp8_", 64),
    ("fp8_attention_backward_q_fp8_", 64),
    ("fp8_attention_backward_kv_fp8_d64", 64),
    ("fp8_attention_backward_kv_fp8_d128", 96),
    ("fp8_attention_forward_wgmma_d64_", 80),
    ("fp8_attention_forward_wgmma_d128_", 64),
    ("fp8_attention_backward_kv_wgmma_d64_", 64),
    ("fp8_attention_backward_kv_wgmma_d128_", 96),
    ("fp8_attention_backward_q_wgmma_d64_", 64),
    ("fp8_attention_backward_q_wgmma_d128_", 64),
    ("fp8_attention_forward_d64_", 128),
    ("fp8_attention_forward_d128_", 160),
    ("fp8_attention_backward_kv_d64_", 64),
    ("fp8_attention_backward_kv_d128_", 128),
    ("fp8_attention_backward_q_d64_", 128),
    ("fp8_attention_backward_q_d128_", 128),
];

/// Kernels on products of warpgroups, by the beginning of their names: how many of these their longest loop starts, and how many
/// exponentials it takes while some are under way: a thread has 64 logits of a step, and without FP8 two factors of what was summed
/// before; in the backward pass 32.
const WARPGROUPS: [(&str, usize, usize); 12] = [
    ("fp8_attention_forward_fp8_d64", 12, 64),
    ("fp8_attention_forward_fp8_d128", 16, 64),
    ("fp8_attention_backward_kv_fp8_d64", 16, 32),
    ("fp8_attention_backward_kv_fp8_d128", 24, 32),
    ("fp8_attention_backward_q_fp8_d64", 12, 32),
    ("fp8_attention_backward_q_fp8_d128", 20, 32),
    ("fp8_attention_forward_wgmma_d64_", 12, 66),
    ("fp8_attention_forward_wgmma_d128_", 16, 66),
    ("fp8_attention_backward_kv_wgmma_d64_", 16, 32),
    ("fp8_attention_backward_kv_wgmma_d128_", 24, 32),
    ("fp8_attention_backward_q_wgmma_d64_", 12, 32),
    ("fp8_attention_backward_q_wgmma_d128_", 20, 32),
];

/// Machine code of kernels by their names: sections `.text.<name>` of a 64-bit ELF file.
fn code(cubin: &[u8]) -> BTreeMap<String, &[u8]> {
    let number = |at: usize, len: usize| {
        let bytes = cubin[at..at + len].iter().rev();
        bytes.fold(0usize, |number, &byte| number << 8 | usize::from(byte))
    };
    let (table, count, names) = (number(0x28, 8), number(0x3C, 2), number(0x3E, 2));
    let section = |index: usize| table + 64 * index;
    let part = |index: usize| {
        (
            number(section(index) + 0x18, 8),
            number(section(index) + 0x20, 8),
        )
    };
    let (strings, len) = part(names);
    let strings = &cubin[strings..strings + len];
    let kernels = (0..count).filter_map(|index| {
        let name = &strings[number(section(index), 4)..];
        let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
        let name = std::str::from_utf8(name).ok()?.strip_prefix(".text.")?;
        let (at, len) = part(index);
        Some((name.to_string(), &cubin[at..at + len]))
    });
    kernels.collect()
}

/// An instruction of Hopper, as far as it is read here. Its layout is not documented; that the numbers are plausible is checked.
struct Instruction(u128);

impl Instruction {
    fn bits(&self, at: u32, len: u32) -> u32 {
        (self.0 >> at) as u32 & ((1 << len) - 1)
    }

    /// Bytes of a load from global memory (LDG).
    fn loads(&self) -> Option<usize> {
        let sizes = [1, 1, 2, 2, 4, 8, 16, 16];
        (self.bits(0, 12) == 0x981).then(|| sizes[self.bits(73, 3) as usize])
    }

    /// A product of tensor cores (HMMA).
    fn multiplies(&self) -> bool {
        self.bits(0, 12) == 0x23C
    }

    /// Columns of a product of a warpgroup (HGMMA), and whether its left operand is in shared memory too.
    fn warpgroup_product(&self) -> Option<(usize, bool)> {
        let opcode = self.bits(0, 12);
        let columns = 8 * (self.bits(53, 8) as usize + 1);
        matches!(opcode, 0x9F0 | 0xDF0).then_some((columns, opcode == 0x9F0))
    }

    /// How many products of 16x8x16 it is.
    fn products(&self) -> usize {
        let of_warpgroup = self.warpgroup_product().map(|(columns, _)| columns / 2);
        of_warpgroup.unwrap_or(usize::from(self.multiplies()))
    }

    /// A load of four 8x8 matrices of 16-bit elements from shared memory (LDSM).
    fn loads_matrices(&self) -> bool {
        self.bits(0, 12) == 0x83B
    }

    /// Bytes of matrices of 16-bit elements that it reads from shared memory.
    fn matrix_bytes(&self) -> usize {
        match self.warpgroup_product() {
            Some((columns, left)) => 2 * 16 * (columns + if left { 64 } else { 0 }),
            None => 512 * usize::from(self.loads_matrices()),
        }
    }

    /// How many groups of products of warpgroups may be under way behind it, if it is a wait for them (WARPGROUP.DEPBAR).
    fn waits_for_products(&self) -> Option<u32> {
        (self.bits(0, 12) == 0x9C5 && self.bits(47, 1) == 1).then(|| self.bits(72, 3))
    }

    /// An exponential or another special function (MUFU).
    fn is_special(&self) -> bool {
        self.bits(0, 12) == 0x308
    }

    /// How far a branch (BRA) goes, in instructions from the next one.
    fn jump(&self) -> Option<i64> {
        // Words of 4 bytes: 8 bits of the number, and apart from these the rest with its sign.
        let rest = ((self.0 >> 34) as i64) << 16 >> 16;
        let words = rest << 8 | i64::from(self.bits(16, 8));
        (self.bits(0, 12) == 0x947).then_some(words / 4)
    }

    /// The barrier that its result opens.
    fn opens(&self) -> u32 {
        self.bits(110, 3)
    }

    fn waits_for(&self, barrier: u32) -> bool {
        self.bits(116, 6) >> barrier & 1 == 1
    }
}

/// The most bytes of loads that are under way when the first of them is waited for, in the order of the code.
fn in_flight(code: &[u8]) -> usize {
    let (mut open, mut most) = (vec![], 0);
    for word in code.as_chunks::<16>().0 {
        let instruction = Instruction(u128::from_le_bytes(*word));
        open.retain(|&(barrier, _)| !instruction.waits_for(barrier));
        if let Some(bytes) = instruction.loads() {
            open.push((instruction.opens(), bytes));
            most = most.max(open.iter().map(|(_, bytes)| bytes).sum());
        }
    }
    most
}

/// The loop with the most products, and of such loops the shortest.
fn longest_loop(code: &[u8]) -> Vec<Instruction> {
    let words = code.as_chunks::<16>().0.iter();
    let mut code: Vec<Instruction> = words
        .map(|word| Instruction(u128::from_le_bytes(*word)))
        .collect();
    let loops = code.iter().enumerate().filter_map(|(at, instruction)| {
        let first = usize::try_from(at as i64 + 1 + instruction.jump()?).ok()?;
        let products: usize = code.get(first..=at)?.iter().map(|i| i.products()).sum();
        Some((products, std::cmp::Reverse(at - first), first, at))
    });
    match loops.max() {
        Some((products, _, first, last)) if products > 0 => code.drain(first..=last).collect(),
        _ => vec![],
    }
}

/// Bytes of matrices that a loop reads from shared memory for each of its products, 0 if it has none.
fn matrices_per_product(body: &[Instruction]) -> usize {
    let products: usize = body.iter().map(|i| i.products()).sum();
    let bytes: usize = body.iter().map(|i| i.matrix_bytes()).sum();
    if products == 0 {
        return 0;
    }
    bytes.div_ceil(products)
}

/// Products of warpgroups in a loop, and special functions between the start of one and the wait for all.
fn warpgroups(body: &[Instruction]) -> (usize, usize) {
    let (mut products, mut beside, mut under_way) = (0, 0, false);
    for instruction in body {
        if instruction.warpgroup_product().is_some() {
            (products, under_way) = (products + 1, true);
        }
        beside += usize::from(under_way && instruction.is_special());
        if instruction.waits_for_products() == Some(0) {
            under_way = false;
        }
    }
    (products, beside)
}

/// What the assembler says of a kernel: registers and bytes that are spilled.
fn resources(text: &str) -> BTreeMap<&str, (usize, usize)> {
    let kernels = text.split("Compiling entry function '").skip(1);
    let of = |text: &str, what: &str| -> usize {
        let before = text.split(what).next().unwrap_or_default();
        let number = before.split_whitespace().last();
        let number = number.and_then(|number| number.parse().ok());
        number.unwrap_or_else(|| panic!("no number before {what:?} in {text}"))
    };
    let kernels = kernels.map(|text| {
        let name = text.split('\'').next().unwrap_or_default();
        let spilled = of(text, " bytes spill stores") + of(text, " bytes spill loads");
        (name, (of(text, " registers"), spilled))
    });
    kernels.collect()
}

/// No kernel for Hopper spills registers or has more code than the instruction caches hold, and those that live on bandwidth
/// have enough loads under way.
#[test]
fn kernels_for_hopper_are_short_and_stay_in_registers() {
    let kernels = all();
    let mut faults = vec![];
    let mut checked = [0; LOADS.len()];
    for module in modules(&kernels).values() {
        let hopper = module.cubins.iter().find(|(arch, _)| *arch == "90a");
        let Some((_, cubin)) = hopper.filter(|(_, cubin)| !cubin.is_empty()) else {
            println!("skipped: {} was not assembled for Hopper", module.name);
            continue;
        };
        let resources = resources(module.resources);
        for (name, code) in code(cubin) {
            let (registers, spilled) = resources[name.as_str()];
            let (instructions, loads) = (code.len() / 16, in_flight(code));
            let matrices = matrices_per_product(&longest_loop(code));
            println!(
                "{name}: {instructions} instructions, {registers} registers, {loads} bytes in flight, {matrices} bytes of matrices \
                 a product"
            );
            if spilled > 0 {
                faults.push(format!("{name} spills {spilled} bytes"));
            }
            if instructions > MOST_INSTRUCTIONS {
                faults.push(format!("{name} has {instructions} instructions"));
            }
            for (at, (beginning, least)) in LOADS.into_iter().enumerate() {
                if name.starts_with(beginning) {
                    checked[at] += 1;
                    if loads < least {
                        faults.push(format!("{name}: {loads} bytes in flight, expected {least}"));
                    }
                }
            }
        }
        for (name, code) in code(cubin) {
            // Products of f32 read their operands one by one.
            let bound = MATRICES.iter().find(|(start, _)| name.starts_with(start));
            let Some((_, most)) = bound.filter(|_| !name.ends_with("f32")) else {
                continue;
            };
            let body = longest_loop(code);
            let matrices = matrices_per_product(&body);
            if matrices == 0 || matrices > *most {
                faults.push(format!(
                    "{name}: {matrices} bytes of matrices a product, expected {most}"
                ));
            }
            let expected = WARPGROUPS
                .iter()
                .find(|(start, ..)| name.starts_with(start));
            let expected = expected.map_or((0, 0), |&(_, products, beside)| (products, beside));
            let (products, beside) = warpgroups(&body);
            if products != expected.0 || beside < expected.1 {
                faults.push(format!(
                    "{name}: {products} products of warpgroups and {beside} special functions beside them, expected {expected:?}"
                ));
            }
        }
        // The assembler says so where it waits for each product before the next.
        if module.resources.contains("serialized") {
            faults.push(format!("{}: products wait for each other", module.name));
        }
        assert!(
            !resources.is_empty(),
            "{}: nothing was assembled",
            module.name
        );
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(
        checked.iter().all(|&n| n > 0) || checked.iter().all(|&n| n == 0),
        "{checked:?}"
    );
}
