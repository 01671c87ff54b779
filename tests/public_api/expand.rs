//! Macros by example, as far as items are made by them: fragments, repetitions and the tokens between.

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};
use std::collections::HashMap;
use syn::Item;

/// The `macro_rules!` seen so far.
#[derive(Default)]
pub struct Macros(HashMap<String, Vec<Rule>>);

struct Rule {
    pattern: Vec<TokenTree>,
    body: Vec<TokenTree>,
}

/// What a name of the pattern stands for: tokens, or a list of such in a repetition.
#[derive(Clone)]
enum Binding {
    Tokens(Vec<TokenTree>),
    List(Vec<Bindings>),
}

type Bindings = HashMap<String, Binding>;

impl Macros {
    pub fn define(&mut self, name: String, definition: &syn::Macro) {
        let mut groups = definition
            .tokens
            .clone()
            .into_iter()
            .filter_map(|token| match token {
                TokenTree::Group(group) => Some(group.stream().into_iter().collect()),
                _ => None,
            });
        let mut rules = vec![];
        while let (Some(pattern), Some(body)) = (groups.next(), groups.next()) {
            rules.push(Rule { pattern, body });
        }
        self.0.insert(name, rules);
    }

    /// The items that a call makes; none if the macro is not known or makes something else.
    pub fn expand(&self, call: &syn::Macro) -> Vec<Item> {
        let name = call.path.segments.last().map(|s| s.ident.to_string());
        let Some(rules) = name.and_then(|name| self.0.get(&name)) else {
            return vec![];
        };
        let input: Vec<TokenTree> = call.tokens.clone().into_iter().collect();
        for rule in rules {
            let mut bindings = Bindings::new();
            if matches(&rule.pattern, &input, &mut bindings) == Some(input.len()) {
                let tokens = transcribe(&rule.body, &bindings);
                return syn::parse2(tokens).map_or(vec![], |file: syn::File| file.items);
            }
        }
        vec![]
    }
}

fn is_punct(token: Option<&TokenTree>, c: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == c)
}

/// A `$( .. ) separator *` at the beginning of `tokens`: what it repeats, its separator, how many tokens it takes.
fn repetition(tokens: &[TokenTree]) -> Option<(Vec<TokenTree>, Option<&TokenTree>, usize)> {
    let [dollar, TokenTree::Group(group), rest @ ..] = tokens else {
        return None;
    };
    if !is_punct(Some(dollar), '$') || group.delimiter() != Delimiter::Parenthesis {
        return None;
    }
    let repeats = |token: Option<&TokenTree>| ['*', '+', '?'].iter().any(|&c| is_punct(token, c));
    let inner = group.stream().into_iter().collect();
    match repeats(rest.first()) {
        true => Some((inner, None, 3)),
        false => Some((inner, rest.first(), 4)),
    }
}

/// How many tokens of `input` the whole pattern takes.
fn matches(pattern: &[TokenTree], input: &[TokenTree], bindings: &mut Bindings) -> Option<usize> {
    let (mut p, mut i) = (0, 0);
    while p < pattern.len() {
        if let Some((inner, separator, len)) = repetition(&pattern[p..]) {
            let mut list = vec![];
            loop {
                let mut after = i;
                if let (Some(separator), false) = (separator, list.is_empty()) {
                    if input.get(i).map(ToString::to_string) != Some(separator.to_string()) {
                        break;
                    }
                    after += 1;
                }
                let mut own = Bindings::new();
                match matches(&inner, &input[after..], &mut own) {
                    Some(taken) if taken > 0 => i = after + taken,
                    _ => break,
                }
                list.push(own);
            }
            for name in names(&inner) {
                bindings.insert(name, Binding::List(list.clone()));
            }
            p += len;
            continue;
        }
        match (&pattern[p], input.get(i)) {
            // `$name:kind`
            (dollar, Some(_)) if is_punct(Some(dollar), '$') => {
                let name = pattern.get(p + 1)?.to_string();
                let kind = pattern.get(p + 3)?.to_string();
                p += 4;
                let len = match kind.as_str() {
                    "ident" | "tt" | "literal" | "lifetime" | "block" => 1,
                    _ => {
                        let end = pattern.get(p).map(ToString::to_string);
                        let stop = |token: &TokenTree| Some(token.to_string()) == end;
                        input[i..].iter().position(stop).unwrap_or(input.len() - i)
                    }
                };
                if kind == "ident" && !matches!(input[i], TokenTree::Ident(_)) {
                    return None;
                }
                bindings.insert(name, Binding::Tokens(input[i..i + len].to_vec()));
                i += len;
            }
            (TokenTree::Group(a), Some(TokenTree::Group(b))) => {
                let a_tokens: Vec<_> = a.stream().into_iter().collect();
                let b_tokens: Vec<_> = b.stream().into_iter().collect();
                let whole = matches(&a_tokens, &b_tokens, bindings)? == b_tokens.len();
                if a.delimiter() != b.delimiter() || !whole {
                    return None;
                }
                (p, i) = (p + 1, i + 1);
            }
            (a, Some(b)) if a.to_string() == b.to_string() => (p, i) = (p + 1, i + 1),
            _ => return None,
        }
    }
    Some(i)
}

/// The names after a `$`, also in groups.
fn names(tokens: &[TokenTree]) -> Vec<String> {
    let mut all = vec![];
    for (i, token) in tokens.iter().enumerate() {
        match token {
            TokenTree::Group(group) => {
                let inner: Vec<_> = group.stream().into_iter().collect();
                all.extend(names(&inner));
            }
            TokenTree::Ident(name) if i > 0 && is_punct(tokens.get(i - 1), '$') => {
                all.push(name.to_string());
            }
            _ => {}
        }
    }
    all
}

fn transcribe(body: &[TokenTree], bindings: &Bindings) -> TokenStream {
    let mut out = TokenStream::new();
    let mut i = 0;
    while i < body.len() {
        if let Some((inner, separator, len)) = repetition(&body[i..]) {
            let list = names(&inner)
                .into_iter()
                .find_map(|name| match bindings.get(&name) {
                    Some(Binding::List(list)) => Some(list.clone()),
                    _ => None,
                });
            for (n, own) in list.unwrap_or_default().into_iter().enumerate() {
                if n > 0 {
                    out.extend(separator.cloned());
                }
                let mut all = bindings.clone();
                all.extend(own);
                out.extend(transcribe(&inner, &all));
            }
            i += len;
            continue;
        }
        match (&body[i], body.get(i + 1)) {
            (dollar, Some(TokenTree::Ident(name))) if is_punct(Some(dollar), '$') => {
                match bindings.get(&name.to_string()) {
                    Some(Binding::Tokens(tokens)) => out.extend(tokens.iter().cloned()),
                    // `$crate`
                    _ => out.extend([TokenTree::Ident(name.clone())]),
                }
                i += 1;
            }
            (TokenTree::Group(group), _) => {
                let inner: Vec<_> = group.stream().into_iter().collect();
                let inner = transcribe(&inner, bindings);
                out.extend([TokenTree::Group(Group::new(group.delimiter(), inner))]);
            }
            (token, _) => out.extend([token.clone()]),
        }
        i += 1;
    }
    out
}
