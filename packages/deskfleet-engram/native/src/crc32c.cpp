#include "crc32c.h"

#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace engram {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78u;  // reflected

struct Tables {
  uint32_t at[8][256];
  Tables() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t value = byte;
      for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (kPolynomial & (0u - (value & 1u)));
      at[0][byte] = value;
    }
    for (int k = 1; k < 8; ++k)
      for (uint32_t byte = 0; byte < 256; ++byte) at[k][byte] = (at[k - 1][byte] >> 8) ^ at[0][at[k - 1][byte] & 255];
  }
};

const Tables& tables() {
  static const Tables instance;
  return instance;
}

uint64_t load64(const uint8_t* p) {
  uint64_t value;
  std::memcpy(&value, p, 8);
  return value;
}

uint32_t portable_update(uint32_t state, const uint8_t* p, size_t n) {
  const auto& t = tables().at;
  for (; n >= 8; p += 8, n -= 8) {
    const uint64_t v = load64(p) ^ state;
    state = t[7][v & 255] ^ t[6][(v >> 8) & 255] ^ t[5][(v >> 16) & 255] ^ t[4][(v >> 24) & 255] ^
            t[3][(v >> 32) & 255] ^ t[2][(v >> 40) & 255] ^ t[1][(v >> 48) & 255] ^ t[0][v >> 56];
  }
  for (; n; ++p, --n) state = (state >> 8) ^ t[0][(state ^ *p) & 255];
  return state;
}

void portable_many(CrcJob* jobs, size_t count, size_t n) {
  for (size_t i = 0; i < count; ++i) jobs[i].state = portable_update(jobs[i].state, jobs[i].data, n);
}

constexpr CrcImplementation kPortable{"portable", portable_update, portable_many};

#if defined(__x86_64__)
#define CRC_TARGET __attribute__((target("sse4.2")))
CRC_TARGET inline uint32_t step8(uint32_t state, uint8_t byte) { return _mm_crc32_u8(state, byte); }
CRC_TARGET inline uint32_t step64(uint32_t state, uint64_t value) {
  return static_cast<uint32_t>(_mm_crc32_u64(state, value));
}
constexpr const char* kHardwareName = "sse4.2";
bool has_hardware() { return __builtin_cpu_supports("sse4.2"); }
#elif defined(__aarch64__)
#define CRC_TARGET __attribute__((target("+crc")))
CRC_TARGET inline uint32_t step8(uint32_t state, uint8_t byte) { return __crc32cb(state, byte); }
CRC_TARGET inline uint32_t step64(uint32_t state, uint64_t value) { return __crc32cd(state, value); }
constexpr const char* kHardwareName = "armv8-crc";
bool has_hardware() { return (getauxval(AT_HWCAP) & (1u << 7)) != 0; }  // HWCAP_CRC32
#endif

#if defined(CRC_TARGET)
CRC_TARGET uint32_t hardware_update(uint32_t state, const uint8_t* p, size_t n) {
  for (; n >= 8; p += 8, n -= 8) state = step64(state, load64(p));
  for (; n; ++p, --n) state = step8(state, *p);
  return state;
}

CRC_TARGET void hardware_many(CrcJob* jobs, size_t count, size_t n) {
  size_t i = 0;
  for (; i + 4 <= count; i += 4) {  // four chains hide the three cycles of the instruction
    CrcJob* job = jobs + i;
    uint32_t a = job[0].state, b = job[1].state, c = job[2].state, d = job[3].state;
    size_t k = 0;
    for (; k + 8 <= n; k += 8) {
      a = step64(a, load64(job[0].data + k));
      b = step64(b, load64(job[1].data + k));
      c = step64(c, load64(job[2].data + k));
      d = step64(d, load64(job[3].data + k));
    }
    for (; k < n; ++k) {
      a = step8(a, job[0].data[k]);
      b = step8(b, job[1].data[k]);
      c = step8(c, job[2].data[k]);
      d = step8(d, job[3].data[k]);
    }
    job[0].state = a, job[1].state = b, job[2].state = c, job[3].state = d;
  }
  for (; i < count; ++i) jobs[i].state = hardware_update(jobs[i].state, jobs[i].data, n);
}

constexpr CrcImplementation kHardware{kHardwareName, hardware_update, hardware_many};
#endif

struct Choice {
  const CrcImplementation* all[3] = {&kPortable, nullptr, nullptr};
  const CrcImplementation* best = &kPortable;
  Choice() {
#if defined(CRC_TARGET)
    if (has_hardware()) best = all[1] = &kHardware;
#endif
  }
};

const Choice& choice() {
  static const Choice instance;
  return instance;
}

}  // namespace

uint32_t crc_update(uint32_t state, const void* data, size_t num_bytes) {
  return choice().best->update(state, static_cast<const uint8_t*>(data), num_bytes);
}

uint32_t crc_update_u64(uint32_t state, uint64_t value) {
  uint8_t bytes[8];
  std::memcpy(bytes, &value, 8);
  return choice().best->update(state, bytes, 8);
}

void crc_update_many(CrcJob* jobs, size_t count, size_t num_bytes) {
  choice().best->update_many(jobs, count, num_bytes);
}

const char* crc_name() { return choice().best->name; }

const CrcImplementation* const* crc_implementations() { return choice().all; }

}  // namespace engram
