//! The server, as its callers see it.

use super::error::ServingError;
use super::options::ServerOptions;
use super::queue::{Phase, Queue, ServerLoad};
use super::reply::{Outlet, Piece, Reply};
use super::request::Request;
use super::waiting::wait_for;
use super::worker;
use crate::models::{CausalLm, FinishReason, GenerationOptions, Tokenizer, check_prompt};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;

/// Computes the requests of many callers together, on a thread of its own.
///
/// Requests join and leave between tokens: every running request gets a token from each pass over the model, and the parts of new
/// prompts are read in between. Each request has its own [`GenerationOptions`] and its own cache, and gets the tokens that it would
/// get alone: [the guide](crate::guide::serving) says under which conditions. Callers on any threads share a server by reference.
///
/// ```
/// # use candle_core::{DType, Device};
/// # use candle_nn::VarBuilder;
/// # use fp8::models::{Llama, LlamaConfig};
/// # let json = serde_json::json!({ "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16,
/// #     "num_hidden_layers": 1, "num_attention_heads": 2 });
/// # let config = LlamaConfig::parse("config.json", &json)?;
/// # let model = Llama::new(&config, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
/// use fp8::models::GenerationOptions;
/// use fp8::serving::{Server, ServerOptions};
/// use std::sync::Arc;
///
/// let server = Server::start(Arc::new(model), &ServerOptions::default())?;
/// let options = GenerationOptions::default().with_max_new_tokens(3);
/// let (first, second) = (server.submit([1, 5, 9], &options)?, server.submit([7], &options)?);
/// for piece in first {
///     println!("{:?}", piece?.token); // as it is made
/// }
/// assert_eq!(second.wait()?.1.len(), 3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Server {
    model: Arc<dyn CausalLm + Send + Sync>,
    tokenizer: Option<Arc<Tokenizer>>,
    options: ServerOptions,
    queue: Arc<Queue>,
    /// Bytes of the keys and values of a token.
    token_bytes: usize,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = f.debug_struct("Server");
        fields.field("options", &self.options);
        fields.field("load", &self.load()).finish_non_exhaustive()
    }
}

impl Server {
    /// A server without a tokenizer: prompts and replies are tokens.
    ///
    /// # Errors
    /// If an option is invalid, the model has no caches, or no thread can be started.
    pub fn start(
        model: Arc<dyn CausalLm + Send + Sync>,
        options: &ServerOptions,
    ) -> Result<Self, ServingError> {
        Self::new(model, None, options)
    }

