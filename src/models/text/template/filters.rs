//! Filters and methods whose results may be much longer than their inputs.

use super::budget::{Budget, refused};
use chrono::Local;
use chrono::format::StrftimeItems;
use minijinja::value::{Rest, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters, functions};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Spaces of an indent, and columns of a formatted value.
const MAX_WIDTH: u64 = 10_000;

/// Bytes that one byte of a format of dates becomes at most.
const LONGEST_DATE: u64 = 32;

/// The local time, as Python's `datetime.now().strftime(format)`.
fn now(format: &str) -> Result<String, Error> {
    let own = of_python(format);
    let items = StrftimeItems::new(&own).parse().map_err(|_| {
        let text = format!("strftime_now: {format:?} is no format of dates");
        Error::new(ErrorKind::InvalidOperation, text)
    })?;
    let now = Local::now().format_with_items(items.iter());
    Ok(now.to_string())
}

/// JSON in which `<`, `>`, `&` and `'` stand for themselves, as transformers writes it.
fn as_in_python(json: &str) -> String {
    const ESCAPED: [(&str, char); 4] = [
        ("u003c", '<'),
        ("u003e", '>'),
        ("u0026", '&'),
        ("u0027", '\''),
    ];
    let mut text = String::with_capacity(json.len());
    let mut rest = json;
    while let Some(at) = rest.find('\\') {
        text += &rest[..at];
        rest = &rest[at + 1..];
        let found = ESCAPED.iter().find(|(code, _)| rest.starts_with(code));
        let taken = match found {
            Some((code, character)) => {
                text.push(*character);
                code.len()
            }
            // Another escaped character, which may be a backslash.
            None => {
                let taken = rest.chars().next().map_or(0, char::len_utf8);
                text.push('\\');
                text += &rest[..taken];
                taken
            }
        };
        rest = &rest[taken..];
    }
    text + rest
}

/// The format in chrono's words: a time without a zone has no name and no distance of one, and fractions are microseconds.
fn of_python(format: &str) -> String {
    let mut own = String::with_capacity(format.len());
    let mut rest = format;
    while let Some((text, after)) = rest.split_once('%') {
        own += text;
        let mut letters = after.chars();
        match letters.next() {
            Some('z' | 'Z') => {}
            Some('f') => own += "%6f",
            Some(letter) => own.extend(['%', letter]),
            None => own.push('%'),
        }
        rest = letters.as_str();
    }
    own + rest
}

/// Replaces these filters, functions and methods by bounded forms.
pub(super) fn add(jinja: &mut Environment<'_>, budget: &Budget) {
    let named = [
        ("join", Value::from_function(filters::join)),
        ("replace", Value::from_function(filters::replace)),
        ("indent", Value::from_function(filters::indent)),
        ("format", Value::from_function(filters::format)),
        ("batch", Value::from_function(filters::batch)),
        ("slice", Value::from_function(filters::slice)),
        ("tojson", Value::from_function(filters::tojson)),
        ("map", Value::from_function(filters::map)),
    ];
    for (name, filter) in named {
        let budget = budget.clone();
        let bounded = move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            let (value, rest) = args
                .split_first()
                .ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
            budget.make(longer(&budget, name, value, rest)?)?;
            let result = filter.call(state, &args)?;
            // `map` creates new elements.
            if name == "map" {
                budget.make(budget.size(&result)?)?;
            }
            Ok::<_, Error>(match (name, result.as_str()) {
                ("tojson", Some(json)) => Value::from_safe_string(as_in_python(json)),
                _ => result,
            })
        };
        jinja.add_filter(name, bounded);
    }
    // `dict` copies a map; `debug` would print everything.
    let (dict, counter) = (Value::from_function(functions::dict), budget.clone());
    let bounded = move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
        let result = dict.call(state, &args.into_values())?;
        counter.make(counter.shallow(&result)?)?;
        Ok::<_, Error>(result)
    };
    jinja.add_function("dict", bounded);
    jinja.remove_global("debug");
    let counter = budget.clone();
    jinja.add_function("strftime_now", move |format: &str| {
        counter.make(LONGEST_DATE * format.len() as u64)?;
        now(format)
    });
    // Methods of Python's strings, lists and dictionaries.
    let budget = budget.clone();
    jinja.set_unknown_method_callback(move |state, value, name, args| {
        budget.size(value)?;
        budget.make(match name {
            // The method belongs to the separator.
            "join" => match args.first() {
                Some(parts) => longer(&budget, "join", parts, std::slice::from_ref(value))?,
                None => 0,
            },
            _ => longer(&budget, name, value, args)?,
        })?;
        let result = unknown_method_callback(state, value, name, args)?;
        budget.make(budget.shallow(&result)?)?;
        Ok(result)
    });
}

/// An upper bound on the bytes of the result beyond those of `value`. Other filters create at most a few times their input, which is
/// bounded already.
fn longer(budget: &Budget, name: &str, value: &Value, args: &[Value]) -> Result<u64, Error> {
    let len = |value: &Value| value.len().unwrap_or(0) as u64;
    let text = |place: usize| args.get(place).and_then(|arg| arg.as_str()).unwrap_or("");
    // The largest number among positional and named arguments.
    let number = || {
        let named = args
            .iter()
            .filter_map(|arg| arg.as_object()?.try_iter_pairs());
        let named = named.flatten().map(|(_, value)| value);
        let numbers = args.iter().cloned().chain(named);
        let largest = numbers.filter_map(|arg| arg.as_usize()).max();
        largest.map_or(0, |number| number as u64)
    };
    Ok(match name {
        "join" => {
            let separator = args
                .iter()
                .filter_map(|arg| arg.as_bytes())
                .map(<[u8]>::len);
            let separator = separator.max().unwrap_or(0) as u64;
            budget.size(value)? + len(value).saturating_mul(separator)
        }
        "replace" => {
            let (text_of, from, to) = (value.as_str().unwrap_or(""), text(0), text(1));
            (text_of.matches(from).count() as u64).saturating_mul(to.len() as u64)
        }
        "indent" => {
            let lines = value.as_str().unwrap_or("").matches('\n').count() as u64 + 1;
            lines.saturating_mul(width(number())?)
        }
        "tojson" => {
            // One line per value, indented by level.
            let size = budget.size(value)?;
            size.saturating_mul(6 + width(number())?)
        }
        "batch" | "slice" => number().saturating_mul(32),
        "format" => format(budget, value, args)?,
        _ => 0,
    })
}

fn width(width: u64) -> Result<u64, Error> {
    match width > MAX_WIDTH {
        true => Err(refused(format!(
            "a width is {width}, expected at most {MAX_WIDTH}"
        ))),
        false => Ok(width),
    }
}

/// A bound on the bytes that `format` makes: each placeholder takes the longest argument or the largest width.
fn format(budget: &Budget, value: &Value, args: &[Value]) -> Result<u64, Error> {
    let text = value.as_str().unwrap_or("");
    let mut columns = 0;
    for number in text.split(|c: char| !c.is_ascii_digit()) {
        if !number.is_empty() {
            columns = width(number.parse().unwrap_or(u64::MAX))?.max(columns);
        }
    }
    if text.contains('*') {
        return Err(refused(
            "a width of `format` stands among its arguments".into(),
        ));
    }
    let places = text.matches(['%', '{']).count() as u64;
    let mut longest = columns;
    for arg in args {
        longest = longest.max(6 * budget.size(arg)?);
    }
    Ok(places.saturating_mul(longest))
}
