// What a block whose warpgroups have different roles asks of Hopper: signals in shared memory, which one role gives and another
// waits for, registers that one role leaves to another, barriers of one warpgroup, and products of 64 weight rows with up to 128
// columns, which run while the next weights are decoded. For sm_90a alone. Owns the PTX of these, and what they are in the
// emulator; all other PTX is device.cuh's.
#pragma once
#include "device.cuh"

constexpr int WARPGROUP = 128;  // threads

#ifndef DESKFLEET_EMULATED

// A signal is given when `arrivals` threads have called give_signal since it was given last. What they have written before is
// seen by those that have waited for it.
DEVICE void make_signal(u64* signal, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(signal)), "r"(arrivals) : "memory");
}

DEVICE void give_signal(u64* signal) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(signal)) : "memory");
}

// Until it has been given an odd number of times (parity 0) or an even one (1), but not fewer than one less than that.
DEVICE void await_signal(u64* signal, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "wait: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra wait; }" ::"r"(shared_address(signal)),
        "r"(parity)
        : "memory");
}

// A barrier of the four warps of a warpgroup; `number` from 1 on is its own.
DEVICE void meet_warpgroup(int number) { asm volatile("bar.sync %0, 128;" ::"r"(number) : "memory"); }

// Registers of a thread from here on, of all threads of a warpgroup.
template <int COUNT_>
DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT_));
}

template <int COUNT_>
DEVICE void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT_));
}

// Four matrices of eight rows of eight halves, of which lane 4g + t has halves 2t and 2t + 1 of row g, turned: half i of all rows
// of a matrix goes where lane i of its eight lanes points to.
DEVICE void store_turned(void* to, u32 first, u32 second, u32 third, u32 fourth) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(to)), "r"(first),
                 "r"(second), "r"(third), "r"(fourth)
                 : "memory");
}

// Columns in shared memory, [.., 8] of the first 8 of K and, `apart` bytes behind them, of the second.
struct Parts {
    u32 low;  // of the tensor cores' description

    DEVICE Parts(const u8* columns, int apart) : low(shared_address(columns) >> 4 | (u32)(apart >> 4) << 16) {}
    DEVICE void move(int bytes) { low += (u32)(bytes >> 4); }
    DEVICE u64 description() const { return (u64)8 << 32 | low; }
};

// As multiply_bf16 of device.cuh: d, of which it takes as much as COLUMNS_ columns need, += a times columns.
template <int COLUMNS_>
struct Product;

#define D4_(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8_(i) D4_(i), D4_(i + 4)
#define D16_(i) D8_(i), D8_(i + 8)
#define D32_(i) D16_(i), D16_(i + 16)
#define R8_ "%0,%1,%2,%3,%4,%5,%6,%7"
#define R16_ R8_ ",%8,%9,%10,%11,%12,%13,%14,%15"
#define R24_ R16_ ",%16,%17,%18,%19,%20,%21,%22,%23"
#define R32_ R24_ ",%24,%25,%26,%27,%28,%29,%30,%31"
#define R36_ R32_ ",%32,%33,%34,%35"
#define R40_ R36_ ",%36,%37,%38,%39"
#define R44_ R40_ ",%40,%41,%42,%43"
#define R48_ R44_ ",%44,%45,%46,%47"
#define R56_ R48_ ",%48,%49,%50,%51,%52,%53,%54,%55"
#define R64_ R56_ ",%56,%57,%58,%59,%60,%61,%62,%63"
// `a` and the columns are the five operands behind the sums.
#define PRODUCT_(columns_, registers_, a_, at_, ...)                                                                            \
    template <>                                                                                                                 \
    struct Product<columns_> {                                                                                                  \
        template <int SUMS_>                                                                                                    \
        static DEVICE void add(float (&d)[SUMS_], const u32 (&a)[4], Parts columns) {                                           \
            asm volatile("{ .reg .pred adds; setp.eq.b32 adds, 0, 0; wgmma.mma_async.sync.aligned.m64n" #columns_               \
                         "k16.f32.bf16.bf16 {" registers_ "}, {" a_ "}, " at_ ", adds, 1, 1, 0; }"                              \
                         : __VA_ARGS__                                                                                          \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns.description()));                             \
        }                                                                                                                       \
    };
#if __CUDA_ARCH__ == 900
PRODUCT_(16, R8_, "%8,%9,%10,%11", "%12", D8_(0))
PRODUCT_(32, R16_, "%16,%17,%18,%19", "%20", D16_(0))
PRODUCT_(48, R24_, "%24,%25,%26,%27", "%28", D16_(0), D8_(16))
PRODUCT_(64, R32_, "%32,%33,%34,%35", "%36", D32_(0))
PRODUCT_(72, R36_, "%36,%37,%38,%39", "%40", D32_(0), D4_(32))
PRODUCT_(80, R40_, "%40,%41,%42,%43", "%44", D32_(0), D8_(32))
PRODUCT_(88, R44_, "%44,%45,%46,%47", "%48", D32_(0), D8_(32), D4_(40))
PRODUCT_(96, R48_, "%48,%49,%50,%51", "%52", D32_(0), D16_(32))
PRODUCT_(112, R56_, "%56,%57,%58,%59", "%60", D32_(0), D16_(32), D8_(48))
PRODUCT_(128, R64_, "%64,%65,%66,%67", "%68", D32_(0), D32_(32))
#endif

