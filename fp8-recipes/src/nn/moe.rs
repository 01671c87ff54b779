//! `candle_nn::moe`, whose kernels have no backward pass: an error where a gradient is tracked.

use super::no_gradient_through;
use candle_core::quantized::QTensor;
use candle_core::{DType, Result, Tensor};

/// Functions of candle-nn that first check that neither `input` nor the tensor after `checks` tracks a gradient.
macro_rules! inference_only {
    ($($name:ident($weights:ident: $type:ty $(, $dtype:ident)?) $(checks $checked:ident)?;)*) => {$(
        #[doc = concat!("`candle_nn::moe::", stringify!($name), "`, for inference.")]
        ///
        /// # Errors
        /// As candle-nn's, and if a gradient is tracked in one of the inputs.
        #[allow(clippy::too_many_arguments)]
        pub fn $name(
            input: &Tensor,
            $weights: &$type,
            topk_weights: &Option<Tensor>,
            sorted_token_ids: &Tensor,
            experts_ids: &Tensor,
            topk: usize,
            is_prefill: bool,
            $($dtype: DType,)?
        ) -> Result<Tensor> {
            let mut checked = vec![input $(, $checked)?];
            checked.extend(topk_weights);
            no_gradient_through(stringify!($name), &checked)?;
            candle_nn::moe::$name(
                input,
                $weights,
                topk_weights,
                sorted_token_ids,
                experts_ids,
                topk,
                is_prefill,
                $($dtype,)?
            )
        }
    )*};
}

inference_only! {
    moe_gemm(weights: Tensor) checks weights;
    moe_gemm_gguf(weights: QTensor, dtype);
}
