//! A recipe in JSON.

use fp8::config::Recipe;

pub fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let _ = text.parse::<Recipe>();
    let Ok(recipe) = serde_json::from_str::<Recipe>(text) else {
        return;
    };
    let _ = recipe.to_string();
    if recipe.resolve().is_err() {
        return;
    }
    let json = serde_json::to_string(&recipe).unwrap();
    let again: Recipe = serde_json::from_str(&json).unwrap();
    assert_eq!(again, recipe, "{json}");
}

pub fn seeds() -> Vec<Vec<u8>> {
    use fp8::config::{CastConfig, DelayedFormat, Fp8LinearConfig, InitialScale};
    use fp8::fp8_core::{AmaxCompute, Format, FormatPair, ScaleRounding};
    use fp8::{DelayedScaling, RecipeName};
    let delayed = DelayedScaling::default()
        .with_margin(-3)
        .with_format(DelayedFormat::E5m2)
        .with_amax_history_len(16)
        .with_amax_compute(AmaxCompute::MostRecent)
        .with_scale_rounding(ScaleRounding::PowerOfTwo)
        .with_initial(InitialScale::FirstBatch)
        .with_reduce_amax(false);
    let linear = Fp8LinearConfig::default()
        .with_input(CastConfig::dynamic_blockwise(1, 128))
        .with_weight(CastConfig::dynamic_blockwise(128, 128).with_format(Format::E5M2))
        .with_input_for_grad_weight(Some(CastConfig::disabled()))
        .with_format_pair(FormatPair::Fnuz);
    let mut recipes: Vec<Recipe> = vec![delayed.into(), linear.into()];
    recipes.push(Fp8LinearConfig::from_recipe_name(RecipeName::RowwiseWithGwHp).into());
    recipes.push(RecipeName::Rowwise.into());
    let json = |recipe: &Recipe| serde_json::to_vec(recipe).unwrap();
    let mut seeds: Vec<Vec<u8>> = recipes.iter().map(json).collect();
    seeds.push(b"delayed".to_vec());
    seeds
}
