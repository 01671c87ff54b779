//! What an open checkpoint says of itself: family, names, shapes, dtypes, configuration.

use super::{Checkpoint, FamilyName, catalogue, names};
use safetensors::Dtype;

impl Checkpoint {
    /// Which family of checkpoints it is: that of the first file with FP8 in it.
    ///
    /// ```
    /// # use fp8_recipes as fp8;
    /// # use candle_core::{DType, Device, Tensor};
    /// # use fp8_recipes::load::Checkpoint;
    /// # use fp8_recipes::rewrite::{self, QuantizeOptions, Scheme};
    /// # let dir = tempfile::tempdir()?;
    /// # let weight = Tensor::ones((32, 64), DType::F32, &Device::Cpu)?;
    /// # let bias = Tensor::zeros(32, DType::F32, &Device::Cpu)?;
    /// # let tensors = [("fc.weight", weight), ("fc.bias", bias)].into();
    /// # candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors"))?;
    /// # let (model, fp8) = (Checkpoint::open_dir(dir.path())?, dir.path().join("fp8"));
    /// # rewrite::quantize(&model, &fp8, &QuantizeOptions::new(Scheme::ChannelToken), &mut rewrite::quiet)?;
    /// # let checkpoint = Checkpoint::open_dir(&fp8)?;
    /// use fp8::load::FamilyName;
    /// assert_eq!(checkpoint.family(), FamilyName::CompressedTensors);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn family(&self) -> FamilyName {
        let fp8 = self
            .catalogue
            .weights
            .values()
            .map(|weight| weight.codes.file);
        let codes = self
            .catalogue
            .values
            .values()
            .filter_map(|value| match value {
                catalogue::Value::Codes(stored) => Some(stored.file),
                _ => None,
            });
        let first = fp8.chain(codes).min();
        first.map_or(FamilyName::HighPrecision, |file| self.families[file].name())
    }

    /// Canonical paths of the layers whose weight is FP8, sorted.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use fp8_recipes::load::Checkpoint;
    /// # use fp8_recipes::rewrite::{self, QuantizeOptions, Scheme};
    /// # let dir = tempfile::tempdir()?;
    /// # let weight = Tensor::ones((32, 64), DType::F32, &Device::Cpu)?;
    /// # let bias = Tensor::zeros(32, DType::F32, &Device::Cpu)?;
    /// # let tensors = [("fc.weight", weight), ("fc.bias", bias)].into();
    /// # candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors"))?;
    /// # let (model, fp8) = (Checkpoint::open_dir(dir.path())?, dir.path().join("fp8"));
    /// # rewrite::quantize(&model, &fp8, &QuantizeOptions::new(Scheme::ChannelToken), &mut rewrite::quiet)?;
    /// # let checkpoint = Checkpoint::open_dir(&fp8)?;
    /// assert_eq!(checkpoint.layer_paths(), ["fc"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn layer_paths(&self) -> Vec<String> {
        let names = self.catalogue.weights.keys();
        let paths = names.filter_map(|name| match names::split(name) {
            (path, "weight") => Some(path.to_string()),
            _ => None,
        });
        let mut paths: Vec<String> = paths.collect();
        paths.sort_unstable();
        paths
    }

    /// Canonical names of everything that is neither an FP8 weight of a layer nor a scale of one, sorted: biases, norms,
    /// embeddings, weights in high precision, scales of caches.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use fp8_recipes::load::Checkpoint;
    /// # use fp8_recipes::rewrite::{self, QuantizeOptions, Scheme};
    /// # let dir = tempfile::tempdir()?;
    /// # let weight = Tensor::ones((32, 64), DType::F32, &Device::Cpu)?;
    /// # let bias = Tensor::zeros(32, DType::F32, &Device::Cpu)?;
    /// # let tensors = [("fc.weight", weight), ("fc.bias", bias)].into();
    /// # candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors"))?;
    /// # let (model, fp8) = (Checkpoint::open_dir(dir.path())?, dir.path().join("fp8"));
    /// # rewrite::quantize(&model, &fp8, &QuantizeOptions::new(Scheme::ChannelToken), &mut rewrite::quiet)?;
    /// # let checkpoint = Checkpoint::open_dir(&fp8)?;
    /// assert_eq!(checkpoint.other_names(), ["fc.bias"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn other_names(&self) -> Vec<String> {
        let tables = self.catalogue.weights.keys();
        let tables = tables.filter(|name| names::split(name).1 != "weight");
        let mut names: Vec<String> = self
            .catalogue
            .values
            .keys()
            .chain(tables)
            .cloned()
            .collect();
        names.sort_unstable();
        names
    }

    /// The model's `config.json` as it was read; None if there is none.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use fp8_recipes::load::Checkpoint;
    /// # use fp8_recipes::rewrite::{self, QuantizeOptions, Scheme};
    /// # let dir = tempfile::tempdir()?;
    /// # let weight = Tensor::ones((32, 64), DType::F32, &Device::Cpu)?;
    /// # let bias = Tensor::zeros(32, DType::F32, &Device::Cpu)?;
    /// # let tensors = [("fc.weight", weight), ("fc.bias", bias)].into();
    /// # candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors"))?;
    /// # let (model, fp8) = (Checkpoint::open_dir(dir.path())?, dir.path().join("fp8"));
    /// # rewrite::quantize(&model, &fp8, &QuantizeOptions::new(Scheme::ChannelToken), &mut rewrite::quiet)?;
    /// # let checkpoint = Checkpoint::open_dir(&fp8)?;
    /// let config = checkpoint.config().expect("a config.json");
    /// assert_eq!(config["quantization_config"]["quant_method"], "compressed-tensors");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn config(&self) -> Option<&serde_json::Value> {
        self.config.as_ref()
    }

    /// Mistral's `params.json` as it was read; None if there is none, or the files are not Mistral's own.
    pub fn params(&self) -> Option<&serde_json::Value> {
        self.params.as_ref()
    }

    /// Dtype of a tensor, by its canonical name or as stored. Weights of four codes in a word are F8_E4M3, scales of caches F32.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use fp8_recipes::load::Checkpoint;
    /// # use fp8_recipes::rewrite::{self, QuantizeOptions, Scheme};
    /// # let dir = tempfile::tempdir()?;
    /// # let weight = Tensor::ones((32, 64), DType::F32, &Device::Cpu)?;
    /// # let bias = Tensor::zeros(32, DType::F32, &Device::Cpu)?;
    /// # let tensors = [("fc.weight", weight), ("fc.bias", bias)].into();
    /// # candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors"))?;
    /// # let (model, fp8) = (Checkpoint::open_dir(dir.path())?, dir.path().join("fp8"));
    /// # rewrite::quantize(&model, &fp8, &QuantizeOptions::new(Scheme::ChannelToken), &mut rewrite::quiet)?;
    /// # let checkpoint = Checkpoint::open_dir(&fp8)?;
    /// assert_eq!(checkpoint.dtype("fc.weight"), Some(safetensors::Dtype::F8_E4M3));
    /// assert_eq!(checkpoint.dtype("fc.bias"), Some(safetensors::Dtype::F32));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn dtype(&self, name: &str) -> Option<Dtype> {
        if self.catalogue.weights.contains_key(name) {
            return Some(Dtype::F8_E4M3);
        }
        match self.catalogue.values.get(name) {
            Some(catalogue::Value::CacheScale { .. }) => Some(Dtype::F32),
            Some(value) => self.stored_dtype(value.stored()),
            None => self.files[*self.index.get(name)?].dtype(name),
        }
    }

    /// Shape of a tensor, by its canonical name or as stored.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use fp8_recipes::load::Checkpoint;
    /// # use fp8_recipes::rewrite::{self, QuantizeOptions, Scheme};
    /// # let dir = tempfile::tempdir()?;
    /// # let weight = Tensor::ones((32, 64), DType::F32, &Device::Cpu)?;
    /// # let bias = Tensor::zeros(32, DType::F32, &Device::Cpu)?;
    /// # let tensors = [("fc.weight", weight), ("fc.bias", bias)].into();
    /// # candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors"))?;
    /// # let (model, fp8) = (Checkpoint::open_dir(dir.path())?, dir.path().join("fp8"));
    /// # rewrite::quantize(&model, &fp8, &QuantizeOptions::new(Scheme::ChannelToken), &mut rewrite::quiet)?;
    /// # let checkpoint = Checkpoint::open_dir(&fp8)?;
    /// assert_eq!(checkpoint.shape("fc.weight"), Some([32, 64].as_slice()));
    /// assert_eq!(checkpoint.shape("none"), None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        if let Some(weight) = self.catalogue.weights.get(name) {
            return Some(&weight.shape);
        }
        match self.catalogue.values.get(name) {
            Some(catalogue::Value::CacheScale { shape, .. }) => Some(shape),
            Some(value) => {
                let stored = value.stored();
                self.files[stored.file].shape(&stored.name)
            }
            None => self.files[*self.index.get(name)?].shape(name),
        }
    }

    fn stored_dtype(&self, stored: &catalogue::Stored) -> Option<Dtype> {
        self.files[stored.file].dtype(&stored.name)
    }

    /// Names of all tensors as they are stored, sorted.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use fp8_recipes::load::Checkpoint;
    /// # use fp8_recipes::rewrite::{self, QuantizeOptions, Scheme};
    /// # let dir = tempfile::tempdir()?;
    /// # let weight = Tensor::ones((32, 64), DType::F32, &Device::Cpu)?;
    /// # let bias = Tensor::zeros(32, DType::F32, &Device::Cpu)?;
    /// # let tensors = [("fc.weight", weight), ("fc.bias", bias)].into();
    /// # candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors"))?;
    /// # let (model, fp8) = (Checkpoint::open_dir(dir.path())?, dir.path().join("fp8"));
    /// # rewrite::quantize(&model, &fp8, &QuantizeOptions::new(Scheme::ChannelToken), &mut rewrite::quiet)?;
    /// # let checkpoint = Checkpoint::open_dir(&fp8)?;
    /// assert_eq!(checkpoint.names(), ["fc.bias", "fc.weight", "fc.weight_scale"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.index.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    /// Value of a metadata key in the first file that has it.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use fp8_recipes::load::Checkpoint;
    /// # use fp8_recipes::rewrite::{self, QuantizeOptions, Scheme};
    /// # let dir = tempfile::tempdir()?;
    /// # let weight = Tensor::ones((32, 64), DType::F32, &Device::Cpu)?;
    /// # let bias = Tensor::zeros(32, DType::F32, &Device::Cpu)?;
    /// # let tensors = [("fc.weight", weight), ("fc.bias", bias)].into();
    /// # candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors"))?;
    /// # let (model, fp8) = (Checkpoint::open_dir(dir.path())?, dir.path().join("fp8"));
    /// # rewrite::quantize(&model, &fp8, &QuantizeOptions::new(Scheme::ChannelToken), &mut rewrite::quiet)?;
    /// # let checkpoint = Checkpoint::open_dir(&fp8)?;
    /// assert_eq!(checkpoint.metadata("format"), Some("pt"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.files.iter().find_map(|file| file.metadata(key))
    }
}
