//! Streamed text.

use crate::toy::Toy;
use fp8::models::{
    FinishReason, GenerationOptions, Result, TextPiece, TextStream, Tokenizer, generate_text,
};
use fp8_test_support::tokenizer::write_byte_tokenizer;
use std::ops::ControlFlow;

/// A token for each byte of `alphabet`, in order, and `<end>` as the last one.
fn byte_tokenizer(alphabet: &str) -> (tempfile::TempDir, Tokenizer) {
    let dir = tempfile::tempdir().expect("a directory");
    write_byte_tokenizer(dir.path(), alphabet);
    let tokenizer = Tokenizer::open(dir.path()).expect("a tokenizer");
    (dir, tokenizer)
}

/// The text from each token, and the rest at the end.
fn pieces(tokenizer: &Tokenizer, ids: &[u32], stops: &[String]) -> Result<Vec<String>> {
    let mut stream = TextStream::new(tokenizer, stops);
    let mut pieces = vec![];
    for id in ids {
        pieces.push(stream.push(*id)?);
    }
    pieces.push(stream.finish()?);
    Ok(pieces)
}

#[test]
fn a_character_is_shown_only_when_it_is_complete() -> Result<()> {
    let text = "aé😀 – 你好!";
    let (_dir, tokenizer) = byte_tokenizer(text);
    assert_eq!(tokenizer.eos().len(), 1);
    let ids = tokenizer.encode(text, false)?;
    assert_eq!(ids.len(), text.len(), "a token for each byte");
    let pieces = pieces(&tokenizer, &ids, &[])?;
    assert_eq!(pieces.concat(), text);
    let whole: Vec<&String> = pieces.iter().filter(|piece| !piece.is_empty()).collect();
    let characters: Vec<String> = text.chars().map(String::from).collect();
    assert_eq!(whole, characters.iter().collect::<Vec<_>>());
    Ok(())
}

#[test]
fn invalid_utf_8_is_shown_once_no_later_token_can_complete_it() -> Result<()> {
    let (_dir, tokenizer) = byte_tokenizer("é😀x");
    let ids = tokenizer.encode("é😀x", false)?;
    // The first two bytes of the emoji, then an x; then half an é at the very end.
    let broken = [ids[2], ids[3], ids[6], ids[0]];
    let pieces = pieces(&tokenizer, &broken, &[])?;
    assert_eq!(pieces, ["", "", "\u{FFFD}x", "", "\u{FFFD}"]);
    Ok(())
}

/// A model may repeat bytes that are no character: they come out long before the end, and text after them is whole.
#[test]
fn a_run_of_invalid_bytes_is_not_held_back() -> Result<()> {
    let (_dir, tokenizer) = byte_tokenizer("é😀x");
    let ids = tokenizer.encode("é😀x", false)?;
    let mut broken = vec![ids[2]; 20];
    broken.extend(&ids[2..]);
    let pieces = pieces(&tokenizer, &broken, &[])?;
    assert_eq!(pieces[..7].concat(), "");
    assert!(pieces.windows(8).all(|pieces| !pieces.concat().is_empty()));
    assert_eq!(pieces.concat(), format!("{}😀x", "\u{FFFD}".repeat(20)));
    Ok(())
}

#[test]
fn a_stop_text_over_several_tokens_is_never_shown() -> Result<()> {
    let (_dir, tokenizer) = byte_tokenizer("abc\n#é");
    let ids = |text: &str| tokenizer.encode(text, false);
    let stops = ["\n\n##".to_string(), "é".to_string()];
    let shown = |text| -> Result<String> { Ok(pieces(&tokenizer, &ids(text)?, &stops)?.concat()) };
    assert_eq!(shown("a\n#b\n\n#c\n\n##abc")?, "a\n#b\n\n#c");
    assert_eq!(shown("\n\n\n##a")?, "\n");
    assert_eq!(shown("abéc")?, "ab");
    // Text that could have started a stop text is shown at the end.
    assert_eq!(shown("ab\n\n#")?, "ab\n\n#");
    let steps = pieces(&tokenizer, &ids("a\n\nb")?, &stops)?;
    assert_eq!(steps, ["a", "", "", "\n\nb", ""]);
    Ok(())
}

#[test]
fn special_tokens_give_no_text() -> Result<()> {
    let (_dir, tokenizer) = byte_tokenizer("ab");
    let end = tokenizer.eos()[0];
    let ids = tokenizer.encode("ab", false)?;
    for run in [1, 50] {
        let ends = vec![end; run];
        let stream = [&ids[..1], &ends, &ids[1..], &ends].concat();
        assert_eq!(pieces(&tokenizer, &stream, &[])?.concat(), "ab", "{run}");
    }
    Ok(())
}

/// Fifty tokens, as many as the toy model has: its tokens are letters.
const LETTERS: &str = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW";

#[test]
fn generated_text_ends_before_a_stop_text() -> Result<()> {
    let (_dir, tokenizer) = byte_tokenizer(LETTERS);
    let prompts = vec![
        tokenizer.encode("abc", false)?,
        tokenizer.encode("d", false)?,
    ];
    let options = GenerationOptions::default()
        .with_max_new_tokens(12)
        .with_stop_tokens([u32::MAX]);
    let on = &mut |_: TextPiece| ControlFlow::Continue(());
    let free = generate_text(&Toy::new(), &tokenizer, &prompts, &options, on)?;
    let text = free[0].text.clone();
    assert_eq!(text, tokenizer.decode(&free[0].tokens, true)?);
    let stop: String = text.chars().skip(5).take(2).collect();

    let mut shown = vec![String::new(); 2];
    let stopping = options.with_stop_strings([stop.clone()]);
    let on = &mut |piece: TextPiece| {
        shown[piece.prompt] += &piece.text;
        ControlFlow::Continue(())
    };
    let ended = generate_text(&Toy::new(), &tokenizer, &prompts, &stopping, on)?;
    assert_eq!(Some(ended[0].text.len()), text.find(&stop));
    assert_eq!(ended[0].finish, FinishReason::StopString);
    assert_eq!(ended[0].tokens.len(), ended[0].text.len() + 2);
    let texts: Vec<&String> = ended.iter().map(|output| &output.text).collect();
    assert_eq!(shown.iter().collect::<Vec<_>>(), texts);
    let whole = &free[1].text;
    assert_eq!(
        ended[1].text,
        whole[..whole.find(&stop).unwrap_or(whole.len())]
    );
    Ok(())
}