    /// A server with a tokenizer: pieces have text, and stop texts and the tokenizer's end tokens end a request.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn with_tokenizer(
        model: Arc<dyn CausalLm + Send + Sync>,
        tokenizer: Arc<Tokenizer>,
        options: &ServerOptions,
    ) -> Result<Self, ServingError> {
        Self::new(model, Some(tokenizer), options)
    }

    fn new(
        model: Arc<dyn CausalLm + Send + Sync>,
        tokenizer: Option<Arc<Tokenizer>>,
        options: &ServerOptions,
    ) -> Result<Self, ServingError> {
        options.check()?;
        let queue = Arc::new(Queue::new());
        let token_bytes = model.new_cache(1, 1)?.size_in_bytes();
        let thread = std::thread::Builder::new().name("fp8-server".into());
        let (own, shown) = (options.clone(), tokenizer.clone());
        let (of_thread, waiting) = (model.clone(), queue.clone());
        let thread = thread
            .spawn(move || worker::run(&*of_thread, shown.as_deref(), &own, &waiting))
            .map_err(|error| ServingError::Thread {
                reason: error.to_string(),
            })?;
        Ok(Self {
            model,
            tokenizer,
            options: options.clone(),
            queue,
            token_bytes,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Adds a request to continue `prompt`, and returns at once.
    ///
    /// # Errors
    /// [`ServingError::QueueFull`]; [`ServingError::Model`] for a prompt or options that [`generate`](crate::models::generate()) refuses;
    /// [`ServingError::CacheTooLarge`]; [`ServingError::NoTokenizer`] for stop texts; [`ServingError::ShutDown`].
    pub fn submit(
        &self,
        prompt: impl Into<Vec<u32>>,
        options: &GenerationOptions,
    ) -> Result<Reply, ServingError> {
        let (prompt, mut options) = (prompt.into(), options.clone());
        options.check()?;
        check_prompt(&*self.model, 0, &prompt, &options)?;
        match &self.tokenizer {
            None if !options.stop_strings.is_empty() => {
                let what = "a stop text";
                return Err(ServingError::NoTokenizer { what });
            }
            None => {}
            Some(tokenizer) => options.end_as(tokenizer),
        }
        let positions = self.model.max_positions().unwrap_or(usize::MAX);
        let tokens = prompt.len().saturating_add(options.max_new_tokens);
        let capacity = tokens.min(positions);
        let bytes = capacity.saturating_mul(self.token_bytes);
        if let Some(limit) = self.options.max_cache_bytes.filter(|limit| bytes > *limit) {
            return Err(ServingError::CacheTooLarge {
                tokens: capacity,
                bytes,
                limit,
            });
        }
        let (mut outlet, reply) = Outlet::new();
        if options.max_new_tokens == 0 {
            self.queue.check_open()?;
            outlet.send(Ok(Piece {
                token: None,
                text: String::new(),
                finish: Some(FinishReason::Length),
            }));
            return Ok(reply);
        }
        let request = Request {
            prompt,
            options,
            outlet,
            capacity,
            bytes,
        };
        self.queue.push(request, self.options.max_waiting)?;
        Ok(reply)
    }

    /// [`Server::submit`] for a text, encoded with the special tokens that the tokenizer puts around texts.
    ///
    /// # Errors
    /// As [`Server::submit`], those of encoding, and [`ServingError::NoTokenizer`].
    pub fn submit_text(
        &self,
        text: &str,
        options: &GenerationOptions,
    ) -> Result<Reply, ServingError> {
        let what = "a text";
        let tokenizer = self.tokenizer.as_ref();
        let tokenizer = tokenizer.ok_or(ServingError::NoTokenizer { what })?;
        self.submit(tokenizer.encode(text, true)?, options)
    }

    /// What the server is doing at this moment.
    pub fn load(&self) -> ServerLoad {
        let state = self.queue.lock();
        let (running, cache_bytes) = state.running;
        ServerLoad {
            waiting: state.waiting.len(),
            running,
            cache_bytes,
        }
    }

    /// Refuses new requests, finishes the waiting and running ones, and ends the server. Returns when all is done.
    pub fn drain(&self) {
        self.end(Phase::Draining);
    }

    /// Refuses new requests and ends all others with [`ServingError::ShutDown`], between two tokens. Returns when the server has ended;
    /// dropping the server does the same.
    pub fn shut_down(&self) {
        self.end(Phase::Closed);
    }

    fn end(&self, phase: Phase) {
        self.queue.end(phase);
        let join = |mut thread: MutexGuard<'_, Option<JoinHandle<()>>>| {
            if let Some(thread) = thread.take() {
                // Errors of the model have gone to the callers; the thread has nothing more to say.
                let _ = thread.join();
            }
        };
        wait_for(
            || join(self.thread.lock().unwrap_or_else(PoisonError::into_inner)),
            || {
                let thread = match self.thread.try_lock() {
                    Ok(thread) => thread,
                    Err(TryLockError::Poisoned(error)) => error.into_inner(),
                    Err(TryLockError::WouldBlock) => return None,
                };
                let has_ended = thread.as_ref().is_none_or(JoinHandle::is_finished);
                has_ended.then(|| join(thread))
            },
        );
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shut_down();
    }
}
