// The part of the kernel's io_uring interface that is used here, as the kernel documents it. Written out because
// the headers of long-lived build images are older than the kernels that their binaries meet.
#pragma once

#include <cstdint>

namespace engram::uring {

constexpr long kSetupCall = 425, kEnterCall = 426, kRegisterCall = 427;  // the same on every architecture

constexpr uint32_t kSetupClamp = 1u << 4;
constexpr uint32_t kSetupCoopTaskrun = 1u << 8;
constexpr uint32_t kSetupSingleIssuer = 1u << 12;
constexpr uint32_t kSetupDeferTaskrun = 1u << 13;
constexpr uint32_t kFeatureSingleMmap = 1u << 0;
constexpr uint32_t kFeatureNoDrop = 1u << 1;
constexpr uint32_t kFeatureExtArg = 1u << 8;
constexpr uint32_t kEnterGetEvents = 1u << 0;
constexpr uint32_t kEnterExtArg = 1u << 3;
constexpr uint8_t kSqeFixedFile = 1u << 0;
constexpr uint8_t kOpReadFixed = 4, kOpRead = 22;
constexpr uint32_t kRegisterBuffers = 0, kRegisterFiles = 2, kRegisterProbe = 8;
constexpr uint64_t kMapRings = 0, kMapEntries = 0x10000000;
constexpr uint16_t kOpSupported = 1u << 0;

struct SqOffsets {
  uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
  uint64_t user_address;
};
struct CqOffsets {
  uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, reserved;
  uint64_t user_address;
};
struct Params {
  uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, reserved[3];
  SqOffsets sq_off;
  CqOffsets cq_off;
};
struct Sqe {
  uint8_t opcode, flags;
  uint16_t priority;
  int32_t fd;
  uint64_t offset, address;
  uint32_t length, op_flags;
  uint64_t user_data;
  uint16_t buffer_index, personality;
  int32_t splice_fd;
  uint64_t pad[2];
};
struct Cqe {
  uint64_t user_data;
  int32_t result;
  uint32_t flags;
};
struct ProbeOp {
  uint8_t op, reserved;
  uint16_t flags;
  uint32_t reserved2;
};
struct Probe {
  uint8_t last_op, num_ops;
  uint16_t reserved;
  uint32_t reserved2[3];
  ProbeOp ops[64];
};
struct GetEventsArg {
  uint64_t signal_mask;
  uint32_t signal_mask_bytes, min_wait_us;
  uint64_t timeout;
};
struct Timespec {
  int64_t seconds, nanoseconds;
};

static_assert(sizeof(Params) == 120 && sizeof(Sqe) == 64 && sizeof(Cqe) == 16 && sizeof(ProbeOp) == 8);
static_assert(sizeof(GetEventsArg) == 24 && sizeof(Timespec) == 16 && sizeof(Probe) == 16 + 64 * 8);

}  // namespace engram::uring
