// Runs every case, those that must abort in a process of their own. usage: tests [NAME...]
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

static int failures;

void fail(const char* file, int line, const char* text) {
  printf("  %s:%d: %s\n", file, line, text);
  failures++;
}

std::vector<float> random_floats(size_t n, uint64_t seed) {
  Random random;
  random.state += seed * 7919;
  std::vector<float> values(n);
  for (float& v : values) v = random.uniform();
  return values;
}

// Something that looks like nvcc's output: names, a launch bound, shared memory.
static const char* const ptx = R"(
.version 9.0
.target sm_90a
.address_size 64
.shared .align 4 .b8 module_level[64];
.extern .shared .align 16 .b8 raw[];
.visible .entry t_barrier_votes(
  .param .u64 t_barrier_votes_param_0
)
.maxntid 128, 1, 1
{ ret; }
.visible .entry t_static_sum(.param .u64 p0)
{
  .shared .align 4 .b8 t_static_sum_partial[1024];
  mov.u32 %r1, module_level;
}
)";

CUfunction function(const char* name) {
  static CUmodule module = [] {
    std::string text = ptx;
    for (const char* n : {"t_shuffles",          "t_votes",
                          "t_reverse_f32",       "t_reverse_u16",
                          "t_indices",           "t_uninitialized",
                          "t_parameters",        "t_atomics",
                          "t_last_block",        "t_mma_bf16",
                          "t_mma_f16",           "t_mma_tf32",
                          "t_mma_ldmatrix",      "t_ldmatrix",
                          "t_cp_async",          "f_some_exit",
                          "f_barrier_in_branch", "f_missing_lanes",
                          "f_exited_lanes",      "f_other_mask",
                          "f_out_of_bounds",     "f_shared_overflow",
                          "f_misaligned",        "f_misaligned_vector",
                          "f_static_overflow",   "f_ldmatrix_alignment",
                          "f_missing_barrier",   "t_wgmma_rows",
                          "t_wgmma_columns",     "t_wgmma_show16",
                          "t_wgmma_show32",      "t_wgmma_show64",
                          "t_wgmma_waits",       "t_named_barriers",
                          "f_wgmma_unfenced",    "f_wgmma_without_wait",
                          "f_wgmma_outside",     "f_wgmma_half",
                          "f_named_barrier",     "t_wgmma_rows_held"})
      text += std::string(".visible .entry ") + n + "()\n{ ret; }\n";
    CUmodule m;
    OK(cuModuleLoadData(&m, text.c_str()));
    return m;
  }();
  CUfunction f = nullptr;
  OK(cuModuleGetFunction(&f, module, name));
  return f;
}

static void set_up() {
  CUcontext context;
  OK(cuInit(0));
  OK(cuDevicePrimaryCtxRetain(&context, 0));
  OK(cuCtxSetCurrent(context));
}

// Runs this program again for one case and looks at how it ends.
static bool ends_as_wanted(const char* self, const Case& c) {
  int out[2];
  if (pipe(out)) return false;
  pid_t child = fork();
  if (child == 0) {
    dup2(out[1], 2);
    dup2(out[1], 1);
    close(out[0]);
    setenv("FP8_FAKE_ORDER", "forward", 1);
    if (c.setting) putenv(const_cast<char*>(c.setting));
    execl(self, self, "--in-this-process", c.name, nullptr);
    _exit(127);
  }
  close(out[1]);
  std::string text;
  char buffer[4096];
  for (ssize_t n; (n = read(out[0], buffer, sizeof buffer)) > 0;) text.append(buffer, n);
  close(out[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (!c.dies_with) {
    if (status == 0) return true;
    printf("%s", text.c_str());
    return false;
  }
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT && text.find(c.dies_with) != std::string::npos) return true;
  printf("  wanted an abort with \"%s\", got status %d and:\n%s\n", c.dies_with, status, text.c_str());
  return false;
}

int main(int count, char** arguments) {
  if (count == 3 && !strcmp(arguments[1], "--in-this-process")) {
    set_up();
    for (auto& c : cases())
      if (!strcmp(c.name, arguments[2])) c.body();
    return failures != 0;
  }
  set_up();
  int failed = 0, ran = 0;
  for (auto& c : cases()) {
    bool chosen = count == 1;
    for (int i = 1; i < count; i++) chosen |= strstr(c.name, arguments[i]) != nullptr;
    if (!chosen) continue;
    ran++;
    failures = 0;
    bool good;
    if (c.dies_with || c.setting) {
      good = ends_as_wanted("/proc/self/exe", c);
    } else {
      c.body();
      good = failures == 0;
    }
    printf("%-6s %s\n", good ? "ok" : "FAILED", c.name);
    failed += !good;
  }
  printf("%d of %d cases failed\n", failed, ran);
  return failed != 0;
}
