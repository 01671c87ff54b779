//! The loops against the definition of a window, element by element.

use super::*;
use crate::device::unfold::Composed;
use proptest::prelude::*;

fn window() -> impl Strategy<Value = (Window, Part)> {
    let pair = |range: std::ops::Range<usize>| prop::array::uniform2(range);
    let sizes = (0usize..4, 1usize..4, pair(1..12), pair(1..5));
    (sizes, pair(1..4), pair(1..4), pair(0..5), pair(0..3)).prop_flat_map(
        |((batch, channels, image, kernel), stride, dilation, padding, extra)| {
            // As many positions as fit, or some more or less, as in transposed convolutions.
            let positions = [0, 1].map(|dim| {
                let span = (kernel[dim] - 1) * dilation[dim];
                let fits = (image[dim] + 2 * padding[dim]).saturating_sub(span + 1) / stride[dim];
                (fits + extra[dim]).max(1)
            });
            let window = Window {
                batch,
                channels,
                image,
                kernel,
                stride,
                dilation,
                padding,
                positions,
            };
            let ranges = (0..=batch, 0..=batch, 0..channels, 1..=channels);
            ranges.prop_map(move |(a, b, c, d)| {
                let part = Part {
                    images: a.min(b)..a.max(b),
                    channels: c.min(d)..d.max(c + 1),
                };
                (window.clone(), part)
            })
        },
    )
}

/// Calls `f` with the index of each element of the columns and, if it is inside, of the images.
fn each(window: &Window, part: &Part, mut f: impl FnMut(usize, Option<usize>)) {
    let mut at = 0;
    for channel in part.channels.clone() {
        for (ty, tx) in (0..window.taps()).map(|t| (t / window.kernel[1], t % window.kernel[1])) {
            for image in part.images.clone() {
                for oy in 0..window.positions[0] {
                    for ox in 0..window.positions[1] {
                        let source = window.source(0, oy, ty).zip(window.source(1, ox, tx));
                        let plane = image * window.channels + channel;
                        f(
                            at,
                            source.map(|(y, x)| plane * window.plane() + y * window.image[1] + x),
                        );
                        at += 1;
                    }
                }
            }
        }
    }
}

fn values(len: usize) -> Vec<f32> {
    (0..len).map(|i| (i as f32 * 0.73).sin() + 1.5).collect()
}

proptest! {
    #[test]
    fn unfolding_reads_what_the_window_says((window, part) in window()) {
        let x = values(window.dims().iter().product());
        let codes: Vec<u8> = (0..x.len()).map(|i| (i % 255) as u8 + 1).collect();
        let (rows, len) = window.columns(&part);
        let (mut expected, mut expected_codes) = (vec![0.; rows * len], vec![0; rows * len]);
        each(&window, &part, |at, source| {
            if let Some(source) = source {
                expected[at] = x[source];
                expected_codes[at] = codes[source];
            }
        });
        prop_assert_eq!(&unfold(&x, &window, &part), &expected);
        prop_assert_eq!(&unfold(&codes, &window, &part), &expected_codes);

        if !part.images.is_empty() {
            let x = Tensor::from_vec(x, window.dims().as_slice(), &Device::Cpu).unwrap();
            let composed = Composed.unfold(&x, &window, &part).unwrap();
            prop_assert_eq!(composed.flatten_all().unwrap().to_vec1::<f32>().unwrap(), expected);
        }
    }

    #[test]
    fn folding_adds_in_the_order_of_the_taps((window, part) in window(), biased: bool) {
        let (rows, len) = window.columns(&part);
        let columns = values(rows * len);
        let bias: Option<Vec<f32>> = biased.then(|| values(window.channels));
        let mut expected = vec![0f32; window.dims().iter().product()];
        each(&window, &part, |at, source| {
            if let Some(source) = source {
                expected[source] += columns[at];
            }
        });
        if let Some(bias) = &bias {
            for (plane, out) in expected.chunks_mut(window.plane()).enumerate() {
                let (image, channel) = (plane / window.channels, plane % window.channels);
                if part.images.contains(&image) && part.channels.contains(&channel) {
                    out.iter_mut().for_each(|out| *out += bias[channel]);
                }
            }
        }
        let mut got = vec![0f32; expected.len()];
        fold(&columns, &window, &part, bias.as_deref(), &mut got);
        prop_assert_eq!(&got, &expected);

        if !part.images.is_empty() {
            let columns = Tensor::from_vec(columns, (rows, len), &Device::Cpu).unwrap();
            let bias = bias.map(|bias| Tensor::from_vec(bias, window.channels, &Device::Cpu).unwrap());
            let mut images = Composed.images(&window, DType::F32, &Device::Cpu).unwrap();
            images.fold(&columns, &window, &part, bias.as_ref()).unwrap();
            let Storage::Cpu(candle_core::CpuStorage::F32(composed)) = images.finish().unwrap() else {
                panic!("not f32");
            };
            prop_assert_eq!(composed, expected);
        }
    }
}

/// A stride that leads out of the image belongs to a single position.
#[test]
fn strides_beyond_the_image_need_no_memory() -> Result<()> {
    let window = Window {
        kernel: [3; 2],
        stride: [1 << 40, usize::MAX],
        padding: [1; 2],
        positions: [1; 2],
        ..Window::single(2, 3, [8, 8])
    };
    let part = Part {
        images: 0..2,
        channels: 0..3,
    };
    let x = values(window.dims().iter().product());
    let expected = unfold(&x, &window, &part);
    let x = Tensor::from_vec(x, window.dims().as_slice(), &Device::Cpu)?;
    let columns = Composed.unfold(&x, &window, &part)?;
    assert_eq!(columns.flatten_all()?.to_vec1::<f32>()?, expected);
    let mut folded = vec![0f32; x.elem_count()];
    fold(&expected, &window, &part, None, &mut folded);
    let mut images = Composed.images(&window, DType::F32, &Device::Cpu)?;
    images.fold(&columns, &window, &part, None)?;
    let images = crate::base::data::storage::tensor_of(images.finish()?, window.dims().as_slice())?;
    assert_eq!(images.flatten_all()?.to_vec1::<f32>()?, folded);

    // With two positions, memory for the space between them would be needed.
    let window = Window {
        stride: [usize::MAX / 2; 2],
        padding: [usize::MAX / 4; 2],
        positions: [2; 2],
        ..window
    };
    let error = Composed.unfold(&x, &window, &part).unwrap_err().to_string();
    assert!(
        error.contains("unfold") && error.contains("[2, 3, 8, 8]"),
        "{error}"
    );
    Ok(())
}

#[test]
fn memory_that_is_not_there_is_an_error() {
    for len in [usize::MAX / 8, usize::MAX] {
        let error = reserve("fold", len).unwrap_err();
        assert!(matches!(error, Error::HostMemory { .. }), "{error}");
        assert!(
            error.to_string().contains("fold: cannot allocate "),
            "{error}"
        );
    }
    reserve("fold", 1 << 20).unwrap();
}
