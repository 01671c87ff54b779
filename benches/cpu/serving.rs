//! Requests that are served together: tokens per second of 1 and of 8, and what the 8 gain.

use crate::checkpoint::{fp8_model, weights};
use crate::rows::Metric;
use crate::session::{Session, Times};
use crate::spread::median;
use anyhow::{Result, bail, ensure};
use fp8::models::{GenerationOptions, Model};
use fp8::serving::{Server, ServerOptions, ServingError};
use std::sync::Arc;
use std::time::Instant;

/// The requests of the second case.
const TOGETHER: usize = 8;
/// Tokens of each prompt.
const PROMPT: u32 = 16;

/// Both numbers of requests take turns on one server.
pub fn run(session: &Session) -> Result<()> {
    let [one, eight] = [1, TOGETHER].map(|n| session.name(format!("serving {n} requests, 135M")));
    if !session.wants(&one) && !session.wants(&eight) {
        return Ok(());
    }
    let (layers, tokens, rounds) = if session.quick() {
        (6, 16, 3)
    } else {
        (30, 48, 7)
    };
    let folder = tempfile::tempdir()?;
    let Model::Llama(model) = fp8_model(&weights(layers)?, layers, folder.path())? else {
        bail!("the model is not a Llama");
    };
    let server = Server::start(Arc::new(model), &ServerOptions::default())?;
    let options = GenerationOptions::default()
        .with_max_new_tokens(tokens)
        .with_ignore_eos(true);
    let time = |requests: usize| -> Result<f64> {
        let start = Instant::now();
        let submit = |request: usize| {
            let ids = (0..PROMPT).map(|i| 1000 * request as u32 + 7 * i);
            server.submit(ids.collect::<Vec<u32>>(), &options)
        };
        let replies = (0..requests).map(submit).collect::<Result<Vec<_>, _>>()?;
        let all = replies.into_iter().map(|reply| Ok(reply.wait()?.1.len()));
        let all = all.collect::<Result<Vec<usize>, ServingError>>()?;
        ensure!(all.iter().all(|&made| made == tokens), "{all:?} tokens");
        Ok(start.elapsed().as_secs_f64() * 1e3)
    };
    let mut ms = [vec![], vec![]];
    for round in 0..=rounds {
        for (ms, requests) in ms.iter_mut().zip([1, TOGETHER]) {
            let time = time(requests)?;
            if round > 0 {
                ms.push(time);
            }
        }
    }
    let [alone, together] = ms.map(median);
    let rate = |requests: usize, ms: f64| (requests * tokens) as f64 / ms * 1e3;
    let times = |ms: f64, requests: usize| Times {
        ours: Some(ms / (requests * tokens) as f64),
        ..Times::default()
    };
    let gain = rate(TOGETHER, together) / rate(1, alone);
    let per_s = |rate| (Metric::TokensPerS, rate);
    let (one_times, times) = (times(alone, 1), times(together, TOGETHER));
    session.report(one, per_s(rate(1, alone)), None, one_times, None)?;
    session.report(
        eight.clone(),
        per_s(rate(TOGETHER, together)),
        None,
        times,
        None,
    )?;
    session.report(eight, (Metric::ServedRatio, gain), Some(3.), times, None)
}
