//! Templates as transformers writes them, and hostile templates.

use super::*;
use crate::models::text::chat::special_tokens;

fn rendered(source: &str) -> Result<String, String> {
    let template = Template::new("folder/chat_template.jinja".into(), source.into());
    let messages = [
        ChatMessage::new("user", " hi "),
        ChatMessage::new("assistant", "ho"),
    ];
    let config = serde_json::json!({
        "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "additional_special_tokens": ["<x>"],
    });
    template
        .render(&messages, true, &special_tokens(&config))
        .map_err(|error| error.to_string())
}

#[test]
fn templates_get_the_variables_and_methods_of_transformers() {
    let template = "{{ bos_token }}{%- for m in messages %}\n{% if m['role'] == 'user' %}\n<u>{{ m['content'].strip() }}</u>\n{% endif %}\n\
        {% endfor %}{% if add_generation_prompt %}<a>{% endif %}";
    assert_eq!(rendered(template).as_deref(), Ok("<s><u>hi</u>\n<a>"));
}

#[test]
fn templates_get_every_special_token() {
    let template = "{{ pad_token }}{{ additional_special_tokens[0] }}{{ unk_token is defined }}{{ unk_token }}";
    assert_eq!(rendered(template).as_deref(), Ok("<pad><x>False"));
}

#[test]
fn templates_know_the_date() {
    let year = || chrono::Local::now().format("in %Y").to_string();
    let before = year();
    let text = rendered("{{ strftime_now('in %Y') }}");
    // The year may have ended meanwhile.
    assert!([Ok(before), Ok(year())].contains(&text), "{text:?}");
    let error = rendered("{{ strftime_now('%!') }}").expect_err("no format");
    assert!(error.contains("\"%!\" is no format of dates"), "{error}");
    // As Python does it: microseconds, and no time zone.
    let text = rendered("{{ strftime_now('%f|%z|%Z|%%z') }}").expect("a time");
    let (micros, rest) = text.split_once('|').expect("two parts");
    assert!(
        micros.len() == 6 && micros.bytes().all(|b| b.is_ascii_digit()),
        "{text}"
    );
    assert_eq!(rest, "||%z");
    let dates = "{% for i in range(100) %}{% set d = strftime_now('%c' * 100000) %}{% endfor %}";
    let error = rendered(dates).expect_err("too much");
    assert!(error.contains("makes more than"), "{error}");
}

/// Marks that transformers makes masks of change no text, and control white space as other statements do.
#[test]
fn marks_around_generated_text() {
    let template = "{% for m in messages %}\n{%- generation -%}\n {{ m.role }}\n{% endgeneration %}\n{%generation%}.{%+ endgeneration +%}\n{% endfor %}";
    let plain = template
        .replace("endgeneration", "endwith")
        .replace("generation", "with");
    let text = rendered(template);
    assert_eq!(text, rendered(&plain));
    assert!(text.is_ok_and(|text| text.contains("user")));
    // What is set within stays within.
    let inside = "{% set x = 1 %}{% generation %}{% set x = 2 %}{% endgeneration %}{{ x }}";
    assert_eq!(rendered(inside).as_deref(), Ok("1"));
    // Other statements and text stay.
    assert_eq!(
        rendered("generation {{ 'generation' }}").as_deref(),
        Ok("generation generation")
    );
}

#[test]
fn a_template_can_refuse() {
    let error = rendered("{{ raise_exception('roles must alternate') }}").expect_err("refused");
    assert!(error.contains("roles must alternate"), "{error}");
    let error = rendered("{% for %}").expect_err("no program");
    assert!(error.contains("syntax error"), "{error}");
}

