//! Requests that end early: cancelled, failed, or with the server.

use crate::gated::{Call, FAILS, Gated, NAN, NO_CACHE, PANICS, expected};
use fp8::models::{Error, FinishReason, GenerationOptions, TextError};
use fp8::serving::{Piece, Reply, ServerOptions, ServingError};

fn new_tokens(count: usize) -> GenerationOptions {
    GenerationOptions::default().with_max_new_tokens(count)
}

/// Pieces before the error, and the error; exactly one comes.
fn fails(reply: Reply) -> (Vec<Piece>, ServingError) {
    let (mut pieces, mut errors) = (vec![], vec![]);
    for piece in reply {
        match piece {
            Ok(piece) => pieces.push(piece),
            Err(error) => errors.push(error),
        }
    }
    assert!(
        pieces.iter().all(|piece| piece.finish.is_none()),
        "{pieces:?}"
    );
    assert_eq!(errors.len(), 1, "{errors:?}");
    (pieces, errors.remove(0))
}

#[test]
fn a_cancelled_request_gets_no_further_token() -> Result<(), ServingError> {
    let model = Gated::closed();
    let server = model.server(&ServerOptions::default());
    let stays = server.submit([1], &new_tokens(6))?;
    model.arrived(1);
    let mut leaves = server.submit([2], &new_tokens(50))?;
    let dropped = server.submit([3], &new_tokens(50))?;
    model.permit(5); // a part and a step, two parts and a step
    model.arrived(6);
    assert_eq!(
        leaves.next().expect("a piece")?.token,
        Some(expected(&model, &[2], 1)[0])
    );
    let canceller = leaves.canceller();
    std::thread::spawn(move || canceller.cancel())
        .join()
        .expect("it cancels");
    drop(dropped);
    model.let_all();
    let rest: Result<Vec<Piece>, ServingError> = leaves.collect();
    let rest = rest?;
    let last = rest.last().expect("a last piece");
    assert_eq!(
        (last.token, last.finish),
        (None, Some(FinishReason::Stopped))
    );
    // The call that was under way ends; nothing of it is computed afterwards.
    assert!(rest.len() <= 3, "{rest:?}");
    assert_eq!(stays.wait()?.1, expected(&model, &[1], 6));
    let steps = model.calls();
    let together = steps.iter().filter(|call| **call == Call::Step(3)).count();
    assert_eq!(together, 2, "{steps:?}");
    Ok(())
}

#[test]
fn errors_of_one_request_do_not_end_the_others() -> Result<(), ServingError> {
    let model = Gated::closed();
    let server = model.server(&ServerOptions::default());
    let well = server.submit([1], &new_tokens(4))?;
    model.arrived(1);
    let nan = server.submit([5, NAN], &new_tokens(4))?;
    let failing = server.submit([5, FAILS], &new_tokens(4))?;
    let panicking = server.submit([5, PANICS], &new_tokens(4))?;
    model.let_all();
    assert_eq!(well.wait()?.1, expected(&model, &[1], 4));
    let (_, error) = fails(nan);
    let ServingError::Model(error) = &error else {
        panic!("{error}");
    };
    let not_finite = matches!(
        &**error,
        Error::Text(TextError::NotFinite { position: 2, .. })
    );
    assert!(not_finite, "{error}");
    assert!(fails(failing).1.to_string().contains("it fails"));
    let (_, error) = fails(panicking);
    assert!(matches!(&error, ServingError::Panicked { message } if message == "it panics"));
    let error = fails(server.submit([1], &new_tokens(NO_CACHE - 1))?).1;
    assert!(matches!(&error, ServingError::Panicked { message } if message == "no cache"));
    // And the server goes on.
    let (_, tokens, _) = server.submit([8], &new_tokens(2))?.wait()?;
    assert_eq!(tokens, expected(&model, &[8], 2));
    Ok(())
}

#[test]
fn a_failed_step_is_told_to_every_request_of_it_once() -> Result<(), ServingError> {
    for (bad, text) in [(FAILS, "it fails"), (PANICS, "it panics")] {
        // The second token of each request is one after which the model fails.
        let model = Gated::new(Some(vec![4, bad]), Some(0));
        let server = model.server(&ServerOptions::default());
        let first = server.submit([1], &new_tokens(9))?;
        model.arrived(1);
        let others = [2, 3].map(|id| server.submit([id], &new_tokens(9)));
        model.let_all();
        let tokens = |reply: Reply| {
            let (pieces, error) = fails(reply);
            assert!(error.to_string().contains(text), "{error}");
            pieces
                .iter()
                .flat_map(|piece| piece.token)
                .collect::<Vec<u32>>()
        };
        assert_eq!(tokens(first), [4, bad]);
        for other in others {
            assert_eq!(tokens(other?), [4], "they were one token behind");
        }
        // One that ends before the model fails.
        let (_, tokens, _) = server.submit([1], &new_tokens(2))?.wait()?;
        assert_eq!(tokens, [4, bad]);
    }
    Ok(())
}

#[test]
fn a_shutdown_ends_every_request_with_a_reason() -> Result<(), ServingError> {
    let model = Gated::closed();
    let server = model.server(&ServerOptions::default().with_max_running(1));
    let running = server.submit([1], &new_tokens(50))?;
    let waiting = server.submit([2], &new_tokens(5))?;
    model.permit(3);
    model.arrived(4);
    std::thread::scope(|scope| {
        scope.spawn(|| server.shut_down());
        // It waits for the call that is under way.
        while server.submit([3], &new_tokens(1)).is_ok() {
            std::thread::yield_now();
        }
        model.let_all();
    });
    let (pieces, error) = fails(running);
    assert!(matches!(error, ServingError::ShutDown), "{error}");
    assert!((3..=4).contains(&pieces.len()), "{pieces:?}");
    let (pieces, error) = fails(waiting);
    assert!(pieces.is_empty() && matches!(error, ServingError::ShutDown));
    for tokens in [0, 1] {
        let refused = server.submit([3], &new_tokens(tokens));
        assert!(matches!(refused, Err(ServingError::ShutDown)));
    }
    let load = server.load();
    assert_eq!((load.waiting, load.running, load.cache_bytes), (0, 0, 0));
    Ok(())
}

#[test]
fn a_drained_server_answers_what_it_has() -> Result<(), ServingError> {
    let model = Gated::open();
    let server = model.server(&ServerOptions::default().with_max_running(2));
    let replies = [1, 2, 3, 4, 5].map(|id| server.submit([id], &new_tokens(7)));
    server.drain();
    assert!(matches!(
        server.submit([6], &new_tokens(1)),
        Err(ServingError::ShutDown)
    ));
    for (id, reply) in (1..).zip(replies) {
        assert_eq!(reply?.wait()?.1, expected(&model, &[id], 7));
    }
    Ok(())
}
