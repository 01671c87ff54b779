//! Sizes and vocabularies of `examples/train_gpt`.

use crate::choice;
use crate::data::Data;
use crate::gpt::{Gpt, GptConfig};
use crate::size::{self, SizeError};
use crate::vocabulary::{BYTES, FILE, Vocabulary};
use candle_core::{DType, Device};
use candle_nn::{VarBuilder, VarMap};
use fp8::RecipeName;
use std::fs;
use std::path::Path;

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn config(hidden: usize, layers: usize, heads: usize, context: usize, vocab: usize) -> GptConfig {
    let mut config = GptConfig {
        hidden_size: hidden,
        ..GptConfig::default()
    };
    config.num_layers = layers;
    config.num_heads = heads;
    config.context = context;
    config.vocab_size = vocab;
    config
}

#[test]
fn sizes_that_are_refused_say_why() {
    let refused = |hidden, layers, heads, context, vocab| {
        size::check(&config(hidden, layers, heads, context, vocab)).unwrap_err()
    };
    for (flag, error) in [
        ("--hidden", refused(0, 1, 1, 1, 256)),
        ("--layers", refused(2, 0, 1, 1, 256)),
        ("--heads", refused(2, 1, 0, 1, 256)),
        ("--context", refused(2, 1, 1, 0, 256)),
    ] {
        assert_eq!(error, SizeError::Zero { flag });
    }
    for (hidden, heads) in [(10, 4), (12, 4), (2, usize::MAX)] {
        let error = refused(hidden, 1, heads, 1, 256);
        assert_eq!(error, SizeError::Heads { hidden, heads });
        assert!(
            error
                .to_string()
                .contains(&format!("--hidden {hidden} --heads {heads}"))
        );
    }
    for vocab in [0, 255, usize::MAX] {
        assert_eq!(refused(8, 1, 4, 1, vocab), SizeError::Vocab { vocab });
    }
    for (hidden, layers) in [(usize::MAX - 1, 1), (8, usize::MAX), (1 << 20, 1)] {
        let error = refused(hidden, layers, 1, 1, 256);
        assert!(matches!(error, SizeError::TooLarge { .. }), "{error}");
    }
    let context = usize::MAX;
    assert_eq!(
        refused(8, 1, 1, context, 256),
        SizeError::Context { context }
    );
}

/// Sizes that no file can hold are refused before training, which would be wasted.
#[test]
fn sizes_that_a_recipe_cannot_be_saved_in_are_refused() {
    let check = |hidden, recipes: &[&str]| {
        let recipes: Vec<String> = recipes.iter().map(|recipe| recipe.to_string()).collect();
        size::check_groups(hidden, &recipes)
    };
    for (recipe, group) in [("blockwise", 128), ("mxfp8", 32)] {
        check(group * 2, &["f32", recipe]).unwrap();
        // This recipe is trained, but another one is saved.
        check(group + 16, &["f32", "delayed", recipe]).unwrap();
        check(group + 16, &[recipe, "rowwise", "scaled_fp8"]).unwrap();
        let hidden = group + 16;
        let refused = SizeError::Groups {
            hidden,
            recipe: recipe.to_string(),
            group,
        };
        assert_eq!(check(hidden, &["f32", recipe]), Err(refused));
    }
}

#[test]
fn parameters_are_those_of_the_model() -> Outcome {
    for config in [GptConfig::default(), config(24, 3, 2, 7, 300)] {
        let vars = VarMap::new();
        Gpt::new(
            &config,
            VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu),
        )?;
        let count: usize = vars.all_vars().iter().map(|var| var.elem_count()).sum();
        assert_eq!(size::check(&config)?, count as u64, "{config:?}");
    }
    Ok(())
}

const TEXT: &[u8] = b"the cat, the hat; the mat\n\n    the rat and \xff\xfe the bat ==== ====";

