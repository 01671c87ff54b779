//! What can be checked without a GPU: that the launches and the PTX agree.

use super::kernels::Kernel;
use std::collections::{BTreeMap, BTreeSet};

const OWN_LISTS: &[&[&[Kernel]]] = &[
    super::scales::AMAX_KERNELS,
    super::scales::SCALE_KERNELS,
    super::cast::CAST_KERNELS,
    super::made::MADE_KERNELS,
    super::codes::CODE_KERNELS,
    super::state::STATE_KERNELS,
    super::epilogue::EPILOGUE_KERNELS,
    super::adamw::ADAMW_KERNELS,
    super::attention::ATTENTION[0],
    super::attention::ATTENTION[1],
];

/// Names and parameter letters of the kernels of a PTX file; pointers and u64 are both `l`.
fn entries(ptx: &str) -> BTreeMap<String, String> {
    let mut entries = BTreeMap::new();
    for part in ptx.split(".entry ").skip(1) {
        let name: String = part
            .chars()
            .take_while(|c| c.is_alphanumeric() || *c == '_')
            .collect();
        let parameters = part.split(')').next().unwrap_or_default();
        let letters = parameters.split(".param ").skip(1).map(|parameter| {
            match parameter.split_whitespace().next() {
                Some(".u64") => 'l',
                Some(".u32" | ".b32") => 'i',
                Some(".f32") => 'f',
                other => panic!("{name}: a parameter of type {other:?}"),
            }
        });
        entries.insert(name.clone(), letters.collect());
    }
    entries
}

#[test]
fn launches_and_ptx_agree() {
    let lists = OWN_LISTS.iter().chain(super::ops::KERNELS);
    let kernels: Vec<&Kernel> = lists
        .flat_map(|list| list.iter().copied().flatten())
        .collect();
    let mut declared = BTreeSet::new();
    for kernel in &kernels {
        assert!(
            declared.insert(kernel.name),
            "{} is declared twice",
            kernel.name
        );
        for ptx in kernel.module.ptx {
            if ptx.starts_with("// stand-in") {
                println!("skipped: the kernels were compiled by a stand-in");
                return;
            }
            let entries = entries(ptx);
            let Some(parameters) = entries.get(kernel.name) else {
                panic!(
                    "{} is not in {}: {:?}",
                    kernel.name,
                    kernel.module.name,
                    entries.keys()
                );
            };
            let expected = kernel.parameters.replace('p', "l");
            assert_eq!(parameters, &expected, "{}", kernel.name);
        }
    }
    // And every compiled kernel is launched.
    let modules: BTreeMap<_, _> = kernels.iter().map(|k| (k.module.name, k.module)).collect();
    for module in modules.values() {
        for name in entries(module.ptx[0]).keys() {
            assert!(declared.contains(name.as_str()), "{name} is never launched");
        }
    }
}

/// The PTX has the instructions that the fast paths rely on.
#[test]
fn ptx_has_the_chips_own_conversions() {
    let ptx = super::kernels::CAST.ptx;
    if ptx[0].starts_with("// stand-in") {
        println!("skipped: the kernels were compiled by a stand-in");
        return;
    }
    for hopper_or_ada in &ptx[1..] {
        assert!(hopper_or_ada.contains("cvt.rn.satfinite.e4m3x2.f32"));
        assert!(hopper_or_ada.contains("cvt.rn.satfinite.e5m2x2.f32"));
        assert!(
            hopper_or_ada.contains("ld.global.v4.u32")
                || hopper_or_ada.contains("ld.global.v4.b32")
                || hopper_or_ada.contains("ld.global.nc.v4")
        );
        assert!(hopper_or_ada.contains("st.global.v4"));
    }
}

/// No kernel for Hopper spills registers to memory.
#[test]
fn kernels_for_hopper_stay_in_registers() {
    let lists = OWN_LISTS.iter().chain(super::ops::KERNELS);
    let kernels = lists.flat_map(|list| list.iter().copied().flatten());
    let modules: BTreeMap<_, _> = kernels.map(|k| (k.module.name, k.module)).collect();
    let mut seen = 0;
    for module in modules.values() {
        let texts = module.resources.split("Compiling entry function '").skip(1);
        for text in texts {
            seen += 1;
            let name = text.split('\'').next().unwrap_or_default();
            // "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", "Used 40 registers, .."
            let before = |what: &str| -> usize {
                let number = text
                    .split(what)
                    .next()
                    .and_then(|text| text.split_whitespace().last());
                let number = number.and_then(|number| number.parse().ok());
                number.unwrap_or_else(|| panic!("{name}: no number before {what:?} in {text}"))
            };
            println!("{name}: {} registers", before(" registers"));
            assert_eq!(before(" bytes spill stores"), 0, "{name}");
            assert_eq!(before(" bytes spill loads"), 0, "{name}");
        }
    }
    if seen == 0 {
        println!("skipped: the kernels were not assembled");
    }
}
