//! The backward pass, from q, k, v and the log-sum-exps.
//!
//! ```text
//! p  = exp(scale * q k^T - lse)        dp = dy v^T, dropped like p
//! ds = p * (dp - rowsum(p * dp))        dq = scale * ds k     dk = scale * ds^T q     dv = dropped(p)^T dy
//! ```

use super::super::scratch::Scratch;
use super::block::{Block, QUERIES};
use super::cast::RowCast;
use super::layout::PANEL;
use super::output::Output;
use super::pack::Packer;
use super::rows::{self, Row};
use super::source::View;
use super::split::Split;
use super::units::{Units, bits};
use crate::base::data::attention::Attention;
use crate::base::parallel::shared::Shared;
use crate::base::parallel::tasks::for_each;
use fp8_core::HighPrecision;

/// The operands of the products, as [`BackwardOperands`](crate::base::data::attention_products::BackwardOperands) has them.
pub(super) struct Views<'a> {
    pub(super) scores: [View<'a>; 2],
    pub(super) grad_probabilities: [View<'a>; 2],
    pub(super) grad_inputs: [View<'a>; 3],
}

/// Writes every element of those `gradients` of q, k and v that are wanted.
pub(super) fn backward<U: Units, T: HighPrecision>(
    units: U,
    attention: &Attention,
    views: Views<'_>,
    lse: &[f32],
    gradients: [Option<Output<'_, T>>; 3],
) {
    let split = Split::new(attention);
    let pass = Pass {
        units,
        attention,
        views,
        lse,
        gradients,
        split: &split,
    };
    if split.parts == 1 || gradients[1].is_none() && gradients[2].is_none() {
        for_each(split.tasks(), |task| {
            let sums = pass.task(task);
            // SAFETY: each head of keys belongs to one task.
            unsafe { pass.write_keys(task, &[&sums]) };
        });
        return;
    }
    // The sums of all tasks of a head of keys are added in a fixed order.
    let mut sums: Vec<Option<KeySums>> = (0..split.tasks()).map(|_| None).collect();
    let places = Shared::new(&mut sums);
    for_each(split.tasks(), |task| {
        // SAFETY: each task has its own place.
        let place = unsafe { places.part(task..task + 1) };
        place[0] = Some(pass.task(task));
    });
    let sums: Vec<KeySums> = sums.into_iter().flatten().collect();
    for_each(split.tasks() / split.parts, |pair| {
        let parts: Vec<&KeySums> = sums[pair * split.parts..][..split.parts].iter().collect();
        // SAFETY: each head of keys belongs to one task.
        unsafe { pass.write_keys(pair * split.parts, &parts) };
    });
}

/// Gradients of a task's keys, without the softmax scale, and values, `[keys][padded]`.
struct KeySums {
    dk: Vec<f32>,
    dv: Vec<f32>,
    padded: usize,
}

struct Pass<'a, U, T> {
    units: U,
    attention: &'a Attention,
    views: Views<'a>,
    lse: &'a [f32],
    gradients: [Option<Output<'a, T>>; 3],
    split: &'a Split,
}

impl<U: Units, T: HighPrecision> Pass<'_, U, T> {
    /// Writes the gradient of q for the blocks of a task, and returns the sums for its keys.
    fn task(&self, task: usize) -> KeySums {
        let (attention, units, split) = (self.attention, self.units, self.split);
        let [q, k] = &self.views.scores;
        let [grad, v] = &self.views.grad_probabilities;
        let [q_values, k_values, grad_values] = &self.views.grad_inputs;
        let [dq, dk, dv] = self.gradients;
        let scale = attention.softmax_scale as f32;
        let products = attention.products;
        let casts = [products.format, products.grad_format].map(RowCast::new);
        let casts = products.grad_inputs.then_some(casts);
        let mut packer = Packer::new(units, attention);
        let mut session = units.session();
        let (steps, padded) = (packer.steps, packer.padded);
        let keys = split.keys(attention, task);
        let (first_key, panels) = (keys.start, keys.len().div_ceil(PANEL));
        let at = split.kv_head(task);
        let mut k_panels = Scratch::<u32>::new(panels * PANEL * steps);
        let mut v_panels = Scratch::<u32>::new(panels * PANEL * steps);
        let mut k_columns = Scratch::<u32>::new(panels * PANEL / U::STEP * padded);
        // Most calls read the same values of a token in all products.
        let shares = [(q, q_values), (k, k_values), (grad, grad_values)];
        let [shares_q, shares_k, shares_grad] = shares.map(|(x, y)| x.is(y));
        let columns = (shares_k && dq.is_some()).then_some(&mut *k_columns);
        packer.panels(k, at, keys.clone(), &mut k_panels, columns);
        packer.panels(v, at, keys.clone(), &mut v_panels, None);
        if !shares_k && dq.is_some() {
            packer.columns(k_values, at, keys.clone(), &mut k_columns);
        }
        let sums_of = |wanted: bool| vec![0f32; if wanted { panels * PANEL * padded } else { 0 }];
        let mut sums = KeySums {
            dk: sums_of(dk.is_some()),
            dv: sums_of(dv.is_some()),
            padded,
        };

        let row_len = (panels + 1) * PANEL;
        let mut q_rows = Scratch::<u32>::new(QUERIES * steps);
        let mut grad_rows = Scratch::<u32>::new(QUERIES * steps);
        let mut q_columns = Scratch::<u32>::new(QUERIES.div_ceil(U::STEP) * padded);
        let mut grad_columns = Scratch::<u32>::new(QUERIES.div_ceil(U::STEP) * padded);
        let mut p = Scratch::<f32>::new(QUERIES * row_len);
        let mut ds = Scratch::<f32>::new(QUERIES * row_len);
        let weights = QUERIES.div_ceil(U::STEP) * panels * PANEL;
        let mut p_columns = Scratch::<u32>::new(weights);
        let mut ds_columns = Scratch::<u32>::new(weights);
        let mut dq_sums = Scratch::<f32>::new(QUERIES * padded);
        let mut factors = vec![0f32; attention.dropout.map_or(0, |_| panels * PANEL)];
        for ([batch, head], index) in split.blocks(task) {
            let at = [batch, head];
            let block = Block::new(attention, batch, index);
            let queries = block.queries.clone();
            let skipped = block.first_key - first_key;
            let panels_from = skipped * steps;
            packer.rows(q, at, queries.clone(), &mut q_rows);
            block.scores(
                (units, &mut session),
                steps,
                &q_rows,
                &k_panels[panels_from..],
                &mut p,
            );
            packer.rows(grad, at, queries.clone(), &mut grad_rows);
            block.scores(
                (units, &mut session),
                steps,
                &grad_rows,
                &v_panels[panels_from..],
                &mut ds,
            );

            let (stride, width) = (block.stride(), block.panels * PANEL);
            let pair = batch * attention.heads + head;
            let lse = &self.lse[pair * attention.queries + queries.start..];
            for (row, query) in queries.clone().enumerate() {
                let p = &mut p[row * stride..][..width];
                let ds = &mut ds[row * stride..][..width];
                let visible = block.visible(row);
                let (mut p, mut ds) = (Row::of(p, &visible), Row::of(ds, &visible));
                if visible.is_empty() {
                    continue;
                }
                let first = block.first_key + visible.start / PANEL * PANEL;
                let dropped = attention.dropout.map_or(0, |_| p.values.len());
                let dropout = attention.dropout.as_ref();
                let kept = rows::factors(dropout, [pair, query], first, &mut factors[..dropped]);
                let lse = (!attention.normalizes).then_some(lse[row]);
                p.gradients(scale, lse, &mut ds, kept, casts);
            }
            let weights_of = |values: &[f32], to: &mut [u32]| {
                let panel = block.steps::<U>() * PANEL;
                // Nothing, if no query sees a key.
                let rows = if width > 0 { block.rows() } else { 0 };
                for (step, row) in (0..rows).step_by(U::STEP).enumerate() {
                    let x = &values[row * stride..][..width];
                    let y = match row + 1 < block.rows() {
                        true => &values[(row + 1) * stride..][..width],
                        false => &[],
                    };
                    units.columns(x, y, &mut to[step * PANEL..], panel);
                }
            };
            if dv.is_some() {
                match shares_grad {
                    true => packer.columns_of_rows(&grad_rows, block.rows(), &mut grad_columns),
                    false => packer.columns(grad_values, at, queries.clone(), &mut grad_columns),
                }
                weights_of(&p, &mut p_columns);
                let to = &mut sums.dv[skipped * padded..];
                block.add_to_keys((units, &mut session), padded, &p_columns, &grad_columns, to);
            }
            if dk.is_some() {
                match shares_q {
                    true => packer.columns_of_rows(&q_rows, block.rows(), &mut q_columns),
                    false => packer.columns(q_values, at, queries.clone(), &mut q_columns),
                }
                weights_of(&ds, &mut ds_columns);
                let to = &mut sums.dk[skipped * padded..];
                block.add_to_keys((units, &mut session), padded, &ds_columns, &q_columns, to);
            }
            if let Some(dq) = dq {
                for row in 0..block.rows() {
                    units.cells_in_place(&mut ds[row * stride..][..width]);
                }
                let columns = &k_columns[skipped / U::STEP * padded..];
                block.weighted(
                    (units, &mut session),
                    padded,
                    bits(&ds),
                    columns,
                    &mut dq_sums,
                );
                for (row, query) in queries.enumerate() {
                    let sums = &dq_sums[row * padded..][..attention.head_dim];
                    // SAFETY: the queries of tasks and blocks are disjoint.
                    unsafe { dq.write([batch, head, query], sums, scale) };
                }
            }
        }
        sums
    }

    /// Writes the gradients for the keys of a task, the sums of `parts`.
    ///
    /// # Safety
    /// No other task may write those of this head of keys.
    unsafe fn write_keys(&self, task: usize, parts: &[&KeySums]) {
        let [_, dk, dv] = self.gradients;
        let attention = self.attention;
        let keys = self.split.keys(attention, task);
        let [batch, head] = self.split.kv_head(task);
        let scale = attention.softmax_scale as f32;
        let mut total = vec![0f32; attention.head_dim];
        for (out, factor, of) in [
            (dk, scale, (|sums| &sums.dk) as fn(&KeySums) -> &Vec<f32>),
            (dv, 1.0, |sums| &sums.dv),
        ] {
            let Some(out) = out else { continue };
            for key in 0..attention.keys {
                let row = |part: &'_ KeySums| (key - keys.start) * part.padded;
                let sums: &[f32] = match parts {
                    _ if !keys.contains(&key) => &[],
                    [part] => &of(part)[row(part)..][..attention.head_dim],
                    _ => {
                        total.fill(0.0);
                        for part in parts {
                            let values = &of(part)[row(part)..];
                            for (total, x) in total.iter_mut().zip(values) {
                                *total += x;
                            }
                        }
                        &total
                    }
                };
                // SAFETY: the caller guarantees that no other task writes these rows.
                unsafe { out.write([batch, head, key], sums, factor) };
            }
        }
    }
}
