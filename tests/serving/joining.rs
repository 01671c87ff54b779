//! Requests that join and leave between tokens.

use crate::gated::{Call, Gated, expected};
use fp8::models::{FinishReason, GenerationOptions};
use fp8::serving::{Server, ServerOptions, ServingError};

fn new_tokens(count: usize) -> GenerationOptions {
    GenerationOptions::default().with_max_new_tokens(count)
}

#[test]
fn requests_join_and_leave_between_tokens() -> Result<(), ServingError> {
    let model = Gated::closed();
    let server = model.server(&ServerOptions::default());
    let first = server.submit([1], &new_tokens(5))?;
    model.arrived(1); // its prompt
    let second = server.submit([2, 3], &new_tokens(2))?;
    model.let_all();
    let (_, tokens, finish) = first.wait()?;
    assert_eq!(tokens, expected(&model, &[1], 5));
    assert_eq!(finish, FinishReason::Length);
    assert_eq!(second.wait()?.1, expected(&model, &[2, 3], 2));
    // The second joins after the first one's second token, and leaves before its fourth.
    let calls = [
        Call::Part(1),
        Call::Step(1),
        Call::Part(2),
        Call::Step(2),
        Call::Step(1),
        Call::Step(1),
    ];
    assert_eq!(model.calls(), calls);
    Ok(())
}

#[test]
fn pieces_come_as_they_are_made() -> Result<(), ServingError> {
    let model = Gated::closed();
    let server = model.server(&ServerOptions::default());
    let mut reply = server.submit([1], &new_tokens(3))?;
    for (made, token) in expected(&model, &[1], 3).into_iter().enumerate() {
        model.permit(1);
        let piece = reply.next().expect("a piece")?;
        assert_eq!(piece.token, Some(token));
        assert_eq!(piece.finish.is_some(), made == 2);
        assert!(model.calls().len() == made + 1);
    }
    assert!(reply.next().is_none());
    Ok(())
}

#[test]
fn long_prompts_are_read_between_the_tokens_of_others() -> Result<(), ServingError> {
    let model = Gated::closed();
    let server = model.server(&ServerOptions::default().with_prompt_part(10));
    let short = server.submit([1], &new_tokens(6))?;
    model.arrived(1);
    let prompt: Vec<u32> = (0..35).collect();
    let long = server.submit(prompt.clone(), &new_tokens(2))?;
    model.let_all();
    assert_eq!(short.wait()?.1, expected(&model, &[1], 6));
    assert_eq!(long.wait()?.1, expected(&model, &prompt, 2));
    let calls = [
        Call::Part(1),
        Call::Step(1),
        Call::Part(10),
        Call::Step(1),
        Call::Part(10),
        Call::Step(1),
        Call::Part(10),
        Call::Step(1),
        Call::Part(5),
        Call::Step(2),
    ];
    assert_eq!(model.calls(), calls);
    Ok(())
}

#[test]
fn short_prompts_do_not_wait_for_a_long_one() -> Result<(), ServingError> {
    let model = Gated::closed();
    let server = model.server(&ServerOptions::default().with_prompt_part(10));
    let long = server.submit(vec![3; 100], &new_tokens(1))?;
    model.arrived(1);
    let short = server.submit([1, 2], &new_tokens(1))?;
    let other = server.submit([4, 5, 6], &new_tokens(1))?;
    model.let_all();
    long.wait()?;
    short.wait()?;
    other.wait()?;
    let calls = model.calls();
    // Both are read within the next two turns, and the long one takes ten.
    let early = |call| calls[..4].contains(&call);
    assert!(early(Call::Part(2)) && early(Call::Part(3)), "{calls:?}");
    Ok(())
}

/// Each caller has a thread, and all share the server by reference.
#[test]
fn callers_on_many_threads_get_their_own_tokens() {
    let model = Gated::open();
    let server: Server = model.server(&ServerOptions::default().with_max_running(3));
    std::thread::scope(|scope| {
        for client in 0..12u32 {
            let (server, model) = (&server, &model);
            scope.spawn(move || {
                for round in 0..5 {
                    let prompt = [client, round];
                    let count = 1 + (client as usize * 3 + round as usize) % 9;
                    let reply = server.submit(prompt, &new_tokens(count)).expect("room");
                    let (_, tokens, _) = reply.wait().expect("tokens");
                    assert_eq!(tokens, expected(model, &prompt, count));
                }
            });
        }
    });
    server.drain();
    let load = server.load();
    assert_eq!((load.waiting, load.running, load.cache_bytes), (0, 0, 0));
    let rows = |call: &Call| matches!(call, Call::Step(rows) if *rows > 3);
    assert!(!model.calls().iter().any(rows), "three run at once");
}
