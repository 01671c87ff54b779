//! Operations of a [`WideNode`](crate::graph::wide::WideNode).

mod attention;
mod elementwise;
mod norm;
