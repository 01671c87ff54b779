//! Generation for many prompts at once.

use crate::toy::{Toy, VOCAB};
use candle_core::{DType, Device};
use fp8::models::{
    Error, FinishReason, GenerationOptions, Llama, LlamaConfig, Output, Result, Stop, TextError,
    Token, generate,
};
use std::ops::ControlFlow;

fn prompts() -> Vec<Vec<u32>> {
    // Lengths 3, 1, 3, 7, 1; two are equal.
    let texts: [&[u32]; 5] = [&[1, 2, 3], &[9], &[4, 5, 6], &[1, 2, 3, 4, 5, 6, 7], &[9]];
    texts.map(<[u32]>::to_vec).to_vec()
}

fn all(prompts: &[Vec<u32>], options: &GenerationOptions) -> Result<(Vec<Output>, Vec<Token>)> {
    let mut tokens = vec![];
    let outputs = generate(&Toy::new(), prompts, options, &mut |token| {
        tokens.push(token);
        ControlFlow::Continue(())
    })?;
    Ok((outputs, tokens))
}

#[test]
fn each_prompt_gets_what_it_gets_alone() -> Result<()> {
    let options = GenerationOptions::default()
        .with_max_new_tokens(40)
        .with_repetition_penalty(1.3, Some(5))
        .with_stop_tokens([11, 30, 31]);
    let (together, _) = all(&prompts(), &options)?;
    assert_eq!(together.len(), prompts().len());
    for (prompt, output) in prompts().iter().zip(&together) {
        let (alone, _) = all(std::slice::from_ref(prompt), &options)?;
        assert_eq!(*output, alone[0], "{prompt:?}");
    }
    assert_ne!(together[0], together[2]);
    let ended = |reason| together.iter().filter(|x| x.finish == reason).count();
    assert!(ended(FinishReason::StopToken) > 0, "{together:?}");
    Ok(())
}

#[test]
fn tokens_are_reported_once_and_in_order() -> Result<()> {
    let options = GenerationOptions::default()
        .with_max_new_tokens(12)
        .with_stop_tokens([11, 30, 31, 8, 20, 21]);
    let (outputs, tokens) = all(&prompts(), &options)?;
    for (prompt, output) in outputs.iter().enumerate() {
        let own: Vec<&Token> = tokens.iter().filter(|t| t.prompt == prompt).collect();
        let ids: Vec<u32> = own.iter().map(|token| token.id).collect();
        assert_eq!(ids, output.tokens);
        assert!(own.iter().enumerate().all(|(i, token)| token.index == i));
        let last = own[own.len() - 1];
        assert_eq!(last.finish, Some(output.finish));
        let ended_before = own[..own.len() - 1].iter().any(|t| t.finish.is_some());
        assert!(!ended_before, "{own:?}");
    }
    Ok(())
}

#[test]
fn a_stop_token_is_the_last_one() -> Result<()> {
    let (free, _) = all(
        &[vec![7]],
        &GenerationOptions::default().with_max_new_tokens(10),
    )?;
    assert_eq!(free[0].finish, FinishReason::Length);
    assert_eq!(free[0].tokens.len(), 10);
    let stop = free[0].tokens[4];
    let first = free[0].tokens.iter().position(|id| *id == stop);
    let options = GenerationOptions::default().with_stop_tokens([stop]);
    let (ended, _) = all(&[vec![7]], &options)?;
    assert_eq!(ended[0].finish, FinishReason::StopToken);
    assert_eq!(Some(ended[0].tokens.len() - 1), first);
    assert_eq!(ended[0].tokens[..], free[0].tokens[..ended[0].tokens.len()]);
    Ok(())
}

#[test]
fn sampled_rows_draw_for_themselves() -> Result<()> {
    let options = GenerationOptions::default()
        .with_temperature(1.0)
        .with_seed(5)
        .with_max_new_tokens(30);
    let (outputs, _) = all(&prompts(), &options)?;
    assert_ne!(outputs[1], outputs[4], "equal prompts, other draws");
    assert_eq!(all(&prompts(), &options)?.0, outputs);
    let second = all(&prompts()[1..2], &options.clone().with_seed(6))?.0;
    assert_eq!(second[0], outputs[1]);
    Ok(())
}

