// Modules, functions and launches.
#include <dirent.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "api.h"
#include "capture.h"
#include "launch.h"
#include "memory.h"
#include "ptx.h"

using namespace coc;

struct CUfunc_st {
  const Kernel* kernel;
  const KernelObject* object;
  PtxKernel ptx;
  unsigned max_dynamic;
};

struct CUmod_st {
  std::mutex mutex;
  bool any_kernel;  // the image was not PTX text
  std::map<std::string, PtxKernel> kernels;
  std::map<std::string, CUfunc_st> functions;
};

namespace {

struct Found {
  const Kernel* kernel;
  const KernelObject* object;
};
using KernelMap = std::unordered_map<std::string, Found>;

// Opens every kernels_*.so beside this library.
KernelMap* load_objects() {
  auto* map = new KernelMap;
  Dl_info self;
  if (!dladdr(reinterpret_cast<void*>(&load_objects), &self)) return map;
  std::string folder = self.dli_fname;
  size_t slash = folder.rfind('/');
  folder = slash == std::string::npos ? "." : folder.substr(0, slash);
  std::vector<std::string> files;
  if (DIR* dir = opendir(folder.c_str())) {
    while (dirent* entry = readdir(dir)) {
      std::string name = entry->d_name;
      if (name.rfind("kernels_", 0) == 0 && name.size() > 3 && name.substr(name.size() - 3) == ".so") files.push_back(name);
    }
    closedir(dir);
  }
  std::sort(files.begin(), files.end());
  for (auto& file : files) {
    std::string path = folder + "/" + file;
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
      fprintf(stderr, "cuda-on-cpu: %s\n", dlerror());
      continue;
    }
    auto* table = static_cast<const KernelTable*>(dlsym(handle, "coc_kernels"));
    if (!table) continue;
    auto* object = new KernelObject{path, table};
    for (size_t i = 0; i < table->count; i++) map->emplace(table->kernels[i].name, Found{&table->kernels[i], object});
  }
  return map;
}

const KernelMap& all_kernels() {
  static const KernelMap* map = load_objects();
  return *map;
}

bool is_text(const char* image) {
  while (*image == ' ' || *image == '\n' || *image == '\r' || *image == '\t') image++;
  return *image == '.' || *image == '/';
}

bool fits_device(const Index3& grid, const Index3& block) {
  return grid.x && grid.y && grid.z && block.x && block.y && block.z && grid.x <= 0x7fffffffu && grid.y <= 65535 &&
         grid.z <= 65535 && block.x <= 1024 && block.y <= 1024 && block.z <= 64 &&
         uint64_t(block.x) * block.y * block.z <= kMaxThreads;
}

CUresult refuse(const CUfunc_st* f, CUresult error, const char* why) {
  fprintf(stderr, "cuda-on-cpu: launch of %s refused: %s\n", f->kernel->name, why);
  return error;
}

struct alignas(16) Value {
  unsigned char bytes[512];
};

// A pointer argument must be null or point to device memory.
void check_pointers(const CUfunc_st* f, void** arguments) {
  for (unsigned i = 0; i < f->kernel->count; i++) {
    if (!f->kernel->arguments[i].is_pointer) continue;
    void* p = *static_cast<void**>(arguments[i]);
    if (p && !points_to_device_memory(p)) {
      fprintf(stderr, "cuda-on-cpu: launch of %s: argument %u (%p) does not point to device memory\n", f->kernel->name, i, p);
      abort();
    }
  }
}

CUresult launch(CUfunction f, Index3 grid, Index3 block, unsigned shared, CUstream stream, void** arguments, void** extra) {
  NEED_CONTEXT();
  if (!f) return CUDA_ERROR_INVALID_HANDLE;
  if (extra) return CUDA_ERROR_NOT_SUPPORTED;
  trace("launch %s grid (%u,%u,%u) block (%u,%u,%u) shared %u", f->kernel->name, grid.x, grid.y, grid.z, block.x, block.y,
        block.z, shared);
  if (!fits_device(grid, block)) return refuse(f, CUDA_ERROR_INVALID_VALUE, "grid or block dimensions");
  Launch l{f->kernel, f->object, arguments, grid, block, shared};
  if (l.threads() > f->ptx.max_threads) return refuse(f, CUDA_ERROR_INVALID_VALUE, "more threads than __launch_bounds__");
  if (shared > f->max_dynamic)
    return refuse(f, CUDA_ERROR_INVALID_VALUE,
                  "more shared memory than allowed; above 48 KB the function attribute must be set");
  if (options().guard) check_pointers(f, arguments);
  if (is_captured(stream)) {
    // The values of the arguments as they are now.
    auto values = std::make_shared<std::vector<Value>>(f->kernel->count);
    for (unsigned i = 0; i < f->kernel->count; i++) {
      if (f->kernel->arguments[i].size > sizeof(Value)) return CUDA_ERROR_NOT_SUPPORTED;
      memcpy(&(*values)[i], arguments[i], f->kernel->arguments[i].size);
    }
    captured(stream, CU_GRAPH_NODE_TYPE_KERNEL, [l, values]() mutable {
      std::vector<void*> places;
      for (auto& value : *values) places.push_back(&value);
      l.arguments = places.data();
      stats().launches++;
      execute(l);
      check_guards(l.kernel->name);
    });
    return CUDA_SUCCESS;
  }
  stats().launches++;
  execute(l);
  check_guards(f->kernel->name);
  return CUDA_SUCCESS;
}

}  // namespace

