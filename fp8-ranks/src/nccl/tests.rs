//! NCCL on one GPU. It takes a rank for each GPU, so this is a group of one: identifiers, communicators, dtypes, offsets, the queue on
//! candle's stream and splits are NCCL's; what several ranks make together is not seen here.

use super::engine::connect;
use crate::engine::{Call, Collective, Engine};
use crate::error::{Failure, Operation};
use crate::group::ProcessGroup;
use candle_core::{DType, Device, Tensor};
use fp8_test_support::{device, flat64, skipped_on_cpu};
use std::sync::Arc;
use std::time::Duration;

const DEADLINE: Duration = Duration::from_secs(30);

fn group() -> Arc<dyn Engine> {
    let host = ProcessGroup::single().engine_of_group();
    connect(host, &device(), &Arc::from("gpus"), DEADLINE).expect("a communicator")
}

fn run(engine: &Arc<dyn Engine>, collective: Collective) -> Result<Tensor, Failure> {
    let call = Call {
        operation: Operation::AllReduce,
        group: Arc::from("gpus"),
        collective,
    };
    engine.start(call)?.wait(DEADLINE)
}

#[test]
fn collectives_of_one_rank_give_what_they_get() {
    if skipped_on_cpu() {
        return;
    }
    let group = group();
    let split = group.split(&Arc::from("parts"), Some(3), 0, DEADLINE);
    let parts = split.expect("a split").expect("this rank");
    for engine in [&group, &parts] {
        assert_eq!(
            (engine.name(), engine.rank(), engine.size()),
            ("NCCL", 0, 1)
        );
        for dtype in [
            DType::U8,
            DType::U32,
            DType::I64,
            DType::F16,
            DType::BF16,
            DType::F32,
            DType::F64,
        ] {
            // A part of a larger tensor, which does not begin where its memory does.
            let values: Vec<f32> = (0..40u8).map(|i| f32::from(i * 5)).collect();
            let whole = Tensor::from_vec(values, 40, &device()).expect("values");
            let whole = whole.to_dtype(dtype).expect("values of the dtype");
            let x = whole.narrow(0, 3, 33).expect("a part");
            let given = || x.clone();
            let mut collectives = vec![
                Collective::AllGather {
                    own: given(),
                    counts: vec![33],
                },
                Collective::AllToAll {
                    pieces: given(),
                    send: vec![33],
                    receive: vec![33],
                    most: Some(33),
                },
                Collective::Broadcast {
                    tensor: given(),
                    root: 0,
                },
            ];
            match dtype {
                DType::U32 => collectives.push(Collective::MaxOfBits { own: given() }),
                DType::F32 | DType::F64 => {
                    collectives.push(Collective::EngineSum { own: given() });
                }
                _ => {}
            }
            for collective in collectives {
                let what = format!("{collective:?}");
                let y = run(engine, collective).expect(&what);
                assert!(y.device().is_cuda(), "{what}");
                assert_eq!((y.dtype(), flat64(&y)), (dtype, flat64(&x)), "{what}");
            }
        }
    }
}

/// A collective is queued behind the kernels before it, and kernels after it see its result.
#[test]
fn collectives_are_in_order_with_kernels() {
    if skipped_on_cpu() {
        return;
    }
    let group = group();
    let mut x = Tensor::ones(1 << 22, DType::F32, &device()).expect("ones");
    for step in 0..10 {
        let own = (&x + 1.).expect("a sum");
        let y = run(&group, Collective::EngineSum { own }).expect("a sum of one");
        x = (y * 2.).expect("a product");
        // 1, 4, 10, 22, ..
        let expected = 3. * 2f64.powi(step + 1) - 2.;
        assert!(flat64(&x).iter().all(|&x| x == expected), "step {step}");
    }
}

#[test]
fn tensors_of_the_cpu_go_over_the_group_of_the_host() {
    if skipped_on_cpu() {
        return;
    }
    let x = Tensor::arange(0f32, 5., &Device::Cpu).expect("values");
    let own = x.clone();
    let y = run(
        &group(),
        Collective::AllGather {
            own,
            counts: vec![5],
        },
    )
    .expect("values");
    assert!(y.device().is_cpu());
    assert_eq!(flat64(&y), flat64(&x));
    run(&group(), Collective::Barrier).expect("a barrier");
}
