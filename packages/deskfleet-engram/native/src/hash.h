// Row ids of every position of a prompt: the native twin of deskfleet_engram.hashing.
#pragma once

#include <cstdint>

#include "deskfleet_engram.h"

namespace engram {

// See es_hash. The plan has been checked.
int32_t hash_prompt(const es_hash_plan& plan, const int64_t* ids, uint64_t total, uint64_t start, void* out,
                    uint64_t* bad_index);

}  // namespace engram
