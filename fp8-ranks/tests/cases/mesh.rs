//! Grids of ranks.

use candle_core::{Device, Tensor};
use fp8_ranks::{DeviceMesh, Error, ProcessGroup};

/// Which ranks of the whole job are in a group, told by themselves.
fn members(group: &ProcessGroup, own: usize) -> Vec<usize> {
    let own = Tensor::full(own as u32, 1, &Device::Cpu).expect("a tensor");
    let all = group
        .all_gather(&own, &vec![1; group.size()])
        .expect("all_gather");
    let all = all.to_vec1::<u32>().expect("values");
    all.into_iter().map(|rank| rank as usize).collect()
}

pub fn axes(group: &ProcessGroup) {
    let (rank, ranks) = (group.rank(), group.size());
    let model = if ranks.is_multiple_of(2) { 2 } else { 1 };
    let data = ranks / model;
    let mesh =
        DeviceMesh::new(group, &[("data", data), ("other", 1), ("model", model)]).expect("a mesh");
    assert_eq!(mesh.names().collect::<Vec<_>>(), ["data", "other", "model"]);
    assert_eq!(mesh.sizes(), [data, 1, model]);
    assert_eq!(mesh.coordinate(), [rank / model, 0, rank % model]);
    assert_eq!(mesh.group().size(), ranks);
    let axis = |name| members(mesh.axis(name).expect("an axis"), rank);
    let along_data: Vec<_> = (0..data).map(|i| i * model + rank % model).collect();
    let along_model: Vec<_> = (0..model).map(|i| rank / model * model + i).collect();
    assert_eq!(axis("data"), along_data);
    assert_eq!(axis("model"), along_model);
    assert_eq!(axis("other"), [rank]);
    assert!(mesh.axis("modell").is_none());
    let axes = |names: &[&str]| members(&mesh.axes(names).expect("axes"), rank);
    assert_eq!(axes(&["data", "model"]), (0..ranks).collect::<Vec<_>>());
    let by_model = |place: usize| place % data * model + place / data;
    let by_model: Vec<_> = (0..ranks).map(by_model).collect();
    assert_eq!(axes(&["model", "data"]), by_model);
    assert_eq!(axes(&["data"]), along_data);
    assert_eq!(axes(&[]), [rank]);
    let both = mesh.axes(&["model", "other"]).expect("axes");
    assert_eq!((both.name(), both.rank()), ("model+other", rank % model));
}

/// They are seen before anything is sent, so the group goes on.
pub fn refused(group: &ProcessGroup) {
    let ranks = group.size();
    let refused = |axes: &[(&str, usize)]| {
        let error = DeviceMesh::new(group, axes).expect_err("no such mesh");
        error.to_string()
    };
    assert_eq!(refused(&[]), "a mesh with axes []: give one at least");
    assert_eq!(
        refused(&[("a", ranks), ("", 1)]),
        "a mesh with axes [\"a\", \"\"]: give each a name"
    );
    let twice = refused(&[("a", ranks), ("a", 1)]);
    assert_eq!(
        twice,
        "a mesh with axes [\"a\", \"a\"]: give each a name of its own"
    );
    let other = refused(&[("a", ranks + 1), ("b", 1)]);
    let expected = format!(
        "a mesh with axes [(\"a\", {}), (\"b\", 1)] has {} places, but group \"world\" has {ranks} ranks",
        ranks + 1,
        ranks + 1
    );
    assert!(other.starts_with(&expected), "{other}");
    assert!(refused(&[("a", 0)]).contains("has 0 places"));
    let large = DeviceMesh::new(group, &[("a", usize::MAX), ("b", 2)]);
    assert!(matches!(large, Err(Error::MeshSize { .. })));
    let mesh = DeviceMesh::new(group, &[("data", ranks)]).expect("a mesh");
    for names in [&["tensor"][..], &["data", "data"]] {
        let error = mesh.axes(names).expect_err("no such axes").to_string();
        assert!(
            error.starts_with(&format!("no axes {names:?} in a mesh with axes [\"data\"]")),
            "{error}"
        );
    }
    group.barrier().expect("barrier");
}