#[test]
fn bounded_templates_render_as_unbounded_ones() {
    let cases = [
        ("{{ 'a' ~ 1 ~ none }}", "a1None"),
        ("{{ 'a' + 'b' }}{{ [1] + [2] }}{{ 1 + 2 }}", "ab[1, 2]3"),
        (
            "{{ 'ab' * 2 }}{{ 2 * 3 }}{{ 2 * 1.5 }}{{ [1] * 2 }}{{ 7 % 4 }}{{ 2 ** 3 }}",
            "abab63.0[1, 1]38",
        ),
        (
            "{{ messages[0].role }}{{ messages[-1]['content'] }}{{ messages[1:]|length }}",
            "userho1",
        ),
        (
            "{{ messages|map(attribute='role')|join(', ') }}",
            "user, assistant",
        ),
        (
            "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}",
            "1",
        ),
        (
            "{{ {'a': 1, 'b': [true, none]}|tojson }}",
            r#"{"a": 1, "b": [true, null]}"#,
        ),
        (
            r#"{{ "<a&'b>\u00e9 \\u003c"|tojson }}"#,
            r#""<a&'b>é \\u003c""#,
        ),
        (
            "{{ 'a b'.split(' ')[-1] }}{{ 'x'.join(['a', 'b']) }}{{ 'a-b'.replace('-', '+') }}",
            "baxba+b",
        ),
        (
            "{{ 'a\nb'|indent(2) }}{{ '%s-%d'|format('x', 3) }}",
            "a\n  bx-3",
        ),
        (
            "{{ tools is none }}{{ documents is defined }}{{ xyz is not defined and messages is defined }}",
            "TrueTrueTrue",
        ),
        (
            "{{ x|default('d') }}{{ '' or 'e' }}{{ 'f' if x else 'g' }}",
            "deg",
        ),
        (
            "{{ 'i' in 'hi' }}{{ 3 not in [1, 2] }}{{ 1 < 2 < 3 }}",
            "TrueTrueTrue",
        ),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + loop.index %}{% endfor %}{{ ns.n }}",
            "3",
        ),
        (
            "{% macro twice(x, y='!') %}{{ x }}{{ x }}{{ y }}{% endmacro %}{{ twice('a') }}{{ twice('b', y='?') }}",
            "aa!bb?",
        ),
        (
            "{% set x %}a{{ 1 }}{% endset %}{{ x }}{% set a, b = 1, 2 %}{{ b }}{% filter upper %}q{% endfilter %}",
            "a12Q",
        ),
        (
            "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% else %}z{% endfor %}",
            "a102",
        ),
        (
            "{% macro box(x) %}<{{ caller() }}{{ x }}>{% endmacro %}{% call box('b') %}a{% endcall %}{{ dict(a=1).a }}",
            "<ab>1",
        ),
    ];
    let mut wrong = vec![];
    for (source, expected) in cases {
        let text = rendered(source);
        if text.as_deref() != Ok(expected) {
            wrong.push((source, expected, text));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_source_has_at_most_128_kb() {
    assert!(rendered(&"x".repeat(128 << 10)).is_ok());
    refused(&"x".repeat((128 << 10) + 1));
}

/// What the guide's page on models allows: values of up to 32 MB, and lists in lists, 64 deep.
#[test]
fn values_up_to_the_bounds_are_rendered() {
    let text = |times: usize| {
        let part = "x".repeat(1000);
        format!("{{% set x = '{part}' * {times} %}}{{{{ x }}}}")
    };
    let length = rendered(&text(32_000)).map(|text| text.len());
    assert_eq!(length, Ok(32_000_000));
    let error = rendered(&text(34_000)).expect_err("too large");
    assert!(error.contains("more than 33554432 bytes"), "{error}");

    let nested = |depth: usize| {
        let wrap = "{% set ns.x = [ns.x] %}";
        let start = "{% set ns = namespace(x=1) %}";
        format!("{start}{{% for i in range({depth}) %}}{wrap}{{% endfor %}}{{{{ ns.x }}}}")
    };
    let shown = format!("{}1{}", "[".repeat(60), "]".repeat(60));
    assert_eq!(rendered(&nested(60)), Ok(shown));
    let error = rendered(&nested(70)).expect_err("too deep");
    assert!(error.contains("beyond 64 levels"), "{error}");
}

/// Each of these took more than a minute, all memory, or all of the stack.
#[test]
fn endless_templates_are_errors() {
    let loops = "{% for a in range(100000) %}{% for b in range(100000) %}{% for c in range(100000) %}{% endfor %}{% endfor %}{% endfor %}";
    let macros = "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}";
    let endless = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
    let nested = "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}";
    let lists = "{% set l = range(100000)|list %}{% for a in range(100000) %}{% set x = l|sort|unique|list %}{% endfor %}";
    let index =
        "{% set l = range(100000) %}{% for a in range(100000) %}{% set x = l[99999] %}{% endfor %}";
    let compare = "{% set l = range(100000)|list %}{% for a in range(100000) %}{% if l == l + [] %}{% endif %}{% endfor %}";
    for source in [loops, macros, endless, nested, lists, index, compare] {
        refused(source);
    }
}

#[test]
fn templates_that_fill_the_memory_are_errors() {
    let start = "{% set ns = namespace(x='0123456789abcdef', l=[1]) %}{% for i in range(60) %}";
    let steps = [
        "{% set ns.x = ns.x ~ ns.x %}",
        "{% set ns.x = ns.x + ns.x %}",
        "{% set ns.x = ns.x * 16 %}",
        "{% set ns.x = [ns.x, ns.x]|join %}",
        "{% set ns.x = ns.x|join(ns.x) %}",
        "{% set ns.x = ns.x.join([ns.x, ns.x, ns.x]) %}",
        "{% set ns.x = '%s%s'|format(ns.x, ns.x) %}",
        "{% set ns.x = '{0}{0}'.format(ns.x) %}",
        "{% set ns.x = ns.x|replace('0', ns.x) %}",
        "{% set ns.x = ns.x.replace('', ns.x) %}",
        "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}",
        "{% set ns.l = ns.l + ns.l %}",
        "{% set ns.l = ns.l * 16 %}",
        "{% set ns.l = [ns.l, ns.l] %}{{ ns.l }}",
        "{% set ns.l = [ns.l, ns.l] %}{% set ns.x = ns.l|tojson %}",
        "{% set ns.l = [ns.l, ns.l] %}{% if ns.l == [ns.l] %}{% endif %}",
        "{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% set ns.x = ns.l|string %}",
        "{% set ns.l = ['0123456789' * 100000] * 100 %}{% set ns.x = ns.l|map('upper')|list %}{{ ns.x|length }}",
    ];
    for step in steps {
        refused(&format!("{start}{step}{{% endfor %}}{{{{ ns.x }}}}"));
    }
    let whole = [
        "{{ '%999999999d'|format(1) }}",
        "{{ '%*d'|format(999999999, 1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ ['%999999999d']|map('format', 1)|list }}",
        "{{ 'a'|indent(9999999999, true) }}",
        "{{ ['a']|map('indent', 9999999999, true)|list }}",
        "{{ [1]|batch(9999999999, 0) }}",
        "{{ [1]|slice(9999999999, 0) }}",
        "{{ [1, 2]|tojson(indent=9999999999) }}",
        "{{ 'x' * 99999999 * 99 }}",
        "{% for i in range(100000) %}{% for i in range(100000) %}some text{% endfor %}{% endfor %}",
        "{% set x %}{% for i in range(100000) %}{% for i in range(100000) %}some text{% endfor %}{% endfor %}{% endset %}",
    ];
    for source in whole {
        refused(source);
    }
    // minijinja's compiler would fold these constants.
    let products = "{{ 'x' * 99999999 }}".repeat(5000);
    refused(&products);
}

#[test]
fn templates_that_overflow_the_stack_are_errors() {
    let deep = |start: &str, inner: &str, end: &str| {
        let times = (MAX_SOURCE - inner.len()) / (start.len() + end.len()) - 10;
        format!("{}{inner}{}", start.repeat(times), end.repeat(times))
    };
    let within = |source: String| format!("{{{{ {source} }}}}");
    for source in [
        within(deep("not ", "x", "")),
        within(deep("-", "x", "")),
        within(deep("x if x else ", "x", "")),
        within(deep("", "x", ".a")),
        within(deep("", "x", "[0]")),
        within(deep("", "x", "|e")),
        within(deep("", "1", "+1")),
        within(deep("", "x", " and x")),
        within(deep("", "x", " is x")),
        within(deep("[", "", "]")),
        within(deep("(", "x", ")")),
        within(deep("f(", "x", ")")),
        deep("{%if x%}", "", "{%endif%}"),
        format!("{{% if x %}}{}{{% endif %}}", deep("{%elif x%}", "", "")),
        deep("{%for i in x%}", "", "{%endfor%}"),
    ] {
        refused(&source);
    }
    refused(&within("not ".repeat(200_000) + "x"));
    for source in [
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns.x|tojson }}",
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns == ns.x }}",
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ {ns: 1} }}",
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ 'a' ~ ns }}",
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ [ns]|join }}",
        "{% set ns = namespace(x=1) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    ] {
        refused(source);
    }
}

/// The error is short and names the file.
#[track_caller]
fn refused(source: &str) {
    let start: String = source.chars().take(200).collect();
    let error = rendered(source).expect_err(&start);
    assert!(error.starts_with("folder/chat_template.jinja: "), "{error}");
    assert!(error.len() < MAX_REASON + 200, "{start}: {}", error.len());
}
