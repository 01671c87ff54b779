//! Commands and flags on the pages are those of the program.

use super::Cli;
use clap::{CommandFactory, Parser};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// README and the pages of the guide, with their names.
fn pages() -> std::io::Result<Vec<(String, String)>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut paths: Vec<PathBuf> = vec![root.join("README.md")];
    for entry in std::fs::read_dir(root.join("docs/guide"))? {
        paths.push(entry?.path());
    }
    let named = paths.into_iter().map(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        Ok((name.into_owned(), std::fs::read_to_string(&path)?))
    });
    named.collect()
}

/// The lines within blocks of code, and those outside.
fn parted(page: &str) -> (Vec<&str>, Vec<&str>) {
    let (mut code, mut text) = (vec![], vec![]);
    let mut is_code = false;
    for line in page.lines() {
        if line.starts_with("```") {
            is_code = !is_code;
        } else if is_code {
            code.push(line);
        } else {
            text.push(line);
        }
    }
    (code, text)
}

/// The words of a command line as a shell sees them: quoted texts are one word, comments are none.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut is_quoted) = (vec![], String::new(), false);
    for c in line.chars() {
        match c {
            '"' => is_quoted = !is_quoted,
            '#' if !is_quoted && word.is_empty() => break,
            ' ' if !is_quoted => words.push(std::mem::take(&mut word)),
            c => word.push(c),
        }
    }
    words.push(word);
    words.retain(|word| !word.is_empty());
    words
}

#[test]
fn commands_on_the_pages_are_accepted() -> std::io::Result<()> {
    let mut count = 0;
    for (name, page) in pages()? {
        for line in parted(&page).0 {
            // Not an entry of Cargo.toml.
            if line.starts_with("fp8 ") && !line.starts_with("fp8 = ") {
                if let Err(error) = Cli::try_parse_from(words(line)) {
                    panic!("{name}: {line}\n{error}");
                }
                count += 1;
            }
        }
    }
    assert!(count >= 20, "only {count} commands");
    Ok(())
}

/// Pages that speak of no other program's flags, except those of cargo.
const OF_FP8: [&str; 4] = ["checking.md", "choosing.md", "fine_tuning.md", "models.md"];

#[test]
fn flags_on_the_pages_exist() -> std::io::Result<()> {
    let program = Cli::command();
    let arguments = program
        .get_subcommands()
        .flat_map(|command| command.get_arguments());
    let known: BTreeSet<&str> = arguments
        .filter_map(|argument| argument.get_long())
        .collect();
    let mut count = 0;
    for (name, page) in pages()? {
        if !OF_FP8.contains(&name.as_str()) {
            continue;
        }
        let text = parted(&page).1.join("\n");
        for span in text.split('`').skip(1).step_by(2) {
            if span.starts_with("cargo ") {
                continue;
            }
            for flag in span.split_whitespace() {
                if let Some(flag) = flag.strip_prefix("--") {
                    assert!(known.contains(flag), "{name}: --{flag} in `{span}`");
                    count += 1;
                }
            }
        }
    }
    assert!(count >= 30, "only {count} flags");
    Ok(())
}

#[test]
fn quotes_and_comments_are_those_of_a_shell() {
    let line = "fp8 generate a#b --prompt \"Once # upon\"   # a text";
    let expected = ["fp8", "generate", "a#b", "--prompt", "Once # upon"];
    assert_eq!(words(line), expected);
}
