//! Rows of a table.

use crate::base::check::{check_device, check_float};
use crate::base::data::storage::take_storage;
use crate::base::error::{Error, Result, dtype_error, shape_error};
use crate::graph::{Ready, attach, offer_rows, with_rows};
use candle_core::{DType, Tensor};

const OP: &str = "embedding";

/// The rows `indexes` of `table`, differentiable: what `candle_nn::Embedding` computes. In [`wide::backward`](crate::wide::backward) the
/// gradient of a table that is a variable is added to those rows of what another operation gave, such as the head that a language
/// model ties to its embedding, instead of being made as a table of its own. Rows of 16 bits are added in f32 and rounded once.
///
/// # Shapes
/// `table` `[rows, features]` of any float dtype, `indexes` `[..]` of u8, u32 or i64; result `[.., features]`.
///
/// # Errors
/// [`Error::Index`] if an index is not a row of the table; if shapes, dtypes or devices do not fit. Indexes on a CUDA device are not
/// read back: there u32::MAX and i64::MAX, which candle leaves out, give rows of zeros.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor, Var};
/// let table = Var::new(&[[1f32, 2.], [3., 4.], [5., 6.]], &Device::Cpu)?;
/// let rows = fp8_candle::ops::embedding(&table, &Tensor::new(&[2u32, 0, 2], &Device::Cpu)?)?;
/// assert_eq!(rows.to_vec2::<f32>()?, [[5., 6.], [1., 2.], [5., 6.]]);
/// let grads = fp8_candle::wide::backward(&rows.sum_all()?)?;
/// assert_eq!(grads.get(&table).unwrap().to_vec2::<f32>()?, [[1., 1.], [0., 0.], [2., 2.]]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn embedding(table: &Tensor, indexes: &Tensor) -> Result<Tensor> {
    check_float(OP, "table", table)?;
    check_device(OP, "indexes", indexes, table.device())?;
    let &[rows, features] = table.dims() else {
        return Err(shape_error(OP, "table", "[rows, features]", table.dims()));
    };
    if indexes.dtype().is_float() {
        return Err(dtype_error(
            OP,
            "indexes",
            "an integer dtype",
            indexes.dtype(),
        ));
    }
    let shape = [indexes.dims(), &[features]].concat();
    let mut indexes = indexes.detach().flatten_all()?;
    // candle leaves the largest number of a dtype out, which for u8 is the last row of a table of bytes.
    if indexes.dtype() == DType::U8 {
        indexes = indexes.to_dtype(DType::U32)?;
    }
    if indexes.device().is_cpu() {
        check_indexes(&indexes, rows)?;
    }
    let rows = table.detach().index_select(&indexes, 0)?;
    let result = Ready::new(take_storage(rows)?, shape)?;
    attach(OP, [table], result, move |[table], _, grad| {
        let rows = grad.contiguous()?.reshape(((), features))?;
        if offer_rows(table, &indexes, &rows)? {
            return Ok([None]);
        }
        Ok([Some(with_rows(table, None, &indexes, &rows)?)])
    })
}

fn check_indexes(indexes: &Tensor, rows: usize) -> Result<()> {
    let indexes = indexes.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    let is_row = |index: i64| usize::try_from(index).is_ok_and(|index| index < rows);
    match indexes.iter().position(|&index| !is_row(index)) {
        None => Ok(()),
        Some(position) => Err(Error::Index {
            op: OP,
            index: indexes[position],
            position,
            rows,
        }),
    }
}
