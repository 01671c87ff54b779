//! The guide: how to do things, each page with code that is compiled and run as a test.

macro_rules! pages {
    ($($name:ident $file:literal;)*) => {
        $(
            #[doc = include_str!(concat!("../docs/guide/", $file))]
            pub mod $name {}
        )*
    };
}

pages! {
    start "start.md";
}
