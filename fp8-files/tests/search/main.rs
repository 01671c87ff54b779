//! The search for codes, against its definition in f64.

mod case;
mod reference;

use candle_core::{DType, Device, Tensor};
use case::{Case, values};
use fp8_core::{Cast, Contraction, Format, Granularity, encode};
use fp8_files::Error;
use fp8_files::scheme::{InputScheme, LayerScheme};
use fp8_files::search::{
    InputProducts, PreparedInputs, SearchOptions, inverse_shift, search_weight, shifted,
    shifts_exactly, shifts_to_try,
};
use proptest::prelude::*;
use reference::reference;

#[test]
fn codes_are_those_of_the_definition() {
    // More features than a block of the fast one has.
    for (granularity, k, group) in [(Granularity::Rowwise, 130, 130), (Granularity::Mx, 128, 32)] {
        let case = Case::new(300, k, 6, 7);
        let found = case.search(granularity);
        let scales = values(found.codes.dequant_scale());
        let expected = reference(&case, &scales, group);
        let got = values(&found.codes.dequantize(DType::F32).unwrap());
        let equal = got
            .iter()
            .zip(&expected)
            .filter(|(a, b)| (*a - *b).abs() < 1e-5);
        // Ties to rounding may go either way, and what follows with them.
        assert!(equal.count() * 100 >= got.len() * 97, "{granularity}");
        let target = case.target();
        let (a, b) = (case.error(&got, &target), case.error(&expected, &target));
        assert!((a - b).abs() < 0.01 * b, "{granularity}: {a} {b}");
    }
}

#[test]
fn codes_are_quotients_by_the_scale_that_was_found() {
    // The scale of this amax is exactly 7/1024, and products with its reciprocal are above ties.
    const SCALE: f64 = 7. / 1024.;
    let units = [
        448., -416., 384., -352., 320., 288., -256., 240., 224., -208., 192., 176., 160., -144.,
        128.,
    ];
    let (k, ties) = (units.len() + 1, [(116., 112.), (-100., -96.)]);
    let rows = ties.map(|(tie, _)| units.into_iter().chain([tie]));
    let weight = rows.into_iter().flatten().map(|unit| unit * SCALE);
    // Inputs that have nothing in common: no weight makes up for another one.
    let inputs: Vec<f64> = (0..k * k)
        .map(|i| f64::from(u8::from(i % (k + 1) == 0)))
        .collect();
    let case = Case {
        tokens: k,
        k,
        n: ties.len(),
        meant: inputs.clone(),
        multiplied: inputs,
        weight: weight.collect(),
    };
    let found = case.search(Granularity::Tensorwise).codes;
    assert_eq!(values(found.dequant_scale()), [SCALE]);
    let weight: Vec<f32> = case.weight.iter().map(|x| *x as f32).collect();
    let (cast, mut quotients) = (Cast::new(Format::E4M3).with_division(true), vec![0; 2 * k]);
    encode(&cast, &weight, SCALE as f32, &mut quotients);
    let codes = found.codes().flatten_all().unwrap();
    assert_eq!(codes.to_vec1::<u8>().unwrap(), quotients);
    let got = values(&found.dequantize(DType::F32).unwrap());
    for (row, (_, even)) in got.chunks(k).zip(ties) {
        assert_eq!(row[k - 1], even * SCALE);
    }
}

