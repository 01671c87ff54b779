//! The path of a layer and its FP8 state, which all clones of the layer share.

use crate::autocast::{Fp8State, Prepared};
use std::sync::{Arc, PoisonError, RwLock};

/// Where [`prepare_fp8`](crate::prepare_fp8) puts a layer's state, through a shared reference: a layer may lie in an `Arc`.
#[derive(Debug, Clone, Default)]
pub(super) struct SharedState(Arc<RwLock<Prepared>>);

impl SharedState {
    pub(super) fn prepared(&self) -> Prepared {
        let prepared = self.0.read().unwrap_or_else(PoisonError::into_inner);
        prepared.clone()
    }

    pub(super) fn get(&self) -> Option<Arc<Fp8State>> {
        match self.prepared() {
            Prepared::With(state) => Some(state),
            Prepared::Never | Prepared::LeftOut => None,
        }
    }

    /// Without a state, the layer counts as left out on purpose.
    pub(super) fn set(&self, state: Option<Arc<Fp8State>>) {
        let prepared = state.map_or(Prepared::LeftOut, Prepared::With);
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = prepared;
    }
}

/// `with_path` and `path` of a layer with a field `path`; `state` is its [`SharedState`], if it has one.
macro_rules! path_methods {
    ($type:ident $(<$parameter:ident>)? $(, $state:ident)?) => {
        impl$(<$parameter>)? $type$(<$parameter>)? {
            /// Sets the path in the checkpoint. Layers built from a VarBuilder know theirs.
            ///
            /// The named layer shares no FP8 state with the layer that it was cloned from, and has none yet.
            #[must_use]
            pub fn with_path(mut self, path: impl Into<std::sync::Arc<str>>) -> Self {
                self.path = Some(path.into());
                $(self.$state = Default::default();)?
                self
            }

            /// Path in the checkpoint: empty at its root, None if unknown.
            pub fn path(&self) -> Option<&str> {
                self.path.as_deref()
            }
        }
    };
}

/// The methods of [`Fp8Layer`](crate::Fp8Layer) and [`Fp8Operator`](crate::Fp8Operator) that read the fields `path` and `state`.
macro_rules! path_and_state {
    () => {
        fn path(&self) -> Option<&str> {
            self.path.as_deref()
        }

        fn fp8_state(&self) -> Option<Arc<Fp8State>> {
            self.state.get()
        }

        fn set_fp8_state(&self, state: Option<Arc<Fp8State>>) {
            self.state.set(state);
        }
    };
}

pub(super) use {path_and_state, path_methods};
