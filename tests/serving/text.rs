//! Streams of text: stop texts over several tokens, characters of several tokens.

use crate::gated::Gated;
use fp8::models::{FinishReason, GenerationOptions, Tokenizer, generate_text};
use fp8::serving::{Server, ServerOptions, ServingError};
use fp8_test_support::tokenizer::write_byte_tokenizer;
use std::ops::ControlFlow;
use std::sync::Arc;

/// A model that says `text` and then the end token, once for each call that it may make.
struct Says {
    model: Arc<Gated>,
    server: Server,
}

fn says(text: &str, calls: Option<usize>) -> Says {
    let folder = tempfile::tempdir().expect("a folder");
    write_byte_tokenizer(folder.path(), text);
    let tokenizer = Tokenizer::open(folder.path()).expect("a tokenizer");
    let mut script = tokenizer.encode(text, false).expect("tokens");
    assert_eq!(script.len(), text.len(), "a token for each byte");
    script.extend(tokenizer.eos());
    let model = Gated::new(Some(script), calls);
    let options = ServerOptions::default();
    let server = Server::with_tokenizer(model.clone(), tokenizer.into(), &options);
    Says {
        model,
        server: server.expect("a server"),
    }
}

fn options() -> GenerationOptions {
    GenerationOptions::default().with_max_new_tokens(60)
}

#[test]
fn characters_come_whole() -> Result<(), ServingError> {
    let text = "aé😀 – 你!";
    let Says { server, .. } = says(text, None);
    let replies = [
        server.submit([0], &options())?,
        server.submit([1], &options())?,
    ];
    for reply in replies {
        let pieces = reply.collect::<Result<Vec<_>, _>>()?;
        let shown: Vec<&str> = pieces.iter().map(|piece| piece.text.as_str()).collect();
        let shown: Vec<&str> = shown.into_iter().filter(|text| !text.is_empty()).collect();
        let characters: Vec<String> = text.chars().map(String::from).collect();
        assert_eq!(shown, characters);
        let last = pieces.last().expect("a last piece");
        assert_eq!(last.finish, Some(FinishReason::StopToken));
    }
    Ok(())
}

#[test]
fn a_stop_text_over_several_tokens_is_never_shown() -> Result<(), ServingError> {
    let Says { server, .. } = says("one enough, end. More", None);
    let stops = |text: &str| options().with_stop_strings([text.to_string()]);
    let early = server.submit([0], &stops("end"))?;
    let late = server.submit([0], &stops("never"))?;
    let pieces = early.collect::<Result<Vec<_>, _>>()?;
    let shown: String = pieces.iter().map(|piece| piece.text.as_str()).collect();
    assert_eq!(shown, "one enough, ");
    assert_eq!(
        pieces.last().and_then(|piece| piece.finish),
        Some(FinishReason::StopString)
    );
    // What might have begun it was held back until it did not.
    assert!(pieces.iter().any(|piece| piece.text == "eno"), "{pieces:?}");
    let (text, _, finish) = late.wait()?;
    assert_eq!(
        (text.as_str(), finish),
        ("one enough, end. More", FinishReason::StopToken)
    );
    Ok(())
}

#[test]
fn a_cancelled_text_gives_what_was_held_back() -> Result<(), ServingError> {
    let Says { server, model } = says("né", Some(2));
    // "n" may begin the stop text, and the second token is half of a character.
    let options = options().with_stop_strings(["no".to_string()]);
    let mut reply = server.submit_text("n", &options)?;
    assert_eq!(reply.next().expect("a piece")?.text, "");
    assert_eq!(reply.next().expect("a piece")?.text, "");
    model.arrived(3);
    reply.cancel();
    model.let_all();
    let rest = reply.collect::<Result<Vec<_>, _>>()?;
    let text: String = rest.iter().map(|piece| piece.text.as_str()).collect();
    assert_eq!(text, "né");
    let last = rest.last().expect("a last piece");
    assert_eq!(
        (last.token, last.finish),
        (None, Some(FinishReason::Stopped))
    );
    Ok(())
}

#[test]
fn texts_end_as_those_of_generate_text() -> Result<(), ServingError> {
    for ignore in [false, true] {
        let folder = tempfile::tempdir().expect("a folder");
        write_byte_tokenizer(folder.path(), "abc");
        let tokenizer = Tokenizer::open(folder.path()).expect("a tokenizer");
        let Says { server, model } = says("abc", None);
        let options = options().with_ignore_eos(ignore);
        let (text, tokens, finish) = server.submit([0], &options)?.wait()?;
        let mut go_on = |_| ControlFlow::Continue(());
        let alone = generate_text(&*model, &tokenizer, &[vec![0]], &options, &mut go_on)?;
        assert_eq!(tokens.len(), if ignore { 60 } else { 4 });
        let alone = alone.into_iter().next().expect("a text");
        assert_eq!(
            (text, tokens, finish),
            (alone.text, alone.tokens, alone.finish)
        );
    }
    Ok(())
}
