//! Macros that write the methods of configurations and the names of enums.

/// Methods that take a configuration and return it with one field changed. A setter without documentation of its own refers to
/// its field; one with the type `into T` takes whatever converts to `T`.
macro_rules! setters {
    (@methods [$($const:tt)?]) => {};
    (@methods [$($const:tt)?] $setter:ident($($field:tt)+); $($rest:tt)*) => {
        setters!(@method [$($const)?] $setter($($field)+));
        setters!(@methods [$($const)?] $($rest)*);
    };
    (@methods [$($const:tt)?] $(#[$doc:meta])+ $setter:ident($($field:tt)+); $($rest:tt)*) => {
        setters!(@documented [$($const)?] [$(#[$doc])+] $setter($($field)+));
        setters!(@methods [$($const)?] $($rest)*);
    };
    (@method [$($const:tt)?] $setter:ident($field:ident: $($type:tt)+)) => {
        setters!(
            @documented [$($const)?] [#[doc = concat!("A copy with this `", stringify!($field), "`.")]]
            $setter($field: $($type)+)
        );
    };
    (@documented [$($const:tt)?] [$($doc:tt)+] $setter:ident($field:ident: into $type:ty)) => {
        $($doc)+
        #[must_use]
        pub fn $setter(mut self, $field: impl Into<$type>) -> Self {
            self.$field = $field.into();
            self
        }
    };
    (@documented [$($const:tt)?] [$($doc:tt)+] $setter:ident($field:ident: $type:ty)) => {
        $($doc)+
        #[must_use]
        pub $($const)? fn $setter(mut self, $field: $type) -> Self {
            self.$field = $field;
            self
        }
    };
    (const $owner:ty: $($setters:tt)*) => {
        impl $owner {
            setters!(@methods [const] $($setters)*);
        }
    };
    ($owner:ty: $($setters:tt)*) => {
        impl $owner {
            setters!(@methods [] $($setters)*);
        }
    };
}

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
