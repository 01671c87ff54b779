//! Setters of configurations.

/// Methods that take a configuration and return it with one field changed.
macro_rules! setters {
    ($owner:ty: $($(#[$doc:meta])* $setter:ident($field:ident: $type:ty);)*) => {
        impl $owner {
            $(
                $(#[$doc])*
                #[must_use]
                pub fn $setter(mut self, $field: $type) -> Self {
                    self.$field = $field;
                    self
                }
            )*
        }
    };
    (const $owner:ty: $($(#[$doc:meta])* $setter:ident($field:ident: $type:ty);)*) => {
        impl $owner {
            $(
                $(#[$doc])*
                #[must_use]
                pub const fn $setter(mut self, $field: $type) -> Self {
                    self.$field = $field;
                    self
                }
            )*
        }
    };
}
