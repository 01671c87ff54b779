//! The thread of a server: a part of a prompt and a token of every request, in turn.

use super::error::ServingError;
use super::options::ServerOptions;
use super::queue::{Phase, Queue};
use super::request::Running;
use crate::models::{CausalLm, Ends, Error, KvCache, Tokenizer, checked};
use candle_core::Tensor;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Answers requests until the queue is closed, or drained and empty.
pub(super) fn run(
    model: &dyn CausalLm,
    tokenizer: Option<&Tokenizer>,
    options: &ServerOptions,
    queue: &Queue,
) {
    let _closing = Closing(queue);
    let mut worker = Worker {
        model,
        tokenizer,
        options,
        queue,
        running: vec![],
        turns: 0,
    };
    while worker.turn() {}
}

/// Closes the queue when the thread ends, even by a panic, so that nobody waits for it any more.
struct Closing<'a>(&'a Queue);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.end(Phase::Closed);
        let waiting = {
            let mut state = self.0.lock();
            state.running = (0, 0);
            std::mem::take(&mut state.waiting)
        };
        // Outside the lock: dropping a request sends its last message.
        drop(waiting);
    }
}

struct Worker<'a> {
    model: &'a dyn CausalLm,
    tokenizer: Option<&'a Tokenizer>,
    options: &'a ServerOptions,
    queue: &'a Queue,
    running: Vec<Running<'a>>,
    /// Counts turns, so that prompts are read in turn.
    turns: usize,
}

impl Worker<'_> {
    /// Admits requests, reads parts of prompts, and makes a token of every request. False when the server ends.
    fn turn(&mut self) -> bool {
        if self.running.is_empty() {
            self.queue.wait();
        }
        let cancelled = self.running.iter_mut();
        for request in cancelled.filter(|request| request.outlet.is_cancelled()) {
            end_guarded(request, Running::stop);
        }
        self.remove_ended();
        match self.admit() {
            Phase::Closed => return false,
            Phase::Draining if self.running.is_empty() => return false,
            _ => {}
        }
        self.read_prompts();
        self.step();
        self.remove_ended();
        self.turns = self.turns.wrapping_add(1);
        true
    }

    /// Admits waiting requests in the order in which they came, as long as there is room for the first one.
    fn admit(&mut self) -> Phase {
        loop {
            let request = {
                let mut state = self.queue.lock();
                state.drop_cancelled();
                let (count, bytes) = state.running;
                let fits = |more: usize| match self.options.max_cache_bytes {
                    Some(most) => bytes.saturating_add(more) <= most,
                    None => true,
                };
                let fits = state
                    .waiting
                    .front()
                    .is_some_and(|request| fits(request.bytes));
                let open = state.phase != Phase::Closed && count < self.options.max_running;
                let next = (fits && open).then(|| state.waiting.pop_front()).flatten();
                match next {
                    Some(request) => {
                        state.running = (count + 1, bytes.saturating_add(request.bytes));
                        request
                    }
                    None => return state.phase,
                }
            };
            let (model, options) = (self.model, &request.options);
            let begun = guarded(|| {
                let mut cache = model.new_cache(1, request.capacity)?;
                // It is read in parts.
                cache.set_prompt_tokens(request.prompt.len());
                Ok((cache, Ends::new(model, options)))
            });
            match begun {
                Ok(begun) => (self.running).push(Running::begin(request, begun, self.tokenizer)),
                Err(error) => request.fail(error),
            }
            self.count();
        }
    }

    /// Tells the queue which requests run.
    fn count(&self) {
        let bytes = self.running.iter().map(|request| request.bytes);
        let bytes = bytes.fold(0, usize::saturating_add);
        self.queue.lock().running = (self.running.len(), bytes);
    }

    fn remove_ended(&mut self) {
        self.running.retain(|request| !request.ended);
        self.count();
    }

    /// Reads parts of prompts, with at most as many tokens together as one part may have. How a prompt is cut into parts depends on its
    /// length and the option alone, so its result does not depend on other requests.
    fn read_prompts(&mut self) {
        let count = self.running.len();
        let mut room = self.options.prompt_part;
        for index in 0..count {
            let request = &mut self.running[(self.turns + index) % count];
            let part = request.part(self.options.prompt_part);
            let tokens = part.len();
            if tokens == 0 || tokens > room {
                continue;
            }
            room -= tokens;
            let model = self.model;
            let read = |ids: &[u32], cache: &mut KvCache| -> Result<_, Error> {
                let ids = Tensor::from_slice(ids, (1, ids.len()), model.device())?;
                checked(model.last_logits(&ids, cache)?, 1, model)
            };
            let part = part.to_vec();
            match guarded(|| read(&part, &mut request.cache)) {
                Ok(mut logits) => {
                    if request.count_read(tokens) {
                        choose(request, logits.remove(0));
                    }
                }
                Err(error) => request.fail(error),
            }
        }
    }

    /// Makes a token of every request whose prompt has been read.
    fn step(&mut self) {
        let running = self.running.iter_mut();
        let ready = running.filter(|request| request.is_read() && !request.ended);
        let mut ready: Vec<&mut Running<'_>> = ready.collect();
        if ready.is_empty() {
            return;
        }
        let ids: Vec<u32> = ready.iter().map(|request| request.last()).collect();
        let logits = guarded(|| {
            let caches = ready.iter_mut().map(|request| &mut request.cache);
            let logits = self
                .model
                .step(&ids, &mut caches.collect::<Vec<&mut KvCache>>())?;
            checked(logits, ids.len(), self.model)
        });
        match logits {
            // Each on its own: sorting a vocabulary takes a while.
            Ok(logits) => {
                let choices = ready.into_iter().zip(logits);
                fp8_candle::parallel::for_each(choices, |(request, logits)| {
                    choose(request, logits)
                });
            }
            Err(error) => {
                for request in ready {
                    request.fail(error.clone());
                }
            }
        }
    }
}

/// Chooses the next token of a request.
fn choose(request: &mut Running<'_>, logits: Vec<f32>) {
    end_guarded(request, |request| request.choose(logits));
}

/// Runs `f`; if it panics, the request ends with that as its error.
fn end_guarded<'t>(request: &mut Running<'t>, f: impl FnOnce(&mut Running<'t>)) {
    let done = guarded(|| {
        f(request);
        Ok(())
    });
    if let Err(error) = done {
        request.fail(error);
    }
}

/// The result of `f`, whose panic is an error too.
fn guarded<T>(f: impl FnOnce() -> Result<T, Error>) -> Result<T, ServingError> {
    // What a panic may leave half-done are the caches of requests, which end with it.
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(result) => Ok(result?),
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
            Err(ServingError::Panicked {
                message: text.unwrap_or_else(|| "without a message".into()),
            })
        }
    }
}
