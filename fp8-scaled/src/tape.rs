//! The graph of operations on [`Scaled`] tensors, and the sweep that differentiates it.
//!
//! candle's own graph cannot carry it: there a gradient is one tensor in its argument's dtype, and gradients are added as
//! plain tensors. Here a cotangent is a [`Scaled`] of any dtype, FP8 included, and cotangents are added by the rule of addition.

use super::error::{Error, Result, internal, shape};
use super::grads::ScaledGrads;
use super::options::Options;
use super::value::{Data, Node, Scaled, Vjp, next_id};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

impl Scaled {
    /// Records `value` as the result of `op` on `parents`. `vjp` gives the cotangent of each parent whose flag is set, in the parent's
    /// shape; it must hold only detached values. The result is tracked if a parent is.
    pub(super) fn record<const N: usize>(
        value: Scaled,
        op: &'static str,
        parents: [&Scaled; N],
        vjp: impl Fn(&Scaled, [bool; N]) -> Result<[Option<Scaled>; N]> + Send + Sync + 'static,
    ) -> Scaled {
        Self::record_many(
            value,
            op,
            &parents,
            move |cotangent, wanted| match <[bool; N]>::try_from(wanted) {
                Ok(wanted) => Ok(vjp(cotangent, wanted)?.into_iter().collect()),
                Err(_) => internal!("{op}: {} parents instead of {N}", wanted.len()),
            },
        )
    }

    /// `value` as the result of `op` on this value, with the function from its cotangent to that of this value.
    pub(super) fn recorded(
        &self,
        value: Scaled,
        op: &'static str,
        vjp: impl Fn(&Scaled) -> Result<Scaled> + Send + Sync + 'static,
    ) -> Scaled {
        Self::record(value, op, [self], move |g, _| Ok([Some(vjp(g)?)]))
    }

    /// [`Scaled::record`] for any number of parents.
    pub(super) fn record_many(
        value: Scaled,
        op: &'static str,
        parents: &[&Scaled],
        vjp: impl Fn(&Scaled, &[bool]) -> Result<Vec<Option<Scaled>>> + Send + Sync + 'static,
    ) -> Scaled {
        Self::record_node(value, op, parents, Arc::new(vjp))
    }

    /// [`Scaled::record_many`], compiled once for all operations.
    fn record_node(
        mut value: Scaled,
        op: &'static str,
        parents: &[&Scaled],
        vjp: Arc<Vjp>,
    ) -> Scaled {
        if value.origin.is_none()
            && let Data::Float(data) = &value.data
        {
            // A view of a parameter's data, or the data themselves, change with them.
            let mut parents = parents.iter().filter(|parent| parent.origin.is_some());
            let shared = parents.find(|parent| parent.shares(data));
            value.origin = shared.and_then(|parent| parent.origin.clone());
        }
        let options = Options::current();
        if options.settings.gradients && parents.iter().any(|parent| parent.is_tracked()) {
            value.node = Some(Arc::new(Node {
                id: next_id(),
                op,
                dims: value.dims().to_vec(),
                parents: parents.iter().map(|parent| parent.node.clone()).collect(),
                vjp: Mutex::new(Some(vjp)),
                is_leaf: false,
                reads: parents
                    .iter()
                    .filter_map(|parent| parent.origin.clone())
                    .collect(),
                options,
            }));
        }
        value
    }

    /// Gradients of a scalar with respect to every [`ScaledVar`](super::ScaledVar) that it was computed from. The pass
    /// frees what the graph has kept, so it runs only once: see [`Scaled::backward_retained`].
    ///
    /// # Errors
    /// [`Error::NotScalar`] if this has more than one element, [`Error::GraphUsed`] if an earlier backward pass has freed a part of the graph,
    /// [`Error::ChangedParameter`] if a parameter has changed since an operation of the graph has read it.
    pub fn backward(&self) -> Result<ScaledGrads> {
        self.sweep(self.unit_cotangent()?, false)
    }

    /// [`Scaled::backward`] that keeps the graph for another backward pass.
    ///
    /// # Errors
    /// As [`Scaled::backward`].
    pub fn backward_retained(&self) -> Result<ScaledGrads> {
        self.sweep(self.unit_cotangent()?, true)
    }

    /// [`Scaled::backward`] for a value of any shape, given its cotangent.
    ///
    /// # Errors
    /// [`fp8_candle::Error::Shape`] if the cotangent has another shape; [`Error::GraphUsed`] and [`Error::ChangedParameter`] as there.
    pub fn backward_with(&self, cotangent: &Scaled) -> Result<ScaledGrads> {
        if cotangent.dims() != self.dims() {
            return Err(shape(
                "backward_with",
                "the cotangent",
                format!("{:?}, as the value has", self.dims()),
                cotangent.dims(),
            ));
        }
        self.sweep(cotangent.detach(), false)
    }

    fn unit_cotangent(&self) -> Result<Scaled> {
        if self.elem_count() != 1 {
            return Err(Error::NotScalar {
                op: "backward",
                got: self.dims().to_vec(),
            });
        }
        Scaled::constant_like(1.0, self)?.reshape(self.dims())
    }

    fn sweep(&self, cotangent: Scaled, retain: bool) -> Result<ScaledGrads> {
        let mut grads = ScaledGrads::default();
        let Some(root) = self.node.clone() else {
            return Ok(grads);
        };
        // By node id, with the sum of the cotangents found so far.
        let mut open = BTreeMap::from([(root.id, (root, cotangent))]);
        // The latest node first: every node computed from it is done.
        while let Some((_, (node, cotangent))) = open.pop_last() {
            if node.is_leaf {
                grads.insert_id(node.id, cotangent);
                continue;
            }
            // Before the node's part of the graph is gone.
            for version in &node.reads {
                version.check(node.op)?;
            }
            let vjp = {
                let mut vjp = node.vjp.lock().unwrap_or_else(PoisonError::into_inner);
                if retain { vjp.clone() } else { vjp.take() }
            };
            let vjp = vjp.ok_or(Error::GraphUsed { op: node.op })?;
            let wanted: Vec<bool> = node.parents.iter().map(Option::is_some).collect();
            let _options = Options::enter(node.options.clone());
            let found = vjp(&cotangent, &wanted)?;
            drop((vjp, cotangent));
            for (parent, found) in node.parents.iter().zip(found) {
                let (Some(parent), Some(found)) = (parent, found) else {
                    continue;
                };
                if found.dims() != parent.dims {
                    internal!(
                        "{}: a cotangent of shape {:?} for an argument of shape {:?}",
                        node.op,
                        found.dims(),
                        parent.dims
                    );
                }
                let found = match open.remove(&parent.id) {
                    None => found.detach(),
                    Some((_, other)) => other.add(&found.detach())?,
                };
                open.insert(parent.id, (parent.clone(), found));
            }
        }
        Ok(grads)
    }
}
