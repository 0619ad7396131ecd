// A GPU block on one CPU thread: the block's threads are fibers, so that a kernel is tested where no GPU is.
//
// Owns what CUDA and device.cuh give a kernel: indices, barriers, shuffles, tensor cores, conversions. Blocks run one
// after the other, so a kernel that waits for another block never ends. A fiber runs until it waits; every second block
// runs its fibers from the last to the first, so that a forgotten barrier gives wrong numbers in one of the two orders.
// Dynamic shared memory begins as NaNs and a write just behind it is an error, as is a wait that nobody ends. Asynchronous
// copies land when they are waited for.
// Knows nothing of the kernel it is compiled with (emulator.py). Sums of a product are exact and rounded once; the
// tensor cores of a GPU cut off earlier.
#pragma once

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct words2 {
    u32 x, y;
};
struct words4 {
    u32 x, y, z, w;
};
struct dim3 {
    u32 x, y, z;
};

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __grid_constant__

#define DEVICE inline
#define KERNEL(threads, blocks) extern "C" void
#define SHARED_BYTES(name) u8*& name = emulator::shared_bytes

namespace emulator {

constexpr u32 LANES = 32, MOST_THREADS = 1024;
constexpr u32 MOST_KEPT = 256;  // stacks after a launch: every kernel has its own
constexpr size_t STACK_BYTES = 256 << 10, GUARD_BYTES = 64 << 10;  // a page of either processor
constexpr u32 MOST_SHARED_BYTES = 227 << 10, FENCE_BYTES = 1 << 10;
constexpr u8 FENCE = 0xa5;

struct Fiber;
typedef void (*Work)(Fiber* lanes, u32 mask);  // what the last lane to arrive does for all

struct Fiber {
    void* stack_pointer;
    dim3 thread;
    u32 number;
    u32 num_copies, num_groups;  // that have not landed; that have been ended
    const char* waits_in;  // the operation it has arrived at
    u32 mask;
    void* operands;
    Work work;
};

struct Warp {
    u32 live, ready, arrived;  // a bit for each lane
};

static Fiber fibers[MOST_THREADS], launcher;
static Warp warps[MOST_THREADS / LANES];
static Fiber* current;
static u8* stacks;
static u32 num_stacks;  // that may be used
static u32 num_warps, num_live, num_at_barrier, barrier_count, barrier_result;
static bool backwards;
static dim3 grid, block_size, block;
static u8* shared_bytes;
static void (*body)();
static char* message;
static u32 message_bytes;

extern "C" __attribute__((visibility("hidden"))) void deskfleet_switch(void** from, void* to);

// Registers that a call preserves go to this stack, and come from the other.
#if defined(__x86_64__)
asm(R"(
.text
.globl deskfleet_switch
.hidden deskfleet_switch
.type deskfleet_switch, @function
deskfleet_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size deskfleet_switch, .-deskfleet_switch
)");
constexpr size_t FRAME_WORDS = 8, RETURN_WORD = 6;  // one word more: a call leaves the stack 8 bytes off 16
#elif defined(__aarch64__)
asm(R"(
.text
.globl deskfleet_switch
.hidden deskfleet_switch
.type deskfleet_switch, %function
deskfleet_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size deskfleet_switch, .-deskfleet_switch
)");
constexpr size_t FRAME_WORDS = 20, RETURN_WORD = 11;
#else
#error "the emulator switches stacks on x86-64 and aarch64"
#endif

static void switch_to(Fiber* next) {
    Fiber* from = current;
    if (next == from) return;
    current = next;
    deskfleet_switch(&from->stack_pointer, next->stack_pointer);
}

// The launch ends with this sentence; fibers stay where they are.
template <class... Values>
static void fail(const char* format, Values... values) {
    snprintf(message, message_bytes, format, values...);
    switch_to(&launcher);
}

static void fail_for_all() {
    const Fiber *first = nullptr, *other = nullptr;
    for (u32 i = 0; i < num_warps * LANES; i++) {
        if (!(warps[i / LANES].live >> i % LANES & 1)) continue;
        if (!first) first = &fibers[i];
        if (!other && (fibers[i].waits_in != first->waits_in || fibers[i].mask != first->mask)) other = &fibers[i];
    }
    if (!other) other = first;
    fail("threads of block (%u, %u, %u) wait for ever: thread %u in %s of lanes %08x, thread %u in %s of lanes %08x",
         block.x, block.y, block.z, first->number, first->waits_in, first->mask, other->number, other->waits_in,
         other->mask);
}

// The next fiber that can run: of this warp while there is one.
static void yield() {
    u32 at = (current->number / LANES) % num_warps;
    for (u32 turn = 0; turn < num_warps; turn++) {
        if (u32 ready = warps[at].ready) {
            u32 lane = backwards ? 31 - __builtin_clz(ready) : __builtin_ctz(ready);
            return switch_to(&fibers[at * LANES + lane]);
        }
        at = backwards ? (at ? at : num_warps) - 1 : at + 1 == num_warps ? 0 : at + 1;
    }
    fail_for_all();
}

// Does an operation of a warp once every living lane of its mask waits in it.
static bool complete(Warp& warp, Fiber* lanes, const Fiber& one) {
    u32 taking = one.mask & warp.live;
    if ((warp.arrived & taking) != taking) return false;
    for (u32 rest = taking; rest; rest &= rest - 1) {
        const Fiber& lane = lanes[__builtin_ctz(rest)];
        if (lane.waits_in != one.waits_in || lane.mask != one.mask) return false;
    }
    one.work(lanes, taking);
    warp.arrived &= ~taking;
    warp.ready |= taking;
    return true;
}

static void arrive(const char* name, u32 mask, void* operands, Work work) {
    Fiber& me = *current;
    Warp& warp = warps[me.number / LANES];
    u32 own = 1u << me.number % LANES;
    if (!(mask & own)) fail("thread %u calls %s without being in its mask %08x", me.number, name, mask);
    me.waits_in = name;
    me.mask = mask;
    me.operands = operands;
    me.work = work;
    warp.arrived |= own;
    warp.ready &= ~own;
    if (!complete(warp, &fibers[me.number / LANES * LANES], me)) yield();
}

static void end_barrier() {
    barrier_result = barrier_count;
    barrier_count = num_at_barrier = 0;
    for (u32 i = 0; i < num_warps; i++) warps[i].ready = warps[i].live;
}

static void leave_ready() { warps[current->number / LANES].ready &= ~(1u << current->number % LANES); }

static u32 barrier(const char* name, bool counts) {
    Fiber& me = *current;
    me.waits_in = name;
    me.mask = 0xffffffffu;
    leave_ready();
    barrier_count += counts;
    if (++num_at_barrier == num_live)
        end_barrier();
    else
        yield();
    return barrier_result;
}

static void run_fiber() {
    body();
    if (current->num_copies) fail("thread %u ends without waiting for its copies", current->number);
    Warp& warp = warps[current->number / LANES];
    Fiber* lanes = &fibers[current->number / LANES * LANES];
    u32 own = 1u << current->number % LANES;
    warp.live &= ~own;
    warp.ready &= ~own;
    for (u32 i = 0; i < LANES; i++)  // those that waited for this one only
        if (warp.arrived >> i & 1) complete(warp, lanes, lanes[i]);
    if (--num_live == 0) switch_to(&launcher);
    if (num_at_barrier == num_live) end_barrier();
    yield();
}

static void run_block(u32 num_threads, u32 num_shared_bytes) {
    num_warps = (num_threads + LANES - 1) / LANES;
    num_live = num_threads;
    num_at_barrier = barrier_count = 0;
    memset(shared_bytes, 0xff, num_shared_bytes);
    memset(shared_bytes + num_shared_bytes, FENCE, FENCE_BYTES);
    for (u32 i = 0; i < num_threads; i++) {
        Fiber& fiber = fibers[i];
        fiber.number = i;
        fiber.waits_in = nullptr;
        fiber.num_copies = fiber.num_groups = 0;
        fiber.thread = {i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y};
        void** frame = (void**)(stacks + (i + 1) * STACK_BYTES) - FRAME_WORDS;
        frame[RETURN_WORD] = (void*)run_fiber;
        fiber.stack_pointer = frame;
    }
    for (u32 i = 0; i < num_warps; i++) {
        u32 lanes = num_threads - i * LANES;
        warps[i] = {lanes >= LANES ? 0xffffffffu : (1u << lanes) - 1, 0, 0};
        warps[i].ready = warps[i].live;
    }
    launcher.number = backwards ? num_threads - 1 : 0;
    yield();
    for (u32 i = 0; i < FENCE_BYTES && !*message; i++)
        if (shared_bytes[num_shared_bytes + i] != FENCE)
            snprintf(message, message_bytes, "block (%u, %u, %u) writes byte %u of %u bytes of shared memory", block.x,
                     block.y, block.z, num_shared_bytes + i, num_shared_bytes);
}

static void run_blocks(u32 num_threads, u32 num_shared_bytes, u32 number) {
    current = &launcher;
    for (block.z = 0; block.z < grid.z; block.z++)
        for (block.y = 0; block.y < grid.y; block.y++)
            for (block.x = 0; block.x < grid.x; block.x++) {
                backwards = (block.x + block.y + block.z + number) & 1;
                run_block(num_threads, num_shared_bytes);
                if (*message) return;
            }
}

// Runs a grid; `text` is empty afterwards, or says what went wrong. Launches of even and odd number differ in their order.
static void run_grid(const u32* shape, u32 num_shared_bytes, u32 number, char* text, u32 text_bytes) {
    message = text;
    message_bytes = text_bytes;
    *message = 0;
    if (!stacks) {
        void* memory = mmap(nullptr, MOST_THREADS * STACK_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) return (void)snprintf(message, message_bytes, "no memory for the threads' stacks");
        stacks = (u8*)memory;
        shared_bytes = (u8*)aligned_alloc(1024, MOST_SHARED_BYTES + FENCE_BYTES);
    }
    grid = {shape[0], shape[1], shape[2]};
    block_size = {shape[3], shape[4], shape[5]};
    u64 num_threads = (u64)block_size.x * block_size.y * block_size.z;
    if (num_threads == 0 || num_threads > MOST_THREADS || num_shared_bytes > MOST_SHARED_BYTES)
        return (void)snprintf(message, message_bytes, "%llu threads and %u bytes of shared memory; a block has 1 to %u and up to %u",
                              num_threads, num_shared_bytes, MOST_THREADS, MOST_SHARED_BYTES);
    for (; num_stacks < num_threads; num_stacks++)  // no more: a process has a limit of such regions
        if (mprotect(stacks + num_stacks * STACK_BYTES + GUARD_BYTES, STACK_BYTES - GUARD_BYTES, PROT_READ | PROT_WRITE))
            return (void)snprintf(message, message_bytes, "no memory for %llu stacks", num_threads);
    run_blocks((u32)num_threads, num_shared_bytes, number);
    if (num_stacks > MOST_KEPT) {
        madvise(stacks, num_stacks * STACK_BYTES, MADV_DONTNEED);
        mprotect(stacks, num_stacks * STACK_BYTES, PROT_NONE);
        num_stacks = 0;
    }
}

constexpr char GATE[] = "pass_gate";

struct Gate {
    u8 count, left, parity, pad;
    int bytes;  // that it expects
};
static_assert(sizeof(Gate) == 8);

static void end_phase(Gate& gate) {
    if (gate.left || gate.bytes) return;
    gate.left = gate.count, gate.parity ^= 1;
    for (u32 i = 0; i < num_warps * LANES; i++)
        if (warps[i / LANES].live >> i % LANES & 1 && fibers[i].waits_in == GATE) warps[i / LANES].ready |= 1u << i % LANES;
}

static void arrive_at_gate(Gate& gate, int bytes) {
    if (!gate.left) fail("thread %u arrives at a gate at which all of this phase have arrived", current->number);
    gate.left--, gate.bytes += bytes;
    end_phase(gate);
}

static void copy_through_gate(void* to, const void* from, u32 bytes, Gate& gate) {
    if (bytes % 16 || (size_t)to % 16 || (size_t)from % 16) fail("thread %u copies what is no multiple of 16 bytes", current->number);
    memcpy(to, from, bytes);
    gate.bytes -= bytes;
    end_phase(gate);
}

static void pass_gate(const Gate& gate, u32 parity) {
    while (gate.parity == parity) {
        current->waits_in = GATE;
        current->mask = 0xffffffffu;
        leave_ready();
        yield();
    }
    current->waits_in = nullptr;
}

// A kernel's parameters, a letter each: p(ointer), i(nteger of 4 bytes), l(ong integer), f(loat), ? for all else.
template <class T> struct Letter { static constexpr char value = '?'; };
template <class T> struct Letter<T*> { static constexpr char value = 'p'; };
template <> struct Letter<int> { static constexpr char value = 'i'; };
template <> struct Letter<u32> { static constexpr char value = 'i'; };
template <> struct Letter<long> { static constexpr char value = 'l'; };
template <> struct Letter<unsigned long> { static constexpr char value = 'l'; };
template <> struct Letter<long long> { static constexpr char value = 'l'; };
template <> struct Letter<u64> { static constexpr char value = 'l'; };
template <> struct Letter<float> { static constexpr char value = 'f'; };

template <auto kernel> struct Call;
template <class... P, void (*kernel)(P...)> struct Call<kernel> {
    static inline void** arguments;
    static constexpr char letters[] = {Letter<P>::value..., 0};

    template <size_t... I> struct Indices {};
    template <size_t N, size_t... I> struct Count : Count<N - 1, N - 1, I...> {};
    template <size_t... I> struct Count<0, I...> { typedef Indices<I...> type; };

    template <size_t... I> static void call(Indices<I...>) { kernel(*(P*)arguments[I]...); }
    static void run() { call(typename Count<sizeof...(P)>::type()); }
};

}  // namespace emulator