#else

namespace emulator {

constexpr char SIGNAL[] = "await_signal", WARPGROUP_BARRIER[] = "meet_warpgroup", STORE_TURNED[] = "store_turned",
               PARTS[] = "Product::add";

struct Signal {
    u16 arrivals, missing;
    u32 times;  // that it has been given
};

static Signal barriers[MOST_BLOCKS][16];

static void wait_for_signal(const char* name, const Signal* signal, u32 parity) {
    while ((signal->times & 1) == parity) {
        current->waits_in = name;
        current->mask = 0xffffffffu;
        current->operands = (void*)signal;
        leave_ready();
        yield();
    }
    current->waits_in = nullptr;
}

static void give(const char* name, Signal* signal) {
    if (signal->missing - 1u >= MOST_THREADS) fail("thread %u gives a signal that nobody has made", current->number);
    if (--signal->missing) return;
    signal->missing = signal->arrivals;
    signal->times++;
    const u32 begin = (current->block - blocks) * num_warps * LANES;
    for (u32 i = begin; i < begin + num_warps * LANES; i++)
        if (warps[i / LANES].live >> i % LANES & 1 && fibers[i].waits_in == name && fibers[i].operands == signal)
            warps[i / LANES].ready |= 1u << i % LANES;
}

struct Turned {
    void* to;
    u32 words[4];
};

static void store_turned(Fiber* lanes, u32) {
    for (u32 matrix = 0; matrix < 4; matrix++)
        for (u32 i = 0; i < 8; i++) {
            u16* to = (u16*)((Turned*)lanes[8 * matrix + i].operands)->to;
            for (u32 row = 0; row < 8; row++)
                to[row] = ((Turned*)lanes[row * 4 + i / 2].operands)->words[matrix] >> 16 * (i % 2);
        }
}

struct PartsProduct {
    float* d;
    u32 a[4];
    const u8* columns;
    int num, apart;
};

static void multiply_parts(Fiber* lanes, u32 mask) {
    if (mask != 0xffffffffu) fail("a product of the tensor cores needs all lanes of a warp, not %08x", mask);
    double a[16][16];
    for (u32 lane = 0; lane < LANES; lane++) {
        const PartsProduct& mine = *(const PartsProduct*)lanes[lane].operands;
        for (u32 i = 0; i < 4; i++)
            for (u32 half = 0; half < 2; half++)
                a[lane / 4 + i % 2 * 8][lane % 4 * 2 + half + i / 2 * 8] = of_bf16(mine.a[i] >> 16 * half & 0xffff);
    }
    const PartsProduct& any = *(const PartsProduct*)lanes[0].operands;
    for (int n = 0; n < any.num; n++) {
        double b[16];
        for (u32 k = 0; k < 16; k++) b[k] = of_bf16(*(const u16*)(any.columns + k / 8 * any.apart + n * 16 + k % 8 * 2));
        for (u32 row = 0; row < 16; row++) {
            float& d = ((PartsProduct*)lanes[row % 8 * 4 + n % 8 / 2].operands)->d[n / 8 * 4 + row / 8 * 2 + n % 2];
            double sum = d;
            for (u32 k = 0; k < 16; k++) sum += a[row][k] * b[k];
            d = (float)sum;
        }
    }
}

}  // namespace emulator

DEVICE void make_signal(u64* signal, u32 arrivals) {
    *(emulator::Signal*)signal = {(u16)arrivals, (u16)arrivals, 0};
}
DEVICE void give_signal(u64* signal) { emulator::give(emulator::SIGNAL, (emulator::Signal*)signal); }
DEVICE void await_signal(u64* signal, u32 parity) {
    emulator::wait_for_signal(emulator::SIGNAL, (const emulator::Signal*)signal, parity);
}
DEVICE void meet_warpgroup(int number) {
    emulator::Signal& barrier = emulator::barriers[emulator::current->block - emulator::blocks][number];
    if (barrier.missing == 0) barrier = {WARPGROUP, WARPGROUP, 0};
    const u32 parity = barrier.times & 1;
    emulator::give(emulator::WARPGROUP_BARRIER, &barrier);
    emulator::wait_for_signal(emulator::WARPGROUP_BARRIER, &barrier, parity);
}
template <int COUNT_> static void take_registers() {}
template <int COUNT_> static void leave_registers() {}
DEVICE void store_turned(void* to, u32 first, u32 second, u32 third, u32 fourth) {
    emulator::Turned operands = {to, {first, second, third, fourth}};
    emulator::arrive(emulator::STORE_TURNED, 0xffffffffu, &operands, emulator::store_turned);
}
struct Parts {
    const u8* columns;
    int apart;

    DEVICE Parts(const u8* columns, int apart) : columns(columns), apart(apart) {}
    DEVICE void move(int bytes) { columns += bytes; }
};

template <int COLUMNS_> struct Product {
    template <int SUMS_> static void add(float (&d)[SUMS_], const u32 (&a)[4], Parts at) {
        emulator::PartsProduct operands = {d, {a[0], a[1], a[2], a[3]}, at.columns, COLUMNS_, at.apart};
        emulator::arrive(emulator::PARTS, 0xffffffffu, &operands, emulator::multiply_parts);
    }
};

#endif