#[test]
fn outputs_are_much_closer_than_with_plain_rounding() {
    // Of plain rounding's error. The damping gives some of the gain away, most where groups of 32 have scales: 0.51 is left there.
    const LEFT: f64 = 0.6;
    let block = Granularity::Blockwise { rows: 16, cols: 16 };
    for granularity in [
        Granularity::Rowwise,
        Granularity::Tensorwise,
        Granularity::Mx,
        block,
    ] {
        let mut case = Case::new(800, 96, 40, 3);
        case.multiplied = case.meant.clone();
        let other = case.split_off(400);
        let found = case.search(granularity);
        assert!(
            found.error < LEFT * found.plain_error,
            "{granularity}: {found:?}"
        );
        // On other samples of the same kind, too.
        let got = values(&found.codes.dequantize(DType::F32).unwrap());
        let plain = other.true_error(&case.plain(granularity));
        let found = other.true_error(&got);
        assert!(found < LEFT * plain, "{granularity}: {found} {plain}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn the_error_is_never_larger_than_with_plain_rounding(
        seed in 1u64..u64::MAX,
        tokens in 1usize..60,
        groups in 1usize..3,
        n in 1usize..9,
        kind in 0usize..4,
        exact in any::<bool>(),
    ) {
        let granularity = [
            Granularity::Rowwise,
            Granularity::Tensorwise,
            Granularity::Mx,
            Granularity::Blockwise { rows: 4, cols: 16 },
        ][kind];
        // Fewer tokens than features, too.
        let mut case = Case::new(tokens, 32 * groups, n, seed);
        if exact {
            // The target is the weight itself.
            case.multiplied = case.meant.clone();
        }
        let found = case.search(granularity);
        prop_assert_eq!(found.codes.granularity(), granularity);
        prop_assert!(found.error <= found.plain_error);
        let got = values(&found.codes.dequantize(DType::F32).unwrap());
        let target = case.target();
        let plain = case.error(&case.plain(granularity), &target);
        let found = case.error(&got, &target);
        prop_assert!(found <= plain * (1. + 1e-4), "{} {}", found, plain);
    }
}

#[test]
fn zeros_in_a_block_do_not_stop_the_choice_of_the_other_scales() {
    let case = Case::new(400, 128, 8, 3);
    let mut zeros = Case::new(400, 128, 8, 3);
    zeros.weight[..32].fill(0.);
    let scales = |case: &Case| {
        let found = case.search(Granularity::Mx).codes;
        values(found.dequant_scale())
    };
    let (all, zeros) = (scales(&case), scales(&zeros));
    // Outputs without zeros have the scales that they had.
    assert_eq!(all[4..], zeros[4..]);
}

#[test]
fn weights_make_up_for_what_is_wrong_with_all_inputs() {
    let mut case = Case::new(800, 96, 40, 11);
    let larger = case.meant.iter().map(|x| f64::from((x * 1.1) as f32));
    case.multiplied = larger.collect();
    let other = case.split_off(400);
    let plain = other.true_error(&case.plain(Granularity::Rowwise));
    let error = |caution: f64| {
        let options = SearchOptions::new().with_caution(caution);
        let weight = case.tensor(&case.weight, case.n);
        let inputs = PreparedInputs::new(&case.products(), &options, "fc").unwrap();
        let found = search_weight(&weight, Granularity::Rowwise, &inputs, "fc");
        let codes = found.unwrap().codes;
        other.true_error(&values(&codes.dequantize(DType::F32).unwrap()))
    };
    let (bold, careful, never) = (error(0.1), error(10.), error(1e12));
    assert!(bold < 0.1 * plain, "{bold} {plain}");
    assert!(
        bold < careful && careful < never,
        "{bold} {careful} {never}"
    );
}

#[test]
fn features_without_inputs_and_equal_features_have_a_solution() {
    let mut case = Case::new(50, 64, 4, 9);
    for t in 0..case.tokens {
        for x in [&mut case.meant, &mut case.multiplied] {
            x[t * 64 + 5] = 0.;
            x[t * 64 + 6] = x[t * 64 + 7];
        }
    }
    let found = case.search(Granularity::Rowwise);
    assert!(found.error.is_finite() && found.error <= found.plain_error);
    // All inputs are zero: plain rounding is as good as any.
    case.meant.fill(0.);
    case.multiplied.fill(0.);
    let found = case.search(Granularity::Rowwise);
    let got = values(&found.codes.dequantize(DType::F32).unwrap());
    assert!(found.error.is_finite());
    let near = got
        .iter()
        .zip(&case.weight)
        .all(|(q, w)| (q - w).abs() <= 0.0626 * w.abs() + 0.002);
    assert!(near);
}

#[test]
fn errors_name_the_layer_and_what_is_wrong() {
    let weight = Tensor::ones((2, 8), DType::F32, &Device::Cpu).unwrap();
    let options = SearchOptions::new();
    let search = |weight: &Tensor, products: &InputProducts| {
        let inputs = PreparedInputs::new(products, &options, "a.fc");
        let found =
            inputs.and_then(|inputs| search_weight(weight, Granularity::Rowwise, &inputs, "a.fc"));
        found.unwrap_err()
    };
    let mut products = InputProducts::new(8).unwrap();
    let error = search(&weight, &products);
    assert!(matches!(&error, Error::Search { path, .. } if path == "a.fc"));
    assert!(error.to_string().contains("no token"), "{error}");

    let x = Tensor::ones((3, 8), DType::F32, &Device::Cpu).unwrap();
    let other = Tensor::ones((3, 7), DType::F32, &Device::Cpu).unwrap();
    assert!(matches!(
        products.add(&x, &other),
        Err(Error::TensorShape { .. })
    ));
    assert!(matches!(
        products.add(&other, &other),
        Err(Error::TensorShape { .. })
    ));
    products.add(&x, &x).unwrap();
    assert!(matches!(
        search(&other, &products),
        Error::TensorShape { .. }
    ));
    let infinite = (&weight / 0.).unwrap();
    let error = search(&infinite, &products);
    assert!(
        matches!(&error, Error::TensorValue { index: 0, .. }),
        "{error}"
    );
    products.add(&(&x / 0.).unwrap(), &x).unwrap();
    let error = search(&weight, &products);
    assert!(
        error.to_string().contains("sum of squares of its input 0"),
        "{error}"
    );
}

#[test]
fn codes_have_the_form_of_the_scheme() {
    let case = Case::new(40, 64, 6, 5);
    for granularity in [
        Granularity::Rowwise,
        Granularity::Tensorwise,
        Granularity::Mx,
    ] {
        let found = case.search(granularity).codes;
        let scheme = LayerScheme {
            weight: granularity,
            input: InputScheme::None,
        };
        let plain = scheme
            .quantize(&case.tensor(&case.weight, 6), None, false, "fc")
            .unwrap();
        assert_eq!(found.dims(), plain.dims());
        assert_eq!(found.dequant_scale().dims(), plain.dequant_scale().dims());
        assert_eq!(found.contraction(), Contraction::Cols);
        if granularity == Granularity::Mx {
            let scales = values(found.dequant_scale());
            assert!(scales.iter().all(|scale| scale.log2().fract() == 0.));
        }
    }
}

#[test]
fn shifts_move_what_is_larger_than_the_rest() {
    let lists = shifts_to_try(&[2., 1., 65536., 1., 0.], &[0.5, 0.25, 0.5, 0.25, 3.]);
    // All of it, so that inputs are as large as each other; the largest factor that moves half.
    let all = vec![0.5, 1., 1. / 65536., 1., 1.];
    assert!(lists.contains(&all), "{lists:?}");
    assert!(lists.iter().any(|list| list[2] == 1. / 256.), "{lists:?}");
    // A feature without inputs says nothing, and features of one size have no shift.
    assert!(lists.iter().all(|list| list[4] == 1.));
    assert!(shifts_to_try(&[3.; 4], &[0.1; 4]).is_empty());
    assert!(shifts_to_try(&[0.; 4], &[0.1; 4]).is_empty());
}

proptest! {
    #[test]
    fn shifted_inputs_and_weights_have_the_same_products(
        values in prop::collection::vec((-1e6f32..1e6, -1e6f32..1e6, -24i8..=24), 1..40),
    ) {
        let shift: Vec<f32> = values.iter().map(|value| f32::from(value.2).exp2()).collect();
        let x = Tensor::from_iter(values.iter().map(|value| value.0), &Device::Cpu).unwrap();
        let w = Tensor::from_iter(values.iter().map(|value| value.1), &Device::Cpu).unwrap();
        let product = |x: &Tensor, w: &Tensor| (x * w).unwrap().to_vec1::<f32>().unwrap();
        for dtype in [DType::F32, DType::BF16] {
            let (x, w) = (x.to_dtype(dtype).unwrap(), w.to_dtype(dtype).unwrap());
            prop_assert!(shifts_exactly(&x, &shift, dtype).unwrap());
            let moved = shifted(&x, &shift).unwrap();
            let divided = shifted(&w, &inverse_shift(&shift)).unwrap();
            prop_assert_eq!(moved.dtype(), dtype);
            let [x, w, moved, divided] = [x, w, moved, divided].map(|t| t.to_dtype(DType::F32).unwrap());
            prop_assert_eq!(product(&moved, &divided), product(&x, &w));
        }
    }
}

#[test]
fn a_shift_beyond_the_dtype_is_not_exact() {
    let x = Tensor::new(&[1f32, 2.5], &Device::Cpu).unwrap();
    for (exponents, exact) in [
        ([0f32, 14.], true),
        ([0., 15.], false),
        ([-24., 0.], true),
        ([0., -24.], false),
    ] {
        let shift = exponents.map(f32::exp2);
        assert_eq!(
            shifts_exactly(&x, &shift, DType::F16).unwrap(),
            exact,
            "{exponents:?}"
        );
        assert!(shifts_exactly(&x, &shift, DType::BF16).unwrap());
    }
}