#define DESKFLEET_EMULATE(kernel)                                                                                        \
    extern "C" __attribute__((visibility("default"))) const char* deskfleet_parameters() {                               \
        return emulator::Call<kernel>::letters;                                                                          \
    }                                                                                                                    \
    extern "C" __attribute__((visibility("default"))) void deskfleet_run(                                                \
        const u32* shape, u32 shared_bytes, void** arguments, u32 number, char* text, u32 text_bytes) {                  \
        emulator::Call<kernel>::arguments = arguments;                                                                   \
        emulator::body = emulator::Call<kernel>::run;                                                                    \
        emulator::run_grid(shape, shared_bytes, number, text, text_bytes);                                               \
    }

// ---- what CUDA gives a kernel ----

#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::block)
#define blockDim (emulator::block_size)
#define gridDim (emulator::grid)
#define warpSize 32

DEVICE void __syncthreads() { emulator::barrier("__syncthreads", false); }
DEVICE int __syncthreads_count(int p) { return emulator::barrier("__syncthreads_count", p); }
DEVICE int __syncthreads_or(int p) { return emulator::barrier("__syncthreads_or", p) != 0; }
DEVICE int __syncthreads_and(int p) { return emulator::barrier("__syncthreads_and", !p) == 0; }
DEVICE void __threadfence() {}
DEVICE void __threadfence_block() {}

