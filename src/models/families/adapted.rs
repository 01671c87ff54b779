//! The adapters of a model of any family.

use super::Model;
use crate::models::adapters::{self, Host};
use crate::models::error::Result;
use candle_nn::{VarBuilder, VarMap};
use fp8_files::adapter::AdapterConfig;
use std::path::Path;

/// # Adapters
///
/// An adapter is a set of low-rank updates (LoRA) beside the linear layers. A model holds any number of adapters, by name, on one base, and
/// adds the updates of the active one. With no active adapter it computes exactly what it computed before.
impl Model {
    fn host(&self) -> &dyn Host {
        match self {
            Self::Llama(model) => model,
            Self::Bert(model) => model,
        }
    }

    fn host_mut(&mut self) -> &mut dyn Host {
        match self {
            Self::Llama(model) => model,
            Self::Bert(model) => model,
        }
    }

    /// Adds a new adapter and makes it the active one. Its matrices are variables of `vb` under PEFT's names
    /// (`base_model.model.{path}.lora_A.weight`), which get gradients. A new A is drawn uniformly, a new B is zero, so that training
    /// begins with the base. From then on the base, in FP8 or high precision, gets no gradients. Returns the paths of the layers.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use fp8::models::{AdapterConfig, Bert, BertConfig, Model, Targets};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let json = serde_json::json!({
    /// #     "model_type": "bert", "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64,
    /// #     "num_hidden_layers": 2, "num_attention_heads": 4,
    /// # });
    /// # let config = BertConfig::parse("config.json", &json)?;
    /// # let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// # let dir = tempfile::tempdir()?;
    /// let mut model = Model::Bert(Bert::new(&config, vb)?); // or from `models::open`
    /// let adapter = AdapterConfig::new(4).with_alpha(8.).with_targets(Targets::names(["query", "value"]));
    /// let vars = VarMap::new();
    /// let paths = model.add_adapter("mine", &adapter, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
    /// assert_eq!((paths.len(), vars.all_vars().len()), (4, 8)); // A and B of two layers, twice
    /// model.save_adapter("mine", dir.path())?; // for PEFT, or for `load_adapter`
    ///
    /// model.load_adapter("copy", dir.path())?;
    /// let ids = Tensor::new(&[[5u32, 6, 7]], &Device::Cpu)?;
    /// let copy = model.forward(&ids)?;
    /// model.set_adapter(Some("mine"))?;
    /// let logits = |y: Tensor| y.flatten_all()?.to_vec1::<f32>();
    /// assert_eq!(logits(model.forward(&ids)?)?, logits(copy)?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If the name is taken, a target matches no linear layer ([`AdapterError::NoTarget`](fp8_files::adapter::AdapterError)), or rank,
    /// alpha or dropout is out of range; [`Error::AdapterMerged`](crate::models::Error::AdapterMerged) if `vb` holds matrices that were
    /// merged into the weights; [`Error::AdapterVariable`](crate::models::Error::AdapterVariable) if another adapter has them, as with the
    /// same `VarMap` and no prefix. The model is then unchanged.
    pub fn add_adapter(
        &mut self,
        name: &str,
        config: &AdapterConfig,
        vb: VarBuilder<'_>,
    ) -> Result<Vec<String>> {
        adapters::add(self.host_mut(), name, config, vb)
    }

    /// Adds the adapter in a directory, as PEFT or [`Model::save_adapter`] wrote it, and makes it the active one. Its matrices are held in
    /// f32 and get no gradients. Returns the paths of the layers.
    ///
    /// # Errors
    /// As [`AdapterFile::open`](fp8_files::adapter::AdapterFile::open); [`AdapterError`](fp8_files::adapter::AdapterError) if the file
    /// lacks a matrix of a targeted layer or holds other tensors; if a matrix has another shape, or the name is taken;
    /// [`Error::AdapterMerged`](crate::models::Error::AdapterMerged) if the adapter was merged into the weights before, in memory or when
    /// they were written. The model is then unchanged.
    pub fn load_adapter(&mut self, name: &str, dir: impl AsRef<Path>) -> Result<Vec<String>> {
        adapters::load(self.host_mut(), name, dir.as_ref())
    }

