//! The clients of `examples/serve`.

use crate::clients::{Round, cancelled};
use fp8::models::{GenerationOptions, Model, ModelOptions, Tokenizer, open};
use fp8::serving::{Server, ServerOptions};
use fp8_test_support::language_model;
use std::error::Error;
use std::sync::Arc;

/// Its first piece is its last.
#[test]
fn a_request_of_one_token_has_ended_before_it_is_cancelled() -> Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir()?;
    language_model::write(dir.path());
    let Model::Llama(model) = open(dir.path(), &ModelOptions::new())? else {
        panic!("it is a language model");
    };
    let tokenizer = Tokenizer::open(dir.path())?;
    let options = ServerOptions::default();
    let server = Server::with_tokenizer(Arc::new(model), tokenizer.into(), &options)?;
    let options = GenerationOptions::default()
        .with_max_new_tokens(1)
        .with_ignore_eos(true);
    let round = Round {
        server: &server,
        options: &options,
        prompt: ". A text",
        clients: 2,
        shows: false,
    };
    assert_eq!(round.run()?.tokens, 2);
    assert_eq!(cancelled(&server, &options, ". A text", 2)?, None);
    server.drain();
    Ok(())
}
