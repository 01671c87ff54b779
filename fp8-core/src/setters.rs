//! The macro that writes the setters of configurations, for the crates of this workspace.

/// Methods that take a configuration and return it with one field changed. A setter without documentation of its own refers to
/// its field; one with the type `into T` takes whatever converts to `T`, one with the type `T` a `T` that converts to the type of the field.
#[doc(hidden)]
#[macro_export]
macro_rules! setters {
    (@methods [$($const:tt)?]) => {};
    (@methods [$($const:tt)?] $setter:ident($($field:tt)+); $($rest:tt)*) => {
        $crate::setters!(@method [$($const)?] $setter($($field)+));
        $crate::setters!(@methods [$($const)?] $($rest)*);
    };
    (@methods [$($const:tt)?] $(#[$doc:meta])+ $setter:ident($($field:tt)+); $($rest:tt)*) => {
        $crate::setters!(@documented [$($const)?] [$(#[$doc])+] $setter($($field)+));
        $crate::setters!(@methods [$($const)?] $($rest)*);
    };
    (@method [$($const:tt)?] $setter:ident($field:ident: $($type:tt)+)) => {
        $crate::setters!(
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
    (@documented [const] [$($doc:tt)+] $setter:ident($field:ident: $type:ty)) => {
        $($doc)+
        #[must_use]
        pub const fn $setter(mut self, $field: $type) -> Self {
            self.$field = $field;
            self
        }
    };
    (@documented [] [$($doc:tt)+] $setter:ident($field:ident: $type:ty)) => {
        $($doc)+
        #[must_use]
        pub fn $setter(mut self, $field: $type) -> Self {
            self.$field = $field.into();
            self
        }
    };
    (const $owner:ty: $($setters:tt)*) => {
        impl $owner {
            $crate::setters!(@methods [const] $($setters)*);
        }
    };
    ($owner:ty: $($setters:tt)*) => {
        impl $owner {
            $crate::setters!(@methods [] $($setters)*);
        }
    };
}
