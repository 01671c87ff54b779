//! Gives FP8 state to the layers of a model and reports the result for each.

mod cast_table;
mod layers;
mod operators;
mod options;
mod report;
mod state;
mod unmatched;

pub use cast_table::{CAST_TENSORS, CastRow, CastTable};
pub use options::{LayerChoice, PrepareOptions};
pub use report::{LayerReport, Note, Outcome, PrepareReport, Unmatched};

use crate::error::Result;
use crate::module::Fp8Module;
use layers::prepare_layers;
use operators::prepare_operators;
pub(crate) use unmatched::named;

/// Gives FP8 state to every linear layer and convolution that the options select, and to operators if they ask for it.
///
/// A weight that is also used by something other than a linear layer (a head tied to an embedding) stays in high precision: here,
/// in the export and when served. Layers that were prepared before keep their state unless they are skipped this time; their
/// recipes are set from the options again. Layers that are not prepared stay in high precision inside a guard. A warning says so,
/// once in a process and with the first three names: where a guard casts nothing; where layers that no preparation has seen run beside
/// prepared ones (those in a closure, or made afterwards); and where the guard's recipe casts operators that no preparation has seen or
/// left out.
///
/// # Errors
/// If the length of histories is out of range, or a tensor operation fails. A layer that cannot be converted is not an error: the
/// report says why, and names patterns that match no layer.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device};
/// use candle_nn::{VarBuilder, VarMap};
/// use fp8::{PrepareOptions, nn, prepare_fp8};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let model = vec![nn::linear(64, 32, vb.pp("up"))?, nn::linear(32, 10, vb.pp("head"))?];
/// let report = prepare_fp8(&model, &PrepareOptions::default().with_off("head")?)?;
/// assert_eq!(report.converted(), 1);
/// println!("{report}"); // a line for each layer
/// # Ok(()) }
/// ```
pub fn prepare_fp8<M: Fp8Module + ?Sized>(
    model: &M,
    options: &PrepareOptions,
) -> Result<PrepareReport> {
    options.check()?;
    let named = named(model, options);
    let layers = prepare_layers(model, options)?;
    let mut report = prepare_operators(model, layers)?;
    report.unmatched = named.unmatched;
    if options.auto.is_some() {
        report.warnings = options.timings.warnings();
    }
    report.high_precision_anyway = named.high_precision_anyway.into_iter().collect();
    for unmatched in &report.unmatched {
        tracing::warn!("prepare_fp8: {unmatched}");
    }
    Ok(report)
}
