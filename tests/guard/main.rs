//! The autocast guard: what is high precision, what nests, what is updated and when.

mod backward;
mod configurations;
mod flows;
mod helpers;
mod high_precision;
mod histories;
mod judged;
mod nesting;
mod non_finite;
mod non_finite_causes;
mod reduction;
mod scales;
mod step_ends;
mod threads;
mod unwinding;
mod update_times;
