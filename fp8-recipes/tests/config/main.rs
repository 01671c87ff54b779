//! Configurations: what recipes resolve to, what is refused and how it is named, JSON round trips.

mod helpers;
mod json;
mod layers;
mod resolve;
