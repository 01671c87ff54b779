//! The gradients of variables, past candle's store.

use crate::base::error::{Error, Result};
use crate::device::cpu::elements::compute_dtype;
use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// Is told of gradients while a backward pass is still running, for example to send them to other processes.
pub trait GradientListener {
    /// The pass has collected a gradient of `variable`; `sum` is its sum so far. More may follow: from another operation that uses the
    /// variable, and, at the end of the pass, from operations of candle, which are not told of.
    ///
    /// # Errors
    /// Your own end the backward pass.
    fn collected(&self, variable: &Tensor, sum: &Tensor) -> Result<()>;
}

#[derive(Default)]
struct Collected {
    gradients: HashMap<TensorId, Tensor>,
    listener: Option<Rc<dyn GradientListener>>,
    /// The error of the sweep: candle's errors carry only its message.
    error: Option<Error>,
}

thread_local! {
    static COLLECTOR: RefCell<Option<Collected>> = const { RefCell::new(None) };
}

/// Ends the collection of this thread, also if the backward pass panics.
struct Collection(Option<Collected>);

impl Drop for Collection {
    fn drop(&mut self) {
        let before = self.0.take();
        COLLECTOR.with(|collector| *collector.borrow_mut() = before);
    }
}

/// The gradients of `loss`, as [`Tensor::backward`] gives them, without its zeros and additions for the parameters of this
/// crate's operations: for every argument of an operation candle makes a tensor of zeros and adds the gradient to it, which
/// is three times the parameters' bytes written per step.
///
/// # Errors
/// The errors of [`Tensor::backward`], and of a forward pass that is [computed again](crate::graph::wide::recompute).
///
/// # Examples
/// ```
/// use candle_core::{Device, Var};
/// let x = Var::new(&[1f32, 2.], &Device::Cpu)?;
/// let grads = fp8_candle::wide::backward(&x.sqr()?.sum_all()?)?;
/// assert_eq!(grads.get(&x).unwrap().to_vec1::<f32>()?, [2., 4.]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn backward(loss: &Tensor) -> Result<GradStore> {
    collect(loss, None)
}

/// [`backward`] that tells `listener` of gradients. Passes inside it, which recompute a part of the model, tell it only of their sums.
///
/// # Errors
/// As [`backward`], and those of `listener`.
pub fn backward_with(loss: &Tensor, listener: Rc<dyn GradientListener>) -> Result<GradStore> {
    collect(loss, Some(listener))
}

fn collect(loss: &Tensor, listener: Option<Rc<dyn GradientListener>>) -> Result<GradStore> {
    let own = Collected {
        listener,
        ..Collected::default()
    };
    let before = COLLECTOR.with(|collector| collector.borrow_mut().replace(own));
    let collection = Collection(before);
    let grads = loss.backward();
    let collected = COLLECTOR.with(|collector| collector.borrow_mut().take());
    drop(collection);
    let Collected {
        gradients, error, ..
    } = collected.unwrap_or_default();
    let mut grads = match (grads, error) {
        (Ok(grads), _) => grads,
        (Err(_), Some(error)) => return Err(error),
        (Err(error), None) => return Err(error.into()),
    };
    for (id, grad) in gradients {
        let grad = match grads.get_id(id) {
            // The variable is used outside wide nodes as well.
            Some(other) => (other + grad)?,
            None => grad,
        };
        grads.insert_id(id, grad);
    }
    Ok(grads)
}

/// Whether this thread collects.
pub(crate) fn is_open() -> bool {
    COLLECTOR.with(|collector| collector.borrow().is_some())
}

/// Keeps `error` for an open collection and returns a candle error with its message; without a collection, returns `error`.
pub(crate) fn tell(error: Error) -> Error {
    COLLECTOR.with(|collector| match collector.borrow_mut().as_mut() {
        None => error,
        Some(collected) => {
            let message = error.to_string();
            collected.error = Some(error);
            Error::Candle(candle_core::Error::Msg(message))
        }
    })
}

/// Takes the gradient of `argument` if it is a variable and this thread collects.
pub(crate) fn offer(argument: &Tensor, gradient: &mut Option<Tensor>) -> Result<()> {
    let Some(new) = gradient.take_if(|_| argument.is_variable() && is_open()) else {
        return Ok(());
    };
    collect_into(argument, |old| match old {
        Some(old) => old + new,
        None => Ok(new),
    })
}

/// Adds gradients of some rows of `argument`, which is a matrix, to its gradient, if it is a variable and this thread collects; returns
/// whether it has done so.
pub(crate) fn offer_rows(argument: &Tensor, indexes: &Tensor, rows: &Tensor) -> Result<bool> {
    if !argument.is_variable() || !is_open() {
        return Ok(false);
    }
    collect_into(argument, |old| with_rows(argument, old, indexes, rows))?;
    Ok(true)
}

/// `sum`, or zeros in the shape and dtype of `table`, with `rows` added to its rows `indexes`. 16-bit numbers are added in f32 and rounded
/// once: beside a sum of 16 bits, the next of many rows would vanish.
pub(crate) fn with_rows(
    table: &Tensor,
    sum: Option<Tensor>,
    indexes: &Tensor,
    rows: &Tensor,
) -> candle_core::Result<Tensor> {
    let wide = compute_dtype(table.dtype());
    let start = match sum {
        Some(sum) => sum.to_dtype(wide)?,
        None => Tensor::zeros(table.shape(), wide, table.device())?,
    };
    let sum = start.index_add(indexes, &rows.to_dtype(wide)?, 0)?;
    // As large as the sum, beside which the result needs memory.
    drop(start);
    sum.to_dtype(table.dtype())
}

/// Changes the gradient of a variable that this thread collects, and tells the listener.
fn collect_into(
    argument: &Tensor,
    change: impl FnOnce(Option<Tensor>) -> candle_core::Result<Tensor>,
) -> Result<()> {
    let told = COLLECTOR.with(|collector| {
        let mut collector = collector.borrow_mut();
        let Some(collected) = collector.as_mut() else {
            return Ok(None);
        };
        let gradients = &mut collected.gradients;
        let sum = change(gradients.remove(&argument.id()))?;
        gradients.insert(argument.id(), sum.clone());
        Ok::<_, Error>(collected.listener.clone().map(|listener| (listener, sum)))
    })?;
    // The collector is not borrowed here: the listener runs code of others.
    match told {
        Some((listener, sum)) => listener.collected(argument, &sum),
        None => Ok(()),
    }
}
