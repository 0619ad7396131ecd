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

DEVICE void multiply_codes(float (&d)[4], const u32 (&a)[4], const u8* columns) {
    asm volatile(
        "{ .reg .pred adds; setp.ne.b32 adds, 0, 0;"
        " wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, adds, 1, 1; }"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns_at(columns, 8)));
}

DEVICE void multiply_codes(float (&d)[8], const u32 (&a)[4], const u8* columns) {
    asm volatile(
        "{ .reg .pred adds; setp.ne.b32 adds, 0, 0;"
        " wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, adds, 1, 1; }"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns_at(columns, 16)));
}

template <int COUNT_, int EACH>
DEVICE void end_products(float (&d)[COUNT_][EACH]) {
    asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < COUNT_; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) asm volatile("" : "+f"(d[i][j])::"memory");
}
#else
template <int COUNT_>
DEVICE void start_products(u32 (&)[COUNT_][4]) {}

template <int EACH>
DEVICE void multiply_codes(float (&d)[EACH], const u32 (&a)[4], const u8* columns) {
    const int lane = threadIdx.x & 31, at = (lane >> 2) * 16 + (lane & 3) * 4;
#pragma unroll
    for (int n = 0; n < EACH / 4; n++) {
        const u32 first = *(const u32*)(columns + n * 128 + at), second = *(const u32*)(columns + (EACH / 4 + n) * 128 + at);
        asm volatile(
            "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
            : "=f"(d[4 * n]), "=f"(d[4 * n + 1]), "=f"(d[4 * n + 2]), "=f"(d[4 * n + 3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(first), "r"(second), "f"(0.0f));
    }
}

template <int COUNT_, int EACH>
DEVICE void end_products(float (&)[COUNT_][EACH]) {}
#endif

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
