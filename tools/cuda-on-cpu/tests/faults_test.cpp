// Wrong launches get error codes; wrong kernels end the program with a report.
#include "harness.h"

TEST(launch_limits) {
  Device<unsigned> y(100000);
  CUfunction f = function("t_indices");
  CHECK(try_launch(f, {0}, {32}, 0, y.address()) == CUDA_ERROR_INVALID_VALUE);
  CHECK(try_launch(f, {1}, {0}, 0, y.address()) == CUDA_ERROR_INVALID_VALUE);
  CHECK(try_launch(f, {1, 65536}, {1}, 0, y.address()) == CUDA_ERROR_INVALID_VALUE);
  CHECK(try_launch(f, {1, 1, 65536}, {1}, 0, y.address()) == CUDA_ERROR_INVALID_VALUE);
  CHECK(try_launch(f, {1}, {1025}, 0, y.address()) == CUDA_ERROR_INVALID_VALUE);
  CHECK(try_launch(f, {1}, {1, 1, 65}, 0, y.address()) == CUDA_ERROR_INVALID_VALUE);
  CHECK(try_launch(f, {1}, {64, 32}, 0, y.address()) == CUDA_ERROR_INVALID_VALUE);
  CHECK(try_launch(f, {1, 65535}, {1}, 0, y.address()) == CUDA_SUCCESS);
  CHECK(try_launch(function("t_barrier_votes"), {1}, {256}, 0, y.address(), y.address()) == CUDA_ERROR_INVALID_VALUE);
}

TEST(dynamic_shared_needs_the_attribute) {
  auto in = random_floats(1024);
  Device<float> x(in), y(1024);
  CUfunction f = function("t_reverse_f32");
  CHECK(try_launch(f, {1}, {1024}, 48 * 1024, x.address(), y.address()) == CUDA_SUCCESS);
  CHECK(try_launch(f, {1}, {1024}, 48 * 1024 + 16, x.address(), y.address()) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 228 * 1024) == CUDA_ERROR_INVALID_VALUE);
  OK(cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 227 * 1024));
  CHECK(try_launch(f, {1}, {1024}, 227 * 1024, x.address(), y.address()) == CUDA_SUCCESS);
  CHECK(y.get()[0] == in[1023]);
}

TEST(attributes_from_ptx) {
  int value = 0;
  OK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function("t_barrier_votes")));
  CHECK(value == 128);
  OK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function("t_static_sum")));
  CHECK(value == 1024 + 64);
  OK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, function("t_static_sum")));
  CHECK(value == 48 * 1024 - 1088);
}

TEST(unknown_names) {
  CUmodule module;
  CUfunction f;
  OK(cuModuleLoadData(&module, ".version 9.0\n.entry other() { }"));
  CHECK(cuModuleGetFunction(&f, module, "t_indices") == CUDA_ERROR_NOT_FOUND);
  CHECK(cuModuleGetFunction(&f, module, "other") == CUDA_ERROR_NOT_FOUND);
  OK(cuModuleUnload(module));
}

TEST(copies_stay_inside_allocations) {
  Device<float> x(10);
  float host[20] = {};
  CHECK(cuMemcpyHtoD(x.address(), host, 44) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemcpyDtoH(host, x.address() + 36, 8) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemsetD8(x.address(), 0, 41) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemcpyHtoD(CUdeviceptr(host), host, 8) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemFree(x.address() + 4) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemcpyDtoH(host, x.address() + 36, 4) == CUDA_SUCCESS);
}

TEST(calls_need_a_context) {
  CUcontext context;
  OK(cuCtxGetCurrent(&context));
  OK(cuCtxSetCurrent(nullptr));
  CUdeviceptr p;
  CHECK(cuMemAlloc(&p, 16) == CUDA_ERROR_INVALID_CONTEXT);
  OK(cuCtxSetCurrent(context));
}