#[test]
fn the_caller_ends_a_row_or_all() -> Result<()> {
    let options = GenerationOptions::default().with_max_new_tokens(6);
    let prompts = vec![vec![1], vec![2], vec![3, 4]];
    let row = generate(
        &Toy::new(),
        &prompts,
        &options,
        &mut |token| match token.prompt == 0 && token.index == 2 {
            true => ControlFlow::Break(Stop::Row),
            false => ControlFlow::Continue(()),
        },
    )?;
    let lengths: Vec<usize> = row.iter().map(|output| output.tokens.len()).collect();
    assert_eq!(lengths, [3, 6, 6]);
    assert_eq!(row[0].finish, FinishReason::Stopped);
    assert_eq!(row[1].finish, FinishReason::Length);

    let all = generate(
        &Toy::new(),
        &prompts,
        &options,
        &mut |token| match token.prompt == 1 && token.index == 1 {
            true => ControlFlow::Break(Stop::All),
            false => ControlFlow::Continue(()),
        },
    )?;
    let lengths: Vec<usize> = all.iter().map(|output| output.tokens.len()).collect();
    assert_eq!(lengths, [2, 2, 0]);
    assert!(
        all.iter()
            .all(|output| output.finish == FinishReason::Stopped)
    );
    Ok(())
}

#[test]
fn no_prompt_or_no_new_tokens_gives_no_tokens() -> Result<()> {
    let options = GenerationOptions::default().with_max_new_tokens(0);
    let (outputs, tokens) = all(&prompts(), &options)?;
    assert!(tokens.is_empty());
    assert!(
        outputs
            .iter()
            .all(|x| x.tokens.is_empty() && x.finish == FinishReason::Length)
    );
    assert!(all(&[], &GenerationOptions::default())?.0.is_empty());
    Ok(())
}

#[test]
fn invalid_prompts_are_refused_before_the_model_runs() {
    let options = GenerationOptions::default().with_max_new_tokens(5);
    let refused = |prompts: &[Vec<u32>], options: &GenerationOptions| match all(prompts, options) {
        Err(Error::Text(error)) => error,
        other => panic!("{prompts:?}: {other:?}"),
    };
    let empty = refused(&[vec![1], vec![]], &options);
    assert!(
        matches!(empty, TextError::EmptyPrompt { prompt: 1 }),
        "{empty}"
    );
    let unknown = refused(&[vec![1, VOCAB as u32]], &options);
    assert!(
        matches!(unknown, TextError::UnknownToken { token: 50, .. }),
        "{unknown}"
    );
    let small = options.clone().with_cache_capacity(Some(7));
    let error = refused(&[vec![1], vec![1, 2, 3]], &small);
    let fits = matches!(
        error,
        TextError::CacheTooSmall {
            prompt: 1,
            tokens: 3,
            capacity: 7,
            ..
        }
    );
    assert!(fits, "{error}");
    assert!(all(&[vec![1, 2]], &small).is_ok());
    let endless = options.clone().with_max_new_tokens(usize::MAX);
    let error = refused(&[vec![1]], &endless);
    assert!(matches!(error, TextError::CacheTooSmall { .. }), "{error}");
    let error = refused(&[vec![1]], &options.with_temperature(f64::NAN));
    assert!(
        matches!(
            error,
            TextError::Option {
                option: "temperature",
                ..
            }
        ),
        "{error}"
    );
}

/// Also with a real network whose inputs have a scale per token, so that rows are independent.
#[test]
fn each_prompt_of_an_fp8_model_gets_what_it_gets_alone() -> Result<()> {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let dir = dir.join("tests/golden/families/ct_channel_token_bf16");
    let text = std::fs::read_to_string(dir.join("config.json")).expect("a configuration");
    let config = serde_json::from_str(&text).expect("JSON");
    let config = LlamaConfig::parse(dir.join("config.json"), &config)?;
    let files = [dir.join("model.safetensors")];
    let vb = fp8::load::var_builder(&files, DType::F32, &Device::Cpu)?;
    let model = Llama::new(&config, vb)?;
    let options = GenerationOptions::default().with_max_new_tokens(20);
    let run = |prompts: &[Vec<u32>]| {
        generate(
            &model,
            prompts,
            &options,
            &mut |_| ControlFlow::Continue(()),
        )
    };
    let together = run(&prompts())?;
    assert_eq!(together.len(), prompts().len());
    for (prompt, output) in prompts().iter().zip(&together) {
        assert_eq!(*output, run(std::slice::from_ref(prompt))?[0], "{prompt:?}");
    }
    Ok(())
}