namespace emulator {

constexpr char SYNCWARP[] = "__syncwarp", SHFL[] = "a shuffle", VOTE[] = "a vote", REDUCE[] = "a warp's reduction";

struct Shuffle {
    u32 value, from, result;
};

static void shuffle(Fiber* lanes, u32 mask) {
    for (u32 rest = mask; rest; rest &= rest - 1) {
        Shuffle& mine = *(Shuffle*)lanes[__builtin_ctz(rest)].operands;
        if (!(mask >> mine.from & 1)) fail("a shuffle of lanes %08x reads lane %u, which takes no part", mask, mine.from);
        mine.result = ((Shuffle*)lanes[mine.from].operands)->value;
    }
}

template <class T> static T shuffled(u32 mask, T value, u32 from) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves 4 or 8 bytes");
    u32 words[sizeof(T) / 4];
    memcpy(words, &value, sizeof value);
    for (u32& word : words) {
        Shuffle operands = {word, from, 0};
        arrive(SHFL, mask, &operands, shuffle);
        word = operands.result;
    }
    memcpy(&value, words, sizeof value);
    return value;
}

static u32 own_lane() { return current->number % LANES; }

static void vote(Fiber* lanes, u32 mask) {
    u32 ballot = 0;
    for (u32 rest = mask; rest; rest &= rest - 1)
        if (*(u32*)lanes[__builtin_ctz(rest)].operands) ballot |= rest & -rest;
    for (u32 rest = mask; rest; rest &= rest - 1) *(u32*)lanes[__builtin_ctz(rest)].operands = ballot;
}

}  // namespace emulator

