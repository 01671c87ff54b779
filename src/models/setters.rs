//! Setters of options.

/// Methods that take options and return them with one field changed.
macro_rules! setters {
    ($owner:ty: $($(#[$doc:meta])* $setter:ident($field:ident: $type:ty);)*) => {
        impl $owner {
            $(
                $(#[$doc])*
                #[must_use]
                pub fn $setter(mut self, $field: $type) -> Self {
                    self.$field = $field.into();
                    self
                }
            )*
        }
    };
}

pub(crate) use setters;
