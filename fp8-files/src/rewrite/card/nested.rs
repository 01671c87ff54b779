//! A card as a section of another one.

/// The level of the highest heading, below the section's own.
const TOP: usize = 3;

/// The text with its headings at level 3 and below, in their order, so that none looks like one of the card around it. Lines of code stay
/// as they are: their comments may begin like headings.
pub(super) fn nested(text: &str) -> String {
    let highest = headings(text).filter_map(|line| line.level).min();
    let deeper = highest.map_or(0, |highest| TOP.saturating_sub(highest));
    let mut nested = String::new();
    for Line { text, level } in headings(text) {
        if let Some(level) = level {
            nested.push_str(&"#".repeat(deeper.min(6 - level)));
        }
        nested.push_str(text);
        nested.push('\n');
    }
    nested
}

struct Line<'a> {
    text: &'a str,
    /// That of a heading.
    level: Option<usize>,
}

/// All lines, and which of them are headings.
fn headings(text: &str) -> impl Iterator<Item = Line<'_>> {
    // The mark that ends a block of code, and the least length of it.
    let mut code: Option<(char, usize)> = None;
    text.lines().map(move |text| {
        let line = text.trim_start();
        let run = |mark: char| line.chars().take_while(|&c| c == mark).count();
        let fence = ['`', '~'].into_iter().find(|&mark| run(mark) >= 3);
        let mut level = None;
        match (code, fence) {
            (None, Some(mark)) => code = Some((mark, run(mark))),
            (Some((mark, least)), Some(own)) => {
                let closes =
                    own == mark && run(own) >= least && line.trim_end().chars().all(|c| c == own);
                if closes {
                    code = None;
                }
            }
            (None, None) if !text.starts_with(char::is_whitespace) => {
                let marks = run('#');
                let is_heading = line[marks..].is_empty() || line[marks..].starts_with([' ', '\t']);
                level = Some(marks).filter(|marks| (1..=6).contains(marks) && is_heading);
            }
            _ => {}
        }
        Line { text, level }
    })
}

#[cfg(test)]
mod tests {
    use super::nested;

    #[test]
    fn headings_go_below_the_section() {
        let card = "# Title\ntext\n## Use\n#no heading\n    # code\n###### Deep\n```python\n# a comment\n``\n```\n#\n";
        let expected = "### Title\ntext\n#### Use\n#no heading\n    # code\n###### Deep\n```python\n# a comment\n``\n```\n###\n";
        assert_eq!(nested(card), expected);
    }

    #[test]
    fn order_is_kept_and_low_headings_stay() {
        assert_eq!(nested("## A\n# B"), "#### A\n### B\n");
        assert_eq!(nested("#### A\ntext"), "#### A\ntext\n");
        assert_eq!(nested("text"), "text\n");
        // A longer fence holds a shorter one.
        let code = "~~~~\n# a\n~~~\n# b\n~~~~\n# C";
        assert_eq!(nested(code), "~~~~\n# a\n~~~\n# b\n~~~~\n### C\n");
    }
}
