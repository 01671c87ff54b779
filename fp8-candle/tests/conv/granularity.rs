//! Scales along the sums: images are unfolded before they are cast.

use crate::reference::{Case, Data, plan, reference, sqnr};
use fp8_candle::{GemmPlan, LinearPlan, Quantizer, Result};
use fp8_core::{Format, Granularity};
use fp8_test_support::flat64;

fn cases() -> [Case; 4] {
    let case = Case::new(4, 24, 32, [14, 15]);
    [
        case,
        case.stride([2, 1]).dilation([1, 2]).groups(2),
        case.transposed(),
        case.stride([2, 2]).groups(2).transposed(),
    ]
}

#[test]
fn every_granularity_reaches_the_contract() -> Result<()> {
    let granularities = [
        Granularity::Rowwise,
        Granularity::Mx,
        Granularity::Blockwise { rows: 1, cols: 128 },
        // Blocks that end within a group: 16 and 12 channels of 9 taps.
        Granularity::Blockwise { rows: 32, cols: 32 },
    ];
    for case in cases() {
        let data = Data::new(&case, 1);
        let (x, weight, go) = (flat64(&data.x), flat64(&data.weight), flat64(&data.go));
        let exact = reference(&case, [[&x, &weight], [&go, &weight], [&go, &x]]);
        for granularity in granularities {
            let results = data.run(&case, None, &plan(Format::E4M3, granularity))?;
            let tensors = [&results.y, &results.grad_x, &results.grad_weight];
            for (tensor, exact) in tensors.into_iter().zip(&exact) {
                let sqnr = sqnr(tensor, &exact.exact);
                assert!(sqnr >= 28., "{granularity} {case:?}: {sqnr} dB");
            }
        }
    }
    Ok(())
}

/// Gradients without a plan are those of the values, whatever the output's cast.
#[test]
fn gradients_in_high_precision_are_exact() -> Result<()> {
    for case in cases() {
        let data = Data::new(&case, 2);
        let (x, weight, go) = (flat64(&data.x), flat64(&data.weight), flat64(&data.go));
        let exact = reference(&case, [[&x, &weight], [&go, &weight], [&go, &x]]);
        let rowwise = || Quantizer::dynamic(Format::E4M3, Granularity::Rowwise);
        let plan = LinearPlan::new("conv").with_output(GemmPlan::new(rowwise(), rowwise()));
        let results = data.run(&case, None, &plan)?;
        exact[1].check(&format!("grad_x of {case:?}"), &results.grad_x, true);
        exact[2].check(
            &format!("grad_weight of {case:?}"),
            &results.grad_weight,
            true,
        );
    }
    Ok(())
}
