//! A request, first waiting and then running.

use super::error::ServingError;
use super::reply::{Outlet, Piece};
use crate::models::{Ends, FinishReason, GenerationOptions, KvCache, Row, TextStream, Tokenizer};

/// A waiting request.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) prompt: Vec<u32>,
    pub(super) options: GenerationOptions,
    pub(super) outlet: Outlet,
    /// Tokens that its cache has room for, and their bytes.
    pub(super) capacity: usize,
    pub(super) bytes: usize,
}

impl Request {
    /// Ends the request at its caller's wish.
    pub(super) fn stop(&mut self) {
        self.outlet.send(Ok(Piece {
            token: None,
            text: String::new(),
            finish: Some(FinishReason::Stopped),
        }));
    }

    /// Ends it because of an error.
    pub(super) fn fail(mut self, error: ServingError) {
        self.outlet.send(Err(error));
    }
}

/// A running request.
pub(super) struct Running<'t> {
    row: Row,
    pub(super) cache: KvCache,
    /// Tokens of the prompt.
    prompt: usize,
    /// How many of them are in the cache.
    read: usize,
    text: Option<TextStream<'t>>,
    pub(super) outlet: Outlet,
    pub(super) bytes: usize,
    /// Whether its last message has been sent.
    pub(super) ended: bool,
}

impl<'t> Running<'t> {
    /// Begins a request.
    pub(super) fn begin(
        request: Request,
        (cache, ends): (KvCache, Ends),
        tokenizer: Option<&'t Tokenizer>,
    ) -> Self {
        let options = request.options;
        Self {
            row: Row::new(0, &request.prompt, &options, ends),
            cache,
            prompt: request.prompt.len(),
            read: 0,
            text: tokenizer.map(|tokenizer| TextStream::new(tokenizer, options.stop_strings)),
            outlet: request.outlet,
            bytes: request.bytes,
            ended: false,
        }
    }

    /// The part of the prompt that is read next, of at most `most` tokens; empty after all of it.
    pub(super) fn part(&self, most: usize) -> &[u32] {
        &self.row.ids[self.read..self.prompt.min(self.read.saturating_add(most))]
    }

    /// Counts tokens of the prompt that have entered the cache. True if these were the last ones.
    pub(super) fn count_read(&mut self, tokens: usize) -> bool {
        self.read += tokens;
        self.read == self.prompt
    }

    /// Whether the whole prompt has been read.
    pub(super) fn is_read(&self) -> bool {
        self.read == self.prompt
    }

    /// The newest token, which the model has not seen yet.
    pub(super) fn last(&self) -> u32 {
        self.row.ids[self.row.ids.len() - 1]
    }

    /// Chooses the next token and sends the text that it adds.
    pub(super) fn choose(&mut self, logits: Vec<f32>) {
        let message = self.piece(logits);
        self.ended = !matches!(&message, Ok(piece) if piece.finish.is_none());
        self.outlet.send(message);
    }

    fn piece(&mut self, logits: Vec<f32>) -> Result<Piece, ServingError> {
        let token = self.row.next(logits)?;
        let (text, finish) = match &mut self.text {
            None => (String::new(), token.finish),
            Some(stream) => stream.take(token.id, token.finish)?,
        };
        Ok(Piece {
            token: Some(token.id),
            text,
            finish,
        })
    }

    /// Ends it because its caller has cancelled it.
    pub(super) fn stop(&mut self) {
        let rest = self.text.as_mut().map(TextStream::finish).transpose();
        let message = rest.map(|text| Piece {
            token: None,
            text: text.unwrap_or_default(),
            finish: Some(FinishReason::Stopped),
        });
        self.outlet.send(message.map_err(Into::into));
        self.ended = true;
    }

    /// Ends it because of an error.
    pub(super) fn fail(&mut self, error: ServingError) {
        self.outlet.send(Err(error));
        self.ended = true;
    }
}
