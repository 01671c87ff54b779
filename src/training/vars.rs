//! Variables by name.

use super::error::Result;
use candle_core::Var;
use candle_nn::VarMap;

pub(super) type Locked<'a> = std::sync::MutexGuard<'a, std::collections::HashMap<String, Var>>;

/// The variables, by name.
pub(super) fn locked(vars: &VarMap) -> Result<Locked<'_>> {
    let poisoned = |_| candle_core::Error::msg("the VarMap's lock is poisoned").into();
    vars.data().lock().map_err(poisoned)
}
