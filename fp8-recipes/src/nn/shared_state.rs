//! FP8 state that the clones of a layer share.

use crate::autocast::Fp8State;
use std::sync::{Arc, PoisonError, RwLock};

/// Where [`prepare_fp8`](crate::prepare_fp8) puts a layer's state, through a shared reference: a layer may lie in an `Arc`.
#[derive(Debug, Clone, Default)]
pub(super) struct SharedState(Arc<RwLock<Option<Arc<Fp8State>>>>);

impl SharedState {
    pub(super) fn get(&self) -> Option<Arc<Fp8State>> {
        let state = self.0.read().unwrap_or_else(PoisonError::into_inner);
        state.clone()
    }

    pub(super) fn set(&self, state: Option<Arc<Fp8State>>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = state;
    }
}
