// Filling es_error: what happened, with its operands.
#pragma once

#include <string>

#include "deskfleet_engram.h"

namespace engram {

constexpr uint32_t kNoColumn = UINT32_MAX;
constexpr uint64_t kNone = UINT64_MAX;

const char* kind_name(int32_t kind);

void clear_error(es_error* error);
// printf-like; keeps every field but kind, sys_errno and message. `error` may be null.
__attribute__((format(printf, 4, 5))) void set_error(es_error* error, int32_t kind, int sys_errno, const char* format,
                                                     ...);
void set_file(es_error* error, const std::string& path);

}  // namespace engram
