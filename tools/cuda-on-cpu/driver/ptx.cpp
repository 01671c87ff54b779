#include "ptx.h"

#include <cctype>
#include <cstdlib>
#include <regex>
#include <vector>

namespace coc {

namespace {

struct SharedVariable {
  std::string name;
  unsigned bytes;
};

// Declarations such as `.shared .align 4 .b8 name[128];` or `.shared .b32 name;`
std::vector<SharedVariable> shared_variables(const std::string& text) {
  static const std::regex declaration(R"(\.shared\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)\s+([\w$]+)(?:\[(\d*)\])?)");
  std::vector<SharedVariable> found;
  for (std::sregex_iterator i(text.begin(), text.end(), declaration), end; i != end; ++i) {
    unsigned count = !(*i)[3].matched ? 1 : (*i)[3].length() ? atoi((*i)[3].str().c_str()) : 0;
    found.push_back({(*i)[2], count * atoi((*i)[1].str().c_str()) / 8});
  }
  return found;
}

bool names(const std::string& text, const std::string& word) {
  for (size_t at = 0; (at = text.find(word, at)) != std::string::npos; at += word.size()) {
    char next = at + word.size() < text.size() ? text[at + word.size()] : ' ';
    if (!isalnum(next) && next != '_' && next != '$') return true;
  }
  return false;
}

unsigned product_of_numbers(const std::string& head, const char* directive) {
  size_t at = head.find(directive);
  if (at == std::string::npos) return 0;
  const char* p = head.c_str() + at + std::string(directive).size();
  unsigned product = 1;
  for (;;) {
    char* end;
    unsigned long n = strtoul(p, &end, 10);
    if (end == p) break;
    product *= n;
    for (p = end; isspace(*p); p++) {}
    if (*p++ != ',') break;
  }
  return product;
}

size_t body_end(const std::string& text, size_t open) {
  int depth = 0;
  for (size_t i = open; i < text.size(); i++) {
    if (text[i] == '{') depth++;
    if (text[i] == '}' && --depth == 0) return i;
  }
  return text.size();
}

// Module-scope declarations are cut out of the line-by-line text, as std::regex is slow on long strings.
std::string shared_lines(const std::string& text) {
  std::string lines;
  for (size_t at = 0; (at = text.find(".shared .", at)) != std::string::npos;) {
    size_t end = text.find('\n', at);
    std::string line = text.substr(at, end - at);
    if (line.find(';') != std::string::npos && line.find('%') == std::string::npos) lines += line + "\n";
    at = end;
    if (end == std::string::npos) break;
  }
  return lines;
}

}  // namespace

std::map<std::string, PtxKernel> parse_ptx(const std::string& text) {
  std::map<std::string, PtxKernel> kernels;
  std::vector<std::pair<std::string, std::string>> bodies;
  std::string outside;
  size_t from = 0;
  for (size_t at = 0; (at = text.find(".entry", at)) != std::string::npos;) {
    size_t name = at + 6;
    while (isspace(text[name])) name++;
    size_t name_end = name;
    while (isalnum(text[name_end]) || text[name_end] == '_' || text[name_end] == '$') name_end++;
    size_t open = text.find('{', name_end);
    if (open == std::string::npos) break;
    size_t end = body_end(text, open);
    std::string head = text.substr(name_end, open - name_end);
    PtxKernel kernel;
    if (unsigned n = product_of_numbers(head, ".maxntid")) kernel.max_threads = n;
    kernels[text.substr(name, name_end - name)] = kernel;
    bodies.emplace_back(text.substr(name, name_end - name), text.substr(open, end - open));
    outside += text.substr(from, at - from);
    from = at = end;
  }
  outside += text.substr(from);
  auto module_shared = shared_variables(shared_lines(outside));
  for (auto& [name, body] : bodies) {
    unsigned bytes = 0;
    for (auto& v : shared_variables(shared_lines(body))) bytes += v.bytes;
    for (auto& v : module_shared)
      if (v.bytes && names(body, v.name)) bytes += v.bytes;
    kernels[name].static_shared = bytes;
  }
  return kernels;
}

}  // namespace coc
