#include "failure.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace engram {

const char* kind_name(int32_t kind) {
  static constexpr const char* kNames[ES_NUM_KINDS] = {
      "none", "argument", "range",    "open",      "size",     "hole",      "superblock", "identity",
      "io",   "short",    "checksum", "misplaced", "deadline", "cancelled", "backend",    "missing"};
  return kind >= 0 && kind < ES_NUM_KINDS ? kNames[kind] : "none";
}

void clear_error(es_error* error) {
  if (!error) return;
  std::memset(error, 0, sizeof *error);
  error->column = kNoColumn;
  error->row = error->column_row = error->block = kNone;
}

void set_error(es_error* error, int32_t kind, int sys_errno, const char* format, ...) {
  if (!error) return;
  error->kind = kind;
  error->sys_errno = sys_errno;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(error->message, sizeof error->message, format, arguments);
  va_end(arguments);
}

void set_file(es_error* error, const std::string& path) {
  if (error) std::snprintf(error->file, sizeof error->file, "%s", path.c_str());
}

}  // namespace engram
