#include "options.h"

#include <cstdlib>
#include <cstring>

namespace coc {

static bool flag(const char* name) {
  const char* value = getenv(name);
  return value && *value && strcmp(value, "0") != 0;
}

static long number(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value && *value ? atol(value) : otherwise;
}

static Options read() {
  Options o;
  o.compute_capability = number("FP8_FAKE_SM", 90);
  long threads = number("FP8_FAKE_THREADS", 2);
  o.threads = threads < 1 ? 1 : threads > 64 ? 64 : threads;
  o.guard = number("FP8_FAKE_GUARD", 0);
  o.trace = flag("FP8_FAKE_TRACE");
  o.stats = flag("FP8_FAKE_STATS");
  o.lenient = flag("FP8_FAKE_LENIENT");
  o.memory = uint64_t(number("FP8_FAKE_MEMORY_MB", 80 * 1024)) << 20;
  if (const char* cp = getenv("FP8_FAKE_CP_ASYNC")) o.early_cp_async = !strcmp(cp, "early");
  if (const char* order = getenv("FP8_FAKE_ORDER")) {
    if (!strcmp(order, "reverse")) o.order = Order::Reverse;
    if (!strncmp(order, "random", 6)) {
      o.order = Order::Random;
      o.seed = order[6] == ':' ? strtoull(order + 7, nullptr, 10) : 1;
    }
  }
  return o;
}

const Options& options() {
  static const Options o = read();
  return o;
}

}  // namespace coc
