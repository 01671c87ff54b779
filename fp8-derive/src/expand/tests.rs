use super::expand;
use syn::{DeriveInput, parse_str};

/// The tokens of the implementation, with one space between them.
fn text(input: &str) -> String {
    let input: DeriveInput = parse_str(input).unwrap();
    expand(&input, "::fp8_recipes").unwrap().to_string()
}

fn error(input: &str) -> String {
    let input: DeriveInput = parse_str(input).unwrap();
    expand(&input, "::fp8_recipes").unwrap_err().to_string()
}

/// How many fields are visited.
fn visits(input: &str) -> usize {
    text(input).matches("Fp8Module :: visit (").count()
}

#[test]
fn every_kind_of_type_visits_the_fields_that_are_not_skipped() {
    for (input, expected) in [
        ("struct A { a: X, b: Y }", 2),
        ("struct A { a: X, #[fp8(skip)] b: Y }", 1),
        ("struct A { #[fp8(skip)] a: X }", 0),
        ("struct A {}", 0),
        ("struct A;", 0),
        ("struct A(X, #[fp8(skip)] Y, Z);", 2),
        ("struct A();", 0),
        ("enum A {}", 0),
        ("enum A { B, C(X), D { x: X, #[fp8(skip)] y: Y } }", 2),
        ("enum A { #[fp8(skip)] B(X), C(X) }", 1),
        ("struct A { r#type: X }", 1),
    ] {
        assert_eq!(visits(input), expected, "{input}");
    }
}

#[test]
fn fields_are_visited_in_the_order_in_which_they_are_written() {
    let text = text("struct A { z: X, a: Y }");
    assert!(
        text.contains("Self { z : __fp8_0 , a : __fp8_1 , .. }"),
        "{text}"
    );
    assert!(text.find("__fp8_0 , visitor").unwrap() < text.find("__fp8_1 , visitor").unwrap());
}

#[test]
fn only_type_parameters_of_visited_fields_are_bound() {
    let text = text(
        "struct A<'a, T: Clone + 'a, U, V, const N: usize> where T: Copy { \
         t: Vec<[T; N]>, #[fp8(skip)] u: U, v: PhantomData<V>, name: &'a str }",
    );
    assert!(
        text.contains(
            "impl < 'a , T : Clone + 'a + :: fp8_recipes :: Fp8Module , U , V , const N : usize > \
             :: fp8_recipes :: Fp8Module for A < 'a , T , U , V , N > where T : Copy"
        ),
        "{text}"
    );
}

#[test]
fn the_crate_can_be_named() {
    let text = text("#[fp8(crate = \"my::fp8\")] struct A { a: X }");
    assert!(text.contains("impl my :: fp8 :: Fp8Module for A"), "{text}");
    assert!(
        text.contains("visitor : & mut dyn my :: fp8 :: Visitor"),
        "{text}"
    );
}

#[test]
fn errors_name_the_place() {
    for (input, expected) in [
        (
            "struct A { #[fp8(skipp)] gain: X }",
            "field `gain` of `A`: unknown attribute `skipp`",
        ),
        (
            "struct A(X, #[fp8(rename)] X);",
            "field 1 of `A`: unknown attribute `rename`",
        ),
        (
            "struct A { #[fp8(skip, skip)] gain: X }",
            "field `gain` of `A`: `skip` is given twice",
        ),
        (
            "enum A { B { #[fp8(no)] x: X } }",
            "field `x` of `A::B`: unknown attribute `no`",
        ),
        (
            "enum A { #[fp8(no)] B }",
            "variant `A::B`: unknown attribute `no`",
        ),
        (
            "#[fp8(skip)] struct A { x: X }",
            "`A`: unknown attribute `skip`",
        ),
        (
            "#[fp8(crate = \"a\")] #[fp8(crate = \"b\")] struct A { x: X }",
            "`A`: `crate` is given twice",
        ),
        (
            "union A { x: u8, y: i8 }",
            "cannot be derived for the union `A`",
        ),
    ] {
        let error = error(input);
        assert!(error.contains(expected), "{input}: {error}");
    }
    // These come from the parser.
    for input in [
        "struct A { #[fp8] x: X }",
        "struct A { #[fp8 = 1] x: X }",
        "#[fp8(crate)] struct A;",
        "#[fp8(crate = 1)] struct A;",
        "#[fp8(crate = \"a b\")] struct A;",
    ] {
        assert!(!error(input).is_empty(), "{input}");
    }
}
