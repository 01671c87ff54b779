//! The forward pass.

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

/// Writes the result, and the log-sum-exps `[batch, heads, queries]`; all of both.
pub(super) fn forward<U: Units, T: HighPrecision>(
    units: U,
    attention: &Attention,
    views: [View<'_>; 3],
    result: Output<'_, T>,
    lse: &mut [f32],
) {
    let split = Split::new(attention);
    let lse = Shared::new(lse);
    for_each(split.tasks(), |task| {
        let pass = Pass {
            units,
            attention,
            views,
        };
        pass.task(&split, task, result, lse);
    });
}

struct Pass<'a, U> {
    units: U,
    attention: &'a Attention,
    /// q, k and v.
    views: [View<'a>; 3],
}

impl<U: Units> Pass<'_, U> {
    fn task<T: HighPrecision>(
        &self,
        split: &Split,
        task: usize,
        result: Output<'_, T>,
        lse: Shared<'_, f32>,
    ) {
        let (attention, [q, k, v]) = (self.attention, &self.views);
        let scale = attention.softmax_scale as f32;
        let products = attention.products;
        let cast = products.values.then(|| RowCast::new(products.format));
        let mut packer = Packer::new(self.units, attention);
        let mut session = self.units.session();
        let (steps, padded) = (packer.steps, packer.padded);
        let keys = split.keys(attention, task);
        let (first_key, panels) = (keys.start, keys.len().div_ceil(PANEL));
        let at = split.kv_head(task);
        let mut k_panels = Scratch::<u32>::new(panels * PANEL * steps);
        let mut v_columns = Scratch::<u32>::new(panels * PANEL / U::STEP * padded);
        packer.panels(k, at, keys.clone(), &mut k_panels, None);
        packer.columns(v, at, keys.clone(), &mut v_columns);

        let mut q_rows = Scratch::<u32>::new(QUERIES * steps);
        let mut scores = Scratch::<f32>::new(QUERIES * (panels + 1) * PANEL);
        let mut sums = Scratch::<f32>::new(QUERIES * padded);
        let mut factors = vec![0f32; attention.dropout.map_or(0, |_| panels * PANEL)];
        for ([batch, head], index) in split.blocks(task) {
            let block = Block::new(attention, batch, index);
            packer.rows(q, [batch, head], block.queries.clone(), &mut q_rows);
            // Where the block's keys begin.
            let k_panels = &k_panels[(block.first_key - first_key) * steps..];
            let v_columns = &v_columns[(block.first_key - first_key) / U::STEP * padded..];
            block.scores(
                (self.units, &mut session),
                steps,
                &q_rows,
                k_panels,
                &mut scores,
            );
            let stride = block.stride();
            let mut totals = [0f32; QUERIES];
            let pair = batch * attention.heads + head;
            for (row, query) in block.queries.clone().enumerate() {
                let scores = &mut scores[row * stride..][..block.panels * PANEL];
                let visible = block.visible(row);
                let log = &mut [f32::NEG_INFINITY];
                let mut seen = Row::of(scores, &visible);
                if !visible.is_empty() {
                    let first = block.first_key + visible.start / PANEL * PANEL;
                    let dropped = attention.dropout.map_or(0, |_| seen.values.len());
                    let dropout = attention.dropout.as_ref();
                    let kept =
                        rows::factors(dropout, [pair, query], first, &mut factors[..dropped]);
                    let (largest, total) = seen.exponentials(scale, kept, cast);
                    totals[row] = if cast.is_some() { 1.0 } else { total };
                    log[0] = largest + total.ln();
                }
                self.units.cells_in_place(scores);
                let place = pair * attention.queries + query;
                // SAFETY: the queries of tasks and blocks are disjoint.
                unsafe { lse.part(place..place + 1) }.copy_from_slice(log);
            }
            block.weighted(
                (self.units, &mut session),
                padded,
                bits(&scores),
                v_columns,
                &mut sums,
            );
            for (row, query) in block.queries.clone().enumerate() {
                let sums = match block.visible(row).is_empty() {
                    true => &[],
                    false => &sums[row * padded..][..attention.head_dim],
                };
                // SAFETY: the queries of tasks and blocks are disjoint.
                unsafe { result.write([batch, head, query], sums, 1.0 / totals[row]) };
            }
        }
    }
}
