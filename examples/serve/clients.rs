//! The clients: threads that ask a server and show what comes.

use anyhow::{Context, Result, anyhow};
use fp8::models::{FinishReason, GenerationOptions};
use fp8::serving::{Reply, Server, ServingError};
use std::time::{Duration, Instant};

/// All clients ask at once.
pub struct Round<'a> {
    pub server: &'a Server,
    pub options: &'a GenerationOptions,
    pub prompt: &'a str,
    pub clients: usize,
    /// Whether the texts are printed as they come.
    pub shows: bool,
}

pub struct RoundResult {
    pub tokens: usize,
    pub time: Duration,
    /// When the first token of each client came.
    pub first: Vec<Duration>,
}

impl Round<'_> {
    pub fn run(&self) -> Result<RoundResult> {
        let start = Instant::now();
        let results = std::thread::scope(|scope| {
            let clients = (1..=self.clients).map(|client| scope.spawn(move || self.ask(client)));
            let clients: Vec<_> = clients.collect();
            let join = |client: std::thread::ScopedJoinHandle<'_, Result<(usize, Duration)>>| {
                client.join().map_err(|_| anyhow!("a client panicked"))?
            };
            clients.into_iter().map(join).collect::<Result<Vec<_>>>()
        })?;
        Ok(RoundResult {
            tokens: results.iter().map(|(tokens, _)| tokens).sum(),
            time: start.elapsed(),
            first: results.into_iter().map(|(_, first)| first).collect(),
        })
    }

    /// One client: its tokens, and when the first one came.
    fn ask(&self, client: usize) -> Result<(usize, Duration)> {
        let start = Instant::now();
        let reply = submit(self.server, self.options, self.prompt, client)?;
        let (mut tokens, mut first, mut line) = (0, None, String::new());
        for piece in reply {
            let piece = piece?;
            first.get_or_insert(start.elapsed());
            tokens += usize::from(piece.token.is_some());
            line += &piece.text;
            // Several clients print, so each prints whole lines.
            if self.shows && (line.len() > 60 || line.contains('\n') || piece.finish.is_some()) {
                println!("{client}/{}: {}", self.clients, line.replace('\n', " "));
                line.clear();
            }
        }
        Ok((tokens, first.context("no piece came")?))
    }
}

fn submit(
    server: &Server,
    options: &GenerationOptions,
    prompt: &str,
    client: usize,
) -> Result<Reply, ServingError> {
    let options = options.clone().with_seed(client as u64);
    server.submit_text(&format!("{client}{prompt}"), &options)
}

/// How long a request continues after it is cancelled, while others run; None if it has ended before, as one of a single token always has.
pub fn cancelled(
    server: &Server,
    options: &GenerationOptions,
    prompt: &str,
    clients: usize,
) -> Result<Option<Duration>> {
    let ask = |client| submit(server, options, prompt, client);
    let mut replies = (1..=clients).map(ask).collect::<Result<Vec<_>, _>>()?;
    let mut reply = replies.pop().context("no client")?;
    let first = reply.next().context("no piece came")??;
    if first.finish.is_some() {
        return Ok(None);
    }
    let start = Instant::now();
    reply.cancel();
    let last = reply.last().context("no last piece")??;
    let stopped = last.finish == Some(FinishReason::Stopped);
    Ok(stopped.then(|| start.elapsed()))
}
