//! `fp8 generate`: continues a prompt and prints the text as it is made.

use crate::model::Source;
use crate::output::{print, print_json};
use crate::usage::Usage;
use anyhow::{Context, Result, bail};
use fp8::models::{
    CausalLm, ChatMessage, FinishReason, GenerationOptions, TextOutput, generate_text,
};
use serde_json::json;
use std::io::{ErrorKind, Write};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: Source,
    /// The text to continue; several run together and are printed when all are done
    #[arg(long, required = true, value_name = "TEXT")]
    prompt: Vec<String>,
    /// Treat each prompt as a message of a user, formatted by the model's chat template
    #[arg(long)]
    chat: bool,
    /// The maximum number of new tokens [default: 128, or the model's setting]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    max_tokens: Option<usize>,
    /// 0 always takes the likeliest token [default: the model's setting]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f64>,
    /// Draw from the K likeliest tokens
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    top_k: Option<usize>,
    /// Draw from the likeliest tokens whose probabilities add up to P
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f64>,
    /// Above 1, tokens that have occurred before become less likely
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    repetition_penalty: Option<f32>,
    /// The penalty looks at the last N tokens only
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    repetition_window: Option<usize>,
    /// End before this text
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Seed of the draws; at a temperature of 0 there are none
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Print texts, tokens and times as JSON
    #[arg(long)]
    json: bool,
    /// Print the speed on stderr; --json has it
    #[arg(long, conflicts_with = "json")]
    stats: bool,
}

impl Args {
    /// The model's own settings where the arguments say nothing.
    fn options(&self) -> Result<GenerationOptions> {
        let own = self.source.generation()?;
        let penalty = self.repetition_penalty.unwrap_or(own.repetition_penalty);
        let mut stops = own.stop_strings.clone();
        stops.extend(self.stop.iter().cloned());
        Ok(own
            .clone()
            .with_max_new_tokens(self.max_tokens.unwrap_or(own.max_new_tokens))
            .with_temperature(self.temperature.unwrap_or(own.temperature))
            .with_top_k(self.top_k.or(own.top_k))
            .with_top_p(self.top_p.or(own.top_p))
            .with_repetition_penalty(penalty, self.repetition_window)
            .with_stop_strings(stops)
            .with_seed(self.seed))
    }

    /// Fails for flags that change nothing beside the others and the model's settings. Scripts may always give a seed.
    fn check_effects(&self, options: &GenerationOptions) -> Result<()> {
        let of_draws = [
            (self.top_k.is_some(), "--top-k"),
            (self.top_p.is_some(), "--top-p"),
        ];
        let given: Vec<&str> = of_draws
            .into_iter()
            .filter_map(|(given, flag)| given.then_some(flag))
            .collect();
        if !given.is_empty() && !options.draws() {
            return Err(Usage(format!(
                "{}: at a temperature of 0 the likeliest token is taken, without a draw: give --temperature above 0",
                given.join(", ")
            ))
            .into());
        }
        if self.repetition_window.is_some() && options.repetition_penalty == 1.0 {
            let why = "--repetition-window needs a --repetition-penalty other than 1";
            return Err(Usage(why.into()).into());
        }
        Ok(())
    }
}

pub fn run(args: &Args) -> Result<()> {
    let options = args.options()?;
    options
        .check()
        .map_err(|error| Usage(format!("--{}", error.to_string().replacen('_', "-", 1))))?;
    args.check_effects(&options)?;
    let tokenizer = args.source.tokenizer()?;
    let mut prompts = vec![];
    for prompt in &args.prompt {
        let ids = match args.chat {
            true => {
                let text = tokenizer.chat(&[ChatMessage::new("user", prompt)])?;
                tokenizer.encode(&text, false)?
            }
            false => tokenizer.encode(prompt, true)?,
        };
        if ids.is_empty() {
            bail!("the prompt {prompt:?} has no tokens");
        }
        prompts.push(ids);
    }
    let (model, _) = args.source.load_llama()?;

    let streams = prompts.len() == 1 && !args.json;
    let mut stdout = std::io::stdout().lock();
    let start = Instant::now();
    let mut first = None;
    let mut written = Ok(());
    let outputs = generate_text(&model, &tokenizer, &prompts, &options, &mut |piece| {
        first.get_or_insert_with(|| start.elapsed());
        if !streams {
            return ControlFlow::Continue(());
        }
        let all = stdout.write_all(piece.text.as_bytes());
        written = all.and_then(|()| stdout.flush());
        match written {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(fp8::models::Stop::All),
        }
    })?;
    drop(stdout);
    // A reader that has closed the pipe, such as `head`, has what it wants.
    let gone = written.is_err();
    if let Err(error) = written
        && error.kind() != ErrorKind::BrokenPipe
    {
        return Err(error).context("writing to stdout");
    }
    let cut = outputs
        .iter()
        .filter(|output| output.finish == FinishReason::Positions)
        .count();
    if let (1.., Some(positions)) = (cut, model.max_positions()) {
        eprintln!(
            "warning: {cut} of {} texts end because the model has {positions} positions",
            outputs.len()
        );
    }
    let times = Times {
        first: first.unwrap_or_default(),
        all: start.elapsed(),
        tokens: outputs.iter().map(|output| output.tokens.len()).sum(),
    };
    if args.json {
        return print_json(&report(args, &prompts, &outputs, &times));
    }
    if streams && !gone {
        print("\n")?;
    } else if !streams {
        for (prompt, output) in args.prompt.iter().zip(&outputs) {
            print(&format!("> {prompt}\n{}\n", output.text))?;
        }
    }
    if args.stats {
        let read: usize = prompts.iter().map(Vec::len).sum();
        eprintln!(
            "{read} tokens read, the first new one after {:.3} s; {} tokens written, {:.1} tokens/s",
            times.first.as_secs_f64(),
            times.tokens,
            times.decode_rate(outputs.len()),
        );
    }
    Ok(())
}

struct Times {
    /// Time until the first token.
    first: Duration,
    all: Duration,
    /// New tokens of all rows.
    tokens: usize,
}

impl Times {
    /// Tokens per second after the first token of each row.
    fn decode_rate(&self, rows: usize) -> f64 {
        let seconds = self.all.saturating_sub(self.first).as_secs_f64();
        match self.tokens.saturating_sub(rows) {
            0 => 0.0,
            tokens => tokens as f64 / seconds,
        }
    }
}

fn report(
    args: &Args,
    prompts: &[Vec<u32>],
    outputs: &[TextOutput],
    times: &Times,
) -> serde_json::Value {
    let finish = |finish: FinishReason| match finish {
        FinishReason::Length => "length",
        FinishReason::StopToken => "stop_token",
        FinishReason::StopString => "stop_string",
        FinishReason::Positions => "positions",
        _ => "stopped",
    };
    let rows = args.prompt.iter().zip(prompts).zip(outputs);
    let rows: Vec<_> = rows
        .map(|((prompt, ids), output)| {
            json!({
                "prompt": prompt,
                "prompt_tokens": ids,
                "text": output.text,
                "tokens": output.tokens,
                "finish": finish(output.finish),
            })
        })
        .collect();
    json!({
        "outputs": rows,
        "seconds_to_first_token": times.first.as_secs_f64(),
        "seconds": times.all.as_secs_f64(),
        "decode_tokens_per_second": times.decode_rate(outputs.len()),
    })
}
