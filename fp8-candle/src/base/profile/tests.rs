use super::*;
use std::panic::catch_unwind;
use std::thread::sleep;

const NAP: Duration = Duration::from_millis(4);

fn nap(kind: Kind) {
    let _scope = enter(kind);
    sleep(NAP);
}

/// The sum is no more than the clock around it says: a nap that counted in two parts would go beyond that, as nothing
/// but naps takes long here.
#[test]
fn parts_are_exclusive_and_add_up() {
    let began = Instant::now();
    let ((), report) = record(|| {
        let _pass = enter(Kind::Candle);
        nap(Kind::Gemm);
        {
            let _layer = enter(Kind::Gemm);
            nap(Kind::Cast);
            nap(Kind::Cast);
        }
        sleep(NAP);
    });
    let around = began.elapsed();
    assert!(report.time(Kind::Cast) >= 2 * NAP, "{report}");
    assert!(report.time(Kind::Gemm) >= NAP, "{report}");
    assert!(report.time(Kind::Candle) >= NAP, "{report}");
    let sum: Duration = Kind::all().map(|kind| report.time(kind)).sum();
    assert_eq!(sum, report.whole());
    assert!(report.whole() <= around, "{report}: more than {around:?}");
}

#[test]
fn recordings_nest_and_end_with_a_panic() {
    let ((inner, caught), outer) = record(|| {
        let _pass = enter(Kind::Candle);
        let ((), inner) = record(|| nap(Kind::Norm));
        let caught = catch_unwind(|| record(|| -> () { panic!("within a recording") }));
        (inner, caught.is_err())
    });
    assert!(caught);
    assert!(inner.time(Kind::Norm) >= NAP);
    assert_eq!(outer.time(Kind::Norm), inner.time(Kind::Norm));
    assert!(outer.whole() >= inner.whole());
}

/// A scope that outlives its recording, one dropped before a scope inside it, and another thread's.
#[test]
fn scopes_out_of_order_count_nowhere_else() {
    let (left, _) = record(|| enter(Kind::Data));
    let ((), report) = record(|| {
        let (around, inside) = (enter(Kind::Loss), enter(Kind::Norm));
        drop(around);
        drop(inside);
        drop(left);
        sleep(NAP);
        std::thread::scope(|s| s.spawn(|| nap(Kind::Cast)).join()).unwrap();
    });
    assert!(report.time(Kind::Other) >= 2 * NAP, "{report}");
    assert!(report.time(Kind::Data).is_zero() && report.time(Kind::Cast).is_zero());
    // Nothing is recorded now.
    assert!(enter(Kind::Cast).place.is_none());
}
