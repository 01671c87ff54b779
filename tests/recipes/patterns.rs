//! Patterns of layer paths: what they match, and how patterns without a match are reported.

use candle_core::DType;
use candle_nn::{VarBuilder, VarMap};
use fp8::config::{CastConfig, ConfigError, Fp8LinearConfig, LayerFilter, SkipReason};
use fp8::{Note, Outcome, PrepareOptions, Recipe, RecipeName, prepare_fp8};
use fp8_test_support::{Mlp, device, fill};

fn mlp() -> Mlp {
    let vars = VarMap::new();
    let mlp = Mlp::new(VarBuilder::from_varmap(&vars, DType::F32, &device())).unwrap();
    fill(&vars, 1);
    mlp
}

#[test]
fn the_last_pattern_that_names_a_layer_counts() {
    let mlp = mlp();
    let options = PrepareOptions::default()
        .with_off("*")
        .unwrap()
        .with_recipe("up", RecipeName::Rowwise)
        .unwrap();
    let report = prepare_fp8(&mlp, &options).unwrap();
    let outcome = |path: &str| &report.get(path).unwrap().outcome;
    let rowwise = Note::OwnRecipe(Recipe::from(RecipeName::Rowwise).into());
    assert_eq!(*outcome("up"), Outcome::Converted(vec![rowwise]));
    let off = SkipReason::Off {
        pattern: "*".parse().unwrap(),
    };
    assert_eq!(*outcome("down"), Outcome::Skipped(off));
    assert_eq!(
        mlp.up.fp8_state().unwrap().own_recipe(),
        Some(RecipeName::Rowwise.into())
    );

    // A later setting replaces an earlier one, even with nothing.
    prepare_fp8(&mlp, &PrepareOptions::default()).unwrap();
    assert_eq!(mlp.up.fp8_state().unwrap().own_recipe(), None);
}

#[test]
fn patterns_that_name_no_layer_are_reported_with_near_names() {
    let options = PrepareOptions::default()
        .with_filter(LayerFilter::new().skip_paths(["lm_head"]))
        .with_off("dwon")
        .unwrap()
        .with_recipe("up.*", RecipeName::Rowwise)
        .unwrap()
        .with_recipe("u?", RecipeName::Rowwise)
        .unwrap();
    let report = prepare_fp8(&mlp(), &options).unwrap();
    let found: Vec<_> = report
        .unmatched
        .iter()
        .map(|unmatched| (unmatched.pattern.as_str(), unmatched.near.join(" ")))
        .collect();
    let expected = [("dwon", "down"), ("up.*", "up"), ("lm_head", "")];
    assert_eq!(
        found,
        expected.map(|(pattern, near)| (pattern, near.to_string()))
    );
    let text = report.to_string();
    assert!(
        text.contains("`dwon` names no layer; did you mean down?"),
        "{text}"
    );
}

#[test]
fn bad_patterns_and_recipes_are_refused_where_they_are_given() {
    let options = PrepareOptions::default;
    let error = options().with_off("blocks[").unwrap_err();
    assert!(matches!(&error, ConfigError::Pattern(error) if error.pattern == "blocks["));
    let error = options().with_off("").unwrap_err();
    assert!(matches!(&error, ConfigError::Pattern(error) if error.pattern.is_empty()));
    let bad = Fp8LinearConfig::default().with_input(CastConfig::disabled());
    let error = options().with_recipe("up", Recipe::from(bad)).unwrap_err();
    assert!(matches!(&error, ConfigError::LayerRecipe { pattern, .. } if pattern == "up"));
    assert!(error.to_string().contains("GEMM output"), "{error}");
}