    /// [`Model::load_adapter`] with the matrices as variables of `vars`, so that training continues as after [`Model::add_adapter`].
    ///
    /// # Errors
    /// As [`Model::load_adapter`]; [`Error::AdapterVariable`](crate::models::Error::AdapterVariable) if `vars` has one of the names already,
    /// such as that of another adapter. `vars` is then unchanged, as is the model.
    pub fn load_trainable_adapter(
        &mut self,
        name: &str,
        dir: impl AsRef<Path>,
        vars: &VarMap,
    ) -> Result<Vec<String>> {
        adapters::load_trainable(self.host_mut(), name, dir.as_ref(), vars)
    }

    /// Makes an adapter the active one. With None the model computes without adapters, to the bit as if it had none.
    ///
    /// # Errors
    /// [`Error::NoAdapter`](crate::models::Error::NoAdapter); [`Error::AdapterMerged`](crate::models::Error::AdapterMerged) if an equal adapter
    /// was merged since this one came.
    pub fn set_adapter(&mut self, name: Option<&str>) -> Result<()> {
        adapters::set(self.host_mut(), name)
    }

    /// The names of all adapters, in the order in which they came.
    pub fn adapters(&self) -> Vec<&str> {
        self.host().adapters().names()
    }

    /// The name of the active adapter.
    pub fn active_adapter(&self) -> Option<&str> {
        self.host().adapters().active()
    }

    /// The configuration of an adapter.
    ///
    /// # Errors
    /// [`Error::NoAdapter`](crate::models::Error::NoAdapter).
    pub fn adapter_config(&self, name: &str) -> Result<&AdapterConfig> {
        self.host().adapters().config(name)
    }

    /// Turns dropout in the updates on. Training calls this with a new seed for each step: the seed and the path of a layer decide what is
    /// dropped. None, the default, drops nothing. The seed is shared by all adapters; each has its own share of dropped inputs.
    pub fn set_dropout_seed(&self, seed: Option<u64>) {
        self.host().adapters().set_dropout_seed(seed);
    }

    /// Writes an adapter into the directory `dir` as PEFT does: `adapter_config.json` and `adapter_model.safetensors`.
    ///
    /// # Errors
    /// [`Error::NoAdapter`](crate::models::Error::NoAdapter), and if a file cannot be written.
    pub fn save_adapter(&self, name: &str, dir: impl AsRef<Path>) -> Result<()> {
        adapters::save(self.host(), name, dir.as_ref())
    }

    /// Adds the updates of an adapter to the weights of the base and forgets the adapter. The layers that it changed are then in high
    /// precision, in the dtype of the model; other adapters stay, and are added to the new weights. `fp8 merge` and
    /// [`rewrite::merge`](crate::rewrite) do the same with files, one layer at a time.
    ///
    /// No adapter is added twice: from then on the model refuses an adapter with the same updates, under any name. PEFT skips it with a
    /// warning, as long as the model is in memory.
    ///
    /// # Errors
    /// [`Error::NoAdapter`](crate::models::Error::NoAdapter); [`Error::AdapterMerged`](crate::models::Error::AdapterMerged); and if a layer
    /// cannot be computed: the layers before it are then merged, and the adapter changes only the others. It may be merged again; equal
    /// adapters are refused.
    pub fn merge_adapter(&mut self, name: &str) -> Result<()> {
        adapters::merge(self.host_mut(), name)
    }

    /// Notes the adapters whose updates the weights have from the file.
    pub(crate) fn set_merged_adapters(&mut self, identities: Vec<String>) {
        self.host_mut().adapters_mut().set_merged(identities);
    }

    /// Removes an adapter. If it was the active one, no adapter is active.
    ///
    /// # Errors
    /// [`Error::NoAdapter`](crate::models::Error::NoAdapter).
    pub fn remove_adapter(&mut self, name: &str) -> Result<()> {
        adapters::remove(self.host_mut(), name)
    }
}