TEST(events_measure_time) {
  CUevent a, b, untimed;
  float ms = -1;
  OK(cuEventCreate(&a, CU_EVENT_DEFAULT));
  OK(cuEventCreate(&b, CU_EVENT_DEFAULT));
  OK(cuEventCreate(&untimed, CU_EVENT_DISABLE_TIMING));
  OK(cuEventRecord(a, nullptr));
  OK(cuEventRecord(b, nullptr));
  OK(cuEventRecord(untimed, nullptr));
  OK(cuEventElapsedTime(&ms, a, b));
  CHECK(ms >= 0);
  CHECK(cuEventElapsedTime(&ms, a, untimed) == CUDA_ERROR_INVALID_HANDLE);
}

static void run(const char* name, unsigned threads, unsigned shared = 0) {
  Device<float> y(64);
  launch(name, {1}, {threads}, shared, y.address());
}
DIES(some_threads_exit, "24 of 64 threads have exited", nullptr) { run("f_some_exit", 64); }
DIES(some_threads_exit_leniently, nullptr, "FP8_FAKE_LENIENT=1") { run("f_some_exit", 64); }
DIES(barrier_in_branch, "different kinds of __syncthreads", nullptr) { run("f_barrier_in_branch", 64); }
DIES(missing_lanes, "where lanes 0xffff0000 never came", nullptr) { run("f_missing_lanes", 32); }
DIES(exited_lanes, "names lanes that have exited", "FP8_FAKE_ORDER=reverse") { run("f_exited_lanes", 32); }
DIES(exited_lanes_later, "where lanes 0xfff00000 never came", nullptr) { run("f_exited_lanes", 32); }
DIES(lanes_that_do_not_exist, "names lanes that have exited or do not exist", nullptr) { run("f_missing_lanes", 8); }
DIES(other_mask, "while lane 3 of that mask waits in __shfl_xor_sync with mask 0xffffffff", nullptr) {
  run("f_other_mask", 32);
}
DIES(shared_overflow, "past the end of dynamic shared memory", nullptr) { run("f_shared_overflow", 32, 128); }
DIES(ldmatrix_alignment, "not 16-byte aligned", nullptr) { run("f_ldmatrix_alignment", 32); }
DIES(guard_zone, "f_out_of_bounds wrote outside of an allocation of 256 bytes", "FP8_FAKE_GUARD=1") {
  Device<float> y(64);
  launch("f_out_of_bounds", {1}, {1}, 0, y.address(), 64);
}
DIES(guard_page, "illegal access", "FP8_FAKE_GUARD=2") {
  Device<float> y(64);
  launch("f_out_of_bounds", {1}, {1}, 0, y.address(), 64);
}
DIES(null_pointer, "kernel f_out_of_bounds", nullptr) { launch("f_out_of_bounds", {1}, {1}, 0, CUdeviceptr(0), 0); }
DIES(host_pointer, "argument 0", "FP8_FAKE_GUARD=1") {
  float host[4];
  launch("f_out_of_bounds", {1}, {1}, 0, CUdeviceptr(host), 0);
}
DIES(misaligned_load, "not aligned to 16 bytes", nullptr) {
  Device<float> y(64);
  launch("f_misaligned", {1}, {1}, 0, y.address(), y.address());
}
DIES(misaligned_vector, "not aligned to 16 bytes", nullptr) {
  Device<float> y(64);
  launch("f_misaligned_vector", {1}, {1}, 0, y.address(), y.address());
}
DIES(static_shared_overflow, "index 17 is outside of 'float [17]'", nullptr) { run("f_static_overflow", 32); }
// The order of threads decides what a kernel without its barrier computes.
DIES(missing_barrier_hidden, nullptr, "FP8_FAKE_ORDER=forward") {
  Device<float> y(32);
  launch("f_missing_barrier", {1}, {64}, 0, y.address());
  CHECK(y.get()[31] == 31);
}
DIES(missing_barrier_shown, nullptr, "FP8_FAKE_ORDER=reverse") {
  Device<float> y(32);
  launch("f_missing_barrier", {1}, {64}, 0, y.address());
  CHECK(std::isnan(y.get()[31]));
}
DIES(memory_limit, nullptr, "FP8_FAKE_MEMORY_MB=1") {
  CUdeviceptr p;
  CHECK(cuMemAlloc(&p, 2 << 20) == CUDA_ERROR_OUT_OF_MEMORY);
  OK(cuMemAlloc(&p, 1 << 19));
}
