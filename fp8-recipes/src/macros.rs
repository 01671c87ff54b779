//! The macro that writes the names of enums.

/// The names of an enum's variants: the method that returns them, `Display`, and on request the list `ALL`.
macro_rules! names {
    ($vis:vis $type:ident::$name:ident, $all:vis ALL: $($variant:ident = $text:literal),+ $(,)?) => {
        impl $type {
            /// Every variant.
            $all const ALL: [Self; [$($text),+].len()] = [$(Self::$variant),+];
        }

        names! { $vis $type::$name: $($variant = $text),+ }
    };
    ($vis:vis $type:ident::$name:ident: $($variant:ident = $text:literal),+ $(,)?) => {
        impl $type {
            /// The name as it is written.
            $vis const fn $name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)+
                }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.$name())
            }
        }
    };
}
