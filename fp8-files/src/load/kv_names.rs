//! Every name of KV cache scales in files.
//!
//! A scale with an unknown name would be dropped, and the cache would run with a scale of 1.

/// The canonical names of the cache scale `name`: `..self_attn.k_scale`, `..self_attn.v_scale`, or both if keys and values share it;
/// also `q_scale` and `prob_output_scale`. Empty for any other name.
pub(super) fn canonical_names(name: &str) -> Vec<String> {
    let parts: Vec<&str> = name.split('.').collect();
    // Ends of names, after the path of the attention, and the canonical ends.
    const ENDS: [(&[&str], &[&str]); 21] = [
        (&["k_scale"], &["k_scale"]),
        (&["v_scale"], &["v_scale"]),
        (&["q_scale"], &["q_scale"]),
        (&["kv_scale"], &["k_scale", "v_scale"]),
        (&["prob_output_scale"], &["prob_output_scale"]),
        (&["k_proj", "output_scale"], &["k_scale"]),
        (&["v_proj", "output_scale"], &["v_scale"]),
        (&["q_proj", "output_scale"], &["q_scale"]),
        (&["k_proj", "k_scale"], &["k_scale"]),
        (&["v_proj", "v_scale"], &["v_scale"]),
        (&["qkv_proj", "k_scale"], &["k_scale"]),
        (&["qkv_proj", "v_scale"], &["v_scale"]),
        (&["attn", "k_scale"], &["k_scale"]),
        (&["attn", "v_scale"], &["v_scale"]),
        (&["k_fake_quantizer", "qscale_act"], &["k_scale"]),
        (&["v_fake_quantizer", "qscale_act"], &["v_scale"]),
        (&["q_fake_quantizer", "qscale_act"], &["q_scale"]),
        (
            &["kv_fake_quantizer", "qscale_act"],
            &["k_scale", "v_scale"],
        ),
        (&["q", "scale"], &["q_scale"]),
        (&["k_cache", "scale"], &["k_scale"]),
        (&["v_cache", "scale"], &["v_scale"]),
    ];
    for (end, own) in ENDS {
        let Some(path) = parts.strip_suffix(end) else {
            continue;
        };
        let Some((module, outer)) = path.split_last() else {
            continue;
        };
        if !is_attention(module)
            || (*module == "attn" && outer.last().is_some_and(|m| is_attention(m)))
        {
            continue;
        }
        let path = path.join(".");
        return own.iter().map(|own| format!("{path}.{own}")).collect();
    }
    vec![]
}

/// Whether a module, of which this is the name or the path, is an attention.
pub(crate) fn is_attention(module: &str) -> bool {
    let module = module.to_ascii_lowercase();
    module.ends_with("attn") || module.ends_with("attention")
}

#[cfg(test)]
mod tests {
    use super::canonical_names;

    #[test]
    fn every_spelling_is_known() {
        let keys = [
            "k_scale",
            "k_proj.output_scale",
            "k_proj.k_scale",
            "qkv_proj.k_scale",
            "attn.k_scale",
            "k_cache.scale",
            "k_fake_quantizer.qscale_act",
        ];
        for key in keys {
            let name = format!("model.layers.3.self_attn.{key}");
            assert_eq!(
                canonical_names(&name),
                ["model.layers.3.self_attn.k_scale"],
                "{name}"
            );
        }
        assert_eq!(
            canonical_names("m.self_attn.kv_scale"),
            ["m.self_attn.k_scale", "m.self_attn.v_scale"]
        );
        for other in [
            "k_scale",
            "ssm.k_scale",
            "self_attn.k_proj.weight_scale",
            "self_attn.o_proj.output_scale",
        ] {
            assert!(canonical_names(other).is_empty(), "{other}");
        }
    }
}
