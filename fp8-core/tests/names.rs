//! Names as users and files write them.

use fp8_core::{
    AmaxCompute, Cast, CustomAmax, DelayedRule, Format, FormatPair, Granularity, Overflow,
    Rounding, ScaleRounding, StochasticKey,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::json;
use std::{fmt, str::FromStr};

fn json_round_trip<T: Serialize + DeserializeOwned + PartialEq + fmt::Debug>(
    value: &T,
    expected: serde_json::Value,
) {
    assert_eq!(serde_json::to_value(value).unwrap(), expected, "{value:?}");
    assert_eq!(&serde_json::from_value::<T>(expected).unwrap(), value);
}

/// `Display`, `FromStr` and, for plain names, serde agree.
fn text<T>(value: T, name: &str)
where
    T: fmt::Display + fmt::Debug + FromStr<Err: fmt::Debug> + PartialEq,
{
    assert_eq!(value.to_string(), name);
    assert_eq!(name.parse::<T>().unwrap(), value);
}

#[test]
fn formats() {
    for format in Format::ALL {
        text(format, format.name());
        json_round_trip(&format, json!(format.name()));
        assert_eq!(format.name().to_uppercase().parse(), Ok(format));
        assert_eq!(
            format.pair().e4m3(),
            format.in_pair(format.pair()).pair().e4m3()
        );
    }
    assert_eq!("float8_e4m3fn".parse(), Ok(Format::E4M3));
    assert_eq!(
        serde_json::from_value::<Format>(json!("float8_e5m2fnuz")).unwrap(),
        Format::E5M2Fnuz
    );
    assert_eq!(Format::E5M2.in_pair(FormatPair::Fnuz), Format::E5M2Fnuz);
    let error = "e3m4".parse::<Format>().unwrap_err().to_string();
    assert_eq!(
        error,
        "unknown 8-bit format \"e3m4\"; the formats are e4m3, e5m2, e4m3fnuz, e5m2fnuz"
    );
    text(FormatPair::Ocp, "ocp");
    text(FormatPair::Fnuz, "fnuz");
    json_round_trip(&FormatPair::Fnuz, json!("fnuz"));
}

#[test]
fn granularities() {
    let blocks = Granularity::Blockwise { rows: 1, cols: 128 };
    for (granularity, name) in [
        (Granularity::Tensorwise, "tensorwise"),
        (Granularity::Rowwise, "rowwise"),
        (Granularity::Mx, "mx"),
        (blocks, "blockwise:1x128"),
    ] {
        text(granularity, name);
    }
    assert_eq!("axiswise".parse(), Ok(Granularity::Rowwise));
    assert_eq!(
        serde_json::from_value::<Granularity>(json!("axiswise")).unwrap(),
        Granularity::Rowwise
    );
    json_round_trip(&Granularity::Mx, json!("mx"));
    json_round_trip(&blocks, json!({"blockwise": {"rows": 1, "cols": 128}}));
    for wrong in ["blockwise:0x4", "blockwise:4", "columnwise", ""] {
        let error = wrong.parse::<Granularity>().unwrap_err().to_string();
        assert!(
            error.contains(&format!("{wrong:?}")) && error.contains("tensorwise"),
            "{error}"
        );
    }
    let empty = json!({"blockwise": {"rows": 0, "cols": 1}});
    let error = serde_json::from_value::<Granularity>(empty).unwrap_err();
    assert!(error.to_string().contains("integer `0`"), "{error}");
}

#[test]
fn casts() {
    let key = StochasticKey {
        seed: 1,
        step: 2,
        tensor: 3,
    };
    let stochastic = json!({"stochastic": {"seed": 1, "step": 2, "tensor": 3}});
    json_round_trip(&Rounding::Stochastic(key), stochastic.clone());
    for (rounding, name) in [
        (Rounding::NearestEven, "nearest_even"),
        (Rounding::TowardZero, "toward_zero"),
        (Rounding::NearestAway, "nearest_away"),
        (Rounding::TowardPositive, "toward_positive"),
        (Rounding::TowardNegative, "toward_negative"),
    ] {
        text(rounding, name);
        json_round_trip(&rounding, json!(name));
    }
    text(Rounding::Stochastic(StochasticKey::default()), "stochastic");
    text(Overflow::Saturate, "saturate");
    text(Overflow::NonFinite, "non_finite");
    json_round_trip(&Overflow::NonFinite, json!("non_finite"));
    let cast = Cast::new(Format::E5M2)
        .with_rounding(Rounding::Stochastic(key))
        .with_via_f16(true);
    json_round_trip(
        &cast,
        json!({"format": "e5m2", "rounding": stochastic, "overflow": "saturate", "via_f16": true}),
    );
    assert_eq!(
        serde_json::from_value::<Cast>(json!({"format": "e4m3"})).unwrap(),
        Cast::new(Format::E4M3)
    );
    let divides = json!({
        "format": "e4m3", "rounding": "nearest_even", "overflow": "saturate", "via_f16": false,
        "divides": true,
    });
    json_round_trip(&Cast::new(Format::E4M3).with_division(true), divides);
    assert_eq!("up".parse::<Rounding>().unwrap_err().name, "up");
    assert_eq!("clip".parse::<Overflow>().unwrap_err().name, "clip");
}

#[test]
fn delayed_rules() {
    text(AmaxCompute::Max, "max");
    text(AmaxCompute::MostRecent, "most_recent");
    text(ScaleRounding::Exact, "exact");
    text(ScaleRounding::PowerOfTwo, "power_of_two");
    let rule = DelayedRule::default()
        .with_margin(1)
        .with_amax_compute(AmaxCompute::MostRecent);
    json_round_trip(
        &rule,
        json!({"margin": 1, "amax_compute": "most_recent", "scale_rounding": "exact"}),
    );
    assert_eq!(
        serde_json::from_value::<DelayedRule>(json!({})).unwrap(),
        DelayedRule::default()
    );

    let custom = AmaxCompute::Custom(CustomAmax::new("mean", |_| 1.0));
    assert_eq!(custom.to_string(), "custom:mean");
    let error = serde_json::to_string(&custom).unwrap_err().to_string();
    assert_eq!(
        error,
        "the custom amax reduction \"mean\" is code and cannot be serialized; use max or most_recent"
    );
    let error = serde_json::from_value::<AmaxCompute>(json!("median"))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("median") && error.contains("max or most_recent"),
        "{error}"
    );
}
