#include "shared_memory.h"

#include <link.h>

namespace coc {

namespace {
struct Search {
  uintptr_t address;
  Segment found;
};

int visit(dl_phdr_info* info, size_t, void* data) {
  auto* search = static_cast<Search*>(data);
  const ElfW(Phdr)* tls = nullptr;
  bool holds = false;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const ElfW(Phdr) & p = info->dlpi_phdr[i];
    if (p.p_type == PT_LOAD && search->address - (info->dlpi_addr + p.p_vaddr) < p.p_memsz) holds = true;
    if (p.p_type == PT_TLS) tls = &p;
  }
  if (!holds) return 0;
  if (tls && info->dlpi_tls_data) search->found = {info->dlpi_tls_data, tls->p_memsz};
  return 1;
}
}  // namespace

Segment thread_local_segment(const KernelTable* table) {
  table->touch_shared();
  Search search{reinterpret_cast<uintptr_t>(table), {nullptr, 0}};
  dl_iterate_phdr(visit, &search);
  return search.found;
}

}  // namespace coc
