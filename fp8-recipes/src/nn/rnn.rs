//! `candle_nn::rnn`: recurrent layers that show their parameters. They compute as candle-nn's do, in high precision.

pub use candle_nn::rnn::*;

use super::NamedTensor;
use crate::Fp8Module;
use crate::nn::scaled_parameter::refuse_scaled;
use candle_core::{Result, Tensor};
use candle_nn::{Init, VarBuilder};
use fp8_files::names::join;
use std::ops::Deref;

/// The parameters of a layer with `gates` gates. candle-nn's layers do not expose theirs, so they are requested again: a VarMap
/// returns the same tensors, a VarBuilder over files reads them twice.
fn parameters(
    sizes: (usize, usize, usize),
    suffix: &str,
    inits: [Option<Init>; 4],
    vb: &VarBuilder<'_>,
) -> Result<Vec<NamedTensor>> {
    let (in_dim, hidden_dim, gates) = sizes;
    let rows = gates * hidden_dim;
    let shapes = [
        ("weight_ih", vec![rows, in_dim]),
        ("weight_hh", vec![rows, hidden_dim]),
        ("bias_ih", vec![rows]),
        ("bias_hh", vec![rows]),
    ];
    let mut all = vec![];
    for ((kind, shape), init) in shapes.into_iter().zip(inits) {
        if let Some(init) = init {
            let name = format!("{kind}_{suffix}");
            let tensor = vb.get_with_hints(shape, &name, init)?;
            refuse_scaled("a recurrent layer", &vb.prefix(), &[&tensor])?;
            all.push(NamedTensor::new(join(&vb.prefix(), &name), tensor));
        }
    }
    Ok(all)
}

macro_rules! recurrent {
    ($type:ident, $config:ident, $state:ident, $create:ident, $gates:literal, $suffix:expr) => {
        #[doc = concat!("`candle_nn::", stringify!($type), "` that shows its parameters by name; its other methods are \
                         candle-nn's.")]
        #[derive(Debug, Clone, Fp8Module)]
        #[fp8(crate = "crate")]
        pub struct $type {
            #[fp8(skip)]
            inner: candle_nn::$type,
            parameters: Vec<NamedTensor>,
            path: String,
        }

        impl $type {
            /// Creates or loads the layer.
            ///
            /// # Errors
            /// If a tensor is missing or has another shape.
            pub fn new(
                in_dim: usize,
                hidden_dim: usize,
                config: $config,
                vb: VarBuilder<'_>,
            ) -> Result<Self> {
                let inner = candle_nn::$type::new(in_dim, hidden_dim, config, vb.clone())?;
                let inits = [
                    Some(config.w_ih_init),
                    Some(config.w_hh_init),
                    config.b_ih_init,
                    config.b_hh_init,
                ];
                let suffix: String = ($suffix)(&config);
                let parameters = parameters((in_dim, hidden_dim, $gates), &suffix, inits, &vb)?;
                Ok(Self {
                    inner,
                    parameters,
                    path: vb.prefix(),
                })
            }
        }

        impl Deref for $type {
            type Target = candle_nn::$type;

            fn deref(&self) -> &Self::Target {
                &self.inner
            }
        }

        impl RNN for $type {
            type State = $state;

            fn zero_state(&self, batch_dim: usize) -> Result<Self::State> {
                self.inner.zero_state(batch_dim)
            }

            fn step(&self, input: &Tensor, state: &Self::State) -> Result<Self::State> {
                let (kind, path) = (stringify!($create), self.path.as_str());
                let _span = tracing::trace_span!("rnn", kind, path).entered();
                self.inner.step(input, state)
            }

            fn states_to_tensor(&self, states: &[Self::State]) -> Result<Tensor> {
                self.inner.states_to_tensor(states)
            }
        }

        /// Creates or loads the layer.
        ///
        /// # Errors
        /// If a tensor is missing or has another shape.
        pub fn $create(
            in_dim: usize,
            hidden_dim: usize,
            config: $config,
            vb: VarBuilder<'_>,
        ) -> Result<$type> {
            $type::new(in_dim, hidden_dim, config, vb)
        }
    };
}

recurrent!(
    LSTM,
    LSTMConfig,
    LSTMState,
    lstm,
    4,
    |config: &LSTMConfig| {
        let direction = match config.direction {
            Direction::Forward => "",
            Direction::Backward => "_reverse",
        };
        format!("l{}{direction}", config.layer_idx)
    }
);
recurrent!(GRU, GRUConfig, GRUState, gru, 3, |_: &GRUConfig| "l0"
    .to_string());