DEVICE void __syncwarp(u32 mask = 0xffffffffu) {
    emulator::arrive(emulator::SYNCWARP, mask, nullptr, [](emulator::Fiber*, u32) {});
}

template <class T> static T __shfl_sync(u32 mask, T value, int lane, int width = 32) {
    return emulator::shuffled(mask, value, (emulator::own_lane() & ~(width - 1)) | (lane & (width - 1)));
}
template <class T> static T __shfl_xor_sync(u32 mask, T value, int bits, int width = 32) {
    u32 own = emulator::own_lane(), from = own ^ bits;
    return emulator::shuffled(mask, value, (from & ~(width - 1)) > own ? own : from);
}
template <class T> static T __shfl_down_sync(u32 mask, T value, u32 step, int width = 32) {
    u32 own = emulator::own_lane(), from = own + step;
    return emulator::shuffled(mask, value, from / width == own / width ? from : own);
}
template <class T> static T __shfl_up_sync(u32 mask, T value, u32 step, int width = 32) {
    u32 own = emulator::own_lane();
    return emulator::shuffled(mask, value, own % width >= step ? own - step : own);
}
DEVICE u32 __ballot_sync(u32 mask, int predicate) {
    u32 operand = predicate != 0;
    emulator::arrive(emulator::VOTE, mask, &operand, emulator::vote);
    return operand;
}
DEVICE int __any_sync(u32 mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
DEVICE int __all_sync(u32 mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

namespace emulator {
template <class T, T (*combine)(T, T)> static void reduce(Fiber* lanes, u32 mask) {
    T all = *(T*)lanes[__builtin_ctz(mask)].operands;
    for (u32 rest = mask & (mask - 1); rest; rest &= rest - 1) all = combine(all, *(T*)lanes[__builtin_ctz(rest)].operands);
    for (u32 rest = mask; rest; rest &= rest - 1) *(T*)lanes[__builtin_ctz(rest)].operands = all;
}
template <class T, T (*combine)(T, T)> static T reduced(u32 mask, T value) {
    arrive(REDUCE, mask, &value, reduce<T, combine>);
    return value;
}
template <class T> static T add(T a, T b) { return a + b; }
template <class T> static T lesser(T a, T b) { return b < a ? b : a; }
template <class T> static T greater(T a, T b) { return b > a ? b : a; }
template <class T> struct Same { typedef T type; };  // keeps a parameter out of deduction

template <class T, T (*combine)(T, T)> static T atomic(T* at, T value) {
    T old = *at;
    *at = combine(old, value);
    return old;
}
}  // namespace emulator

DEVICE u32 __reduce_add_sync(u32 mask, u32 v) { return emulator::reduced<u32, emulator::add>(mask, v); }
DEVICE int __reduce_add_sync(u32 mask, int v) { return emulator::reduced<int, emulator::add>(mask, v); }
DEVICE u32 __reduce_max_sync(u32 mask, u32 v) { return emulator::reduced<u32, emulator::greater>(mask, v); }
DEVICE int __reduce_max_sync(u32 mask, int v) { return emulator::reduced<int, emulator::greater>(mask, v); }
DEVICE u32 __reduce_min_sync(u32 mask, u32 v) { return emulator::reduced<u32, emulator::lesser>(mask, v); }
DEVICE int __reduce_min_sync(u32 mask, int v) { return emulator::reduced<int, emulator::lesser>(mask, v); }

template <class T> static T atomicAdd(T* at, typename emulator::Same<T>::type v) { return emulator::atomic<T, emulator::add>(at, v); }
template <class T> static T atomicMin(T* at, typename emulator::Same<T>::type v) { return emulator::atomic<T, emulator::lesser>(at, v); }
template <class T> static T atomicMax(T* at, typename emulator::Same<T>::type v) { return emulator::atomic<T, emulator::greater>(at, v); }
template <class T> static T atomicExch(T* at, typename emulator::Same<T>::type v) {
    T old = *at;
    *at = v;
    return old;
}
template <class T> static T atomicOr(T* at, typename emulator::Same<T>::type v) {
    T old = *at;
    *at = old | v;
    return old;
}
template <class T> static T atomicCAS(T* at, typename emulator::Same<T>::type expected, typename emulator::Same<T>::type v) {
    T old = *at;
    if (old == expected) *at = v;
    return old;
}

template <class T> static T __ldg(const T* at) { return *at; }
template <class T> static T __ldcg(const T* at) { return *at; }
template <class T> static void __stcg(T* at, typename emulator::Same<T>::type value) { *at = value; }

template <class A, class B> static auto min(A a, B b) -> decltype(a + b) { return b < a ? b : a; }
template <class A, class B> static auto max(A a, B b) -> decltype(a + b) { return a < b ? b : a; }
DEVICE int __popc(u32 v) { return __builtin_popcount(v); }
DEVICE int __clz(u32 v) { return v ? __builtin_clz(v) : 32; }
DEVICE int __ffs(u32 v) { return __builtin_ffs(v); }
DEVICE u32 __umulhi(u32 a, u32 b) { return (u64)a * b >> 32; }
DEVICE u32 __byte_perm(u32 x, u32 y, u32 selector) {
    u64 bytes = (u64)y << 32 | x;
    u32 out = 0;
    for (u32 i = 0; i < 4; i++) {
        u32 byte = bytes >> (selector >> 4 * i & 7) * 8 & 0xff;
        out |= (selector >> 4 * i & 8 ? (byte & 0x80 ? 0xff : 0) : byte) << 8 * i;
    }
    return out;
}

// ---- what device.cuh gives a kernel ----

template <class Out, class In> static Out bits_as(In value) {
    static_assert(sizeof(Out) == sizeof(In), "bits have no other size");
    Out out;
    memcpy(&out, &value, sizeof out);
    return out;
}
DEVICE float as_float(u32 bits) { return bits_as<float>(bits); }
DEVICE u32 as_u32(float value) { return bits_as<u32>(value); }
DEVICE float __uint_as_float(u32 bits) { return as_float(bits); }
DEVICE u32 __float_as_uint(float value) { return as_u32(value); }
DEVICE float __int_as_float(int bits) { return as_float(bits); }
DEVICE int __float_as_int(float value) { return as_u32(value); }
DEVICE float rsqrtf(float x) { return 1.0f / sqrtf(x); }
DEVICE float __expf(float x) { return expf(x); }
DEVICE float __logf(float x) { return logf(x); }
DEVICE float fast_exp(float x) { return expf(x); }
DEVICE float fast_exp2(float x) { return exp2f(x); }
DEVICE float fast_rsqrt(float x) { return rsqrtf(x); }

namespace emulator {

// A magnitude as a narrow float: nearest, ties to even. `lowest` is the exponent of the least normal number.
static u32 rounded(float magnitude, int mantissa_bits, int lowest) {
    int exponent = (int)(as_u32(magnitude) >> 23) - 127;
    if (exponent < lowest) exponent = lowest;
    float steps = rintf(magnitude * as_float((u32)(127 + mantissa_bits - exponent) << 23));
    return ((u32)(exponent - lowest) << mantissa_bits) + (u32)steps;  // 2^mantissa_bits steps are in the exponent already
}

static float of_f16(u32 bits) {
    u32 magnitude = (bits & 0x7fff) << 13;
    float value = as_float(magnitude) * 0x1p112f;
    if (magnitude >= 0x7c00u << 13) value = as_float(magnitude | 0x7f800000);
    return as_float(as_u32(value) | (bits & 0x8000) << 16);
}

static u32 to_f16(float value) {
    u32 sign = as_u32(value) >> 16 & 0x8000;
    float magnitude = fabsf(value);
    if (magnitude != magnitude) return 0x7fff;
    return sign | (magnitude >= 65520.0f ? 0x7c00 : rounded(magnitude, 10, -14));
}

static float of_bf16(u32 bits) { return as_float(bits << 16); }

static u32 to_bf16(float value) {
    u32 bits = as_u32(value);
    return value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static u32 to_e4m3(float value) {
    u32 sign = as_u32(value) >> 24 & 0x80;
    float magnitude = fabsf(value);
    if (magnitude != magnitude) return 0x7f;
    return sign | (magnitude > 448.0f ? 0x7e : rounded(magnitude, 3, -6));
}

static u32 f16_of_e4m3(u32 code) {
    if ((code & 0x7f) == 0x7f) return 0x7fff;
    return (code & 0x80) << 8 | to_f16(of_f16((code & 0x7f) << 7) * 256.0f);
}

struct F16OfE4m3 {
    u16 table[256];
    F16OfE4m3() {
        for (u32 code = 0; code < 256; code++) table[code] = f16_of_e4m3(code);
    }
};
static const F16OfE4m3 f16_of_e4m3_table;

struct Product {
    float* d;
    u32 a[4], b[2];
};

// Lane 4 g + t has rows g and g + 8 of a and d, column g of b; words of a and b are places 2 t, 2 t + 1 of K (and + 8).
template <float (*decoded)(u32)> static void multiply(Fiber* lanes, u32 mask) {
    if (mask != 0xffffffffu) fail("a product of the tensor cores needs all lanes of a warp, not %08x", mask);
    double a[16][16], b[16][8];
    for (u32 lane = 0; lane < LANES; lane++) {
        const Product& mine = *(const Product*)lanes[lane].operands;
        u32 g = lane >> 2, t = lane & 3;
        for (u32 half = 0; half < 2; half++) {
            for (u32 i = 0; i < 4; i++) a[g + i % 2 * 8][t * 2 + i / 2 * 8 + half] = decoded(mine.a[i] >> 16 * half & 0xffff);
            for (u32 i = 0; i < 2; i++) b[t * 2 + i * 8 + half][g] = decoded(mine.b[i] >> 16 * half & 0xffff);
        }
    }
    for (u32 row = 0; row < 16; row++) {
        double sums[8];
        for (u32 n = 0; n < 8; n++) sums[n] = ((Product*)lanes[row % 8 * 4 + n / 2].operands)->d[row / 8 * 2 + n % 2];
        for (u32 k = 0; k < 16; k++)
            for (u32 n = 0; n < 8; n++) sums[n] += a[row][k] * b[k][n];
        for (u32 n = 0; n < 8; n++) ((Product*)lanes[row % 8 * 4 + n / 2].operands)->d[row / 8 * 2 + n % 2] = (float)sums[n];
    }
}

constexpr char MMA_F16[] = "mma_f16", MMA_BF16[] = "mma_bf16", CODES[] = "multiply_codes";

struct Codes {
    float* d;
    u32 a[4];
    const u8* columns;
    int num;
};

static float of_e4m3(u32 code) { return of_f16(f16_of_e4m3_table.table[code]); }

// Of 16 rows, added to what is there: lane 4 g + t has codes 4 t .. 4 t + 3 of K (and + 16) of rows g and g + 8; columns as
// device.cuh says.
static void multiply_e4m3(Fiber* lanes, u32 mask) {
    if (mask != 0xffffffffu) fail("a product of the tensor cores needs all lanes of a warp, not %08x", mask);
    float a[16][32];
    for (u32 lane = 0; lane < LANES; lane++) {
        const Codes& mine = *(const Codes*)lanes[lane].operands;
        for (u32 i = 0; i < 4; i++)
            for (u32 j = 0; j < 4; j++)
                a[lane / 4 + i % 2 * 8][lane % 4 * 4 + j + i / 2 * 16] = of_e4m3(mine.a[i] >> 8 * j & 0xff);
    }
    const Codes& any = *(const Codes*)lanes[0].operands;
    for (u32 row = 0; row < 16; row++)
        for (int n = 0; n < any.num; n++) {
            double sum = 0;
            for (u32 k = 0; k < 32; k++) sum += (double)a[row][k] * of_e4m3(any.columns[(k / 16 * any.num + n) * 16 + k % 16]);
            float& to = ((Codes*)lanes[row % 8 * 4 + n % 8 / 2].operands)->d[n / 8 * 4 + row / 8 * 2 + n % 2];
            to = (float)(to + sum);
        }
}

}  // namespace emulator

DEVICE void mma_f16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    emulator::Product operands = {d, {a0, a1, a2, a3}, {b0, b1}};
    emulator::arrive(emulator::MMA_F16, 0xffffffffu, &operands, emulator::multiply<emulator::of_f16>);
}
DEVICE void mma_bf16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    emulator::Product operands = {d, {a0, a1, a2, a3}, {b0, b1}};
    emulator::arrive(emulator::MMA_BF16, 0xffffffffu, &operands, emulator::multiply<emulator::of_bf16>);
}

template <int COUNT_> static void start_products(u32 (&)[COUNT_][4]) {}
DEVICE void let_tensor_cores_read() {}
typedef const u8* CodesAt;
DEVICE CodesAt codes_at(const u8* columns, int) { return columns; }
DEVICE CodesAt further(CodesAt at, int bytes) { return at + bytes; }
template <int EACH> static void add_codes(float (&d)[EACH], const u32 (&a)[4], CodesAt columns) {
    emulator::Codes operands = {d, {a[0], a[1], a[2], a[3]}, columns, 2 * EACH};
    emulator::arrive(emulator::CODES, 0xffffffffu, &operands, emulator::multiply_e4m3);
}
template <int EACH> static void multiply_codes(float (&d)[EACH], const u32 (&a)[4], CodesAt columns) {
    for (float& to : d) to = 0;
    add_codes(d, a, columns);
}
template <int COUNT_, int EACH> static void end_products(float (&)[COUNT_][EACH]) {}
DEVICE void commit_products() {}
template <int LEFT, int COUNT_> static void wait_for_products(u32 (&)[COUNT_][4]) {}
template <int EACH> static void take_products(float (&)[EACH]) {}

DEVICE void make_gate(u64* gate, u32 count) { *(emulator::Gate*)gate = {(u8)count, (u8)count, 0, 0, 0}; }
DEVICE void arrive_at_gate(u64* gate) { emulator::arrive_at_gate(*(emulator::Gate*)gate, 0); }
DEVICE void expect_at_gate(u64* gate, u32 bytes) { emulator::arrive_at_gate(*(emulator::Gate*)gate, bytes); }
DEVICE void copy_through_gate(void* to, const void* from, u32 bytes, u64* gate) {
    emulator::copy_through_gate(to, from, bytes, *(emulator::Gate*)gate);
}
DEVICE void pass_gate(u64* gate, u32 parity) { emulator::pass_gate(*(const emulator::Gate*)gate, parity); }

namespace emulator {

// Copies land when they are waited for, and until then there are NaNs: who reads too early, or goes on reading what was there
// before, gets wrong numbers.
constexpr u32 MOST_COPIES = 64;
struct Copy {
    void* to;
    const void* from;
    u32 group;
};
static Copy copies[MOST_THREADS][MOST_COPIES];

static void land_copies(u32 left) {
    Fiber& me = *current;
    u32 kept = 0;
    for (u32 i = 0; i < me.num_copies; i++) {
        const Copy copy = copies[me.number][i];
        if (copy.group + left >= me.num_groups) {
            copies[me.number][kept++] = copy;
            continue;
        }
        if (copy.from)
            memcpy(copy.to, copy.from, 16);
        else
            memset(copy.to, 0, 16);
    }
    me.num_copies = kept;
}

struct Matrices {
    const u16* row;
    u32* to;
};

template <bool TURNED> static void load_matrices(Fiber* lanes, u32 mask) {
    if (mask != 0xffffffffu) fail("a load of matrices needs all lanes of a warp, not %08x", mask);
    for (u32 lane = 0; lane < LANES; lane++)
        for (u32 i = 0; i < 4; i++) {
            u32 halves[2];
            for (u32 half = 0; half < 2; half++) {
                const u32 row = TURNED ? lane % 4 * 2 + half : lane / 4, column = TURNED ? lane / 4 : lane % 4 * 2 + half;
                halves[half] = ((const Matrices*)lanes[i * 8 + row].operands)->row[column];
            }
            ((Matrices*)lanes[lane].operands)->to[i] = halves[0] | halves[1] << 16;
        }
}

constexpr char MATRICES[] = "load_matrices", TURNED_MATRICES[] = "load_turned";

}  // namespace emulator

DEVICE void copy_later(void* to, const void* from, bool exists) {
    using namespace emulator;
    Fiber& me = *current;
    if ((uintptr_t)to % 16 || (uintptr_t)from % 16) fail("thread %u copies 16 bytes that are not at a multiple of 16", me.number);
    if (me.num_copies == MOST_COPIES) fail("thread %u has more than %u copies under way", me.number, MOST_COPIES);
    copies[me.number][me.num_copies++] = {to, exists ? from : nullptr, me.num_groups};
    memset(to, 0xff, 16);
}
DEVICE void end_copies() { emulator::current->num_groups++; }
template <int LEFT> static void wait_for_copies() { emulator::land_copies(LEFT); }
DEVICE void load_matrices(u32 (&to)[4], const void* row) {
    emulator::Matrices operands = {(const u16*)row, to};
    emulator::arrive(emulator::MATRICES, 0xffffffffu, &operands, emulator::load_matrices<false>);
}
DEVICE void load_turned(u32 (&to)[4], const void* row) {
    emulator::Matrices operands = {(const u16*)row, to};
    emulator::arrive(emulator::TURNED_MATRICES, 0xffffffffu, &operands, emulator::load_matrices<true>);
}

DEVICE u32 f16x2_of_e4m3x2(u16 codes) {
    const u16* table = emulator::f16_of_e4m3_table.table;
    return (u32)table[codes >> 8] << 16 | table[codes & 0xff];
}
DEVICE u16 e4m3x2_of_floats(float high, float low) { return emulator::to_e4m3(high) << 8 | emulator::to_e4m3(low); }
DEVICE u32 bf16x2_of_floats(float high, float low) { return emulator::to_bf16(high) << 16 | emulator::to_bf16(low); }
DEVICE u32 bf16x2_mul(u32 a, u32 b) {
    using namespace emulator;
    return to_bf16(of_bf16(a >> 16) * of_bf16(b >> 16)) << 16 | to_bf16(of_bf16(a & 0xffff) * of_bf16(b & 0xffff));
}

DEVICE words2 load_stream2(const void* at) { return *(const words2*)at; }
DEVICE words4 load_stream4(const void* at) { return *(const words4*)at; }
DEVICE u32 load_fresh(const void* at) { return *(const u32*)at; }
DEVICE float load_fresh_f(const float* at) { return *at; }
DEVICE words2 load_fresh2(const void* at) { return *(const words2*)at; }
DEVICE words4 load_fresh4(const void* at) { return *(const words4*)at; }
DEVICE u32 load_scale(const u32* at) { return *at; }
DEVICE words2 load_row2(const void* at) { return *(const words2*)at; }
DEVICE words4 load_row4(const void* at) { return *(const words4*)at; }
DEVICE u32 unknown(u32 number) { return number; }
DEVICE void wait_for_predecessor() {}
DEVICE void let_successor_start() {}