EXPORT CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  NEED_CONTEXT();
  if (any_captured()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (!image) return CUDA_ERROR_INVALID_VALUE;
  auto* text = static_cast<const char*>(image);
  // Machine code: there is none for this chip, as for one that is newer than the program.
  if (!memcmp(text, "\x7f" "ELF", 4)) {
    trace("machine code refused");
    return CUDA_ERROR_NO_BINARY_FOR_GPU;
  }
  auto* m = new CUmod_st;
  if (is_text(text)) m->kernels = parse_ptx(text);
  m->any_kernel = m->kernels.empty();
  *module = m;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(module, image);
}

EXPORT CUresult cuModuleLoad(CUmodule* module, const char* path) {
  FILE* file = fopen(path, "rb");
  if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
  std::string text;
  char buffer[65536];
  for (size_t n; (n = fread(buffer, 1, sizeof buffer, file)) > 0;) text.append(buffer, n);
  fclose(file);
  return cuModuleLoadData(module, text.c_str());
}

EXPORT CUresult cuModuleUnload(CUmodule module) {
  delete module;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  NEED_CONTEXT();
  std::lock_guard<std::mutex> lock(module->mutex);
  auto known = module->functions.find(name);
  if (known != module->functions.end()) {
    *function = &known->second;
    return CUDA_SUCCESS;
  }
  auto in_ptx = module->kernels.find(name);
  if (in_ptx == module->kernels.end() && !module->any_kernel) {
    trace("the module's PTX has no kernel %s", name);
    return CUDA_ERROR_NOT_FOUND;
  }
  auto found = all_kernels().find(name);
  if (found == all_kernels().end()) {
    fprintf(stderr, "cuda-on-cpu: no kernels_*.so has the kernel %s\n", name);
    return CUDA_ERROR_NOT_FOUND;
  }
  PtxKernel ptx = in_ptx == module->kernels.end() ? PtxKernel{} : in_ptx->second;
  unsigned dynamic = ptx.static_shared < kDefaultShared ? kDefaultShared - ptx.static_shared : 0;
  auto added = module->functions.emplace(name, CUfunc_st{found->second.kernel, found->second.object, ptx, dynamic});
  *function = &added.first->second;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr*, size_t*, CUmodule, const char*) { return CUDA_ERROR_NOT_FOUND; }

EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction f) {
  switch (which) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = f->ptx.max_threads; break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = f->ptx.static_shared; break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = f->max_dynamic; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = options().compute_capability; break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute which, int value) {
  if (which == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    if (value < 0 || value + f->ptx.static_shared > max_shared_opt_in()) return CUDA_ERROR_INVALID_VALUE;
    f->max_dynamic = value;
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

EXPORT CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                               unsigned shared, CUstream stream, void** arguments, void** extra) {
  return launch(f, {gx, gy, gz}, {bx, by, bz}, shared, stream, arguments, extra);
}

EXPORT CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                          unsigned bz, unsigned shared, CUstream stream, void** arguments) {
  return launch(f, {gx, gy, gz}, {bx, by, bz}, shared, stream, arguments, nullptr);
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction f, int threads, size_t dynamic) {
  if (threads <= 0) return CUDA_ERROR_INVALID_VALUE;
  size_t shared = dynamic + f->ptx.static_shared + 1024;
  *blocks = int(std::min<size_t>({32, 2048u / unsigned(threads), (max_shared_opt_in() + 1024) / shared}));
  return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, CUfunction f, int threads, size_t dynamic,
                                                                     unsigned) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, f, threads, dynamic);
}

EXPORT CUresult cuOccupancyMaxPotentialBlockSize(int* grid, int* block, CUfunction f, CUoccupancyB2DSize, size_t dynamic,
                                                 int limit) {
  int threads = std::min<int>(f->ptx.max_threads, limit > 0 ? limit : 1024), blocks = 0;
  CUresult result = cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, f, threads, dynamic);
  *grid = 132 * blocks;
  *block = threads;
  return result;
}

EXPORT CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(int* grid, int* block, CUfunction f, CUoccupancyB2DSize size,
                                                          size_t dynamic, int limit, unsigned) {
  return cuOccupancyMaxPotentialBlockSize(grid, block, f, size, dynamic, limit);
}

EXPORT CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t* bytes, CUfunction f, int blocks, int) {
  size_t each = (max_shared_opt_in() + 1024) / size_t(blocks > 0 ? blocks : 1);
  *bytes = each > f->ptx.static_shared + 1024 ? each - f->ptx.static_shared - 1024 : 0;
  return CUDA_SUCCESS;
}
