//! Configurations: what recipes resolve to, what is refused and how it is named, JSON round trips, options that casts follow.

mod casts;
mod helpers;
mod json;
mod layers;
mod resolve;
