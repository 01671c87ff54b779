//! What can be checked without a GPU: that the launches and the PTX agree.

use super::kernels::{Kernel, Module};
use std::collections::{BTreeMap, BTreeSet};

const OWN_LISTS: &[&[&[Kernel]]] = &[
    super::scales::AMAX_KERNELS,
    super::scales::SCALE_KERNELS,
    super::cast::CAST_KERNELS,
    super::made::MADE_KERNELS,
    super::codes::CODE_KERNELS,
    super::state::STATE_KERNELS,
    super::epilogue::EPILOGUE_KERNELS,
    super::trial::TRIAL_KERNELS,
    super::adamw::ADAMW_KERNELS,
    super::adamw::ADAMW_CODED_KERNELS,
    super::adamw_table::ADAMW_TABLE_KERNELS,
    super::attention::ATTENTION[0],
    super::attention::ATTENTION[1],
    super::attention::ATTENTION[2],
    super::attention::ATTENTION[3],
    super::attention::ATTENTION[4],
    super::attention::ATTENTION[5],
    super::attention::ATTENTION[6],
    super::attention::ATTENTION[7],
];

/// Every declared kernel.
pub(super) fn all() -> Vec<&'static Kernel> {
    let lists = OWN_LISTS.iter().chain(super::ops::KERNELS);
    lists
        .flat_map(|list| list.iter().copied().flatten())
        .collect()
}

/// The modules of these kernels, each once.
pub(super) fn modules(kernels: &[&'static Kernel]) -> BTreeMap<&'static str, &'static Module> {
    kernels.iter().map(|k| (k.module.name, k.module)).collect()
}

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
    let kernels = all();
    let mut declared = BTreeSet::new();
    for kernel in &kernels {
        assert!(
            declared.insert(kernel.name),
            "{} is declared twice",
            kernel.name
        );
        let (_, ptx) = kernel.module.ptx;
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
    // And every compiled kernel is launched.
    for module in modules(&kernels).values() {
        for name in entries(module.ptx.1).keys() {
            assert!(declared.contains(name.as_str()), "{name} is never launched");
        }
    }
}

#[test]
fn activations_have_the_kernels_of_their_names() -> crate::base::error::Result<()> {
    for activation in crate::base::activation::Activation::all() {
        let kernels = super::ops::activation::FORWARD.of(activation);
        let kernel = kernels.of("activation", candle_core::DType::F16)?;
        let expected = format!("fp8_activation_{activation}_f16");
        assert_eq!(kernel.name, expected);
    }
    Ok(())
}

/// The PTX has the instructions that the fast paths rely on.
#[test]
fn ptx_has_the_chips_own_conversions() {
    let (arch, ptx) = super::kernels::CAST.ptx;
    if arch == "80" || ptx.starts_with("// stand-in") {
        println!("skipped: the kernels were compiled by a stand-in, or for chips without these");
        return;
    }
    assert!(ptx.contains("cvt.rn.satfinite.e4m3x2.f32"));
    assert!(ptx.contains("cvt.rn.satfinite.e5m2x2.f32"));
    assert!(
        ptx.contains("ld.global.v4.u32")
            || ptx.contains("ld.global.v4.b32")
            || ptx.contains("ld.global.nc.v4")
    );
    assert!(ptx.contains("st.global.v4"));
}