#[test]
fn frequent_pairs_become_tokens_and_any_bytes_come_back() -> Outcome {
    let bytes = Vocabulary::learn(TEXT, BYTES)?;
    assert!(bytes.is_bytes());
    assert_eq!(bytes.encode(b"a\xff"), [97, 255]);

    let merged = Vocabulary::learn(TEXT, BYTES + 4)?;
    // "==" occurs 6 times, "at", "he" and "th" 5 times; of equal counts the smaller pair comes first.
    assert_eq!(merged.decode(&[256]), b"==");
    assert_eq!(merged.decode(&[257]), b"at");
    assert_eq!(merged.decode(&[258]), b"he");
    assert_eq!(merged.decode(&[259]), b"the");
    assert_eq!(merged.encode(b"the that"), [259, 32, 116, 104, 257]);
    for text in [TEXT, b"", b" ", b"   x", b"==== a", &[0, 255, 128, 10]] {
        let tokens = merged.encode(text);
        assert_eq!(merged.decode(&tokens), text);
        assert!(tokens.iter().all(|&token| (token as usize) < merged.len()));
    }
    assert!(merged.encode(TEXT).len() < TEXT.len());
    assert!(merged.decode(&[u32::MAX]).is_empty());
    // The result is reproducible, and larger vocabularies begin with the same merges.
    assert_eq!(Vocabulary::learn(TEXT, BYTES + 4)?, merged);
    let larger = Vocabulary::learn(TEXT, BYTES + 5)?;
    assert_eq!(larger.decode(&[259, 260]), b"the the");
    // Two more occur twice: two spaces, and "====".
    let error = Vocabulary::learn(TEXT, 4096).unwrap_err().to_string();
    assert!(error.contains("--vocab 4096: only 263"), "{error}");
    Ok(())
}

#[test]
fn a_vocabulary_is_saved_and_a_file_of_another_refused() -> Outcome {
    let dir = tempfile::tempdir()?;
    assert!(Vocabulary::open(dir.path(), BYTES)?.is_bytes());
    let refused = |size: usize, part: &str| {
        let error = Vocabulary::open(dir.path(), size).unwrap_err();
        let error = format!("{error:#}");
        assert!(error.contains(FILE) && error.contains(part), "{error}");
    };
    refused(259, "reading");
    let path = dir.path().join(FILE);
    let merged = Vocabulary::learn(TEXT, 259)?;
    fs::write(&path, serde_json::to_string(&merged)?)?;
    let opened = Vocabulary::open(dir.path(), 259)?;
    assert_eq!(opened, merged);
    assert_eq!(opened.encode(TEXT), merged.encode(TEXT));
    refused(260, "259 tokens, where the model has 260");
    fs::write(&path, r#"{"merges": [[97, 256]]}"#)?;
    refused(257, "come later");
    fs::write(&path, "{")?;
    refused(257, "not the merges");
    // Six doublings would be 64 bytes.
    let doubled: Vec<[u32; 2]> = [97, 256, 257, 258, 259, 260].map(|t| [t, t]).to_vec();
    fs::write(&path, serde_json::json!({ "merges": doubled }).to_string())?;
    refused(262, "64 bytes, more than 32");
    Ok(())
}

#[test]
fn data_are_tokens_of_the_training_text() -> Outcome {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("text");
    fs::write(&path, TEXT.repeat(20))?;
    let data = Data::load(Some(&path), 260, 2, 8)?;
    let (inputs, targets) = data.train_batch(0, 0, 2, 8)?;
    assert_eq!(inputs.dims(), [2, 8]);
    let (inputs, targets) = (inputs.to_vec2::<u32>()?, targets.to_vec2::<u32>()?);
    assert_eq!(inputs[0][1..], targets[0][..7]);
    let window = data.vocabulary.decode(&inputs[1]);
    let text = TEXT.repeat(2);
    assert!(text.windows(window.len()).any(|part| part == window));
    assert!(
        data.vocabulary
            .encode(TEXT)
            .iter()
            .any(|&token| token >= 256)
    );

    let refused = |batch: usize, context: usize| {
        let error = Data::load(Some(Path::new(&path)), 260, batch, context).err();
        error.expect("an error").to_string()
    };
    assert!(refused(2, 2000).contains("a smaller --context or --batch"));
    assert!(refused(usize::MAX, 8).contains("too few"));
    Ok(())
}

/// What `auto` left in high precision is left again when the run goes on, without a measurement.
#[test]
fn a_resumed_run_keeps_the_choice_of_layers() -> Outcome {
    let config = config(24, 2, 2, 7, 300);
    let model = || {
        let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
        Gpt::new(&config, vb)
    };
    let recipe = RecipeName::Delayed.into();
    let every = choice::prepare("delayed", &recipe, &model()?, 7, None)?;
    assert_eq!((every.converted(), every.skipped()), (13, 0));
    let slow: Vec<String> = [0, 5, 12]
        .map(|i| every.layers[i].path.clone().unwrap_or_default())
        .into();
    let report = choice::prepare(choice::AUTO, &recipe, &model()?, 7, Some(&slow))?;
    assert_eq!((report.converted(), report.skipped()), (10, 3));
    assert_eq!(choice::slow(&report), slow);
    Ok(())
}
