//! Callers that are workers of rayon, on which the model computes.

use crate::gated::{Gated, expected};
use fp8::models::GenerationOptions;
use fp8::serving::ServerOptions;
use fp8_test_support::child::child;
use fp8_test_support::mpirun::{HANGS, run};

#[test]
fn the_only_worker_may_wait_for_its_request() {
    let mut child = child("workers::the_only_worker");
    let ended = run(child.env("RAYON_NUM_THREADS", "1"), HANGS);
    assert!(ended.status.success(), "{}", ended.said);
    assert!(ended.said.contains("1 passed"), "{}", ended.said);
}

#[test]
#[ignore = "run by the_only_worker_may_wait_for_its_request in a child process"]
fn the_only_worker() {
    let model = Gated::open();
    let server = model.server(&ServerOptions::default());
    let options = GenerationOptions::default().with_max_new_tokens(5);
    let mut tokens = vec![];
    rayon::scope(|scope| {
        scope.spawn(|_| {
            tokens = server
                .submit([4], &options)
                .expect("room")
                .wait()
                .expect("tokens")
                .1;
            server.drain();
        });
    });
    assert_eq!(tokens, expected(&model, &[4], 5));
}
