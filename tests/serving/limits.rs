//! What a server refuses, and what waits.

use crate::gated::{Gated, POSITIONS, VOCAB, expected};
use fp8::models::{CausalLm, Error, FinishReason, GenerationOptions};
use fp8::serving::{Reply, Server, ServerOptions, ServingError};

fn new_tokens(count: usize) -> GenerationOptions {
    GenerationOptions::default().with_max_new_tokens(count)
}

/// A server whose only place is taken by the reply.
fn busy(model: &std::sync::Arc<Gated>, options: ServerOptions) -> (Server, Reply) {
    let server = model.server(&options);
    let running = server.submit([1], &new_tokens(4)).expect("room");
    model.arrived(1);
    (server, running)
}

/// The table in `docs/guide/serving.md`.
#[test]
fn defaults_are_those_of_the_guide() {
    let options = ServerOptions::default();
    assert_eq!((options.max_running, options.max_waiting), (8, 64));
    assert_eq!((options.prompt_part, options.max_cache_bytes), (32, None));
}

#[test]
fn a_full_queue_refuses_and_keeps_the_others() -> Result<(), ServingError> {
    let model = Gated::closed();
    let options = ServerOptions::default()
        .with_max_running(1)
        .with_max_waiting(2);
    let (server, running) = busy(&model, options);
    let waiting = [2, 3].map(|id| server.submit([id], &new_tokens(2)));
    let refused = server.submit([4], &new_tokens(2));
    assert!(matches!(
        refused,
        Err(ServingError::QueueFull { waiting: 2 })
    ));
    let load = server.load();
    assert_eq!((load.waiting, load.running), (2, 1));

    // One that is cancelled gives up its place.
    let [second, third] = waiting;
    let (second, third) = (second?, third?);
    second.cancel();
    let fourth = server.submit([4], &new_tokens(2))?;
    model.let_all();
    assert_eq!(running.wait()?.1, expected(&model, &[1], 4));
    let (_, tokens, finish) = second.wait()?;
    assert_eq!((tokens.len(), finish), (0, FinishReason::Stopped));
    assert_eq!(third.wait()?.1, expected(&model, &[3], 2));
    assert_eq!(fourth.wait()?.1, expected(&model, &[4], 2));
    Ok(())
}

#[test]
fn caches_stay_within_their_limit() -> Result<(), ServingError> {
    let model = Gated::closed();
    let token = model.new_cache(1, 1)?.size_in_bytes();
    let options = ServerOptions::default().with_max_cache_bytes(Some(20 * token));
    let server = model.server(&options);
    let large = server.submit([1; 11], &new_tokens(10));
    let error = large.expect_err("it never fits").to_string();
    assert!(
        error.contains("21 tokens") && error.contains(&(20 * token).to_string()),
        "{error}"
    );

    let first = server.submit([1; 10], &new_tokens(5))?; // 15 tokens
    model.arrived(1);
    let second = server.submit([2; 4], &new_tokens(2))?; // 6: one too many beside it
    let third = server.submit([3], &new_tokens(1))?; // 2 would fit, but it came later
    model.permit(2);
    model.arrived(3);
    let load = server.load();
    assert_eq!((load.waiting, load.running), (2, 1));
    assert_eq!(load.cache_bytes, 15 * token);
    model.let_all();
    assert_eq!(first.wait()?.1.len(), 5);
    assert_eq!(second.wait()?.1.len(), 2);
    assert_eq!(third.wait()?.1.len(), 1);
    Ok(())
}

#[test]
fn invalid_requests_are_refused_at_once() {
    let model = Gated::closed(); // it never computes
    let server = model.server(&ServerOptions::default());
    let refused = |prompt: Vec<u32>, options: GenerationOptions| match server
        .submit(prompt, &options)
        .expect_err("it is invalid")
    {
        ServingError::Model(error) => match &*error {
            Error::Text(error) => error.to_string(),
            error => panic!("{error}"),
        },
        error => panic!("{error}"),
    };
    assert!(refused(vec![], new_tokens(1)).contains("no tokens"));
    let unknown = refused(vec![1, VOCAB as u32], new_tokens(1));
    assert!(unknown.contains(&VOCAB.to_string()), "{unknown}");
    let long = refused(vec![1; POSITIONS + 1], new_tokens(1));
    assert!(long.contains("201") && long.contains("200"), "{long}");
    let options = new_tokens(1).with_top_p(Some(2.));
    assert!(refused(vec![1], options).contains("top_p"));
    let options = new_tokens(10).with_cache_capacity(Some(5));
    assert!(refused(vec![1], options).contains('5'));

    let stop = new_tokens(1).with_stop_strings(["x".to_string()]);
    let error = server.submit([1], &stop).expect_err("no tokenizer");
    assert!(matches!(error, ServingError::NoTokenizer { .. }), "{error}");
    let error = server
        .submit_text("x", &new_tokens(1))
        .expect_err("no tokenizer");
    assert!(matches!(error, ServingError::NoTokenizer { .. }), "{error}");
    assert!(model.calls().is_empty());

    let options = ServerOptions::default().with_prompt_part(0);
    let error = Server::start(model, &options).expect_err("no part");
    let named = matches!(
        error,
        ServingError::Option {
            option: "prompt_part",
            ..
        }
    );
    assert!(named, "{error}");
}

#[test]
fn a_request_ends_at_its_last_token_or_position() -> Result<(), ServingError> {
    let model = Gated::open();
    let server = model.server(&ServerOptions::default());
    let (_, tokens, finish) = server.submit([1], &new_tokens(0))?.wait()?;
    assert_eq!((tokens.len(), finish), (0, FinishReason::Length));
    let (_, tokens, finish) = server.submit(vec![1; 197], &new_tokens(50))?.wait()?;
    assert_eq!((tokens.len(), finish), (3, FinishReason::Positions));
    let free = expected(&model, &[9], 8);
    let stop = free[5];
    let place = free.iter().position(|id| *id == stop);
    let options = new_tokens(8).with_stop_tokens([stop]);
    let (_, tokens, finish) = server.submit([9], &options)?.wait()?;
    assert_eq!(Some(tokens.len() - 1), place);
    assert_eq!(finish, FinishReason::StopToken);
    Ok(())
}
