// What the kernels ask of the machine. Owns every line of PTX; in the emulator (emulator.h) the same names are plain
// C++. Knows nothing of models.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef DESKFLEET_EMULATED

struct words2 {
    u32 x, y;
};
struct words4 {
    u32 x, y, z, w;
};

#define DEVICE __device__ __forceinline__
#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define SHARED_BYTES(name) extern __shared__ __align__(16) u8 name[]

// d += a b on the tensor cores: 16x16 of a, 16x8 of b, float32 sums; fragments as PTX lays them out.
DEVICE void mma_f16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

DEVICE void mma_bf16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two E4M3 codes of the low or the high half of a word, the lower byte in the low half of the result.
DEVICE u32 f16x2_of_low_e4m3x2(u32 codes) {
    u32 out;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }" : "=r"(out) : "r"(codes));
    return out;
}

DEVICE u32 f16x2_of_high_e4m3x2(u32 codes) {
    u32 out;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high; }" : "=r"(out) : "r"(codes));
    return out;
}

DEVICE u16 e4m3x2_of_floats(float high, float low) {
    u16 out;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
    return out;
}

DEVICE u32 bf16x2_of_floats(float high, float low) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

DEVICE u32 bf16x2_mul(u32 a, u32 b) {
    u32 out;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

// Weights: codes, which are read once, and scales, whose neighbours other lanes read. Not as constants (.nc): ptxas moves
// such loads behind wait_for_predecessor.
DEVICE words2 load_stream2(const void* at) {
    words2 out;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(out.x), "=r"(out.y) : "l"(at) : "memory");
    return out;
}

DEVICE words4 load_stream4(const void* at) {
    words4 out;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
                 : "l"(at)
                 : "memory");
    return out;
}

DEVICE u32 load_scale(const u32* at) {
    u32 out;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(out) : "l"(at) : "memory");
    return out;
}

// What an earlier kernel has written, past the cache of this processor.
DEVICE u32 load_fresh(const void* at) {
    u32 out;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(out) : "l"(at) : "memory");
    return out;
}

DEVICE float load_fresh_f(const float* at) {
    float out;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(out) : "l"(at) : "memory");
    return out;
}

DEVICE words2 load_fresh2(const void* at) {
    words2 out;
    asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(out.x), "=r"(out.y) : "l"(at) : "memory");
    return out;
}

DEVICE words4 load_fresh4(const void* at) {
    words4 out;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
                 : "l"(at)
                 : "memory");
    return out;
}

// A row of x: many blocks and warps read it. Never before wait_for_predecessor.
DEVICE words2 load_row2(const void* at) {
    words2 out;
    asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(out.x), "=r"(out.y) : "l"(at) : "memory");
    return out;
}

DEVICE words4 load_row4(const void* at) {
    words4 out;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
                 : "l"(at)
                 : "memory");
    return out;
}

// The number, of which the compiler knows nothing: what is addressed by it takes one register, not a pointer each.
DEVICE u32 unknown(u32 number) {
    asm volatile("" : "+r"(number));
    return number;
}

