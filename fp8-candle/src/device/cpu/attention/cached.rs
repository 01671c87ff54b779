//! Attention over caches of keys and values, in host memory.

use super::super::elements::{Element, for_narrow, storage};
use super::choose::with_units;
use super::few::{self, Few};
use super::forward;
use super::output::{self, Output};
use super::source::{Scales, View, with_views};
use crate::base::data::attention::{Attention, CacheSide};
use crate::base::data::attention_products::Operand;
use crate::base::error::Result;
use crate::base::parallel::tasks::for_each;
use candle_core::{Storage, Tensor};

/// Waking another thread takes about as long as this many multiplications.
const FEW_PRODUCTS: usize = 200_000;

/// The sizes of a call, and its keys and values.
type Cached<'a> = (&'a Attention, View<'a>, View<'a>);

/// The result for `q` `[batch, heads, queries, head_dim]`, contiguous in its shape and dtype. `calls` have the keys and values of
/// its batch entries, in order: one call for all, or one for each. They differ in their keys alone, and have no dropout.
pub(crate) fn cached(q: &Tensor, calls: &[(Attention, [CacheSide<'_>; 2])]) -> Result<Storage> {
    let Some((first, _)) = calls.first() else {
        crate::base::error::internal!("attention over no cache");
    };
    let locks: Vec<_> = (calls.iter())
        .map(|(_, sides)| sides.map(|side| side.tensor.storage_and_layout()))
        .collect();
    let mut caches = Vec::with_capacity(calls.len());
    for ((attention, sides), locks) in calls.iter().zip(&locks) {
        let view = |i: usize| {
            let (storage, layout) = &locks[i];
            let fp8 = (sides[i].fp8).map(|(format, scales)| (format, Scales::Heads(scales)));
            View::new(attention, storage, layout, fp8)
        };
        caches.push((attention, view(0)?, view(1)?));
    }
    let whole = Attention {
        batch: caches.iter().map(|(attention, ..)| attention.batch).sum(),
        ..first.clone()
    };
    let dtype = q.dtype();
    with_views(
        &whole,
        [Operand::Values(q)],
        |[q]| for_narrow!("attention", "q", dtype, T => run::<T>(&whole, q, &caches)),
    )
}

fn run<T: Element>(whole: &Attention, q: View<'_>, caches: &[Cached<'_>]) -> Result<Storage> {
    let Attention {
        heads,
        kv_heads,
        queries,
        ..
    } = *whole;
    let in_bf16 = whole.in_bf16(T::DTYPE);
    let len = output::len(whole, [heads, queries]);
    let mut result = Vec::<T>::with_capacity(len);
    let output = Output::of(&mut result, whole, [heads, queries]);
    with_units!(in_bf16, units => match caches {
        [(attention, k, v)] if heads / kv_heads * queries > few::MOST => {
            let mut lse = vec![0f32; attention.batch * heads * queries];
            forward::forward(units, attention, [q, *k, *v], output, &mut lse);
        }
        _ => {
            let task = |task: usize| {
                let (entry, kv_head) = (task / kv_heads, task % kv_heads);
                let (call, batch) = match caches.len() {
                    1 => (0, entry),
                    _ => (entry, 0),
                };
                let (attention, k, v) = caches[call];
                let few = Few { units, attention, q, entry, k, v, at: [batch, kv_head] };
                // SAFETY: each head of keys of each entry belongs to one task.
                unsafe { few.run(output) };
            };
            let keys: usize = caches.iter().map(|(attention, ..)| attention.batch * attention.keys).sum();
            let tasks = whole.batch * kv_heads;
            match 2 * heads * queries * whole.head_dim * keys < FEW_PRODUCTS {
                true => (0..tasks).for_each(task),
                false => for_each(tasks, task),
            }
        }
    });
    // SAFETY: every query of every head has been written.
    unsafe { result.set_len(len) };
    Ok(storage(result))
}