DEVICE u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// Shared memory that this thread has written may be read by the tensor cores once a barrier has been passed.
DEVICE void let_tensor_cores_read() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// d = a times columns, of E4M3 codes: a is 64x32 in the registers of a warpgroup, 16 rows a warp; columns are [2, N, 16] bytes
// of shared memory, the first and the second 16 of K. Fragments of a and d as of mma.sync.m16n8k32. On Hopper this runs
// on its own: between a start and an end nothing else may touch a and d.
#if __CUDA_ARCH__ == 900
template <int COUNT_>
DEVICE void start_products(u32 (&a)[COUNT_][4]) {
#pragma unroll
    for (int i = 0; i < COUNT_; i++)  // whatever makes them is done
        asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

DEVICE u64 columns_at(const u8* columns, int rows) {
    return (u64)(shared_address(columns) >> 4) | (u64)(rows) << 16 | (u64)8 << 32;
}

// Where the columns of a product are: the part of columns_at that differs, so that the next is one sum away.
typedef u32 CodesAt;
DEVICE CodesAt codes_at(const u8* columns, int rows) { return (CodesAt)columns_at(columns, rows); }
DEVICE CodesAt further(CodesAt at, int bytes) { return at + (u32)(bytes >> 4); }

DEVICE void multiply_codes(float (&d)[4], const u32 (&a)[4], CodesAt at) {
    asm volatile(
        "{ .reg .pred adds; setp.ne.b32 adds, 0, 0; .reg .b64 columns; mov.b64 columns, {%8, 8};"
        " wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0,%1,%2,%3}, {%4,%5,%6,%7}, columns, adds, 1, 1; }"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(at));
}

DEVICE void multiply_codes(float (&d)[8], const u32 (&a)[4], CodesAt at) {
    asm volatile(
        "{ .reg .pred adds; setp.ne.b32 adds, 0, 0; .reg .b64 columns; mov.b64 columns, {%12, 8};"
        " wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, columns, adds, 1, 1; }"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(at));
}

// The same, added to d.
DEVICE void add_codes(float (&d)[4], const u32 (&a)[4], CodesAt at) {
    asm volatile(
        "{ .reg .pred adds; setp.eq.b32 adds, 0, 0; .reg .b64 columns; mov.b64 columns, {%8, 8};"
        " wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0,%1,%2,%3}, {%4,%5,%6,%7}, columns, adds, 1, 1; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(at));
}

template <int COUNT_, int EACH>
DEVICE void end_products(float (&d)[COUNT_][EACH]) {
    asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < COUNT_; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) asm volatile("" : "+f"(d[i][j])::"memory");
}

// What start_products has begun runs on until wait_for_products has left but the LEFT last commits running; `a` is of the
// products that have ended with it.
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT, int COUNT_>
DEVICE void wait_for_products(u32 (&a)[COUNT_][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#pragma unroll
    for (int i = 0; i < COUNT_; i++) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}

// Sums may be read: all products have ended.
template <int EACH>
DEVICE void take_products(float (&d)[EACH]) {
#pragma unroll
    for (int i = 0; i < EACH; i++) asm volatile("" : "+f"(d[i])::"memory");
}
#else
template <int COUNT_>
DEVICE void start_products(u32 (&)[COUNT_][4]) {}

typedef const u8* CodesAt;
DEVICE CodesAt codes_at(const u8* columns, int) { return columns; }
DEVICE CodesAt further(CodesAt at, int bytes) { return at + bytes; }

template <int EACH>
DEVICE void add_codes(float (&d)[EACH], const u32 (&a)[4], CodesAt columns) {
    const int lane = threadIdx.x & 31, at = (lane >> 2) * 16 + (lane & 3) * 4;
#pragma unroll
    for (int n = 0; n < EACH / 4; n++) {
        const u32 first = *(const u32*)(columns + n * 128 + at), second = *(const u32*)(columns + (EACH / 4 + n) * 128 + at);
        asm volatile(
            "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[4 * n]), "+f"(d[4 * n + 1]), "+f"(d[4 * n + 2]), "+f"(d[4 * n + 3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(first), "r"(second));
    }
}

template <int EACH>
DEVICE void multiply_codes(float (&d)[EACH], const u32 (&a)[4], CodesAt columns) {
#pragma unroll
    for (int i = 0; i < EACH; i++) d[i] = 0.0f;
    add_codes(d, a, columns);
}

template <int COUNT_, int EACH>
DEVICE void end_products(float (&)[COUNT_][EACH]) {}

DEVICE void commit_products() {}
template <int LEFT, int COUNT_>
DEVICE void wait_for_products(u32 (&)[COUNT_][4]) {}
template <int EACH>
DEVICE void take_products(float (&)[EACH]) {}
#endif

// A gate in shared memory has phases: one ends when `count` have arrived and all bytes that it expects have come. One thread makes
// it; it may be used when the block has met after that.
DEVICE void make_gate(u64* gate, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1; fence.mbarrier_init.release.cluster;" ::"r"(shared_address(gate)), "r"(count)
                 : "memory");
}

DEVICE void arrive_at_gate(u64* gate) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(gate)) : "memory");
}

// Arrives, and has this phase wait for `bytes` more.
DEVICE void expect_at_gate(u64* gate, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(gate)), "r"(bytes) : "memory");
}

// Copies a multiple of 16 bytes, which come to the gate when they are there.
DEVICE void copy_through_gate(void* to, const void* from, u32 bytes, u64* gate) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(gate))
                 : "memory");
}

// Waits until the phase of this parity has ended; phases count from 0, and the one before that has.
DEVICE void pass_gate(u64* gate, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "wait: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra wait; }" ::"r"(shared_address(gate)),
        "r"(parity)
        : "memory");
}

// Copies of 16 bytes of memory that an earlier kernel has written into shared memory, or of zeros. They run on their own until
// their thread waits for all but the last LEFT groups of its copies; other threads may read them behind a barrier after that.
DEVICE void copy_later(void* to, const void* from, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(exists ? 16 : 0)
                 : "memory");
}

DEVICE void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT>
DEVICE void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Four matrices of eight rows of eight halves, whose rows `row` of the lanes point to, eight lanes a matrix: lane 4g + t gets
// halves 2t and 2t + 1 of row g, or, turned, half g of rows 2t and 2t + 1.
DEVICE void load_matrices(u32 (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

DEVICE void load_turned(u32 (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Two to the power of x; below what is normal, 0.
DEVICE float fast_exp2(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

DEVICE float fast_exp(float x) { return __expf(x); }
DEVICE float fast_rsqrt(float x) { return rsqrtf(x); }
DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 as_u32(float value) { return __float_as_uint(value); }

// Programmatic dependent launch: what the kernel before has written may be read after the first; kernels after this one
// may start after the second. Every block of every kernel waits, so that a kernel's end is the end of all before it.
DEVICE void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_successor_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

#else

DEVICE u32 f16x2_of_low_e4m3x2(u32 codes) { return f16x2_of_e4m3x2((u16)(codes & 0xffff)); }
DEVICE u32 f16x2_of_high_e4m3x2(u32 codes) { return f16x2_of_e4m3x2((u16)(codes >> 16)); }

#endif

#define ALL_LANES 0xffffffffu
